"""Host ops that parse `tf.Example`, by protobuf's own parser where nothing is compiled, and raw bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.table import TYPES, HostNode, NativeNode, NotOurs, Run, check, host_op, objects
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


def _no_example(row: int) -> ValueError:
    return ValueError(f"could not parse example {row}: it is no serialized tf.Example")


def _check_kinds(kinds: NDArray[np.int64], key: bytes, kind: int) -> None:
    """Refuses values of another type than the one asked for."""
    wrong = np.flatnonzero((kinds != 0) & (kinds != kind))
    if len(wrong):
        name, found = key.decode("utf-8", "backslashreplace"), _NAMES[int(kinds[wrong[0]])]
        raise ValueError(f"feature {name} of example {wrong[0]} is {found}, expected {_NAMES[kind]}")


def features(rows: Sequence[bytes], keys: Sequence[bytes], types: Sequence[str]) -> list[ParsedFeature]:
    """Reads features of serialized examples.

    Args:
        rows: The examples.
        keys: Names of the features.
        types: Type of each: string, float32 or int64.

    Raises:
        ValueError: A row is no Example, or a feature has values of another type.
    """
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
        empty = default.reshape(-1)[:1] if default.size else b"" if name == "string" else 0
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


class _Asked(NamedTuple):
    """Features that a node reads.

    Attributes:
        keys: Their names.
        sparse: Types of sparse ones, which come first.
        dense: Types of dense ones.
        ragged: Types of values of ragged ones.
        splits: Types of where their rows end.
    """

    keys: list[bytes]
    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    ragged: tuple[str, ...]
    splits: tuple[str, ...]


def _asked(node: HostNode) -> _Asked:
    attrs, known = node.attrs, node.known
    names = ("sparse_types", "Tdense", "ragged_value_types", "ragged_split_types")
    sparse, dense, ragged, splits = (tuple(attrs.get(name, ())) for name in names)
    named = known[2 : len(known) - len(dense)]
    if "sparse_keys" in attrs:  # of one example alone
        keys = _texts([*attrs["sparse_keys"], *attrs["dense_keys"]])
    elif any(value is None for value in named):
        raise NotOurs
    else:
        keys = [key for value in named if value is not None for key in value.reshape(-1)]
    types = (*sparse, *dense, *ragged)
    if len(keys) != len(types) or not set(types) <= set(_KINDS) or len(set(keys)) != len(keys):
        raise NotOurs
    return _Asked(keys, sparse, dense, ragged, splits)


def _features_in_memory(node: HostNode) -> NativeNode:
    """The examples, the keys and the defaults of dense features; and types and shapes."""
    keys, *types = _asked(node)
    shapes = [
        size
        for shape in node.attrs["dense_shapes"]
        for size in (len(shape), *(-1 if size is None else size for size in shape))
    ]
    names = [TYPES.index(name) for some in types for name in some]
    defaults = range(len(node.known) - len(types[1]), len(node.known))
    return NativeNode([*map(len, types[:3]), *names, *shapes], [0, objects(keys, (len(keys),)), *defaults])


@host_op("ParseExampleV2", "ParseExample", "ParseSingleExample", native=_features_in_memory)
def parse_example(node: HostNode) -> Run:
    """Features of serialized examples: sparse ones, dense ones, and ragged ones."""
    attrs, single = node.attrs, "sparse_keys" in node.attrs
    keys, sparse, dense, ragged, splits = _asked(node)
    types = (*sparse, *dense, *ragged)

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
