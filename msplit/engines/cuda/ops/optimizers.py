"""Updates of variables by optimizers, or only of the rows that a gradient names, in place, by `kernels.optimizer_formulas`.

On a GPU variables of float32 and float64 are updated by our own kernels (`kernels.optimizers`, `kernels.sparse_optimizers`), which compute
the same.

Of rows, nothing is as large as the variable. Indices are as in `ops.scatter_state`: those out of range change nothing. An index that comes
several times makes its steps one after the other, as in TensorFlow's kernels on the CPU, on a GPU by our own kernel. Where that can not be,
one of them is made, as TensorFlow's GPU kernels leave it open: its optimizers sum the rows of an index up before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import optimizers as whole
from msplit.engines.cuda.kernels import sparse_optimizers as sparse
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS, Optimizer
from msplit.engines.cuda.kernels.sparse_optimizers import Given, compares
from msplit.engines.cuda.ops.loss_scale import keep
from msplit.engines.cuda.ops.scatter_state import all_nowhere_unless, change_rows
from msplit.engines.cuda.ops.segment import rows_of_segments, sum_rows
from msplit.engines.cuda.ops.sort import unique_padded
from msplit.engines.cuda.ops.variables import apart, fit

OPTIMIZERS: dict[str, Optimizer] = {f"Apply{row.name}": row for row in ROWS}
"""Optimizers of whole variables, by the name of the op."""

_SPARSE = {f"SparseApply{row.name}": row.for_rows() for row in ROWS if row.sparse}

ROW_OPTIMIZERS: dict[str, Optimizer] = {
    "ScatterAdd": Optimizer("ScatterAdd", lambda rows, _, g, *__: [rows[0] + g], 1, 2, indices=1),
    "ScatterSub": Optimizer("ScatterSub", lambda rows, _, g, *__: [rows[0] - g], 1, 2, indices=1),
    **_SPARSE,
}
"""Optimizers of rows, by the name of the op; also additions of rows, which are lowered elsewhere."""


def _register(op: str, optimizer: Optimizer) -> None:
    """Makes a formula the lowering of an op."""
    of_rows = optimizer.indices >= 0

    def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, numbers, *given = optimizer.parts(inputs)
        slots = [[one] for one in state]
        if of_rows:
            _update_rows(node, op, slots, numbers, [tuple(given)])
        else:
            _update_whole(node, op, slots, numbers, given)
        return tuple(state)

    lowered.__doc__ = f"A step on rows. {optimizer.formula.__doc__}" if of_rows else optimizer.formula.__doc__
    lowering(op, mutates=tuple(range(optimizer.variables)))(lowered)


for _op, _row in (OPTIMIZERS | _SPARSE).items():
    _register(_op, _row)


@lowering("_ApplyFlat", own=True)
def apply_flat(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Updates many variables as the op that the attribute `op` names does one of them, as if they were one flat tensor.

    Inputs are the `count` trained variables, then as many of each slot, the numbers that all share, and the gradients.
    """
    op, count = node.attrs["op"], node.attrs["count"]
    last = OPTIMIZERS[op].variables * count
    state = [inputs[start : start + count] for start in range(0, last, count)]
    _update_whole(node, op, state, inputs[last:-count], inputs[-count:])
    return tuple(inputs[:last])


def _update_whole(
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
    if whole.fits(op, written, numbers):
        whole.update(op, node.attrs, state, numbers, gradients, finite)
        return
    before = [] if finite is None else [one.clone() for one in written]
    for variables, gradient in zip(zip(*state, strict=True), gradients, strict=True):
        for old, new in zip(variables, OPTIMIZERS[op].step(node.attrs, variables, numbers, gradient), strict=True):
            if new is not old:
                old.copy_(new)
    if finite is not None:
        keep(finite, written, before)


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
    _update_rows(node, op, state, inputs[last:-own], given, summed=bool(node.attrs["summed"]))
    return tuple(inputs[:last])


def _update_rows(
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
    if combiner and not (sparse.fits(op, state, numbers, given) and compares(given)):
        given = [(rows_of_segments(rows, segments, combiner), indices) for rows, indices, segments in given]
    if sparse.fits(op, state, numbers, given):
        sparse.update_rows(op, node.attrs, state, numbers, given, summed=summed)
        return
    optimizer = ROW_OPTIMIZERS[op]
    for variables, (rows, indices, *_) in zip(zip(*state, strict=True), given, strict=True):
        if summed:
            indices, places = unique_padded(node, indices)
            rows = sum_rows(rows, places, indices.shape[0])
        change_rows(variables, indices, rows, lambda old, new: optimizer.step(node.attrs, old, numbers, new))
