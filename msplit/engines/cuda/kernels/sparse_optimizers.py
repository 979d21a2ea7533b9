"""Updates of rows of variables by an optimizer, of all variables that it updates alike in one kernel. On a GPU.

With PyTorch's operators one table takes some thirty kernels: to find distinct ids, to sum up their rows, to fetch and to put back rows of
the variable and of its slots. Here one program per id looks whether its id has come before, and does all of that for it if not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.kernels.launch import Code, can_launch, launch
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS
from msplit.engines.cuda.kernels.optimizers import DTYPES, on_device
from msplit.opset.traits import on_values, ops_with

_UPDATE, _DISTINCT = Code("sparse_optimizers", "update_rows"), Code("sparse_optimizers", "distinct")
_GRADIENT = Code("sparse_optimizers", "segment_gradient")

OPTIONS = {on_values(op): ("", False) for op in sorted(ops_with("adds rows"))} | {
    f"SparseApply{row.name}": row.flag for row in ROWS if row.kernel and row.sparse
}
"""The optimizers that the kernel knows: the attribute that it looks at, and what that is where the file left it out."""

_NUMBERS = 5
"""Arguments of the kernel for numbers."""

_LARGEST_BLOCK = 1024
"""Elements of a row that are updated at once."""

_CHUNK = 256
"""Ids that are looked at at once."""

MOST_COMPARED = 2048
"""Ids of a table that are each compared with all others; more are sorted before, by PyTorch's kernels."""


def finds(ids: Tensor) -> bool:
    """True if `distinct` can find the distinct ones of a vector of ids."""
    return ids.dtype in (torch.int32, torch.int64) and 0 < ids.numel() <= MOST_COMPARED and can_launch(ids.device)


