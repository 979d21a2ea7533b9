"""Attributes as plain values, decoded only when somebody asks.

Nothing here trusts what a message says about its own size: a constant that declares more elements than it carries is broadcast
without being stored, as TensorFlow does, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import FunctionRef, TensorValue
from msplit.errors import LoadError

_MAX_EXPANDED_BYTES = 2**31
"""Most bytes that a constant may grow to when the values that it leaves out are filled in."""

_REF_OFFSET = 100
"""A reference to a type is numbered this much higher than the type."""

_DTYPES = {
    0: "invalid", 1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64",
    9: "int64", 10: "bool", 11: "qint8", 12: "quint8", 13: "qint32", 14: "bfloat16", 15: "qint16", 16: "quint16", 17: "uint16",
    18: "complex128", 19: "float16", 20: "resource", 21: "variant", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn", 26: "float8_e4m3fnuz", 27: "float8_e4m3b11fnuz", 28: "float8_e5m2fnuz", 29: "int4", 30: "uint4",
    31: "int2", 32: "uint2", 33: "float4_e2m1fn",
}  # fmt: skip

_STORED_AS = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}
"""Types that NumPy does not have, by what their bits are."""

_VALUE_FIELDS = {
    "float32": "float_val", "float64": "double_val", "int64": "int64_val", "uint32": "uint32_val", "uint64": "uint64_val",
    "bool": "bool_val", "complex64": "scomplex_val", "complex128": "dcomplex_val", "float16": "half_val",
    "bfloat16": "half_val",
}  # fmt: skip
"""Field that holds the values of a constant, by type; small integers are in int_val and 8-bit floats in float8_val."""


def dtype_name(number: int) -> str:
    """Name of a TensorFlow type as in ``"float32"``; a reference's name ends in ``"_ref"``.

    A number that no known TensorFlow uses gives ``"dtype_<number>"``.
    """
    known = _DTYPES.get(number)
    if known is not None:
        return known
    if _REF_OFFSET < number <= 2 * _REF_OFFSET:
        return f"{dtype_name(number - _REF_OFFSET)}_ref"
    return f"dtype_{number}"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type for a TensorFlow type; quantized types are the integers they are stored as, strings are objects.

    Raises:
        LoadError: NumPy has no such type (resources, variants, unknown types).
    """
    name = _STORED_AS.get(name, name)
    if name == "string":
        return np.dtype(object)
    if name.startswith(("bfloat16", "float8_", "float4_", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return small
    if name in ("resource", "variant", "invalid") or name.startswith("dtype_") or name.endswith("_ref"):
        raise LoadError(f"a constant of type {name} has no value that can be read")
    return np.dtype(name)


def shape_tuple(shape: Any) -> tuple[int | None, ...] | None:
    """A TensorShapeProto as sizes, None for an unknown size and None alone for unknown rank."""
    if shape.unknown_rank:
        return None
    # A list: a hostile graph has a million dimensions.
    return tuple([size if (size := dim.size) >= 0 else None for dim in shape.dim])


def plain(value: Any) -> Any:
    """An AttrValue as a plain value; see `msplit.core.graph.Graph.attrs`."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    return _SCALARS[kind](getattr(value, kind))


class NodeAttrs(Mapping[str, Any]):
    """The attributes of one node or function call; a value is decoded when it is first asked for, and kept.

    Nodes whose attributes are equal share one of these (see `AttrTable`).
    """

    __slots__ = ("_decoded", "_encoded")

    def __init__(self, encoded: Any) -> None:
        self._encoded = encoded
        self._decoded: dict[str, Any] | None = None

    def __getitem__(self, key: str) -> Any:
        # Indexing a protobuf map with a key that it lacks would add the key to the message.
        if key not in self._encoded:
            raise KeyError(key)
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an attribute, or a default."""
        decoded = self._decoded
        if decoded is None:
            decoded = self._decoded = {}
        elif key in decoded:
            return decoded[key]
        if key not in self._encoded:
            return default
        value = decoded[key] = plain(self._encoded[key])
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._encoded

    def __iter__(self) -> Iterator[str]:
        # The order of a protobuf map changes from process to process.
        return iter(sorted(self._encoded))

    def __len__(self) -> int:
        return len(self._encoded)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, eq=False)
class _Kinds:
    """What one look at every node of a message finds; see `AttrTable`.

    Attributes:
        attrs: Per node its attributes.
        of: Per node its kind: nodes of one kind have the same op and the same attributes, but for the values of constants.
        keys: Per kind the names of its attributes.
        functions: Per kind the functions that its attributes name, by attribute.
    """

    attrs: list[NodeAttrs]
    of: list[int]
    keys: list[frozenset[str]]
    functions: list[tuple[str, ...]]


def _kinds(nodes: Any) -> _Kinds:
    """Looks at every node once. Most of a large graph is the same few nodes over and over."""
    found: dict[tuple[str, frozenset[Any]], int] = {}
    shared: list[NodeAttrs] = []
    kinds = _Kinds([], [], [], [])
    for node in nodes:
        encoded = node.attr
        parts: list[Any] = []
        constant = False
        for key, value in encoded.items():
            held = value.WhichOneof("value")
            if held == "type":
                parts.append((key, value.type))
            elif held == "tensor":
                constant = True  # may be as large as the model, so that it is not compared
                parts.append(key)
            else:
                parts.append((key, value.SerializeToString()))
        signature = (node.op, frozenset(parts))  # the order of a protobuf map depends on that in which it was filled
        kind = found.get(signature)
        if kind is None:
            kind = found[signature] = len(shared)
            shared.append(NodeAttrs(encoded))
            kinds.keys.append(frozenset(encoded))
            kinds.functions.append(tuple(_functions_of(encoded)))
        kinds.attrs.append(NodeAttrs(encoded) if constant else shared[kind])
        kinds.of.append(kind)
    return kinds


def _functions_of(encoded: Any) -> Iterator[str]:
    # Sorted, because the order of a protobuf map changes from process to process.
    for key in sorted(encoded):
        value = encoded[key]
        for function in [value.func] if value.HasField("func") else value.list.func:
            yield function.name


class AttrTable(Sequence[Mapping[str, Any]]):
    """The attributes of every node of a message, decoded on access.

    Args:
        nodes: NodeDefs; not modified while this is in use.
        before: Attributes of nodes that stand before them (the parameters of a function).
    """

    def __init__(self, nodes: Any, before: Sequence[Mapping[str, Any]] = ()) -> None:
        self._nodes = nodes
        self._before = before

    def __len__(self) -> int:
        return len(self._before) + len(self._nodes)

    @cached_property
    def _found(self) -> _Kinds:
        return _kinds(self._nodes)

    @cached_property
    def _all(self) -> list[Mapping[str, Any]]:
        return [*self._before, *self._found.attrs]

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        return self._all[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._all)

    def kinds(self) -> list[int]:
        """Per node a number; nodes of the same number have the same op and the same attributes, but for the values of constants."""
        first = len(self._before)
        return [*range(first), *(first + kind for kind in self._found.of)] if first else self._found.of

    def nodes_with(self, key: str) -> list[int]:
        """Nodes that have an attribute, ascending."""
        first = len(self._before)
        found = [index for index, attrs in enumerate(self._before) if key in attrs]
        having = {kind for kind, keys in enumerate(self._found.keys) if key in keys}
        if having:
            found += [index for index, kind in enumerate(self._found.of, first) if kind in having]
        return found

    def function_names(self) -> list[tuple[int, str]]:
        """(node, function) for every attribute that names a function, by node and then by attribute."""
        named = self._found.functions
        having = {kind for kind, functions in enumerate(named) if functions}
        if not having:
            return []
        first = len(self._before)
        return [
            (index, function)
            for index, kind in enumerate(self._found.of, first)
            if kind in having
            for function in named[kind]
        ]


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _call(value: Any) -> FunctionRef:
    return FunctionRef(value.name, NodeAttrs(value.attr))


def _list(value: Any) -> tuple[Any, ...]:
    for kind in ("s", "i", "f", "b", "type", "shape", "tensor", "func"):
        items = getattr(value, kind)
        if len(items):
            return tuple(map(_SCALARS[kind], items))
    return ()


def tensor_value(proto: Any) -> TensorValue:
    """A TensorProto as a constant that decodes itself on demand. Sizes that it does not say are 0.

    Nothing is raised here: `TensorValue.load` raises a LoadError where the constant is damaged or does not say its shape.
    """
    name = dtype_name(proto.dtype)
    declared = proto.tensor_shape
    shape = tuple([dim.size for dim in declared.dim])  # a list: every constant of a graph comes by here
    known = not declared.unknown_rank
    if shape and min(shape) < 0:
        known = False
        shape = tuple([max(size, 0) for size in shape])

    def load() -> NDArray[Any]:
        if not known:
            raise LoadError("a constant does not say its shape")
        return _decode(proto, name, shape)

    return TensorValue(name, shape, load)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "s": _text,
    "i": int,
    "f": float,
    "b": bool,
    "type": dtype_name,
    "shape": shape_tuple,
    "tensor": tensor_value,
    "func": _call,
    "list": _list,
    "placeholder": str,
}


