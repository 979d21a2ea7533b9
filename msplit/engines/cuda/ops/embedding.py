"""Lookups of all embedding columns of one stage, with what stands before and behind them. See `kernels.embedding_spec`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.graph import RESULT
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels.embedding_launch import fill
from msplit.engines.cuda.kernels.embedding_spec import LOWEST, Columns, Segment, Term
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.ops.gather import or_zeros, take
from msplit.engines.cuda.ops.sort import vector


@lowering("_Columns", own=True)
def columns(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Lookups in many tables at once, bucketized, combined and laid side by side as the attribute `columns` says."""
    spec: Columns = node.attrs["columns"]
    tables = {term.table for segment in spec.segments for term in segment.terms if term.table >= 0}
    outputs = empty_outputs(spec, inputs[0].device, str(node.attrs.get(RESULT, spec.dtype)))
    # A product may have its weights lie in an order of its own.
    ours = all(inputs[slot].is_contiguous() for slot in tables) and can_launch(inputs[0].device)
    if ours and fill(spec, inputs, outputs):
        return outputs
    for segment in spec.segments:
        place = torch.as_strided(
            outputs[segment.output],
            (segment.rows, segment.width),
            (segment.step, 1),
            outputs[segment.output].storage_offset() + segment.start,
        )
        rows = _rows(segment, inputs)
        place.copy_(rows if segment.scale is None else rows * segment.scale)
    return outputs


def empty_outputs(spec: Columns, device: torch.device, result: str) -> tuple[Tensor, ...]:
    """Memory for the outputs, one block: each begins where a vector of 16 bytes may, or equal shapes side by side, as one stack."""
    sizes = [math.prod(shape) for shape in spec.outputs]
    dtype = torch_dtype(result)
    unit = max(16 // dtype.itemsize, 1)
    starts, end = [], 0
    for number, (size, shape) in enumerate(zip(sizes, spec.outputs, strict=True)):
        if number and shape != spec.outputs[number - 1]:
            end = -(-end // unit) * unit
        starts.append(end)
        end += size
    block = torch.empty(end, dtype=dtype, device=device)
    return tuple(
        block[start : start + size].view(shape) for start, size, shape in zip(starts, sizes, spec.outputs, strict=True)
    )


def _rows(segment: Segment, inputs: tuple[Tensor, ...]) -> Tensor:
    total: Tensor | None = None
    always = 0  # ids that count in every row
    counted: Tensor | None = None  # and besides, in each
    for term in segment.terms:
        rows, valid = _term(segment, term, inputs)
        total = rows if total is None else total + rows
        if valid is None:
            always += term.count
        else:
            counted = valid.sum(1) if counted is None else counted + valid.sum(1)
    assert total is not None
    if segment.combiner == "sum":
        return total
    if counted is None:
        return total / (math.sqrt(always) if segment.combiner == "sqrtn" else always)
    divisor = (counted + always).clamp(min=1).to(torch.promote_types(total.dtype, torch.float32))
    divisor = divisor.sqrt() if segment.combiner == "sqrtn" else divisor
    return total / divisor.unsqueeze(1).to(total.dtype)


def _term(segment: Segment, term: Term, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
    """Each row's sum over its ids, and which of its ids count (None: all)."""
    source = inputs[term.source].contiguous().reshape(-1)
    width = segment.width if term.table < 0 else term.count
    chosen = torch.as_strided(source, (segment.rows, width), (term.step, 1), source.storage_offset() + term.first)
    if term.table < 0:
        return chosen, None
    if term.weighted:
        return chosen * inputs[term.table].reshape(-1, segment.width)[term.low], None
    ids = _ids(term, chosen)
    valid = None if term.valid_from == LOWEST else ids >= term.valid_from
    table = inputs[term.table].reshape(-1, segment.width)
    rows = take(table, ids if valid is None else ids.where(valid, 0))
    if valid is not None:
        rows = or_zeros(valid.unsqueeze(-1), rows)
    return rows[:, 0] if term.count == 1 else rows.sum(1, dtype=rows.dtype), valid


def _ids(term: Term, values: Tensor) -> Tensor:
    if term.narrow:
        values = values.to(torch.int32)
    if term.boundaries is not None:
        common = torch.float64 if values.dtype == torch.float64 else torch.float32
        edges = vector(list(term.boundaries), common, values.device)
        values = torch.bucketize(values.to(common).contiguous(), edges, right=True)
    values = values.to(torch.int64)
    if term.modulo:
        values = values.remainder(term.modulo)
    return values.clamp(term.low, term.high) + term.offset
