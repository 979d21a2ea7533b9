"""The formula of each optimizer, once, and its row: for PyTorch's operators, and for Triton, which compiles the same source.

A formula takes what it updates (the variable, then its slots, or rows of them), its numbers, the gradient, a flag of its own, and
`sparse`: TensorFlow's kernels for rows round otherwise than those for whole variables. It gives what it updates anew, each step rounded
to the variable's type as in TensorFlow's kernels. Those that Triton compiles call the functions above them, for which
`kernels.code.optimizers` has its own, and nothing of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

State = Sequence[Tensor]
constexpr = bool
"""A flag that Triton knows when it compiles."""


def root(x: Tensor) -> Tensor:
    """The square root."""
    return x.sqrt()


def inverse_root(x: Tensor) -> Tensor:
    """One by the square root."""
    return x.rsqrt()


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """x / y."""
    return x / y


def minus_power(x: Tensor, power: Tensor) -> Tensor:
    """x to minus the power; the usual one, -0.5, is a root, which is more exact."""
    return torch.where(power == -0.5, x.sqrt(), x.pow(-power))


def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """x where the condition holds, y elsewhere."""
    return torch.where(condition, x, y)


def sign(x: Tensor) -> Tensor:
    """1, 0 or -1."""
    return x.sign()


def magnitude(x: Tensor) -> Tensor:
    """The absolute value."""
    return x.abs()


def gradient_descent(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Gradient descent."""
    return (state[0] - g * numbers[0],)


def momentum(state: State, numbers: State, g: Tensor, nesterov: constexpr, sparse: constexpr) -> State:
    """Gradient descent with momentum, Nesterov's where `use_nesterov` is set."""
    v, accum = state
    rate, factor = numbers
    accum = accum * factor + g
    step = g * rate + accum * factor * rate if nesterov else accum * rate
    return v - step, accum


def keras_momentum(state: State, numbers: State, g: Tensor, nesterov: constexpr, sparse: constexpr) -> State:
    """Gradient descent with momentum in Keras' form, where the learning rate is part of what is accumulated."""
    v, accum = state
    rate, factor = numbers
    accum = accum * factor - g * rate
    step = accum * factor - g * rate if nesterov else accum
    return v + step, accum


def moments(m: Tensor, s: Tensor, numbers: State, g: Tensor) -> State:
    """Adam's moments, and the learning rate without their bias."""
    beta1_power, beta2_power, rate, beta1, beta2, _ = numbers
    m = m + (g - m) * (1 - beta1)
    s = s + (g * g - s) * (1 - beta2)
    return m, s, quotient(rate * root(1 - beta2_power), 1 - beta1_power)


def adam(state: State, numbers: State, g: Tensor, nesterov: constexpr, sparse: constexpr) -> State:
    """Adam, with Nesterov's momentum where `use_nesterov` is set."""
    v, m, s = state
    m, s, rate = moments(m, s, numbers, g)
    step = g * (1 - numbers[3]) + numbers[3] * m if nesterov else m
    return v - quotient(step * rate, root(s) + numbers[5]), m, s


