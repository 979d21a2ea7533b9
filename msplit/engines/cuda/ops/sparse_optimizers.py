"""Optimizers that change only the rows of a variable, and of its slots, that a gradient names.

In place, and nothing is as large as the variable. Indices are as in `ops.scatter_state`: those out of range change nothing; an index that
comes several times makes its steps one after the other on the CPU, as TensorFlow's kernels there do. On a GPU one of them is made, as in
TensorFlow's GPU kernels: its optimizers sum the rows of an index up before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.scatter_state import change_rows

_Rows = Sequence[Tensor]


@lowering("SparseApplyProximalGradientDescent", mutates=(0,))
def sparse_proximal_gradient_descent(
    node: Node, variable: Tensor, lr: Tensor, l1: Tensor, l2: Tensor, grad: Tensor, indices: Tensor
) -> Tensor:
    """A step of gradient descent on rows, with L1 and L2 regularization."""

    def step(rows: _Rows, g: Tensor) -> _Rows:
        return [_proximal(rows[0] - g * lr, lr, l1, l2)]

    change_rows([variable], indices, grad, step)
    return variable


@lowering("SparseApplyMomentum", mutates=(0, 1))
def sparse_momentum(
    node: Node, variable: Tensor, accum: Tensor, lr: Tensor, grad: Tensor, indices: Tensor, momentum: Tensor
) -> _Rows:
    """A step with momentum, or Nesterov's, on rows."""
    nesterov = bool(node.get("use_nesterov", False))

    def step(rows: _Rows, g: Tensor) -> _Rows:
        v, a = rows[0], rows[1] * momentum + g
        return v - (g * lr + a * momentum * lr if nesterov else a * lr), a

    change_rows([variable, accum], indices, grad, step)
    return variable, accum


@lowering("SparseApplyKerasMomentum", mutates=(0, 1))
def sparse_keras_momentum(
    node: Node, variable: Tensor, accum: Tensor, lr: Tensor, grad: Tensor, indices: Tensor, momentum: Tensor
) -> _Rows:
    """A step with momentum as Keras has it, of which the learning rate is a part, on rows."""
    nesterov = bool(node.get("use_nesterov", False))

    def step(rows: _Rows, g: Tensor) -> _Rows:
        a = rows[1] * momentum - g * lr
        return rows[0] + (a * momentum - g * lr if nesterov else a), a

    change_rows([variable, accum], indices, grad, step)
    return variable, accum


@lowering("SparseApplyAdagrad", mutates=(0, 1))
def sparse_adagrad(node: Node, variable: Tensor, accum: Tensor, lr: Tensor, grad: Tensor, indices: Tensor) -> _Rows:
    """A step of Adagrad on rows."""
    updates = bool(node.get("update_slots", True))

    def step(rows: _Rows, g: Tensor) -> _Rows:
        a = rows[1] + g * g if updates else rows[1]
        return rows[0] - lr * g * a.rsqrt(), a

    change_rows([variable, accum], indices, grad, step)
    return variable, accum


@lowering("SparseApplyAdagradV2", mutates=(0, 1))
def sparse_adagrad_v2(
    node: Node, variable: Tensor, accum: Tensor, lr: Tensor, epsilon: Tensor, grad: Tensor, indices: Tensor
) -> _Rows:
    """A step of Adagrad, with a number beside the root, on rows."""
    updates = bool(node.get("update_slots", True))

    def step(rows: _Rows, g: Tensor) -> _Rows:
        a = rows[1] + g * g if updates else rows[1]
        return rows[0] - lr * g / (a.sqrt() + epsilon), a

    change_rows([variable, accum], indices, grad, step)
    return variable, accum


@lowering("SparseApplyAdagradDA", mutates=(0, 1, 2))
def sparse_adagrad_da(
    node: Node, variable: Tensor, total: Tensor, squares: Tensor, grad: Tensor, indices: Tensor, *numbers: Tensor
) -> _Rows:
    """A step of dual averaging Adagrad on rows: what is left of the sum of all gradients."""
    lr, l1, l2, steps = numbers
    steps = steps.to(variable.dtype)

    def step(rows: _Rows, g: Tensor) -> _Rows:
        sums, squared = rows[1] + g, rows[2] + g * g
        shrunk = sums.sign() * (sums.abs() - l1 * steps).clamp(min=0)
        return -lr * torch.where(l1 > 0, shrunk, sums) / (l2 * steps * lr + squared.sqrt()), sums, squared

    change_rows([variable, total, squares], indices, grad, step)
    return variable, total, squares


