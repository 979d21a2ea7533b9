"""Serialized tf.Examples and SequenceExamples: what a parsing op wants in them, made, and read again.

They are messages of few fields (example.proto, feature.proto): they are written and read here, field by field, so that neither needs
TensorFlow.

What share of the ids and strings that a model is fed is in the tables in which it looks them up.

A model whose every lookup misses reads one row over and over: outputs that agree then verify that row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.formats import wire
from msplit.inputs.lookups import InputLookup, Use, constant, use_of
from msplit.opset import schema
from msplit.opset.traits import PARSERS
from msplit.shapes.registry import plain_shape

_SEQUENCES = "ParseSequenceExampleV2"
_PER_ROW = 2
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
"""Fields of the message Feature."""

Values = Sequence[bytes] | Sequence[float] | Sequence[int]


@dataclass(frozen=True)
class Feature:
    """A feature that a parsing op takes out of an example.

    Attributes:
        name: Its key.
        dtype: "string", "float32" or "int64".
        shape: Its shape within one example; ``(2,)`` where it may have any length.
        node: The parsing op.
        port: Output that holds its values.
        steps: Whether it is there once for every step of a sequence.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    node: int
    port: int
    steps: bool = False


def features_of(flat: FlatGraph, node: int) -> list[Feature] | None:
    """The features that a parsing op names; None where they are not constants of the graph."""
    attrs, op = flat.graph.attrs[node], flat.graph.ops[node]
    if op == _SEQUENCES:
        context = _of_sequences(flat, node, "context", 2)
        listed = _of_sequences(flat, node, "feature_list", 5)
        return None if context is None or listed is None else [*context, *listed]
    sparse: Sequence[Any]
    dense: Sequence[Any]
    ragged: Sequence[Any] = ()
    sparse_types, dense_types = _list(attrs, "sparse_types"), _list(attrs, "Tdense")
    ragged_types = _list(attrs, "ragged_value_types") if op == "ParseExampleV2" else ()
    if op == "ParseSingleExample":
        sparse, dense = _list(attrs, "sparse_keys"), _list(attrs, "dense_keys")
    elif op == "ParseExampleV2":
        sparse, dense, ragged = (_vector(flat, node, slot) for slot in (2, 3, 4))
    else:
        last = 2 + len(sparse_types)
        sparse = [key for slot in range(2, last) for key in _vector(flat, node, slot)]
        dense = [key for slot in range(last, last + len(dense_types)) for key in _vector(flat, node, slot)]
    kinds = (*sparse_types, *dense_types, *ragged_types)
    keys = [_text(key) for key in (*sparse, *dense, *ragged)]
    if len(keys) != len(kinds) or not all(isinstance(kind, str) for kind in kinds):
        return None
    count, first = len(sparse_types), 3 * len(sparse_types)
    ports = [*range(count, 2 * count), *range(first, first + len(dense_types) + len(ragged_types))]
    open_shapes = [plain_shape(shape) for shape in _list(attrs, "dense_shapes")]
    shapes: list[tuple[int, ...]] = [(_PER_ROW,)] * count
    shapes += [tuple(_PER_ROW if size is None else size for size in shape or ()) for shape in open_shapes]
    shapes += [(_PER_ROW,)] * len(ragged_types)
    if len(shapes) != len(keys):
        return None
    return [
        Feature(key, kind, shape, node, port) for key, kind, shape, port in zip(keys, kinds, shapes, ports, strict=True)
    ]


def _of_sequences(flat: FlatGraph, node: int, part: str, slot: int) -> list[Feature] | None:
    """The features of the context or of the steps of a SequenceExample. Keys of sparse, dense and ragged ones come in from a slot on."""
    attrs, op = flat.graph.attrs[node], flat.graph.ops[node]
    steps = part == "feature_list"
    dense_types = "feature_list_dense_types" if steps else "Tcontext_dense"
    found = []
    types_of = {"sparse": f"{part}_sparse_types", "dense": dense_types, "ragged": f"{part}_ragged_value_types"}
    for at, (form, types) in enumerate(types_of.items()):
        keys, kinds = list(map(_text, _vector(flat, node, slot + at))), _list(attrs, types)
        ports = schema.output_ports(op, attrs, f"{part}_{form}_values")
        shapes = [plain_shape(shape) or () for shape in _list(attrs, f"{part}_dense_shapes")] if form == "dense" else []
        if len(keys) != len(kinds) or (keys and ports is None) or (form == "dense" and len(shapes) != len(keys)):
            return None
        for number, (key, kind) in enumerate(zip(keys, kinds, strict=True)):
            shape = tuple(size or _PER_ROW for size in shapes[number]) if form == "dense" else (_PER_ROW,)
            found.append(Feature(key, str(kind), shape, node, (ports or (0, 0))[0] + number, steps))
    return found


