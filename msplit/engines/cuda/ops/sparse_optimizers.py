"""Optimizers that change only the rows of a variable, and of its slots, that a gradient names.

In place, and nothing is as large as the variable. Indices are as in `ops.scatter_state`: those out of range change nothing. An index that
comes several times makes its steps one after the other, as in TensorFlow's kernels on the CPU, on a GPU by our own kernel
(`kernels.sparse_optimizers`). Where that can not be, one of them is made, as TensorFlow's GPU kernels leave it open: its optimizers sum the
rows of an index up before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS, Optimizer
from msplit.engines.cuda.kernels.sparse_optimizers import Given, compares, fits, update_rows
from msplit.engines.cuda.ops.scatter_state import all_nowhere_unless, change_rows
from msplit.engines.cuda.ops.segment import rows_of_segments, sum_rows
from msplit.engines.cuda.ops.sort import unique_padded
from msplit.engines.cuda.ops.variables import apart

_SPARSE = {f"SparseApply{row.name}": row.for_rows() for row in ROWS if row.sparse}

ROW_OPTIMIZERS: dict[str, Optimizer] = {
    "ScatterAdd": Optimizer("ScatterAdd", lambda rows, _, g, *__: [rows[0] + g], 1, 2, indices=1),
    "ScatterSub": Optimizer("ScatterSub", lambda rows, _, g, *__: [rows[0] - g], 1, 2, indices=1),
    **_SPARSE,
}
"""By the name of the op; those of gradient descent, which are lowered elsewhere, too."""


def _register(op: str, optimizer: Optimizer) -> None:
    """Makes a formula the lowering of an op."""

    def lowered(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        state, numbers, rows, indices = optimizer.parts(inputs)
        _update(node, op, [[one] for one in state], numbers, [(rows, indices)])
        return tuple(state)

    lowered.__doc__ = f"A step on rows. {optimizer.formula.__doc__}"
    lowering(op, mutates=tuple(range(optimizer.variables)))(lowered)


for _op, _row in _SPARSE.items():
    _register(_op, _row)


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
    optimizer = ROW_OPTIMIZERS[op]
    for variables, (rows, indices, *_) in zip(zip(*state, strict=True), given, strict=True):
        if summed:
            indices, places = unique_padded(node, indices)
            rows = sum_rows(rows, places, indices.shape[0])
        change_rows(variables, indices, rows, lambda old, new: optimizer.step(node.attrs, old, numbers, new))
