"""Kernels of optimizers: updates of many variables, or of rows of many tables, in one launch.

Updates of variables by an optimizer, all that it updates alike in one kernel, and their conversion to half precision. On a GPU.

Updates are bound by how often they are launched: with PyTorch's operators Adam takes twelve kernels per variable, and a model has hundreds.

Updates of rows of variables by an optimizer, of all variables that it updates alike in one kernel. On a GPU.

With PyTorch's operators one table takes some thirty kernels: to find distinct ids, to sum up their rows, to fetch and to put back rows of
the variable and of its slots. Here one program per id looks whether its id has come before, and does all of that for it if not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.device.capture import is_capturing, keep
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.launch import Code, can_launch, launch
from msplit.engines.cuda.kernels.optimizer_formulas import ROWS
from msplit.opset.traits import on_values, ops_with

_UPDATE, _CONVERT = Code("optimizers", "update"), Code("optimizers", "convert")

OPTIONS = {f"Apply{row.name}": row.flag for row in ROWS if row.kernel}
"""The optimizers that the kernel knows: the attribute that it looks at, and what that is where the file left it out."""

DTYPES = (torch.float32, torch.float64)
"""Types that it computes in. TensorFlow rounds narrower ones after each operation, which operators of PyTorch do as well."""

_BLOCK = 1024

_NUMBERS = 6
"""Arguments of the kernel for numbers."""

_PROGRAMS = 4096
"""Programs that one launch has about at most, however many elements there are: a table has a row for each."""


def fits(op: str, variables: Sequence[Tensor], numbers: Sequence[Tensor]) -> bool:
    """True if the kernel can update these variables with these numbers."""
    dtype, place = variables[0].dtype, variables[0].device
    return (
        op in OPTIONS
        and dtype in DTYPES
        and all(one.is_contiguous() for one in variables)
        and all(one.dtype == dtype and one.device == place for one in (*variables, *numbers))
        and can_launch(place)
    )


def update(
    op: str,
    attrs: Mapping[str, Any],
    state: Sequence[Sequence[Tensor]],
    numbers: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
    finite: Tensor | None = None,
) -> None:
    """Updates variables in place.

    Args:
        op: One of `OPTIONS`.
        attrs: The op's.
        state: The trained variables, and as many of each slot. Contiguous, on one GPU, of one of `DTYPES`.
        numbers: The op's inputs of one element of that type, in their order.
        gradients: One for each trained variable, of its shape; of each rank such a list: the mean is taken, summed up in that order.
        finite: True if anything is to be changed, on the GPU; None: it is.
    """
    gradients = [[one.contiguous() for one in each] for each in gradients]
    rows, steps, vector = _rows([*zip(*state, *gradients, strict=True)])
    if not rows:
        return
    first = state[0][0]
    name, default = OPTIONS[op]
    launch(_UPDATE, (len(rows),))(
        on_device(rows, first.device),
        *numbers,
        *[numbers[0]] * (_NUMBERS - len(numbers)),
        numbers[0] if finite is None else finite.view(torch.uint8),
        OP=op.removeprefix("Apply"),
        OPTION=bool(attrs.get(name, default)),
        SLOTS=len(state),
        RANKS=len(gradients),
        GUARDED=finite is not None,
        VECTOR=vector,
        T=first.dtype,
        BLOCK=_BLOCK,
        STEPS=steps,
        enable_fp_fusion=False,
    )


def convert(values: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes values, contiguous and of one type, to contiguous tensors of another. PyTorch gives 65,536 elements to a block, which takes
    17 µs for them.
    """
    rows, steps, vector = _rows([*zip(values, results, strict=True)])
    if rows:
        launch(_CONVERT, (len(rows),))(
            on_device(rows, values[0].device),
            VECTOR=vector,
            FROM=values[0].dtype,
            TO=results[0].dtype,
            BLOCK=_BLOCK,
            STEPS=steps,
        )


def _rows(alike: Sequence[Sequence[Tensor]]) -> tuple[list[list[int]], int, int]:
    """Rows of a table that say what each program works on, of tensors in rows of one size: addresses of its parts of them, and how many
    elements these have. Then how often it takes a block, and how many elements may come at once.
    """
    total = sum(row[0].numel() for row in alike)
    steps = 1 << (total // (_PROGRAMS * _BLOCK)).bit_length()
    share = steps * _BLOCK
    rows = [
        [*(one.data_ptr() + start * one.element_size() for one in row), min(share, row[0].numel() - start)]
        for row in alike
        for start in range(0, row[0].numel(), share)
    ]
    vector = 16 // min((one.element_size() for row in alike for one in row), default=16)
    aligned = all(not count % vector and not any(one % 16 for one in addresses) for *addresses, count in rows)
    return rows, steps, vector if aligned else 1


def on_device(rows: Sequence[Sequence[int]], place: torch.device) -> Tensor:
    """Rows on the device. Those of a graph that is being captured are there before it runs, and as long as it is."""
    if not is_capturing():
        return torch.tensor(rows, dtype=torch.int64, device=place)
    streams = Device.of(place).streams
    aside = streams.lease(1)
    with torch.cuda.stream(aside[0]):
        table = keep(torch.tensor(rows, dtype=torch.int64, device=place))
        aside[0].synchronize()
    streams.give_back(aside)
    return table


_UPDATE_ROWS, _DISTINCT = Code("optimizers", "update_rows"), Code("optimizers", "distinct")
_GRADIENT = Code("optimizers", "segment_gradient")

ROW_OPTIONS = {on_values(op): ("", False) for op in sorted(ops_with("adds rows"))} | {
    f"SparseApply{row.name}": row.flag for row in ROWS if row.kernel and row.sparse
}
"""The optimizers that the kernel knows: the attribute that it looks at, and what that is where the file left it out."""

_ROW_NUMBERS = 5
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


def rows_fit(op: str, state: Sequence[Sequence[Tensor]], numbers: Sequence[Tensor], given: Sequence[Given]) -> bool:
    """True if the kernel can update these variables with these numbers."""
    first = state[0][0]
    dtype, place, index = first.dtype, first.device, given[0][1].dtype
    variables = [one for slot in state for one in slot]
    floats = [*variables, *numbers, *(one[0] for one in given)]
    return (
        op in ROW_OPTIONS
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
    name, default = ROW_OPTIONS[op]
    launch(_UPDATE_ROWS, (longest, len(tables)))(
        on_device(described, tables[0][1].device),
        *[*numbers, *[tables[0][1]] * _ROW_NUMBERS][:_ROW_NUMBERS],  # those that are not there are not looked at
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
