"""Updates of variables by optimizers, in place: the formulas of TensorFlow's kernels, each step rounded to the variable's type as there.

On a GPU variables of float32 and float64 are updated by one kernel (`kernels.optimizers`), which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.optimizers import fits, update
from msplit.engines.cuda.ops.loss_scale import keep
from msplit.engines.cuda.ops.variables import apart, fit

Formula = Callable[[Node, Sequence[Tensor], Sequence[Tensor], Tensor], None]
"""Takes the node, its variables (the trained one first, then its slots), its numbers and the gradient, and changes the variables."""


@dataclass(frozen=True)
class Optimizer:
    """One op that updates a variable.

    Attributes:
        variables: How many it changes: its first inputs.
        gradient: Which input is the gradient. The others are numbers.
        formula: How.
    """

    variables: int
    gradient: int
    formula: Formula

    def parts(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[Tensor], Tensor]:
        """The inputs of a node as variables, numbers and gradient."""
        numbers = [one for slot, one in enumerate(inputs) if slot >= self.variables and slot != self.gradient]
        return inputs[: self.variables], numbers, inputs[self.gradient]


OPTIMIZERS: dict[str, Optimizer] = {}


def _optimizer(op: str, *, variables: int, gradient: int) -> Callable[[Formula], Formula]:
    """Registers a formula as the lowering of an op."""

    def register(formula: Formula) -> Formula:
        optimizer = OPTIMIZERS[op] = Optimizer(variables, gradient, formula)

        def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
            state, numbers, grad = optimizer.parts(inputs)
            _update(node, op, [[one] for one in state], numbers, [grad])
            return tuple(state)

        lowered.__doc__ = formula.__doc__
        lowering(op, mutates=tuple(range(variables)))(lowered)
        return formula

    return register


@lowering("_ApplyFlat", own=True)
def apply_flat(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Updates many variables as the op that the attribute `op` names does one of them, as if they were one flat tensor.

    Inputs are the `count` trained variables, then as many of each slot, the numbers that all share, and the gradients.
    """
    op, count = node.attrs["op"], node.attrs["count"]
    last = OPTIMIZERS[op].variables * count
    state = [inputs[start : start + count] for start in range(0, last, count)]
    _update(node, op, state, inputs[last:-count], inputs[-count:])
    return tuple(inputs[:last])


