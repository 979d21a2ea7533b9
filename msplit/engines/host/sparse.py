"""Host ops on sparse and ragged tensors, of numbers and of strings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.hashing import concatenated, hashes
from msplit.engines.host.table import HostNode, NativeNode, NotOurs, Run, as_bytes, check, check_size, host_op, objects

Array = NDArray[Any]


def _places(indices: Array, shape: list[int]) -> Array:
    """Position of each index in a tensor of such a shape that lies flat. An index that is out of bounds is a ValueError."""
    return np.asarray(np.ravel_multi_index(tuple(indices.T), tuple(shape)))


def _counted(numbers: Array, rows: int) -> Array:
    """How often each row's number is there. `numpy.bincount` would write to memory that is not its own for 2**63 - 1."""
    check(((numbers >= 0) & (numbers < rows)).all(), "an index is out of bounds")
    check_size(rows)
    return np.bincount(numbers, minlength=rows)


@host_op("SparseToDense", native="validate_indices")
def sparse_to_dense(node: HostNode) -> Run:
    """A dense tensor of values at indices, and a default elsewhere."""
    strict = bool(node.attrs["validate_indices"])

    def run(indices: Array, shape: Array, values: Array, default: Array) -> Array:
        sizes = shape.tolist()
        check_size(*sizes)
        made = np.full(sizes, default, values.dtype)
        if indices.size:
            places = _places(indices.reshape(-1, len(sizes)), sizes)
            check(not strict or (places[1:] > places[:-1]).all(), "indices are out of order, or repeated")
            made.reshape(-1)[places] = values
        return made

    return run


@host_op("SparseReshape", native="")
def sparse_reshape(node: HostNode) -> Run:
    """The indices of a sparse tensor in another shape, of which one size may be -1; and that shape."""

    def run(indices: Array, shape: Array, wanted: Array) -> tuple[Array, Array]:
        sizes, total = wanted.tolist(), math.prod(shape.tolist())
        if -1 in sizes:
            rest = math.prod(size for size in sizes if size != -1)
            check(rest and total % rest == 0, f"{shape.tolist()} can not become {sizes}")
            sizes[sizes.index(-1)] = total // rest
        check(min(sizes, default=0) >= 0 and math.prod(sizes) == total, f"{shape.tolist()} can not become {sizes}")
        if sizes == shape.tolist():
            return indices, shape
        if not len(indices):
            return np.zeros((0, len(sizes)), np.int64), np.array(sizes, np.int64)
        places = _places(indices, shape.tolist())
        made = np.array(np.unravel_index(places, sizes), np.int64).T.reshape(len(places), len(sizes))
        return made, np.array(sizes, np.int64)

    return run


@host_op("SparseFillEmptyRows", native="")
def fill_empty_rows(node: HostNode) -> Run:
    """A sparse tensor with a default in each row that has nothing; which rows had none; and where each value went."""

    def run(indices: Array, values: Array, shape: Array, default: Array) -> tuple[Array, ...]:
        rows = int(shape[0])
        first = indices[:, 0]
        empty = _counted(first, rows) == 0
        if not empty.any() and (first[1:] >= first[:-1]).all():
            return indices, values, empty, np.arange(len(values))
        missing = np.flatnonzero(empty)
        more = np.zeros((len(missing), indices.shape[1]), np.int64)
        more[:, 0] = missing
        order = np.argsort(np.concatenate([first, missing]), kind="stable")
        filled = np.concatenate([values, np.full(len(missing), default, values.dtype)])
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return np.concatenate([indices, more])[order], filled[order], empty, back[: len(values)]

    return run


@host_op("Where", native="")
def where(node: HostNode) -> Run:
    """Indices of what is not zero."""
    return lambda x: np.argwhere(x).astype(np.int64)


@host_op("Unique", native="out_idx")
def unique(node: HostNode) -> Run:
    """Distinct values in the order of their first appearance, and for each value its number among them."""
    dtype = node.dtype("out_idx")
    if node.dtype("T").startswith("float"):
        raise NotOurs  # of NaN

    def run(x: Array) -> tuple[Array, Array]:
        check(x.ndim == 1, "values to make distinct have one axis")
        seen: dict[Any, int] = {}
        number = [seen.setdefault(value, len(seen)) for value in x.tolist()]
        kept = objects([*seen], (len(seen),)) if x.dtype.hasobject else np.array([*seen], x.dtype)
        return kept, np.array(number, dtype)

    return run


def _between(splits: Array) -> Array:
    """How many values each row has. Compared, since a difference may wrap around: `numpy.repeat` would write past its memory."""
    check(len(splits) and splits[0] == 0 and (splits[1:] >= splits[:-1]).all(), f"{splits.tolist()} are no splits")
    return np.diff(splits)


def _one_ragged_axis(node: HostNode) -> NativeNode | None:
    """Which of the two ways there are to say where rows end; None where there are several ragged axes."""
    kinds = node.attrs["row_partition_types"]
    return NativeNode([len(kinds) - 1]) if len(kinds) == 1 + (kinds[0] == "FIRST_DIM_SIZE") else None


