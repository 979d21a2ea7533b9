"""Updates of variables by optimizers, in place, by the formulas of `kernels.optimizer_formulas`.

On a GPU variables of float32 and float64 are updated by one kernel (`kernels.optimizers`), which computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS, Optimizer
from msplit.engines.cuda.kernels.optimizers import fits, update
from msplit.engines.cuda.ops.loss_scale import keep
from msplit.engines.cuda.ops.variables import apart, fit

OPTIMIZERS: dict[str, Optimizer] = {f"Apply{row.name}": row for row in ROWS}
"""By the name of the op."""


def _register(op: str, optimizer: Optimizer) -> None:
    """Makes a formula the lowering of an op."""

    def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, numbers, grad = optimizer.parts(inputs)
        _update(node, op, [[one] for one in state], numbers, [grad])
        return tuple(state)

    lowered.__doc__ = optimizer.formula.__doc__
    lowering(op, mutates=tuple(range(optimizer.variables)))(lowered)


for _op, _row in OPTIMIZERS.items():
    _register(_op, _row)


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
        for old, new in zip(variables, OPTIMIZERS[op].step(node.attrs, variables, numbers, gradient), strict=True):
            if new is not old:
                old.copy_(new)
    if finite is not None:
        keep(finite, written, before)
