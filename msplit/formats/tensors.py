"""Tensors of TensorFlow's protos, and nodes of a GraphDef made of plain values.

Types, shapes and values of tensors as TensorFlow's protos hold them.

Nothing here trusts what a message says about its own size: a constant that declares more elements than it carries is broadcast
without being stored, as TensorFlow does, or refused.

Makes nodes of a GraphDef from plain values.
"""

from __future__ import annotations

import itertools
import math
import mmap
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import TensorValue
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

_NUMBERS = {name: number for number, name in _DTYPES.items()}

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


def dtype_number(name: str) -> int:
    """Number of a TensorFlow type, by its name as `dtype_name` gives it.

    Raises:
        LoadError: There is no such type: the model has text, or a number of its own, in the place of one.
    """
    number = _NUMBERS.get(name)
    if number is None:
        raise LoadError(f"has a tensor of type {name!r}, which TensorFlow does not know", fix="export the model again")
    return number


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type for a TensorFlow type; quantized types are the integers they are stored as, strings are objects.

    Raises:
        LoadError: NumPy has no such type (resources, variants, unknown types).
    """
    name = _STORED_AS.get(name, name)
    if name == "string":
        return np.dtype(object)
    if name in ("resource", "variant", "invalid") or name.startswith("dtype_") or name.endswith("_ref"):
        raise LoadError(f"a constant of type {name} has no value that can be read")
    if name.startswith(("bfloat16", "float8_", "float4_", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, name, object))
    else:
        try:
            # NumPy parses other texts as records and as Python's own, each with errors of its own.
            found = np.dtype(name if name.isidentifier() else object)
        except TypeError:
            found = np.dtype(object)
    if found.name != name:  # S5, for one
        raise LoadError(f"there is no type {name!r}")
    return found


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element on the device; 0 for strings, handles and unknown types."""
    try:
        found = numpy_dtype(dtype.removesuffix("_ref"))
    except LoadError:
        return 0
    return 0 if found.hasobject else found.itemsize


def fits(shape: Sequence[int | None], stated: Sequence[int | None] | None) -> bool:
    """True if a shape is one of those stated: None stands for any size, and alone for any shape."""
    if stated is None:
        return True
    return len(shape) == len(stated) and all(a == b or None in (a, b) for a, b in zip(shape, stated, strict=True))


def shape_tuple(shape: Any) -> tuple[int | None, ...] | None:
    """A TensorShapeProto as sizes, None for an unknown size and None alone for unknown rank."""
    if shape.unknown_rank:
        return None
    # A list: a hostile graph has a million dimensions.
    return tuple([size if (size := dim.size) >= 0 else None for dim in shape.dim])


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
    return filled(values, shape)


def _listed_values(proto: Any, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values that a constant lists one by one; there may be fewer than it has elements."""
    if name == "string":
        return np.array(list(proto.string_val), dtype=object)
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


def filled(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Values in a shape that has as many or more: the last one is repeated; no values at all are zeros (empty strings)."""
    count, dtype = math.prod(shape), values.dtype
    if len(values) == count:
        return values.reshape(shape)
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


_copies: weakref.WeakValueDictionary[tuple[Any, ...], NDArray[Any]] = weakref.WeakValueDictionary()
"""By where their parts lie in mapped files: a model is compiled more than once."""


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any] | None:
    """Arrays one below the other: a view of the mapped file in which they follow each other, else a copy; None if their rows differ."""
    first, roots = parts[0], {id(one.base): one.base for one in parts}
    if {(one.dtype, one.shape[1:], one.ndim > 0) for one in parts} != {(first.dtype, first.shape[1:], True)}:
        return None
    files = [one for one in roots.values() if isinstance(one, np.ndarray) and one.shape == (one.nbytes,)]
    if len(files) < len(roots) or any(one.flags.writeable for one in files):
        return np.concatenate(parts)
    begin, root = first.ctypes.data - files[0].ctypes.data, files[0].ctypes.data
    ends = [*itertools.accumulate((one.nbytes for one in parts), initial=begin)]
    follow = [one.ctypes.data - root for one in parts if one.flags.c_contiguous] == ends[:-1]
    if follow and len(files) == 1:
        return files[0][begin : ends[-1]].view(first.dtype).reshape(sum(map(len, parts)), *first.shape[1:])
    places = tuple((one.ctypes.data, one.shape, one.strides, one.dtype) for one in parts)
    if (whole := _copies.get(places)) is None:
        _copies[places] = whole = np.concatenate(parts)
        whole.flags.writeable = False
        weakref.finalize(whole, bool, parts).atexit = False  # nothing else lies where they do, as long as it is there
    return whole


class NotWireFormat(ValueError):
    """The bytes are not a protobuf message."""


def varint(data: bytes | mmap.mmap | memoryview, position: int, end: int) -> tuple[int, int]:
    """A varint and the position behind it.

    Raises:
        NotWireFormat: It is longer than ten bytes.
        IndexError: It runs past `end`.
    """
    value = shift = 0
    while True:
        if position >= end:
            raise IndexError("varint runs past the end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise NotWireFormat("varint longer than ten bytes")


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
    lengths, position = [], 0
    try:
        for _ in range(count):
            length, position = varint(data, position, len(data))
            lengths.append(length)
    except (IndexError, NotWireFormat):
        raise damaged from None
    if position + sum(lengths) != len(data):
        raise damaged
    ends = itertools.accumulate(lengths, initial=position)
    return np.array([data[start:end] for start, end in itertools.pairwise(ends)], dtype=object)


def add_node(graph_def: Any, name: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> None:
    """Adds a node.

    Args:
        graph_def: Where to.
        name: Its name.
        op: Its op.
        inputs: ``node``, ``node:port`` or ``^node``.
        **attrs: A number, a truth value, the name of a type (``"float32"``) or a list of these, a shape as a tuple, or for a constant a
            pair of its type and its value.
    """
    node = graph_def.node.add(name=name, op=op, input=inputs)
    for key, value in attrs.items():
        attr = node.attr[key]
        if key.endswith("shape"):
            attr.shape.SetInParent()
            for size in value:
                attr.shape.dim.add().size = -1 if size is None else size
        elif isinstance(value, bool):
            attr.b = value
        elif isinstance(value, int):
            attr.i = value
        elif isinstance(value, str):
            attr.type = dtype_number(value)
        elif isinstance(value, list):
            attr.list.type.extend(map(dtype_number, value))
        else:
            _fill(attr.tensor, *value)


def add_copy(nodes: Any, node: Any) -> Any:
    """Adds a copy of a node to a field of nodes, and gives it."""
    nodes.append(node)
    return nodes[-1]


def _fill(tensor: Any, dtype: str, value: Any) -> None:
    tensor.dtype = dtype_number(dtype)
    array = np.asarray(value, numpy_dtype(dtype))
    tensor.tensor_shape.SetInParent()
    for size in array.shape:
        tensor.tensor_shape.dim.add().size = size
    if dtype == "string":
        tensor.string_val.extend(item.encode() if isinstance(item, str) else item for item in array.ravel().tolist())
    else:
        tensor.tensor_content = array.tobytes()
