"""Host ops that parse `tf.Example`, and raw bytes: with compiled functions where the wheel has them, else by protobuf's own parser."""

from __future__ import annotations

import itertools
import math
import struct
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


class ParsedFeature(NamedTuple):
    """One feature of all rows.

    Attributes:
        there: Per row, whether the row has it.
        counts: How many values each row has.
        values: Values of all rows behind each other.
        indices: Row and place in it of each value.
        most: Values of the row that has most.
    """

    there: NDArray[np.bool_]
    counts: NDArray[np.int64]
    values: Array
    indices: NDArray[np.int64]
    most: int


def features(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[ParsedFeature]:
    """Reads features of serialized examples.

    Args:
        rows: The examples.
        keys: Names of the features.
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


def _compiled(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[ParsedFeature]:
    library, count = native(), len(rows)
    (data, sizes), (names, name_sizes) = packed(rows), packed(keys)
    kinds = [_KINDS[name] for name in types]
    numbers = struct.pack(f"{len(kinds)}q", *kinds)
    found, totals = np.zeros((len(keys), count, 4), np.int64), np.zeros((len(keys), 3), np.int64)
    place = found.ctypes.data
    wrong = library.scan_examples(data, sizes, count, names, name_sizes, numbers, len(keys), place, totals.ctypes.data)
    if wrong >= 0:
        raise _no_example(wrong)
    each: list[list[int]] = totals.tolist()
    for key, kind, lists, (_, _, wrong) in zip(keys, kinds, found, each, strict=True):
        if wrong:
            _check_kinds(lists[:, 0], key, kind)
    width = {1: 16, 2: 4, 3: 8}
    ends = [
        *itertools.accumulate(
            -(-total * width[kind] // 8) + 2 * total for kind, (total, _, _) in zip(kinds, each, strict=True)
        )
    ]
    memory = np.empty(ends[-1] if ends else 0, np.int64)
    library.read_examples(data, count, len(keys), numbers, place, memory.ctypes.data)
    made, start = [], 0
    for name, lists, (total, most, _), end in zip(types, found, each, ends, strict=True):
        values: Array = memory[start : end - 2 * total]
        if name == "string":
            pairs = values.tolist()
            values = objects([data[first:last] for first, last in zip(pairs[::2], pairs[1::2], strict=True)], (total,))
        elif name == "float32":
            values = values.view(np.float32)[:total]
        indices = memory[end - 2 * total : end].reshape(total, 2)
        made.append(ParsedFeature(lists[:, 0] != 0, lists[:, 3], values, indices, most))
        start = end
    return made


def _by_protobuf(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[ParsedFeature]:
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
    for named, name, own, rows_of in zip(keys, types, kinds, lists, strict=True):
        _check_kinds(own, named, _KINDS[name])
        flat = [value for one in rows_of for value in one]
        whole = objects(flat, (len(flat),)) if name == "string" else np.array(flat, name)
        indices = [(number, column) for number, one in enumerate(rows_of) for column in range(len(one))]
        counts = np.array([*map(len, rows_of)], np.int64)
        made.append(
            ParsedFeature(
                own != 0, counts, whole, np.array(indices, np.int64).reshape(-1, 2), int(counts.max(initial=0))
            )
        )
    return made


def _dense(found: ParsedFeature, key: bytes, shape: tuple[int | None, ...], name: str, default: Array) -> Array:
    """Values of one shape a row, a default where a row has none. Where the first size is not known, rows are filled up."""
    rows, inner = len(found.counts), tuple(size or 0 for size in shape)
    if shape and shape[0] is None:
        inner, size = inner[1:], math.prod(inner[1:])
        check(size and not (found.counts % size).any(), f"feature {_said(key)} has not a multiple of {size} values")
        empty = default.reshape(-1)[0] if default.size else b"" if name == "string" else 0
        made = np.full((rows, found.most), empty, numpy_dtype(name))
        made[np.arange(found.most) < found.counts[:, None]] = found.values
        return made.reshape(rows, found.most // size, *inner)
    size = math.prod(inner)
    if len(found.values) == size * rows and found.most <= size:
        return found.values.reshape(rows, *inner)
    wrong = np.flatnonzero(found.there & (found.counts != size))
    if len(wrong):
        raise ValueError(
            f"feature {_said(key)} of example {wrong[0]} has {found.counts[wrong[0]]} values, expected {size}"
        )
    if not default.size:
        missing = np.flatnonzero(~found.there)[0]
        raise ValueError(f"feature {_said(key)} is required, but example {missing} does not have it")
    made = np.empty((rows, size), numpy_dtype(name))
    made[:] = default.reshape(-1)
    made[found.there] = found.values.reshape(-1, size)
    return made.reshape(rows, *inner)


def _said(key: bytes) -> str:
    return key.decode("utf-8", "backslashreplace")


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
        some = [
            (one.indices, one.values, np.array([len(one.counts), one.most], np.int64)) for one in found[: len(sparse)]
        ]
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
