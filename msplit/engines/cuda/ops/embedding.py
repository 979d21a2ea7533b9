"""Ops of embeddings: lookups of all columns at once, and reductions over segments.

Lookups of all embedding columns of one stage, with what stands before and behind them. See `kernels.embedding`.

Reductions over segments: rows of a tensor that share an id.

Ids that name no segment are passed over, negative ones included. Where TensorFlow derives the number of segments from the
largest id, the result's shape depends on values, and the op runs eagerly only; where it is an input, the op can be captured.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.graph import RESULT
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.embedding import LOWEST, Columns, Segment, Term, fill
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.optimizers import segment_gradient, spreads
from msplit.engines.cuda.ops.gather import or_zeros, take
from msplit.engines.cuda.ops.reduce import vector
from msplit.engines.cuda.ops.shape import integer
from msplit.opset.traits import SPARSE_SEGMENTS


@lowering("_RowsOfKeys", own=True)
def rows_of_keys(node: Node, keys: Tensor, wanted: Tensor) -> Tensor:
    """The number of the row of each key among ascending ones, the last of those that are alike; the number of keys where there is none."""
    if not keys.numel():
        return torch.zeros_like(wanted, dtype=torch.int64)
    found = (torch.searchsorted(keys, wanted.contiguous(), right=True) - 1).clamp(min=0)
    return torch.where(keys[found] == wanted, found, keys.numel())


@lowering("_OrDefaults", own=True)
def or_defaults(node: Node, rows: Tensor, numbers: Tensor, defaults: Tensor) -> Tensor:
    """Rows that were looked up by number, and defaults in place of those of number `count`: one for all, or one for each."""
    each = defaults.reshape(rows.shape if defaults.numel() == rows.numel() else rows.shape[numbers.dim() :])
    missing = (numbers == node.attrs["count"]).reshape(*numbers.shape, *(1 for _ in rows.shape[numbers.dim() :]))
    return torch.where(missing, each, rows)


@lowering("_Columns", own=True)
def columns(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Lookups in many tables at once, bucketized, combined and laid side by side as the attribute `columns` says."""
    spec: Columns = node.attrs["columns"]
    tables = {term.table for segment in spec.segments for term in segment.terms if term.table >= 0}
    outputs = empty_outputs(spec, inputs[0].device, str(node.attrs.get(RESULT, spec.dtype)))
    host = Device.of(inputs[0].device).owned(HostTables)
    with host.lookup(inputs[slot] for slot in tables):
        # A product may have its weights lie in an order of its own.
        ours = all(inputs[slot].is_contiguous() for slot in tables) and can_launch(inputs[0].device)
        if not ours or not fill(spec, inputs, outputs):
            _fill(spec, inputs, outputs)
    return outputs


