"""Optimizers that change only the rows of a variable, and of its slots, that a gradient names.

In place, and nothing is as large as the variable. Indices are as in `ops.scatter_state`: those out of range change nothing. An index that
comes several times makes its steps one after the other, as in TensorFlow's kernels on the CPU, on a GPU by our own kernel
(`kernels.sparse_optimizers`). Where that can not be, one of them is made, as TensorFlow's GPU kernels leave it open: its optimizers sum the
rows of an index up before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.sparse_optimizers import Given, compares, fits, update_rows
from msplit.engines.cuda.ops.scatter_state import all_nowhere_unless, change_rows
from msplit.engines.cuda.ops.segment import rows_of_segments, sum_rows
from msplit.engines.cuda.ops.sort import unique_padded
from msplit.engines.cuda.ops.variables import apart

_Rows = Sequence[Tensor]
_Input = TypeVar("_Input")

Formula = Callable[[Node, _Rows, Sequence[Tensor], Tensor], _Rows]
"""Takes the node, rows of its variables (the trained one first, then its slots), its numbers and rows of the gradient. Gives new rows."""


@dataclass(frozen=True)
class RowOptimizer:
    """One op that updates rows of a variable.

    Attributes:
        variables: How many it changes: its first inputs.
        gradient: Which input is the gradient.
        indices: Which one names the rows. The others are numbers.
        formula: How.
    """

    variables: int
    gradient: int
    indices: int
    formula: Formula

    def parts(self, inputs: Sequence[_Input]) -> tuple[Sequence[_Input], list[_Input], _Input, _Input]:
        """The inputs of a node as variables, numbers, gradient and indices."""
        own = (self.gradient, self.indices)
        numbers = [one for slot, one in enumerate(inputs) if slot >= self.variables and slot not in own]
        return inputs[: self.variables], numbers, inputs[self.gradient], inputs[self.indices]


ROW_OPTIMIZERS: dict[str, RowOptimizer] = {
    "ScatterAdd": RowOptimizer(1, 2, 1, lambda _, rows, __, g: [rows[0] + g]),
    "ScatterSub": RowOptimizer(1, 2, 1, lambda _, rows, __, g: [rows[0] - g]),
}
"""By the name of the op; those of gradient descent, which are lowered elsewhere, too."""


def _optimizer(op: str, *, variables: int, gradient: int) -> Callable[[Formula], Formula]:
    """Registers a formula as the lowering of an op."""

    def register(formula: Formula) -> Formula:
        optimizer = ROW_OPTIMIZERS[op] = RowOptimizer(variables, gradient, gradient + 1, formula)

        def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
            state, numbers, rows, indices = optimizer.parts(inputs)
            _update(node, op, [[one] for one in state], numbers, [(rows, indices)])
            return tuple(state)

        lowered.__doc__ = formula.__doc__
        lowering(op, mutates=tuple(range(variables)))(lowered)
        return formula

    return register


@lowering("_ApplyRows", own=True)
def apply_rows(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Updates rows of many variables as the op that the attribute `op` names does of one.

    Inputs are the `count` trained variables, then as many of each slot, the numbers that all share, the gradients, and the indices. With
    the attribute `summed` rows of one index are summed up before. With `combiner`, which is how rows of a segment were put together, the
    segments of the indices follow, and the gradients are those of segments.
    """
    op, count = node.attrs["op"], node.attrs["count"]
    last = ROW_OPTIMIZERS[op].variables * count
    state = [inputs[start : start + count] for start in range(0, last, count)]
    own = (3 if node.get("combiner") else 2) * count
    given = list(zip(*(inputs[-start : count - start or None] for start in range(own, 0, -count)), strict=True))
    _update(node, op, state, inputs[last:-own], given, summed=bool(node.attrs["summed"]))
    return tuple(inputs[:last])


def _update(
    node: Node,
    op: str,
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    given: Sequence[Given],
    *,
    summed: bool = False,
) -> None:
    """Updates rows of variables, given slot by slot, each by its gradient's rows at its indices. With the attribute `guarded` the last
    number is whether any is to be changed."""
    if node.get("guarded", False):
        *numbers, finite = numbers
        places = all_nowhere_unless(finite, [indices for _, indices, *_ in given])
        given = [(rows, there, *more) for (rows, _, *more), there in zip(given, places, strict=True)]
    written = [one for slot in state for one in slot]
    numbers = apart(numbers, written)
    gradients = apart([rows for rows, *_ in given], written)
    given = [(rows, *more) for rows, (_, *more) in zip(gradients, given, strict=True)]
    combiner = str(node.get("combiner", ""))
    if combiner and not (fits(op, state, numbers, given) and compares(given)):
        given = [(rows_of_segments(rows, segments, combiner), indices) for rows, indices, segments in given]
    if fits(op, state, numbers, given):
        update_rows(op, node.attrs, state, numbers, given, summed=summed)
        return
    formula = ROW_OPTIMIZERS[op].formula
    for variables, (rows, indices, *_) in zip(zip(*state, strict=True), given, strict=True):
        if summed:
            indices, places = unique_padded(node, indices)
            rows = sum_rows(rows, places, indices.shape[0])
        change_rows(variables, indices, rows, lambda old, new: formula(node, old, numbers, new))