def distinct(ids: Tensor, places: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ids where they stand first, -1 elsewhere; and for each, as this type, where it stands first."""
    ids = ids.contiguous()
    found, first = torch.empty_like(ids), torch.empty_like(ids, dtype=places)
    launch(_DISTINCT, (ids.numel(),))(ids, found, first, CHUNK=_CHUNK, num_warps=1)
    return found, first


Given = tuple[Tensor, ...]
"""Rows of a gradient, and the row of the variable that each is for. Or rows of segments, the rows of the variable that the segments were
made of, and the segment of each of these."""

_COMBINERS = ("", "sum", "mean", "sqrtn")


def spreads(grad: Tensor, places: Tensor, segments: Tensor, count: int) -> bool:
    """True if `segment_gradient` can spread a gradient of segments."""
    return (
        grad.dtype in DTYPES
        and grad.numel() > 0
        and all(one.dtype in (torch.int32, torch.int64) for one in (places, segments))
        and 0 < places.numel() == segments.numel() <= MOST_COMPARED
        and 0 < count <= MOST_COMPARED
        and can_launch(grad.device)
    )


def segment_gradient(grad: Tensor, places: Tensor, segments: Tensor, count: int, combiner: str) -> Tensor:
    """The gradient of rows of which segments were made: for each of `count` places what its segments bring; zeros for none."""
    grad, places, segments = grad.contiguous(), places.contiguous(), segments.contiguous()
    out = grad.new_empty((count, *grad.shape[1:]))
    width = grad.numel() // grad.shape[0]
    launch(_GRADIENT, (count,))(
        *(grad, places, segments, out, places.numel(), grad.shape[0], width),
        COMBINER=_COMBINERS.index(combiner),
        BLOCK=_block(width),
        CHUNK=_CHUNK,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _block(width: int) -> int:
    return min(_LARGEST_BLOCK, 1 << math.ceil(math.log2(width)))


def compares(given: Sequence[Given]) -> bool:
    """True if ids are few enough to be compared with each other, as segments are."""
    return max((indices.numel() for _, indices, *_ in given), default=0) <= MOST_COMPARED


def fits(op: str, state: Sequence[Sequence[Tensor]], numbers: Sequence[Tensor], given: Sequence[Given]) -> bool:
    """True if the kernel can update these variables with these numbers."""
    first = state[0][0]
    dtype, place, index = first.dtype, first.device, given[0][1].dtype
    variables = [one for slot in state for one in slot]
    floats = [*variables, *numbers, *(one[0] for one in given)]
    return (
        op in OPTIONS
        and dtype in DTYPES
        and all(one.dtype == dtype and one.device == place for one in floats)
        and all(one.is_contiguous() for one in variables)
        and all(ids.dtype == index for _, *each in given for ids in each)
        and all(_fit(of_one, *pair) for of_one, pair in zip(zip(*state, strict=True), given, strict=True))
        and can_launch(place)
    )


def _fit(variables: Sequence[Tensor], rows: Tensor, indices: Tensor, *segments: Tensor) -> bool:
    shape = variables[0].shape
    count = rows.shape[0] if segments else indices.numel()
    return (
        rows.shape == (count, *shape[1:])
        and all(one.shape == shape for one in variables)
        and all(one.numel() == indices.numel() for one in segments)
    )


def _contiguous(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """Rows as the kernel reads them. Parts of one gradient, as the columns of a concatenation have them, are copied at once."""
    if len({one.shape for one in rows}) == 1 and sum(not one.is_contiguous() for one in rows) > 1:
        together: Sequence[Tensor] = torch.stack(list(rows)).unbind(0)
        return together
    return [one.contiguous() for one in rows]


def update_rows(
    op: str,
    attrs: Mapping[str, Any],
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    given: Sequence[Given],
    *,
    summed: bool,
) -> None:
    """Updates rows of variables in place.

    Args:
        op: One of `OPTIONS`.
        attrs: The op's.
        state: The trained variables, and as many of each slot. What `fits` says of all this holds.
        numbers: The op's inputs of one element, in their order.
        given: What each trained variable is updated by. Of segments the attribute `combiner` says what was made of their rows.
        summed: Rows for one row are summed up, which then takes one step; otherwise it takes one after the other.
    """
    rows_of = _contiguous([rows for rows, *_ in given])
    tables = [
        (variables, rows, *(one.contiguous() for one in each))
        for variables, rows, (_, *each) in zip(zip(*state, strict=True), rows_of, given, strict=True)
        if rows.numel() and each[0].numel() and variables[0].numel()
    ]
    longest = max((indices.numel() for _, _, indices, *_ in tables), default=0)
    if not longest:
        return
    in_order = longest > MOST_COMPARED
    described, held = [], []
    for variables, rows, indices, *segments in tables:
        order = segments[0] if segments else indices
        if in_order:
            indices, order = torch.sort(indices, stable=True)
        held += [rows, indices, order]
        size = variables[0].shape[0]
        sizes = [indices.numel(), size, variables[0].numel() // size, rows.shape[0]]
        described.append([one.data_ptr() for one in (*variables, rows, indices, order)] + sizes)
    widest = max(sizes[-2] for sizes in described)
    name, default = OPTIONS[op]
    launch(_UPDATE, (longest, len(tables)))(
        on_device(described, tables[0][1].device),
        *[*numbers, *[tables[0][1]] * _NUMBERS][:_NUMBERS],  # those that are not there are not looked at
        OP=op.removeprefix("SparseApply"),
        OPTION=bool(attrs.get(name, default)),
        SLOTS=len(state),
        SUM=summed,
        SORTED=in_order,
        COMBINER=_COMBINERS.index(str(attrs.get("combiner", ""))) if len(tables[0]) > 3 else 0,
        T=tables[0][1].dtype,
        INDEX=tables[0][2].dtype,
        BLOCK=_block(widest),
        CHUNK=_CHUNK,
        num_warps=1,
        enable_fp_fusion=False,
    )
    del held  # until here: addresses keep nothing alive
