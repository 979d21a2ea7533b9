"""Serialized tf.Examples and SequenceExamples: what a parsing op wants in them, made, and read again.

Measures the share of ids and strings, of those that a model is fed, that are in the tables in which it looks them up. A model whose
every lookup misses reads one row over and over: outputs that agree then verify that row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.flatten.flat import FlatGraph
from msplit.inputs.lookups import InputLookup, Use, constant, use_of
from msplit.opset import schema
from msplit.opset.traits import PARSERS
from msplit.shapes.registry import plain_shape

_SEQUENCES = "ParseSequenceExampleV2"
_PER_ROW = 2
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
    found = []
    for listed, form, types in _keys_by_form(flat, node):
        kinds, ports = _list(attrs, types), schema.output_ports(op, attrs, f"{form}_values")
        shapes: list[tuple[int, ...]] = [(_PER_ROW,)] * len(listed)
        if form.endswith("dense"):
            open_shapes = [plain_shape(shape) for shape in _list(attrs, f"{form}_shapes")]
            shapes = [tuple(_PER_ROW if size is None else size for size in shape or ()) for shape in open_shapes]
        if not len(listed) == len(kinds) == len(shapes) or (listed and ports is None):
            return None
        for number, (key, kind, shape) in enumerate(zip(listed, kinds, shapes, strict=True)):
            if not isinstance(kind, str):
                return None
            first, steps = (ports or (0, 0))[0], form.startswith("feature_list")
            found.append(Feature(_text(key), kind, shape, node, first + number, steps))
    return found


def _keys_by_form(flat: FlatGraph, node: int) -> Iterator[tuple[Sequence[Any], str, str]]:
    """(keys, beginning of the names of their attributes and outputs, attribute with their types) for each form that features have."""
    attrs, op = flat.graph.attrs[node], flat.graph.ops[node]
    if op == _SEQUENCES:
        # The keys of the context's sparse, dense and ragged features come in from slot 2 on, and then those of the steps.
        for part, slot, dense_types in (
            ("context", 2, "Tcontext_dense"),
            ("feature_list", 5, "feature_list_dense_types"),
        ):
            yield _vector(flat, node, slot), f"{part}_sparse", f"{part}_sparse_types"
            yield _vector(flat, node, slot + 1), f"{part}_dense", dense_types
            yield _vector(flat, node, slot + 2), f"{part}_ragged", f"{part}_ragged_value_types"
        return
    ragged: Sequence[Any] = ()
    if op == "ParseSingleExample":
        sparse, dense = _list(attrs, "sparse_keys"), _list(attrs, "dense_keys")
    elif op == "ParseExampleV2":
        sparse, dense, ragged = (tuple(_vector(flat, node, slot)) for slot in (2, 3, 4))
    else:  # an input per key
        last = 2 + len(_list(attrs, "sparse_types"))
        end = last + len(_list(attrs, "Tdense"))
        sparse, dense = (
            tuple(key for slot in slots for key in _vector(flat, node, slot))
            for slots in (range(2, last), range(last, end))
        )
    yield sparse, "sparse", "sparse_types"
    yield dense, "dense", "Tdense"
    if op == "ParseExampleV2":
        yield ragged, "ragged", "ragged_value_types"


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
    """A serialized Example of lists of bytes, floats or integers by name. Equal features give equal bytes."""
    example = schema.example_pb2.Example()
    example.features.SetInParent()
    for name, values in features.items():
        _fill(example.features.feature[name], values)
    return bytes(example.SerializeToString(deterministic=True))


def encode_steps(steps: Mapping[str, Sequence[Values]]) -> bytes:
    """Bytes that make a serialized Example a SequenceExample: the values of each feature for each step of the sequence."""
    example = schema.example_pb2.SequenceExample()
    for name, each in steps.items():
        for values in each:
            _fill(example.feature_lists.feature_list[name].feature.add(), values)
    return bytes(example.SerializeToString(deterministic=True))


def _fill(feature: Any, values: Values) -> None:
    """Puts values into a feature, by the type of the first; one without values has no type, and counts as missing.

    Raises:
        OverflowError: A number is too large for 32 bits.
    """
    if not len(values):
        return
    first = values[0]
    if isinstance(first, float):
        struct.pack(f"<{len(values)}f", *values)  # protobuf would take infinity in its place
        held = feature.float_list
    else:
        held = feature.bytes_list if isinstance(first, bytes) else feature.int64_list
    held.SetInParent()
    held.value.extend(values)


def decode(data: bytes) -> dict[str, list[Any]]:
    """The features of a serialized Example, or of a SequenceExample, of that the values of all steps.

    Raises:
        ValueError: It is none.
    """
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    try:
        example = schema.example_pb2.SequenceExample.FromString(data)
    except DecodeError:
        raise ValueError("this is no tf.Example") from None
    if len(UnknownFieldSet(example)):
        raise ValueError("this is no tf.Example")
    found = {name: _values(feature) for name, feature in example.context.feature.items()}
    for name, steps in example.feature_lists.feature_list.items():
        found.setdefault(name, []).extend(value for feature in steps.feature for value in _values(feature))
    return found


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return [] if kind is None else list(getattr(feature, kind).value)


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