def _decode(proto: Any, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    dtype = numpy_dtype(name)
    count = math.prod(shape)
    content = proto.tensor_content
    if content:
        if dtype.hasobject:
            return string_array(content, count).reshape(shape)
        if count * dtype.itemsize != len(content):
            raise LoadError(
                f"a constant declares {count:,} elements of {name} and carries {len(content):,} bytes instead of "
                f"{count * dtype.itemsize:,}",
                fix="the file is damaged: export the model again",
            )
        return np.frombuffer(content, dtype).reshape(shape)
    values = _listed_values(proto, name, dtype)
    if len(values) > count:
        raise LoadError(
            f"a constant declares {count:,} elements and carries {len(values):,}",
            fix="the file is damaged: export the model again",
        )
    if len(values) == count:
        return values.reshape(shape)
    return _fill(values, count, shape, dtype)


def _listed_values(proto: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values that a constant lists one by one; there may be fewer than it has elements."""
    if name == "string":
        values = np.empty(len(proto.string_val), dtype=object)
        values[:] = list(proto.string_val)
        return values
    if name.startswith(("float8_", "float4_")):
        return np.frombuffer(proto.float8_val, dtype)
    listed = list(getattr(proto, _VALUE_FIELDS.get(name, "int_val")))
    if name in ("float16", "bfloat16"):
        return (np.array(listed, dtype=np.int64) & 0xFFFF).astype(np.uint16).view(dtype)
    if name in ("complex64", "complex128"):
        if len(listed) % 2:
            raise LoadError("a complex constant has a real part without its imaginary part")
        part = np.float32 if name == "complex64" else np.float64
        return np.array(listed, dtype=part).view(dtype)
    if dtype.kind in "iuV" and not name.startswith(("int64", "uint64")):
        # Small integers are stored in wider ones: keep the low bits, as TensorFlow does.
        return np.array(listed, dtype=np.int64).astype(dtype)
    return np.array(listed, dtype=dtype)


def _fill(values: NDArray[Any], count: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Repeats the last value up to `count` elements; no values at all are zeros (empty strings)."""
    if len(values) <= 1:
        last = values[0] if len(values) else (b"" if dtype.hasobject else dtype.type(0))
        single = np.empty((), dtype=dtype)
        single[()] = last
        # A view of one element: a constant may declare a size that no memory holds.
        return np.broadcast_to(single, shape)
    if count * dtype.itemsize > _MAX_EXPANDED_BYTES:
        raise LoadError(
            f"a constant declares {count:,} elements and carries {len(values):,}",
            fix="the file is damaged: export the model again",
        )
    filled = np.empty(count, dtype=dtype)
    filled[: len(values)] = values
    filled[len(values) :] = values[-1]
    return filled.reshape(shape)


def string_array(data: bytes, count: int) -> NDArray[Any]:
    """Strings packed as `count` varint lengths followed by the bytes of all of them.

    Raises:
        LoadError: The lengths do not fit the data.
    """
    damaged = LoadError(
        f"a constant declares {count:,} strings that its {len(data):,} bytes do not hold",
        fix="the file is damaged: export the model again",
    )
    if count > len(data):
        raise damaged
    lengths = []
    position = 0
    for _ in range(count):
        length = shift = 0
        while True:
            if position >= len(data) or shift > 63:
                raise damaged
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        lengths.append(length)
    if position + sum(lengths) != len(data):
        raise damaged
    values = np.empty(count, dtype=object)
    for index, length in enumerate(lengths):
        values[index] = data[position : position + length]
        position += length
    return values