def amsgrad(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Adam with the largest second moment that there was."""
    v, m, s, largest = state
    m, s, rate = moments(m, s, numbers, g)
    largest = where(s > largest, s, largest)
    return v - quotient(m * rate, root(largest) + numbers[5]), m, s, largest


def adagrad(state: State, numbers: State, g: Tensor, update_slots: constexpr, sparse: constexpr) -> State:
    """Adagrad. Its accumulator stays as it is where `update_slots` is off."""
    v, accum = state
    accum = accum + g * g if update_slots else accum
    return v - g * numbers[0] * inverse_root(accum), accum


def adagrad_v2(state: State, numbers: State, g: Tensor, update_slots: constexpr, sparse: constexpr) -> State:
    """Adagrad with an epsilon."""
    v, accum = state
    accum = accum + g * g if update_slots else accum
    return v - quotient(g * numbers[0], root(accum) + numbers[1]), accum


def adadelta(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Adadelta."""
    v, squares, updates = state
    rate, rho, epsilon = numbers
    squares = squares * rho + g * g * (1 - rho)
    step = root(updates + epsilon) * inverse_root(squares + epsilon) * g
    return v - step * rate, squares, updates * rho + step * step * (1 - rho)


def rmsprop(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """RMSProp with momentum."""
    v, squares, accum = state
    rate, rho, factor, epsilon = numbers
    if sparse:
        squares = squares * rho + g * g * (1 - rho)
        accum = accum * factor + inverse_root(squares + epsilon) * rate * g
    else:
        squares = squares + (g * g - squares) * (1 - rho)
        accum = accum * factor + quotient(g * rate, root(squares + epsilon))
    return v - accum, squares, accum


def centered_rmsprop(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """RMSProp that divides by the deviation from the mean gradient."""
    v, means, squares, accum = state
    rate, rho, factor, epsilon = numbers
    if sparse:
        means = means * rho + g * (1 - rho)
        squares = squares * rho + g * g * (1 - rho)
        accum = accum * factor + inverse_root(squares + epsilon - means * means) * rate * g
    else:
        means = means + (g - means) * (1 - rho)
        squares = squares + (g * g - squares) * (1 - rho)
        accum = accum * factor + quotient(g * rate, root(squares - means * means + epsilon))
    return v - accum, means, squares, accum


def ftrl(state: State, numbers: State, g: Tensor, by_rate: constexpr, sparse: constexpr) -> State:
    """Follow the regularized leader."""
    return follow(state, numbers, g, g, by_rate, sparse)


def ftrl_v2(state: State, numbers: State, g: Tensor, by_rate: constexpr, sparse: constexpr) -> State:
    """Follow the regularized leader, with a penalty that shrinks the weights online."""
    rate, l1, l2, shrinkage, power = numbers
    return follow(state, (rate, l1, l2, power), g, g + 2 * shrinkage * state[0], by_rate, sparse)


def follow(state: State, numbers: State, g: Tensor, penalized: Tensor, by_rate: constexpr, sparse: constexpr) -> State:
    """FTRL. What is no number stays none in rows; a whole variable becomes zero there."""
    v, squares, linear = state
    rate, l1, l2, power = numbers
    after = squares + g * g
    divisor = minus_power(after, power)
    change = divisor - minus_power(squares, power)
    if by_rate:
        penalized, l1, l2 = penalized * rate, l1 * rate, l2 * rate
    else:
        divisor, change = quotient(divisor, rate), quotient(change, rate)
    if sparse:
        linear = linear + penalized - change * v
        kept = where(linear > l1, l1, where(linear < -l1, -l1, linear))
        found = quotient(kept - linear, divisor + 2 * l2)
    else:
        linear = linear + (penalized - change * v)
        found = where(magnitude(linear) > l1, quotient(sign(linear) * l1 - linear, divisor + 2 * l2), 0.0)
    return found, after, linear


def proximal_gradient_descent(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Gradient descent, followed by what draws the variable to zero (FOBOS)."""
    rate, l1, l2 = numbers
    return (_shrunk(state[0] - g * rate, rate, l1, l2),)


def proximal_adagrad(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Adagrad, followed by what draws the variable to zero (FOBOS)."""
    (v, accum), (rate, l1, l2) = state, numbers
    accum = accum + g * g
    rates = rate * accum.rsqrt()
    return _shrunk(v - g * rates, rates, l1, l2), accum


def _shrunk(moved: Tensor, rate: Tensor, l1: Tensor, l2: Tensor) -> Tensor:
    """Values nearer to zero, by as much as L1 and L2 regularization ask for."""
    nearer = moved.sign() * (moved.abs() - rate * l1).clamp(min=0)
    return torch.where(l1 > 0, nearer, moved) / (1 + l2 * rate)


def adagrad_da(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Adagrad with dual averaging: the variable is made anew of all gradients so far."""
    (_, sums, squares), (rate, l1, l2, count) = state, numbers
    sums, squares = sums + g, squares + g * g
    steps = count.to(g.dtype) if sparse else count.to(torch.float32).to(g.dtype)
    weight = l2 * steps * rate if sparse else l2 * (steps * rate)
    nearer = sums.sign() * (sums.abs() - steps * l1).clamp(min=0)
    return -rate * torch.where(l1 > 0, nearer, sums) / (weight + squares.sqrt()), sums, squares


def adamax(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """Adam with the infinity norm."""
    (v, m, largest), (beta1_power, rate, beta1, beta2, epsilon) = state, numbers
    m = m + (g - m) * (1 - beta1)
    largest, size = beta2 * largest, g.abs()
    largest = torch.where(size > largest, size, largest)  # the first where either is no number, as in Eigen
    return v - rate / (1 - beta1_power) * (m / (largest + epsilon)), m, largest


def add_sign(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """A step that is larger where gradient and mean gradient agree in sign (AddSign)."""
    (v, mean), (rate, alpha, decay, beta) = state, numbers
    mean = mean * beta + g * (1 - beta)
    return v - rate * (alpha + decay * _agree(mean, g)) * g, mean


def power_sign(state: State, numbers: State, g: Tensor, option: constexpr, sparse: constexpr) -> State:
    """A step that is larger by a power where gradient and mean gradient agree in sign (PowerSign)."""
    (v, mean), (rate, base, decay, beta) = state, numbers
    mean = mean * beta + g * (1 - beta)
    return v - rate * (base * decay * _agree(mean, g)).exp() * g, mean


def _agree(mean: Tensor, g: Tensor) -> Tensor:
    """1 where a gradient has the sign of the mean gradient, else 0 or -1."""
    return g.sign() * torch.where(mean.isnan(), mean, mean.sign())


Formula = Callable[[State, State, Tensor, bool, bool], State]


@dataclass(frozen=True)
class Optimizer:
    """One optimizer's row.

    Attributes:
        name: As TensorFlow's ops have it behind Apply and SparseApply.
        formula: Its formula.
        variables: Tensors that it changes: the first inputs of its op.
        gradient: Place of the gradient among the inputs. The others are numbers.
        flag: Attribute that is the formula's flag, and its value where a file left it out.
        sparse: Set where there is an op for rows.
        kernel: Set where Triton compiles the formula.
        indices: Of an op for rows, the place of the input that names them; -1 of others.
    """

    name: str
    formula: Formula
    variables: int
    gradient: int
    flag: tuple[str, bool] = ("", False)
    sparse: bool = True
    kernel: bool = True
    indices: int = -1

    def parts(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The inputs of an op as variables, numbers and gradient, and the indices where it has some."""
        given = [slot for slot in (self.gradient, self.indices) if slot >= 0]
        numbers = [one for slot, one in enumerate(inputs) if slot >= self.variables and slot not in given]
        return inputs[: self.variables], numbers, *(inputs[slot] for slot in given)

    def step(self, attrs: Mapping[str, Any], state: State, numbers: State, gradient: Tensor) -> State:
        """The formula for an op with these attributes."""
        name, default = self.flag
        return self.formula(state, numbers, gradient, bool(attrs.get(name, default)), self.indices >= 0)

    def for_rows(self) -> Optimizer:
        """The row of the op for rows, which has their indices behind the gradient."""
        return replace(self, indices=self.gradient + 1)


_NESTEROV, _SLOTS, _BY_RATE = ("use_nesterov", False), ("update_slots", True), ("multiply_linear_by_lr", False)

ROWS = (
    Optimizer("GradientDescent", gradient_descent, 1, 2, sparse=False),
    Optimizer("Momentum", momentum, 2, 3, _NESTEROV),
    Optimizer("KerasMomentum", keras_momentum, 2, 3, _NESTEROV),
    Optimizer("Adam", adam, 3, 9, _NESTEROV, sparse=False),
    Optimizer("AdamWithAmsgrad", amsgrad, 4, 10, sparse=False),
    Optimizer("Adagrad", adagrad, 2, 3, _SLOTS),
    Optimizer("AdagradV2", adagrad_v2, 2, 4, _SLOTS),
    Optimizer("Adadelta", adadelta, 3, 6),
    Optimizer("RMSProp", rmsprop, 3, 7),
    Optimizer("CenteredRMSProp", centered_rmsprop, 4, 8),
    Optimizer("Ftrl", ftrl, 3, 3, _BY_RATE),
    Optimizer("FtrlV2", ftrl_v2, 3, 3, _BY_RATE),
    Optimizer("ProximalGradientDescent", proximal_gradient_descent, 1, 4, kernel=False),
    Optimizer("ProximalAdagrad", proximal_adagrad, 2, 5, kernel=False),
    Optimizer("AdagradDA", adagrad_da, 3, 3, kernel=False),
    Optimizer("AdaMax", adamax, 3, 8, sparse=False, kernel=False),
    Optimizer("AddSign", add_sign, 2, 6, sparse=False, kernel=False),
    Optimizer("PowerSign", power_sign, 2, 6, sparse=False, kernel=False),
)

OPTIMIZERS: dict[str, Optimizer] = {f"Apply{row.name}": row for row in ROWS}
"""Those of whole variables, by the name of the op."""

SPARSE_OPTIMIZERS = {f"SparseApply{row.name}": row.for_rows() for row in ROWS if row.sparse}

ROW_OPTIMIZERS: dict[str, Optimizer] = {
    "ScatterAdd": Optimizer("ScatterAdd", lambda rows, _, g, *__: [rows[0] + g], 1, 2, indices=1),
    "ScatterSub": Optimizer("ScatterSub", lambda rows, _, g, *__: [rows[0] - g], 1, 2, indices=1),
    **SPARSE_OPTIMIZERS,
}
"""Those of rows, by the name of the op; those of gradient descent, which are lowered elsewhere, too."""
