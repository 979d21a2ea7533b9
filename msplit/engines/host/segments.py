"""Host ops on segments of rows, counts, ranges and ragged rows: what is around a pooled feature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.sparse import row_sizes
from msplit.engines.host.table import HostNode, NotOurs, Run, check, check_size, host_op

Array = NDArray[Any]
Fold = Callable[[Array, Array], Array]


class _Way(NamedTuple):
    """How rows become one, and what that begins with."""

    fold: Fold
    begin: float


_NUMBERS = ("int32", "int64", "float32", "float64")
# Of equal numbers, and of NaN, the later one, as in TensorFlow.
_FOLDS = {
    "Sum": _Way(np.add, 0),
    "Mean": _Way(np.add, 0),
    "Prod": _Way(np.multiply, 1),
    "Max": _Way(lambda a, b: np.where(b < a, a, b), -np.inf),
    "Min": _Way(lambda a, b: np.where(a < b, a, b), np.inf),
}
_FIRST: dict[str, Fold] = {"Max": lambda a, b: np.where(a < b, b, a), "Min": lambda a, b: np.where(b < a, b, a)}
"""Of equal numbers, and of NaN, the first."""


def _fold_of(node: HostNode) -> tuple[Fold, Any]:
    fold, begin = _FOLDS[node.op[-4:].removeprefix("t")]
    dtype = np.dtype(node.dtype("T"))
    if dtype.name not in _NUMBERS or (node.op.endswith("Mean") and dtype.kind == "i"):
        raise NotOurs
    if np.isinf(begin) and (dtype.kind == "i" or node.op.startswith("Unsorted")):
        limits: Any = np.iinfo(dtype) if dtype.kind == "i" else np.finfo(dtype)
        return fold, limits.max if begin > 0 else limits.min
    return fold, begin


def _numbered(places: Array) -> Array:
    """How many of the same place are in front of each."""
    order = np.argsort(places, kind="stable")
    first, numbers = places[order], np.arange(len(places))
    begins = np.maximum.accumulate(np.where(np.append(True, first[1:] != first[:-1])[: len(first)], numbers, 0))
    made = np.empty(len(places), np.int64)
    made[order] = numbers - begins
    return made


def _fold_rows(fold: Fold, made: Array, places: Array, rows: Array) -> None:
    """Folds each row into the one at its place, those of one place in their order."""
    numbers = _numbered(places)
    order = np.argsort(numbers, kind="stable")
    for turn in np.split(order, np.cumsum(np.bincount(numbers))[:-1]) if len(numbers) else ():
        made[places[turn]] = fold(made[places[turn]], rows[turn])


@host_op("UnsortedSegmentSum", "UnsortedSegmentProd", "UnsortedSegmentMax", "UnsortedSegmentMin", native="")
def unsorted_segments(node: HostNode) -> Run:
    """The sum, product, largest or smallest of the rows of each number; those of negative numbers are left out."""
    fold, begin = _fold_of(node)

    def run(data: Array, ids: Array, count: Array) -> Array:
        check(data.shape[: ids.ndim] == ids.shape, f"{ids.shape} is not how {data.shape} begins")
        inner = data.shape[ids.ndim :]
        check_size(int(count), *inner)
        check(ids.max(initial=-1) < int(count), "a segment is out of bounds")
        made, places = np.full((int(count), *inner), begin, data.dtype), ids.reshape(-1)
        kept = places >= 0
        _fold_rows(fold, made, places[kept], data.reshape(ids.size, *inner)[kept])
        return made

    return run


@host_op("SegmentSum", "SegmentMean", "SegmentProd", "SegmentMax", "SegmentMin", native="")
def sorted_segments(node: HostNode) -> Run:
    """The sum, mean, product, largest or smallest of the rows of each number, which do not decrease.

    As TensorFlow has it, columns of 32 bytes are summed, or multiplied, in four parts where there are 16 rows, and of numbers that are
    equal or NaN the first is the largest; columns that are left, and means, go row by row.
    """
    fold, begin = _fold_of(node)
    dtype = np.dtype(node.dtype("T"))
    wide = 32 // dtype.itemsize if dtype.kind == "f" and node.op != "SegmentMean" else 1 << 40
    first = _FIRST.get(node.op[7:])

    def run(data: Array, ids: Array) -> Array:
        check(ids.ndim == 1 and data.shape[:1] == ids.shape, "there is not one segment for each row")
        check((ids[:1] >= 0).all() and (ids[1:] >= ids[:-1]).all(), "segment ids are not increasing")
        rows = int(ids[-1]) + 1 if len(ids) else 0
        check_size(rows, *(size for size in data.shape[1:] if size))
        flat = data.reshape(len(data), math.prod(data.shape[1:]))
        sizes, made = np.bincount(ids, minlength=rows), np.full((rows, flat.shape[1]), begin, dtype)
        cut = flat.shape[1] // wide * wide
        _fold_rows(fold, made[:, cut:], ids, flat[:, cut:])
        large, numbers = (sizes >= 16)[ids] & (first is None), _numbered(ids)
        in_parts = large & (numbers < (sizes // 4 * 4)[ids])
        if cut and in_parts.any():
            parts = np.full((rows, 4, cut), begin, dtype)
            _fold_rows(fold, parts.reshape(-1, cut), (ids * 4 + numbers % 4)[in_parts], flat[in_parts, :cut])
            for part in range(4):
                made[:, :cut] = fold(made[:, :cut], parts[:, part])
        _fold_rows(first or fold, made[:, :cut], ids[~in_parts], flat[~in_parts, :cut])
        made[ids[sizes[ids] == 1]] = flat[sizes[ids] == 1]
        made[sizes == 0] = node.op == "SegmentProd"
        if node.op == "SegmentMean":
            made /= np.maximum(sizes, 1).astype(dtype)[:, None]
        return made.reshape(rows, *data.shape[1:])

    return run


@host_op("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN", native="")
def sparse_segments(node: HostNode) -> Run:
    """Rows of a table, summed per segment, of which the ids do not decrease; up to nine first, then by eights, as TensorFlow does it."""
    if node.dtype("T") not in ("float32", "float64"):
        raise NotOurs

    def run(data: Array, indices: Array, ids: Array) -> Array:
        check(len(ids) == len(indices) and (ids[1:] >= ids[:-1]).all(), "segment ids are not increasing")
        check(min(indices.min(initial=0), ids.min(initial=0)) >= 0, "an index or a segment is negative")
        segments = int(ids[-1]) + 1 if len(ids) else 0
        check_size(segments, *(size for size in data.shape[1:] if size))
        made, sizes, numbers = np.zeros((segments, *data.shape[1:]), data.dtype), np.bincount(ids), _numbered(ids)
        heads = np.where(sizes % 8 < 2, sizes % 8 + 8, sizes % 8)[ids]
        first = (numbers == 0) | ((numbers >= heads) & ((numbers - heads) % 8 == 0))
        parts = np.zeros((np.count_nonzero(first), *data.shape[1:]), data.dtype)
        _fold_rows(np.add, parts, np.cumsum(first) - 1, data.take(indices, 0))
        _fold_rows(np.add, made, ids[first], parts)
        if node.op != "SparseSegmentSum":
            sizes = np.maximum(sizes, 1).reshape(-1, *[1] * (data.ndim - 1))
            by = (sizes if node.op.endswith("Mean") else np.sqrt(sizes)).astype(data.dtype)
            made = np.where(sizes < 10, made * (1 / by), made / by)  # TensorFlow multiplies where there are few
        return made

    return run


@host_op("Bincount", "DenseBincount", "RaggedBincount", native="binary_output")
def counts(node: HostNode) -> Run:
    """How often each number is there, of all or of each row, or the sum of its weights; or only whether it is there."""
    binary, ragged = bool(node.attrs.get("binary_output", False)), node.op == "RaggedBincount"

    def run(*inputs: Array) -> Array:
        numbers, size, weights = inputs[-3:]
        most = int(size.reshape(-1)[0])
        check(numbers.min(initial=0) >= 0, "a number to count is negative")
        check(
            not weights.size or (weights.size == numbers.size and not binary), "there is not one weight for each number"
        )
        if ragged:
            found = row_sizes(inputs[0], len(numbers))
            shape, row = (len(found), most), np.repeat(np.arange(len(found)), found)
        else:
            shape = (*numbers.shape[: numbers.ndim == 2], most)
            row = np.arange(numbers.size) // max(numbers.shape[1], 1) if numbers.ndim == 2 else np.zeros(1, np.int64)
        check_size(*(size for size in shape if size))
        made, flat = np.zeros(shape, weights.dtype), numbers.reshape(-1)
        kept = flat < most
        places = np.broadcast_to(row * most, flat.shape)[kept] + flat[kept]
        if binary:
            made.reshape(-1)[places] = 1
        else:
            np.add.at(made.reshape(-1), places, weights.reshape(-1)[kept] if weights.size else 1)
        return made

    return run


@host_op("Cumsum", native="exclusive reverse")
def running_sum(node: HostNode) -> Run:
    """The sum up to each element, or up to the one in front of it, from either end."""
    exclusive, reverse = bool(node.attrs["exclusive"]), bool(node.attrs["reverse"])
    if node.dtype("T") not in _NUMBERS:
        raise NotOurs

    def run(x: Array, axis: Array) -> Array:
        moved = np.moveaxis(x, int(axis.reshape(())), 0)[:: -1 if reverse else 1]
        if exclusive:
            moved = np.concatenate([np.zeros_like(moved[:1]), moved[:-1]])
        return np.moveaxis(np.cumsum(moved, 0, x.dtype)[:: -1 if reverse else 1], 0, int(axis.reshape(())))

    return run


@host_op("Range", native="")
def range_(node: HostNode) -> Run:
    """Whole numbers from a first one on, at one distance, up to a last one and without it."""
    if node.dtype("Tidx") not in ("int32", "int64"):
        raise NotOurs

    def run(start: Array, limit: Array, delta: Array) -> Array:
        first, last, step = (int(one.reshape(())) for one in (start, limit, delta))
        check(step and (first == last or (last > first) == (step > 0)), f"{step} does not lead from {first} to {last}")
        check_size(len(range(first, last, step)))
        return np.array(range(first, last, step), start.dtype)

    return run


@host_op("RaggedRange", native="Tsplits")
def ragged_range(node: HostNode) -> Run:
    """A range of whole numbers in each row: the splits between rows, and the numbers."""
    splits = np.dtype(node.dtype("Tsplits"))
    if node.dtype("T") not in ("int32", "int64"):
        raise NotOurs

    def run(starts: Array, limits: Array, deltas: Array) -> tuple[Array, Array]:
        sizes = {one.size for one in (starts, limits, deltas) if one.ndim}
        check(len(sizes) <= 1, "starts, limits and deltas have different lengths")
        columns = (np.broadcast_to(one, max(sizes, default=1)).tolist() for one in (starts, limits, deltas))
        rows = [range(*row) for row in zip(*columns, strict=True)]
        check_size(total := sum(map(len, rows)))
        values = np.fromiter(itertools.chain.from_iterable(rows), starts.dtype, total)
        return np.cumsum([0, *map(len, rows)], dtype=splits), values

    return run


@host_op("RaggedGather", native="PARAMS_RAGGED_RANK OUTPUT_RAGGED_RANK")
def ragged_gather(node: HostNode) -> Run:
    """Rows of a ragged tensor by index: the splits of all axes, and the values."""
    nested, made_splits = int(node.attrs["PARAMS_RAGGED_RANK"]), int(node.attrs["OUTPUT_RAGGED_RANK"])

    def run(*inputs: Array) -> tuple[Array, ...]:
        values, indices = inputs[nested:]
        check(
            nested + indices.ndim - 1 == made_splits, f"indices of {indices.ndim} axes do not make {made_splits} splits"
        )
        sizes = [*(len(one) - 1 for one in inputs[1:nested]), len(values)]
        lengths = [row_sizes(splits, size) for splits, size in zip(inputs[:nested], sizes, strict=True)]
        starts = indices.reshape(-1).astype(np.int64)
        check(starts.min(initial=0) >= 0 and starts.max(initial=-1) < len(lengths[0]), "an index is out of bounds")
        ends, dtype, made = starts + 1, inputs[0].dtype, list[Array]()
        for axis in range(1, indices.ndim):
            made.append(np.arange(math.prod(indices.shape[:axis]) + 1, dtype=dtype) * dtype.type(indices.shape[axis]))
        for splits, length in zip(inputs[:nested], lengths, strict=True):
            made.append(np.append(0, np.cumsum(length[_spans(starts, ends)])).astype(dtype))
            starts, ends = splits[starts].astype(np.int64), splits[ends].astype(np.int64)
        return (*made[len(made) - made_splits :], values[_spans(starts, ends)])  # a scalar's row is all that there is

    return run


def _spans(starts: Array, ends: Array) -> Array:
    """All numbers from each start on, up to its end and without it."""
    sizes = ends - starts
    check_size(int(sizes.sum()))
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