@lowering("SparseApplyProximalAdagrad", mutates=(0, 1))
def sparse_proximal_adagrad(node: Node, variable: Tensor, accum: Tensor, *others: Tensor) -> _Rows:
    """A step of Adagrad on rows, with L1 and L2 regularization."""
    lr, l1, l2, grad, indices = others

    def step(rows: _Rows, g: Tensor) -> _Rows:
        a = rows[1] + g * g
        rate = lr * a.rsqrt()
        return _proximal(rows[0] - g * rate, rate, l1, l2), a

    change_rows([variable, accum], indices, grad, step)
    return variable, accum


@lowering("SparseApplyAdadelta", mutates=(0, 1, 2))
def sparse_adadelta(node: Node, variable: Tensor, accum: Tensor, accum_update: Tensor, *others: Tensor) -> _Rows:
    """A step of Adadelta on rows."""
    lr, rho, epsilon, grad, indices = others

    def step(rows: _Rows, g: Tensor) -> _Rows:
        a = rows[1] * rho + g * g * (1 - rho)
        update = (rows[2] + epsilon).sqrt() * (a + epsilon).rsqrt() * g
        return rows[0] - update * lr, a, rows[2] * rho + update * update * (1 - rho)

    change_rows([variable, accum, accum_update], indices, grad, step)
    return variable, accum, accum_update


@lowering("SparseApplyRMSProp", mutates=(0, 1, 2))
def sparse_rms_prop(node: Node, variable: Tensor, squares: Tensor, moments: Tensor, *others: Tensor) -> _Rows:
    """A step of RMSProp on rows."""
    lr, rho, momentum, epsilon, grad, indices = others

    def step(rows: _Rows, g: Tensor) -> _Rows:
        square = rows[1] * rho + g * g * (1 - rho)
        moment = rows[2] * momentum + (square + epsilon).rsqrt() * lr * g
        return rows[0] - moment, square, moment

    change_rows([variable, squares, moments], indices, grad, step)
    return variable, squares, moments


@lowering("SparseApplyCenteredRMSProp", mutates=(0, 1, 2, 3))
def sparse_centered_rms_prop(
    node: Node, variable: Tensor, means: Tensor, squares: Tensor, moments: Tensor, *others: Tensor
) -> _Rows:
    """A step of RMSProp, divided by the deviation from the mean, on rows."""
    lr, rho, momentum, epsilon, grad, indices = others

    def step(rows: _Rows, g: Tensor) -> _Rows:
        mean, square = rows[1] * rho + g * (1 - rho), rows[2] * rho + g * g * (1 - rho)
        moment = rows[3] * momentum + (square + epsilon - mean * mean).rsqrt() * lr * g
        return rows[0] - moment, mean, square, moment

    change_rows([variable, means, squares, moments], indices, grad, step)
    return variable, means, squares, moments


@lowering("SparseApplyFtrl", "SparseApplyFtrlV2", mutates=(0, 1, 2))
def sparse_ftrl(node: Node, variable: Tensor, accum: Tensor, linear: Tensor, *others: Tensor) -> _Rows:
    """A step of follow the regularized leader on rows; V2 has shrinkage, an L2 penalty on the gradient alone."""
    grad, indices, lr, l1, l2, *shrinkage, power = others
    by_rate = bool(node.get("multiply_linear_by_lr", False))
    # What is kept in `linear` is as large as gradients, or as these times the learning rate.
    scale, weight = (lr, 1.0) if by_rate else (1.0, lr)

    def step(rows: _Rows, g: Tensor) -> _Rows:
        v, a, before = rows
        pulled = g + 2 * shrinkage[0] * v if shrinkage else g
        after = a + g * g
        root = _power(after, power)
        total = before + pulled * scale - (root - _power(a, power)) / weight * v
        limit = l1 * scale
        kept = torch.maximum(torch.minimum(total, limit), -limit)
        return (kept - total) / (root / weight + 2 * l2 * scale), after, total

    change_rows([variable, accum, linear], indices, grad, step)
    return variable, accum, linear


def _power(x: Tensor, power: Tensor) -> Tensor:
    """x to minus the power; the usual one is a root, which is more exact."""
    return torch.where(power == -0.5, x.sqrt(), x.pow(-power))


def _proximal(moved: Tensor, rate: Tensor, l1: Tensor, l2: Tensor) -> Tensor:
    """What regularization leaves of rows after a step."""
    shrunk = moved.sign() * (moved.abs() - rate * l1).clamp(min=0)
    return torch.where(l1 > 0, shrunk, moved) / (1 + l2 * rate)
