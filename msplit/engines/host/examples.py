"""Host ops that parse `tf.Example`, and raw bytes: with compiled functions where the wheel has them, else by protobuf's own parser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.hashing import native, packed
from msplit.engines.host.table import HostNode, NotOurs, Run, check, host_op, objects
from msplit.formats.tensors import numpy_dtype
from msplit.opset import schema

Array = NDArray[Any]

_KINDS = {"string": 1, "float32": 2, "int64": 3}
"""Number of each type's list in `Feature`."""
_NAMES = {1: "string", 2: "float", 3: "int64"}


class Feature(NamedTuple):
    """One feature of all rows.

    Attributes:
        there: Per row, whether the row has it.
        counts: How many values each row has.
        values: Values of all rows behind each other.
    """

    there: NDArray[np.bool_]
    counts: NDArray[np.int64]
    values: Array


def features(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[Feature]:
    """Reads features of serialized examples.

    Args:
        keys: Their names.
        types: Type of each: string, float32 or int64.

    Raises:
        ValueError: A row is no Example, or a feature has values of another type.
    """
    return _compiled(rows, keys, types) if native() is not None else _by_protobuf(rows, keys, types)


def _no_example(row: int) -> ValueError:
    return ValueError(f"could not parse example {row}: it is no serialized tf.Example")


def _check_kinds(kinds: NDArray[np.int64], key: bytes, kind: int) -> None:
    """Refuses values of another type than the one asked for."""
    wrong = np.flatnonzero((kinds != 0) & (kinds != kind))
    if len(wrong):
        name, found = key.decode("utf-8", "backslashreplace"), _NAMES[int(kinds[wrong[0]])]
        raise ValueError(f"feature {name} of example {wrong[0]} is {found}, expected {_NAMES[kind]}")


def _compiled(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[Feature]:
    library, count = native(), len(rows)
    (data, ends), (names, name_ends) = packed(rows), packed(keys)
    found = np.zeros((len(keys), count, 3), np.int64)
    wrong = library.scan_examples(
        data, ends.ctypes.data, count, names, name_ends.ctypes.data, len(keys), found.ctypes.data
    )
    if wrong >= 0:
        raise _no_example(wrong)
    made = []
    for key, name, lists in zip(keys, types, found, strict=True):
        kind = _KINDS[name]
        _check_kinds(lists[:, 0], key, kind)
        counts = np.zeros(count, np.int64)
        total = library.read_lists(data, lists.ctypes.data, count, 0, kind, counts.ctypes.data, None)
        if total < 0:
            raise _no_example(-1 - total)
        values = np.empty((total, 2), np.int64) if kind == 1 else np.empty(total, name)
        library.read_lists(data, lists.ctypes.data, count, total, kind, counts.ctypes.data, values.ctypes.data)
        if kind == 1:
            values = objects([data[start:end] for start, end in values.tolist()], (total,))
        made.append(Feature(lists[:, 0] != 0, counts, values))
    return made


def _by_protobuf(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[Feature]:
    from google.protobuf.message import DecodeError

    parse, texts = schema.example_pb2.Example.FromString, [key.decode() for key in keys]
    kinds = np.zeros((len(keys), len(rows)), np.int64)
    lists: list[list[Any]] = [[] for _ in keys]
    for number, row in enumerate(rows):
        try:
            there = parse(row).features.feature
        except DecodeError:
            raise _no_example(number) from None
        for which, key in enumerate(texts):
            field = there[key].WhichOneof("kind") if key in there else None
            kinds[which, number] = {None: 0, "bytes_list": 1, "float_list": 2, "int64_list": 3}[field]
            lists[which].append(getattr(there[key], field).value if field else ())
    made = []
    for key, name, own, values in zip(keys, types, kinds, lists, strict=True):
        _check_kinds(own, key, _KINDS[name])
        flat = [value for one in values for value in one]
        whole = objects(flat, (len(flat),)) if name == "string" else np.array(flat, name)
        made.append(Feature(own != 0, np.array([*map(len, values)], np.int64), whole))
    return made


def _sparse(found: Feature) -> tuple[Array, Array, Array]:
    """Values of any number a row as a sparse tensor: indices, values and shape."""
    row = np.repeat(np.arange(len(found.counts)), found.counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(found.counts) - found.counts, found.counts)
    shape = np.array([len(found.counts), found.counts.max(initial=0)], np.int64)
    return np.stack([row, column], 1), found.values, shape


def _dense(found: Feature, key: bytes, shape: tuple[int | None, ...], name: str, default: Array) -> Array:
    """Values of one shape a row, a default where a row has none. Where the first size is not known, rows are filled up."""
    said, rows = key.decode("utf-8", "backslashreplace"), len(found.counts)
    if shape and shape[0] is None:
        inner = int(np.prod([size or 0 for size in shape[1:]]))
        check(inner and (found.counts % inner == 0).all(), f"feature {said} has not a multiple of {inner} values")
        most = int(found.counts.max(initial=0))
        empty = default.reshape(-1)[0] if default.size else b"" if name == "string" else 0
        made = np.full((rows, most), empty, numpy_dtype(name))
        made[np.arange(most) < found.counts[:, None]] = found.values
        return made.reshape(rows, most // inner, *(int(size or 0) for size in shape[1:]))
    size = int(np.prod([one or 0 for one in shape]))
    wrong = np.flatnonzero(found.there & (found.counts != size))
    if len(wrong):
        raise ValueError(f"feature {said} of example {wrong[0]} has {found.counts[wrong[0]]} values, expected {size}")
    if found.there.all():
        return found.values.reshape(rows, *(int(one or 0) for one in shape))
    if not default.size and size:
        raise ValueError(f"feature {said} is required, but example {np.flatnonzero(~found.there)[0]} does not have it")
    made = np.empty((rows, size), numpy_dtype(name))
    made[:] = default.reshape(-1)
    made[found.there] = found.values.reshape(-1, size)
    return made.reshape(rows, *(int(one or 0) for one in shape))


def _texts(values: Sequence[str | bytes]) -> list[bytes]:
    return [value.encode() if isinstance(value, str) else value for value in values]


@host_op("ParseExampleV2", "ParseExample", "ParseSingleExample")
def parse_example(node: HostNode) -> Run:
    """Features of serialized examples: sparse ones, dense ones, and ragged ones."""
    attrs, known, single = node.attrs, node.known, node.op == "ParseSingleExample"
    sparse, dense = tuple(attrs["sparse_types"]), tuple(attrs["Tdense"])
    ragged, splits = tuple(attrs.get("ragged_value_types", ())), tuple(attrs.get("ragged_split_types", ()))
    if single:
        keys = _texts([*attrs["sparse_keys"], *attrs["dense_keys"]])
    elif any(value is None for value in known[2 : len(known) - len(dense)]):
        raise NotOurs
    else:
        keys = [key for value in known[2 : len(known) - len(dense)] if value is not None for key in value.reshape(-1)]
    types = (*sparse, *dense, *ragged)
    if len(keys) != len(types) or not set(types) <= set(_KINDS) or len(set(keys)) != len(keys):
        raise NotOurs

    def run(serialized: Array, *more: Array) -> tuple[Array, ...]:
        check(serialized.ndim < 2, "serialized examples have one axis at most")
        found = features(serialized.reshape(-1).tolist(), keys, types)
        defaults = more[len(more) - len(dense) :] if dense else ()
        some = [_sparse(one) for one in found[: len(sparse)]]
        shapes = attrs["dense_shapes"]
        whole = [
            _dense(one, key, shape, name, default)
            for one, key, shape, name, default in zip(
                found[len(sparse) :], keys[len(sparse) :], shapes, dense, defaults, strict=False
            )
        ]
        rows = [one.values for one in found[len(sparse) + len(dense) :]]
        ends = [
            np.append(0, np.cumsum(one.counts)).astype(kind)
            for one, kind in zip(found[len(sparse) + len(dense) :], splits, strict=True)
        ]
        if single or not serialized.ndim:
            check(not ragged, "ragged features of one example are not parsed")
            some = [(indices[:, 1:], values, shape[1:]) for indices, values, shape in some]
            whole = [value[0] for value in whole]
        return (*(part for kind in zip(*some, strict=True) for part in kind), *whole, *rows, *ends)

    return run


@host_op("DecodeRaw")
def decode_raw(node: HostNode) -> Run:
    """Numbers of each string's bytes, along a new last axis."""
    dtype = numpy_dtype(node.dtype("out_type"))
    dtype = dtype if node.attrs["little_endian"] or dtype.itemsize == 1 else dtype.newbyteorder(">")

    def run(texts: Array) -> Array:
        items = texts.reshape(-1).tolist()
        sizes = {len(text) for text in items}
        check(len(sizes) < 2, "DecodeRaw requires strings of one length")
        size = sizes.pop() if sizes else 0
        check(size % dtype.itemsize == 0, f"{size} bytes are no numbers of {dtype.itemsize} bytes each")
        flat = np.frombuffer(b"".join(items), dtype)
        return flat.astype(dtype.newbyteorder("=")).reshape(*texts.shape, size // dtype.itemsize)

    return run