def _fill(spec: Columns, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """What the kernel does, by PyTorch's."""
    for segment in spec.segments:
        place = torch.as_strided(
            outputs[segment.output],
            (segment.rows, segment.width),
            (segment.step, 1),
            outputs[segment.output].storage_offset() + segment.start,
        )
        rows = _rows(segment, inputs)
        place.copy_(rows if segment.scale is None else rows * segment.scale)


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
    table = inputs[term.table]
    place = Device.of(table.device).owned(HostTables).find(table)
    packed = place is not None and place.packed
    ids = ids if valid is None else ids.where(valid, 0)
    rows = take(table if packed else table.reshape(-1, segment.width), ids)
    rows = rows if place is None else place.taken(ids, rows, valid)
    rows = place.unpacked(rows, segment.width) if place is not None and packed else rows
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


IN_ORDER = "_in_order"
"""Attribute of sums of rows whose last bit must be the same wherever they are computed: float sums in another order are others."""


@lowering("SegmentSum", "SegmentMean", dynamic=True)
@lowering("UnsortedSegmentSum", static=(2,))
def segment_sum(node: Node, data: Tensor, ids: Tensor, *num_segments: np.ndarray) -> Tensor:
    """Sum (mean) of every segment's rows; only Unsorted ids need not rise. An empty segment gives 0."""
    count = _count(ids, num_segments)
    total = sum_rows(data, ids, count, ordered=bool(node.get(IN_ORDER, False)))
    return _divided(total, _sizes(ids, count)) if _combiner(node) == "mean" else total


@lowering("_StackedSegmentSum", own=True, static=(2,))
def stacked_segment_sum(node: Node, data: Tensor, ids: Tensor, num_segments: np.ndarray) -> Tensor:
    """UnsortedSegmentSum of several members, which are the first axis of `data` and of `ids`, a matrix."""
    count = integer(num_segments)
    begins = torch.arange(0, len(ids) * count, max(count, 1), device=ids.device)
    places = torch.where((ids >= 0) & (ids < count), ids + begins.unsqueeze(1), -1)
    total = sum_rows(data.flatten(0, 1), places.flatten(), len(ids) * count, ordered=bool(node.get(IN_ORDER, False)))
    return total.unflatten(0, (len(ids), count))


@lowering("SegmentProd", dynamic=True)
@lowering("UnsortedSegmentProd", static=(2,))
def segment_product(node: Node, data: Tensor, ids: Tensor, *num_segments: np.ndarray) -> Tensor:
    """Product of every segment's rows; only Unsorted ids need not rise. An empty segment gives 1."""
    return _reduced(data, ids, _count(ids, num_segments), "prod", 1)


@lowering("SegmentMax", "SegmentMin", dynamic=True)
@lowering("UnsortedSegmentMax", "UnsortedSegmentMin", static=(2,))
def segment_extreme(node: Node, data: Tensor, ids: Tensor, *num_segments: np.ndarray) -> Tensor:
    """Largest (smallest) of every segment's rows. An empty one gives 0, or Unsorted the lowest (highest) finite number."""
    count = _count(ids, num_segments)
    limits = torch.finfo(data.dtype) if data.is_floating_point() else torch.iinfo(data.dtype)
    how, start = ("amax", limits.min) if node.op.endswith("Max") else ("amin", limits.max)
    result = _reduced(data, ids, count, how, start)
    if num_segments:
        return result
    occupied = (_sizes(ids, count) > 0).reshape(-1, *(1 for _ in data.shape[1:]))
    return torch.where(occupied, result, 0)


@lowering(*SPARSE_SEGMENTS, dynamic=True)
@lowering(*(f"{op}WithNumSegments" for op in SPARSE_SEGMENTS), static=(3,))
def sparse_segment(node: Node, data: Tensor, indices: Tensor, ids: Tensor, *num_segments: np.ndarray) -> Tensor:
    """Sum (mean, sum over root of count) of the rows of `data` at the indices, by segment, as many as given or as the rising ids name."""
    count = _count(ids, num_segments)
    total = sum_rows(take(data, indices), ids, count)
    if _combiner(node) == "sum":
        return total
    sizes = _sizes(ids, count)
    if _combiner(node) == "sqrtn":
        # The root of a narrow float would be rounded twice.
        wide = torch.promote_types(total.dtype, torch.float32)
        return _divided(total, sizes.clamp(min=1).to(wide).sqrt())
    return _divided(total, sizes)


@lowering(*(f"{op}Grad" for op in SPARSE_SEGMENTS), static=(3,))
def sparse_segment_grad(node: Node, grad: Tensor, indices: Tensor, ids: Tensor, rows: np.ndarray) -> Tensor:
    """The gradient of a sum (mean, sum over root of count) of rows by segment, for as many rows as given."""
    return _grad(node, grad, indices, ids, integer(rows))


@lowering(*(f"{op}GradV2" for op in SPARSE_SEGMENTS), dynamic=True)
def sparse_segment_distinct_grad(
    node: Node, grad: Tensor, indices: Tensor, ids: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of rows for the distinct indices alone, and these, rising."""
    distinct, places = torch.unique(indices, return_inverse=True)
    return _grad(node, grad, places, ids, distinct.shape[0]), distinct


def _grad(node: Node, grad: Tensor, indices: Tensor, ids: Tensor, rows: int) -> Tensor:
    combiner = _combiner(node)
    if spreads(grad, indices, ids, rows):
        return segment_gradient(grad, indices, ids, rows, combiner)
    return sum_rows(rows_of_segments(grad, ids, combiner), indices, rows)


def _combiner(node: Node) -> str:
    """Name of how the rows of a segment are put together, which is part of the op's."""
    return next(name for name in ("sum", "mean", "sqrtn") if name in node.op.lower())


def rows_of_segments(grad: Tensor, ids: Tensor, combiner: str) -> Tensor:
    """For each id the row of its segment, divided by how many ids that has ("mean") or the root of it ("sqrtn"); zeros for no segment."""
    count = grad.shape[0]
    if not count:
        return grad.new_zeros((ids.shape[0], *grad.shape[1:]))
    if combiner != "sum":
        sizes = _sizes(ids, count)
        grad = _divided(grad, sizes.clamp(min=1).to(grad.dtype).sqrt() if combiner == "sqrtn" else sizes)
    inside = ((ids >= 0) & (ids < count)).reshape(-1, *(1 for _ in grad.shape[1:]))
    return torch.where(inside, grad.index_select(0, ids.clamp(0, count - 1)), 0)


def _count(ids: Tensor, given: tuple[np.ndarray, ...]) -> int:
    """The number of segments: that given, or else one more than the last id, which rise then. Waits for the device."""
    if given:
        return integer(given[0])
    return int(ids[-1]) + 1 if ids.numel() else 0


def _places(ids: Tensor, count: int) -> Tensor:
    """Row of the buffer for every id: 0 for those below the first segment, count + 1 for those behind the last."""
    return ids.reshape(-1).add(1).clamp(0, count + 1)


def _segment_rows(data: Tensor, ids: Tensor) -> Tensor:
    """The data as one row per id."""
    if data.shape[: ids.dim()] != ids.shape:
        raise Unsupported(f"segment ids of shape {tuple(ids.shape)} do not fit data of shape {tuple(data.shape)}")
    return data.reshape(ids.numel(), math.prod(data.shape[ids.dim() :]))


def sum_rows(data: Tensor, ids: Tensor, count: int, *, ordered: bool = False) -> Tensor:
    """Sum of every segment's rows, of as many segments as given; `ordered`, in their order, on a GPU, too, where it is any otherwise."""
    rows, places = _segment_rows(data, ids), _places(ids, count)
    buffer = rows.new_zeros((count + 2, rows.shape[1]))
    if ordered:
        buffer.index_put_((places.long(),), rows, accumulate=True)  # sorts the places
    else:
        buffer.index_add_(0, places, rows)
    return buffer[1 : count + 1].reshape(count, *data.shape[ids.dim() :])


def _reduced(data: Tensor, ids: Tensor, count: int, how: str, start: float) -> Tensor:
    rows = _segment_rows(data, ids)
    buffer = torch.full((count + 2, rows.shape[1]), start, dtype=data.dtype, device=data.device)
    index = _places(ids, count).to(torch.int64).unsqueeze(1).expand(rows.shape)
    buffer.scatter_reduce_(0, index, rows, how)
    return buffer[1 : count + 1].reshape(count, *data.shape[ids.dim() :])


def _sizes(ids: Tensor, count: int) -> Tensor:
    """Number of rows of every segment, int64."""
    places = _places(ids, count)
    buffer = torch.zeros(count + 2, dtype=torch.int64, device=ids.device)
    return buffer.index_add_(0, places, torch.ones_like(places, dtype=torch.int64))[1 : count + 1]


def _divided(total: Tensor, sizes: Tensor) -> Tensor:
    """Sums over the sizes of their segments, where an empty one counts as one; integers are divided towards zero."""
    divisor = sizes.clamp(min=1).reshape(-1, *(1 for _ in total.shape[1:])).to(total.dtype)
    return total / divisor if total.is_floating_point() else torch.div(total, divisor, rounding_mode="trunc")