def make_examples(
    features: Sequence[Feature], count: int, values: Callable[[Feature, tuple[int, ...]], NDArray[Any]]
) -> NDArray[Any]:
    """So many serialized examples.

    Args:
        features: What is in each; a name that is there twice is made once.
        count: How many.
        values: Makes the values of a feature for all examples, in a shape whose first size is their number.
    """
    rows: dict[bool, dict[str, list[Any]]] = {False: {}, True: {}}
    for feature in reversed(features):
        times = _PER_ROW if feature.steps else 1
        made = values(feature, (count * times, *feature.shape)).reshape(count, times, -1).tolist()
        rows[feature.steps][feature.name] = made if feature.steps else [each for (each,) in made]
    examples = [encode({name: each[at] for name, each in rows[False].items()}) for at in range(count)]
    if rows[True]:
        steps = [{name: each[at] for name, each in rows[True].items()} for at in range(count)]
        examples = [example + encode_steps(each) for example, each in zip(examples, steps, strict=True)]
    return np.array(examples, dtype=object)


def encode(features: Mapping[str, Values]) -> bytes:
    """A serialized Example of lists of bytes, floats or integers by name; the names in order, so that equal features give equal bytes."""
    entries = (_field(1, name.encode()) + _field(2, _feature(features[name])) for name in sorted(features))
    return _field(1, b"".join(_field(1, entry) for entry in entries))


def encode_steps(steps: Mapping[str, Sequence[Values]]) -> bytes:
    """Bytes that make a serialized Example a SequenceExample: the values of each feature for each step of the sequence."""
    entries = (
        _field(1, _field(1, name.encode()) + _field(2, b"".join(_field(1, _feature(values)) for values in steps[name])))
        for name in sorted(steps)
    )
    return _field(2, b"".join(entries))


def decode(data: bytes) -> dict[str, list[Any]]:
    """The features of a serialized Example, or of a SequenceExample, of that the values of all steps.

    Raises:
        ValueError: It is none.
    """
    found: dict[str, list[Any]] = {}
    for part, features in _fields(data, 1, 2):
        for _, entry in _fields(features, 1):
            parts = dict(_fields(entry, 1, 2))
            name, inside = parts.get(1, b"").decode(), parts.get(2, b"")
            for feature in [inside] if part == 1 else [step for _, step in _fields(inside, 1)]:
                for kind, values in _fields(feature, _BYTES, _FLOATS, _INTEGERS):
                    found.setdefault(name, []).extend(_values(kind, values))
    return found


def _feature(values: Values) -> bytes:
    first = values[0] if len(values) else b""
    if isinstance(first, bytes):
        kind, packed = _BYTES, b"".join(_field(1, bytes(item)) for item in values)  # type: ignore[arg-type]
    elif isinstance(first, float):
        kind, packed = _FLOATS, _field(1, struct.pack(f"<{len(values)}f", *values))
    else:
        kind, packed = _INTEGERS, _field(1, b"".join(_varint(int(item)) for item in values))
    return _field(kind, packed)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _fields(data: bytes, *wanted: int) -> Iterator[tuple[int, bytes]]:
    """The fields of a message that are wanted; all of them are strings or messages."""
    try:
        for field in wire.fields(data):
            if field.kind != wire.LENGTH or field.end > len(data):
                raise ValueError("this is no tf.Example")
            if field.number in wanted:
                yield field.number, data[field.start : field.end]
    except IndexError as error:
        raise ValueError("this is no tf.Example") from error


