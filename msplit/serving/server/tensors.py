"""Types of the protocols, and arrays as answers carry them: TensorFlow's TensorProto, and the tensors of the Open Inference Protocol."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.formats import tensors as protos
from msplit.serving.server.refusal import invalid

MOST_DIMS = 32
"""NumPy knows no more than 64, and no model has as many as this."""
_MOST_VALUES = sys.maxsize // 16
"""Of the largest type."""

_BY_NUMBER: dict[int, np.dtype[Any]] = {}
"""TensorFlow's number of a type whose values can be read -> NumPy's type."""
_NUMBERS: dict[str, int] = {"object": 7}
"""NumPy's name of a type -> TensorFlow's number."""
for _number in range(1, 34):
    try:
        _dtype = protos.numpy_dtype(protos.dtype_name(_number))
    except (LoadError, AttributeError):  # no type for values, or none that this ml_dtypes knows
        continue
    _BY_NUMBER[_number] = _dtype
    if protos.dtype_name(_number) == _dtype.name:  # not a quantized type, which is kept as this one is
        _NUMBERS[_dtype.name] = _number

_PACKED = {"float32": 0x2A, "float64": 0x32, "bool": 0x5A, "complex64": 0x4A, "complex128": 0x62}
"""Tags of the fields of a TensorProto whose packed values are the array's own bytes."""
_LISTED = {
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "float16": "half_val",
    "bfloat16": "half_val",
}
_SMALL = frozenset({"int8", "int16", "int32", "uint8", "uint16"})
"""What is listed in int_val."""


def dtype_number(name: str) -> int:
    """TensorFlow's number of one of NumPy's types, 0 where it has none."""
    return _NUMBERS.get(name, 0)


def dtype_of(number: int) -> np.dtype[Any] | None:
    """NumPy's type for one of TensorFlow's numbers, None where there is none."""
    return _BY_NUMBER.get(number)


def to_tensor_proto(array: NDArray[Any], proto: Any, *, as_content: bool) -> None:
    """Fills a TensorProto.

    Args:
        array: What with.
        proto: An empty one.
        as_content: Put values into `tensor_content`; otherwise, as TensorFlow Serving does unless it is told to, into the field of their
            type, where its clients look for them.
    """
    name = name_of(array.dtype)
    proto.dtype = _NUMBERS.get(name, 0)
    dims = proto.tensor_shape.dim
    for size in array.shape:
        dims.add().size = size
    if name == "object":
        proto.string_val.extend([as_bytes(value) for value in array.ravel().tolist()])
    elif as_content or not (name in _PACKED or name in _LISTED or name in _SMALL):
        proto.tensor_content = array.tobytes()
    elif name in _PACKED:
        data = array.tobytes()
        proto.MergeFromString(bytes((_PACKED[name],)) + _varint(len(data)) + data)
    elif array.dtype.itemsize == 2 and name in _LISTED:
        proto.half_val.extend(array.view(np.uint16).ravel().tolist())
    else:
        getattr(proto, _LISTED.get(name, "int_val")).extend(array.ravel().tolist())


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a type, ``object`` for all that holds strings. NumPy puts it together anew each time, which takes 5 µs."""
    return dtype.name if dtype.kind not in "OSU" else "object"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def as_bytes(value: Any) -> bytes:
    """A string as the protocols carry it."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


# --- Open Inference Protocol

_OPEN = {
    "BOOL": "bool", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32", "UINT64": "uint64", "INT8": "int8", "INT16": "int16",
    "INT32": "int32", "INT64": "int64", "FP16": "float16", "BF16": "bfloat16", "FP32": "float32", "FP64": "float64", "BYTES": "object",
}  # fmt: skip
_OPEN_NAMES = {dtype: name for name, dtype in _OPEN.items()}


def open_name(dtype: str) -> str:
    """The Open Inference Protocol's name of one of NumPy's types.

    Raises:
        Refusal: It has none.
    """
    if dtype not in _OPEN_NAMES:
        raise invalid(f"the Open Inference Protocol has no type for {dtype}; use TensorFlow Serving's")
    return _OPEN_NAMES[dtype]


def open_dtype(datatype: str, name: str) -> np.dtype[Any]:
    """NumPy's type for one of the Open Inference Protocol.

    Raises:
        Refusal: There is none of that name.
    """
    if datatype not in _OPEN:
        raise invalid(f"input {name} is of an unknown type {datatype!r}; known are {', '.join(_OPEN)}")
    dtype = _OPEN[datatype]
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def reshaped(array: NDArray[Any], shape: Sequence[int], name: str) -> NDArray[Any]:
    """An array in the shape that it is said to have.

    Raises:
        Refusal: It has another number of elements.
    """
    if len(shape) > MOST_DIMS or any(size < 0 for size in shape) or math.prod(shape) != array.size:
        raise invalid(f"input {name} is said to be {list(shape)[:MOST_DIMS]}, and {array.size:,} values came")
    refuse_vast(shape, name)
    return array.reshape(shape)


def refuse_vast(shape: Sequence[int], name: str) -> None:
    """Refuses the shape of an array without values that NumPy can not have: it counts its bytes as if 0 were 1.

    Raises:
        Refusal: It is one.
    """
    if 0 in shape and math.prod(filter(None, shape)) > _MOST_VALUES:
        raise invalid(f"input {name} has sizes that no array has: {list(shape)}")


def raw_content(array: NDArray[Any]) -> bytes:
    """An array as raw content of the Open Inference Protocol."""
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    strings = [as_bytes(value) for value in array.ravel().tolist()]
    return b"".join(part for value in strings for part in (len(value).to_bytes(4, "little"), value))