@host_op("RaggedTensorToTensor", native=_one_ragged_axis)
def ragged_to_tensor(node: HostNode) -> Run:
    """A dense tensor of ragged rows, cut or filled up with a default. Rows by their splits, or by the row of each value."""
    kinds = tuple(node.attrs["row_partition_types"])
    by_rows = kinds[:1] == ("FIRST_DIM_SIZE",)
    if not kinds or any(kind != ("VALUE_ROWIDS" if by_rows else "ROW_SPLITS") for kind in kinds[by_rows:]):
        raise NotOurs

    def run(shape: Array, values: Array, default: Array, *parts: Array) -> Array:
        counts = []
        rows = int(parts[0]) if by_rows else len(parts[0]) - 1
        sizes = [rows]
        for part in parts[by_rows:]:
            count = _counted(part, rows) if by_rows else _between(part)
            counts.append(count)
            sizes.append(int(count.max(initial=0)))
            rows = int(count.sum())
        check(rows == len(values), f"there are {len(values)} values for {rows} places")
        wanted = shape.tolist() if shape.ndim else [-1] * (len(sizes) + values.ndim - 1)
        inner = values.shape[1:]
        sizes = [size if given < 0 else given for size, given in zip(sizes, wanted, strict=False)]
        check_size(*sizes, *inner)
        made = np.full((*sizes, *inner), default, values.dtype)
        index, keep = [np.arange(len(counts[0]))], np.ones(len(counts[0]), bool)
        for count in counts:
            column = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            index = [*(np.repeat(one, count) for one in index), column]
            keep = np.repeat(keep, count)
        for one, size in zip(index, sizes, strict=True):
            keep &= one < size
        made[tuple(one[keep] for one in index)] = values[keep]
        return made

    return run


def row_sizes(splits: Array, count: int) -> Array:
    """How many values each row has, of so many in all."""
    found = _between(splits)
    check(splits[-1] == count, f"{splits.tolist()} are no splits of {count} values")
    return found


@host_op("RaggedTensorToSparse", native="")
def ragged_to_sparse(node: HostNode) -> Run:
    """A sparse tensor of ragged rows of single values."""
    if int(node.attrs["RAGGED_RANK"]) != 1:
        raise NotOurs

    def run(splits: Array, values: Array) -> tuple[Array, Array, Array]:
        if values.ndim != 1:
            raise ValueError("values have more than one axis")
        count = row_sizes(splits, len(values))
        column = np.arange(len(values)) - np.repeat(splits[:-1], count)
        indices = np.stack([np.repeat(np.arange(len(count)), count), column], 1).astype(np.int64)
        return indices, values, np.array([len(count), count.max(initial=0)], np.int64)

    return run


@host_op("StringNGrams")
def ngrams(node: HostNode) -> Run:
    """Strings that stand side by side in a row, joined; the row is padded on both sides."""
    attrs, splits_type = node.attrs, np.dtype(node.dtype("Tsplits"))
    separator, left, right = (as_bytes(attrs[name]) for name in ("separator", "left_pad", "right_pad"))
    widths, most, short = attrs["ngram_widths"], int(attrs["pad_width"]), bool(attrs["preserve_short_sequences"])

    def of(row: list[bytes]) -> list[bytes]:
        made = []
        for width in widths:
            pad = width - 1 if most < 0 else min(most, width - 1)
            padded = [left] * pad + row + [right] * pad
            made += [separator.join(padded[at : at + width]) for at in range(len(padded) - width + 1)]
        if short and row and not made:
            made.append(separator.join([left] * max(most, 0) + row + [right] * max(most, 0)))
        return made

    def run(data: Array, splits: Array) -> tuple[Array, Array]:
        if not len(splits):
            return data[:0], splits
        row_sizes(splits, len(data))
        if not len(data):  # TensorFlow pads empty rows, but not where all are
            return data, np.zeros_like(splits)
        found = [of(data[start:end].tolist()) for start, end in itertools.pairwise(splits)]
        ends = np.cumsum([0, *map(len, found)], dtype=splits_type)
        return objects([text for row in found for text in row], (int(ends[-1]),)), ends

    return run


@host_op("SparseCross", native="N num_buckets hash_key")
def sparse_cross(node: HostNode) -> Run:
    """All combinations of the features of each row, one of each column, hashed: a sparse tensor."""
    attrs = node.attrs
    if not attrs["hashed_output"]:
        raise NotOurs
    count, dense, buckets = int(attrs["N"]), len(attrs["dense_types"]), int(attrs["num_buckets"])
    salt = np.uint64(int(attrs["hash_key"]) & (1 << 64) - 1)

    def column(values: Array) -> Array:
        flat = values.reshape(-1)
        return hashes(flat) if flat.dtype.hasobject else flat.astype(np.int64).view(np.uint64)

    def run(*inputs: Array) -> tuple[Array, Array, Array]:
        indices, values, shapes = inputs[:count], inputs[count : 2 * count], inputs[2 * count : 3 * count]
        rows = int(shapes[0][0]) if count else len(inputs[-1])
        columns = [column(value) for value in (*values, *inputs[len(inputs) - dense :])]
        starts = [np.append(0, np.cumsum(_counted(index[:, 0], rows))) for index in indices]
        starts += [np.arange(rows + 1) * value.shape[1] for value in inputs[len(inputs) - dense :] if dense]
        most = np.prod([np.diff(start).astype(np.float64) for start in starts], 0).sum()
        check(
            most < 1 << 40, "there are too many combinations"
        )  # more would wrap around, and `numpy.repeat` write past its memory
        total, last = np.diff(starts[0]), buckets or np.iinfo(np.int64).max
        for start in starts[1:]:
            total = total * np.diff(start)
        size = int(total.sum())
        shape = np.array([rows, total.max(initial=0)], np.int64)
        row = np.repeat(np.arange(rows), total)
        number = np.arange(size) - np.repeat(np.cumsum(total) - total, total)
        hashed, left, picks = np.full(size, salt, np.uint64), number, []
        for value, start in zip(reversed(columns), reversed(starts), strict=True):  # the last column changes fastest
            each = np.diff(start)[row]
            picks.append(value[start[row] + left % each] if size else value[:0])
            left = left // each
        for pick in reversed(picks):
            hashed = concatenated(hashed, pick)
        return np.stack([row, number], 1), (hashed % np.uint64(last)).astype(np.int64), shape

    return run