@_optimizer("SparseApplyProximalGradientDescent", variables=1, gradient=4)
def _proximal_gradient_descent(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of gradient descent on rows, with L1 and L2 regularization."""
    lr, l1, l2 = numbers
    return [_proximal(rows[0] - g * lr, lr, l1, l2)]


@_optimizer("SparseApplyMomentum", variables=2, gradient=3)
def _momentum(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step with momentum, or Nesterov's, on rows."""
    (v, accum), (lr, momentum) = rows, numbers
    accum = accum * momentum + g
    step = g * lr + accum * momentum * lr if node.get("use_nesterov", False) else accum * lr
    return v - step, accum


@_optimizer("SparseApplyKerasMomentum", variables=2, gradient=3)
def _keras_momentum(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step with momentum as Keras has it, of which the learning rate is a part, on rows."""
    (v, accum), (lr, momentum) = rows, numbers
    accum = accum * momentum - g * lr
    return v + (accum * momentum - g * lr if node.get("use_nesterov", False) else accum), accum


@_optimizer("SparseApplyAdagrad", variables=2, gradient=3)
def _adagrad(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of Adagrad on rows."""
    (v, accum), (lr,) = rows, numbers
    accum = accum + g * g if node.get("update_slots", True) else accum
    return v - lr * g * accum.rsqrt(), accum


@_optimizer("SparseApplyAdagradV2", variables=2, gradient=4)
def _adagrad_v2(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of Adagrad, with a number beside the root, on rows."""
    (v, accum), (lr, epsilon) = rows, numbers
    accum = accum + g * g if node.get("update_slots", True) else accum
    return v - lr * g / (accum.sqrt() + epsilon), accum


@_optimizer("SparseApplyAdagradDA", variables=3, gradient=3)
def _adagrad_da(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of dual averaging Adagrad on rows: what is left of the sum of all gradients."""
    lr, l1, l2, steps = numbers
    steps = steps.to(g.dtype)
    sums, squares = rows[1] + g, rows[2] + g * g
    shrunk = sums.sign() * (sums.abs() - l1 * steps).clamp(min=0)
    return -lr * torch.where(l1 > 0, shrunk, sums) / (l2 * steps * lr + squares.sqrt()), sums, squares


@_optimizer("SparseApplyProximalAdagrad", variables=2, gradient=5)
def _proximal_adagrad(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of Adagrad on rows, with L1 and L2 regularization."""
    lr, l1, l2 = numbers
    accum = rows[1] + g * g
    rate = lr * accum.rsqrt()
    return _proximal(rows[0] - g * rate, rate, l1, l2), accum


@_optimizer("SparseApplyAdadelta", variables=3, gradient=6)
def _adadelta(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of Adadelta on rows."""
    (v, squares, updates), (lr, rho, epsilon) = rows, numbers
    squares = squares * rho + g * g * (1 - rho)
    update = (updates + epsilon).sqrt() * (squares + epsilon).rsqrt() * g
    return v - update * lr, squares, updates * rho + update * update * (1 - rho)


@_optimizer("SparseApplyRMSProp", variables=3, gradient=7)
def _rms_prop(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of RMSProp on rows."""
    (v, squares, moments), (lr, rho, momentum, epsilon) = rows, numbers
    squares = squares * rho + g * g * (1 - rho)
    moments = moments * momentum + (squares + epsilon).rsqrt() * lr * g
    return v - moments, squares, moments


@_optimizer("SparseApplyCenteredRMSProp", variables=4, gradient=8)
def _centered_rms_prop(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of RMSProp, divided by the deviation from the mean, on rows."""
    (v, means, squares, moments), (lr, rho, momentum, epsilon) = rows, numbers
    means, squares = means * rho + g * (1 - rho), squares * rho + g * g * (1 - rho)
    moments = moments * momentum + (squares + epsilon - means * means).rsqrt() * lr * g
    return v - moments, means, squares, moments


@_optimizer("SparseApplyFtrl", variables=3, gradient=3)
def _ftrl(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """A step of follow the regularized leader on rows."""
    lr, l1, l2, power = numbers
    return _follow(node, rows, (lr, l1, l2, power), g, g)


@_optimizer("SparseApplyFtrlV2", variables=3, gradient=3)
def _ftrl_v2(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor) -> _Rows:
    """The same with shrinkage, an L2 penalty on the gradient alone."""
    lr, l1, l2, shrinkage, power = numbers
    return _follow(node, rows, (lr, l1, l2, power), g, g + 2 * shrinkage * rows[0])


def _follow(node: Node, rows: _Rows, numbers: Sequence[Tensor], g: Tensor, penalized: Tensor) -> _Rows:
    (v, squares, linear), (lr, l1, l2, power) = rows, numbers
    # What is kept in `linear` is as large as gradients, or as these times the learning rate.
    scale, weight = (lr, 1.0) if node.get("multiply_linear_by_lr", False) else (1.0, lr)
    after = squares + g * g
    root = _power(after, power)
    linear = linear + penalized * scale - (root - _power(squares, power)) / weight * v
    limit = l1 * scale
    kept = torch.maximum(torch.minimum(linear, limit), -limit)
    return (kept - linear) / (root / weight + 2 * l2 * scale), after, linear


def _power(x: Tensor, power: Tensor) -> Tensor:
    """x to minus the power; the usual one is a root, which is more exact."""
    return torch.where(power == -0.5, x.sqrt(), x.pow(-power))


def _proximal(moved: Tensor, rate: Tensor, l1: Tensor, l2: Tensor) -> Tensor:
    """What regularization leaves of rows after a step."""
    shrunk = moved.sign() * (moved.abs() - rate * l1).clamp(min=0)
    return torch.where(l1 > 0, shrunk, moved) / (1 + l2 * rate)