def _values(kind: int, data: bytes) -> list[Any]:
    if kind == _BYTES:
        return [item for _, item in _fields(data, 1)]
    packed = b"".join(item for _, item in _fields(data, 1))
    if kind == _FLOATS:
        return list(struct.unpack(f"<{len(packed) // 4}f", packed[: len(packed) // 4 * 4]))
    found, position = [], 0
    while position < len(packed):
        value, position = wire.varint(packed, position, len(packed))
        found.append(value - (1 << 64) if value >> 63 else value)
    return found


def _list(attrs: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    value = attrs.get(key)
    return value if isinstance(value, tuple) else ()


def _vector(flat: FlatGraph, node: int, slot: int) -> list[Any]:
    value = constant(flat, node, slot)
    return [] if value is None else value.reshape(-1).tolist()


def _text(key: Any) -> str:
    return key.decode(errors="surrogateescape") if isinstance(key, bytes) else str(key)


@dataclass(frozen=True)
class Hits:
    """One input and one table.

    Attributes:
        input: The input; of a serialized example ``input.feature``.
        table: Name of the node that is or makes the table.
        kind: "keys" of a vocabulary, or "rows" of a table that is indexed.
        size: How many there are.
        values: How many values the input has.
        hits: How many of them are in the table.
        distinct: How many different entries they meet.
    """

    input: str
    table: str
    kind: str
    size: int
    values: int
    hits: int
    distinct: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def hits(flat: FlatGraph, feeds: Mapping[str, NDArray[Any]]) -> tuple[Hits, ...]:
    """Hits and misses of the fed values in the model's tables, as far as their way there can be followed."""
    found: dict[tuple[str, str, str], Hits] = {}
    for tensor in flat.inputs:
        if tensor.name in feeds:
            use = use_of(flat, tensor.node, tensor.port)
            for name, values, its_use in _lookup_values(
                flat, tensor.name, feeds[tensor.name].reshape(-1).tolist(), use
            ):
                for lookup in its_use.lookups:
                    one = _met(name, values, its_use, lookup)
                    found.setdefault((one.input, one.table, one.kind), one)
    return tuple(found.values())


def _lookup_values(flat: FlatGraph, name: str, values: list[Any], use: Use) -> Iterator[tuple[str, list[Any], Use]]:
    """An input, and the features in it where it is serialized examples."""
    yield name, values, use
    features = [
        feature for node in use.readers if flat.graph.ops[node] in PARSERS for feature in features_of(flat, node) or ()
    ]
    if not features:
        return
    try:
        parsed = [decode(bytes(value)) for value in values]
    except (ValueError, TypeError):
        return  # TensorFlow says what is wrong with them
    for feature in features:
        inside = [item for one in parsed for item in one.get(feature.name, ())]
        yield f"{name}.{feature.name}", inside, use_of(flat, feature.node, feature.port)


def _met(name: str, values: list[Any], use: Use, lookup: InputLookup) -> Hits:
    if values and isinstance(values[0], str | bytes):
        values = [item for value in values for item in _words(value, use)]
    if lookup.keys is None:
        size, kind = lookup.rows or 0, "rows"
        numbers = [number + lookup.offset for number in map(_number, values) if number is not None]
        inside: list[Any] = [number for number in numbers if 0 <= number < size]
    else:
        size, kind = len(lookup.keys), "keys"
        text = lookup.keys.dtype.kind == "O"
        known = set(lookup.keys.tolist())
        shifted = [_bytes(value) if text else _shifted(value, lookup.offset) for value in values]
        inside = [value for value in shifted if value in known]
    return Hits(name, lookup.table, kind, size, len(values), len(inside), len(set(inside)))


def _words(value: str | bytes, use: Use) -> list[bytes]:
    data = value.encode() if isinstance(value, str) else value
    for op, change in (("StringLower", bytes.lower), ("StringUpper", bytes.upper), ("StringStrip", bytes.strip)):
        data = change(data) if op in use.ops else data
    return [data] if use.separator is None else data.split(use.separator or None)


def _number(value: Any) -> int | None:
    try:
        return int(float(value))
    except (ValueError, OverflowError, TypeError):
        return None


def _shifted(value: Any, offset: int) -> int | None:
    number = _number(value)
    return None if number is None else number + offset


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