def _update(
    node: Node, op: str, state: Sequence[Sequence[Tensor]], numbers: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Updates variables, given slot by slot, in one kernel or one after the other. With the attribute `guarded` the last number is whether
    anything is to be changed."""
    for same in zip(*state, gradients, strict=True):
        fit(node, *same)
    finite = None
    if node.get("guarded", False):
        *numbers, finite = numbers
    written = [one for slot in state for one in slot]
    numbers, gradients = apart(numbers, written), apart(gradients, written)
    if fits(op, written, numbers):
        update(op, node.attrs, state, numbers, gradients, finite)
        return
    before = [] if finite is None else [one.clone() for one in written]
    for variables, gradient in zip(zip(*state, strict=True), gradients, strict=True):
        OPTIMIZERS[op].formula(node, variables, numbers, gradient)
    if finite is not None:
        keep(finite, written, before)


@_optimizer("ApplyGradientDescent", variables=1, gradient=2)
def _gradient_descent(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Gradient descent."""
    (variable,), (rate,) = state, numbers
    variable.sub_(gradient * rate)


@_optimizer("ApplyProximalGradientDescent", variables=1, gradient=4)
def _proximal(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Gradient descent, followed by what draws the variable to zero (FOBOS)."""
    (variable,), (rate, l1, l2) = state, numbers
    _shrink(variable, variable - gradient * rate, rate * l1, rate * l2, l1)


def _shrink(variable: Tensor, moved: Tensor, by: Tensor, weight: Tensor, l1: Tensor) -> None:
    """Moves values towards zero by as much, and divides them."""
    nearer = moved.sign() * (moved.abs() - by).clamp(min=0)
    variable.copy_(torch.where(l1 > 0, nearer, moved) / (1 + weight))


@_optimizer("ApplyMomentum", variables=2, gradient=3)
def _momentum(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Gradient descent with momentum, Nesterov's where `use_nesterov` is set."""
    (variable, accumulated), (rate, momentum) = state, numbers
    accumulated.mul_(momentum).add_(gradient)
    if node.get("use_nesterov", False):
        variable.sub_(gradient * rate + accumulated * momentum * rate)
    else:
        variable.sub_(accumulated * rate)


@_optimizer("ApplyKerasMomentum", variables=2, gradient=3)
def _keras_momentum(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Gradient descent with momentum in Keras' form, where the learning rate is part of what is accumulated."""
    (variable, accumulated), (rate, momentum) = state, numbers
    step = gradient * rate
    accumulated.mul_(momentum).sub_(step)
    variable.add_(accumulated * momentum - step if node.get("use_nesterov", False) else accumulated)


@_optimizer("ApplyAdam", variables=3, gradient=9)
def _adam(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adam, with Nesterov's momentum where `use_nesterov` is set."""
    (variable, m, v), (_, _, _, beta1, _, epsilon) = state, numbers
    rate = _moments(m, v, numbers, gradient)
    step = gradient * (1 - beta1) + beta1 * m if node.get("use_nesterov", False) else m
    variable.sub_(step * rate / (v.sqrt() + epsilon))


@_optimizer("ApplyAdamWithAmsgrad", variables=4, gradient=10)
def _amsgrad(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adam with the largest second moment that there was."""
    variable, m, v, largest = state
    rate = _moments(m, v, numbers, gradient)
    largest.copy_(_larger(largest, v))
    variable.sub_(m * rate / (largest.sqrt() + numbers[-1]))


def _moments(m: Tensor, v: Tensor, numbers: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Updates Adam's moments; gives the learning rate without their bias."""
    beta1_power, beta2_power, rate, beta1, beta2, _ = numbers
    m.add_((gradient - m) * (1 - beta1))
    v.add_((gradient.square() - v) * (1 - beta2))
    return rate * (1 - beta2_power).sqrt() / (1 - beta1_power)


@_optimizer("ApplyAdaMax", variables=3, gradient=8)
def _adamax(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adam with the infinity norm."""
    (variable, m, v), (beta1_power, rate, beta1, beta2, epsilon) = state, numbers
    m.add_((gradient - m) * (1 - beta1))
    v.copy_(_larger(beta2 * v, gradient.abs()))
    variable.sub_(rate / (1 - beta1_power) * (m / (v + epsilon)))


@_optimizer("ApplyAdagrad", variables=2, gradient=3)
def _adagrad(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adagrad. Its accumulator stays as it is where `update_slots` is off."""
    (variable, accumulated), (rate,) = state, numbers
    if node.get("update_slots", True):
        accumulated.add_(gradient.square())
    variable.sub_(gradient * rate * accumulated.rsqrt())


@_optimizer("ApplyAdagradV2", variables=2, gradient=4)
def _adagrad_v2(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adagrad with an epsilon."""
    (variable, accumulated), (rate, epsilon) = state, numbers
    if node.get("update_slots", True):
        accumulated.add_(gradient.square())
    variable.sub_(gradient * rate / (accumulated.sqrt() + epsilon))


@_optimizer("ApplyProximalAdagrad", variables=2, gradient=5)
def _proximal_adagrad(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adagrad, followed by what draws the variable to zero (FOBOS)."""
    (variable, accumulated), (rate, l1, l2) = state, numbers
    accumulated.add_(gradient.square())
    rates = rate * accumulated.rsqrt()
    _shrink(variable, variable - gradient * rates, rates * l1, l2 * rates, l1)


@_optimizer("ApplyAdagradDA", variables=3, gradient=3)
def _adagrad_da(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adagrad with dual averaging: the variable is made anew of all gradients so far."""
    (variable, gradients, squares), (rate, l1, l2, count) = state, numbers
    gradients.add_(gradient)
    squares.add_(gradient.square())
    steps = count.to(torch.float32).to(rate.dtype)
    nearer = gradients.sign() * (gradients.abs() - steps * l1).clamp(min=0)
    variable.copy_(-rate * torch.where(l1 > 0, nearer, gradients) / (l2 * (steps * rate) + squares.sqrt()))


@_optimizer("ApplyAdadelta", variables=3, gradient=6)
def _adadelta(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Adadelta."""
    (variable, squares, updates), (rate, rho, epsilon) = state, numbers
    squares.copy_(squares * rho + gradient.square() * (1 - rho))
    step = (updates + epsilon).sqrt() * (squares + epsilon).rsqrt() * gradient
    variable.sub_(step * rate)
    updates.copy_(updates * rho + step.square() * (1 - rho))


@_optimizer("ApplyRMSProp", variables=3, gradient=7)
def _rmsprop(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """RMSProp with momentum."""
    (variable, squares, momentum), (rate, rho, factor, epsilon) = state, numbers
    squares.add_((gradient.square() - squares) * (1 - rho))
    momentum.copy_(momentum * factor + gradient * rate / (squares + epsilon).sqrt())
    variable.sub_(momentum)


@_optimizer("ApplyCenteredRMSProp", variables=4, gradient=8)
def _centered_rmsprop(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """RMSProp that divides by the deviation from the mean gradient."""
    (variable, means, squares, momentum), (rate, rho, factor, epsilon) = state, numbers
    squares.add_((gradient.square() - squares) * (1 - rho))
    means.add_((gradient - means) * (1 - rho))
    momentum.copy_(momentum * factor + gradient * rate / (squares - means.square() + epsilon).sqrt())
    variable.sub_(momentum)


@_optimizer("ApplyFtrl", variables=3, gradient=3)
def _ftrl(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """Follow the regularized leader."""
    rate, l1, l2, power = numbers
    _follow(node, state, (rate, l1, l2, power), gradient, gradient)


@_optimizer("ApplyFtrlV2", variables=3, gradient=3)
def _ftrl_v2(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """The same with a penalty that shrinks the weights online."""
    rate, l1, l2, shrinkage, power = numbers
    _follow(node, state, (rate, l1, l2, power), gradient, gradient + 2 * shrinkage * state[0])


def _follow(
    node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor, penalized: Tensor
) -> None:
    (variable, accumulated, linear), (rate, l1, l2, power) = state, numbers
    after = accumulated + gradient.square()
    before_root, root = (torch.where(power == -0.5, one.sqrt(), one.pow(-power)) for one in (accumulated, after))
    if node.get("multiply_linear_by_lr", False):
        l1, l2, divisor = l1 * rate, l2 * rate, root
        linear.add_(penalized * rate - (root - before_root) * variable)
    else:
        divisor = root / rate
        linear.add_(penalized - (root - before_root) / rate * variable)
    found = (l1 * linear.sign() - linear) / (divisor + 2 * l2)
    variable.copy_(torch.where(linear.abs() > l1, found, 0))
    accumulated.copy_(after)


@_optimizer("ApplyAddSign", variables=2, gradient=6)
def _add_sign(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """A step that is larger where gradient and mean gradient agree in sign (AddSign)."""
    (variable, mean), (rate, alpha, decay, beta) = state, numbers
    agree = _agree(mean, beta, gradient)
    variable.sub_(rate * (alpha + decay * agree) * gradient)


@_optimizer("ApplyPowerSign", variables=2, gradient=6)
def _power_sign(node: Node, state: Sequence[Tensor], numbers: Sequence[Tensor], gradient: Tensor) -> None:
    """The same with a power in the place of a sum (PowerSign)."""
    (variable, mean), (rate, base, decay, beta) = state, numbers
    agree = _agree(mean, beta, gradient)
    variable.sub_(rate * (base * decay * agree).exp() * gradient)


def _agree(mean: Tensor, beta: Tensor, gradient: Tensor) -> Tensor:
    """Updates the mean gradient; whether the gradient has its sign, as 1, 0 or -1."""
    mean.copy_(mean * beta + gradient * (1 - beta))
    return gradient.sign() * torch.where(mean.isnan(), mean, mean.sign())


def _larger(first: Tensor, second: Tensor) -> Tensor:
    """The larger one; the first where either is no number, as in Eigen."""
    return torch.where(second > first, second, first)
