"""Arrays as the protocols carry them: TensorFlow's TensorProto, the tensors of the Open Inference Protocol, and JSON.

What a client says of sizes is not trusted: nothing is allocated for a shape before it is known to fit the bytes that came.
"""

from __future__ import annotations

import math
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

_BY_NUMBER: dict[int, np.dtype[Any]] = {}
"""TensorFlow's number of a numeric type -> NumPy's type."""
_NUMBERS: dict[str, int] = {"object": 7}
"""NumPy's name of a type -> TensorFlow's number."""
for _number in range(1, 34):
    try:
        _dtype = protos.numpy_dtype(protos.dtype_name(_number))
    except (LoadError, AttributeError):  # no type for values, or none that this ml_dtypes knows
        continue
    if not _dtype.hasobject:
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


def of_tensor_proto(proto: Any, name: str) -> NDArray[Any]:
    """The array in a TensorProto. It may share the message's bytes, and is then not to be written.

    Raises:
        Refusal: Sizes, type and content do not fit each other.
    """
    dims = proto.tensor_shape.dim
    if len(dims) > MOST_DIMS:
        raise invalid(f"input {name} has {len(dims):,} dimensions; {MOST_DIMS} is the most")
    content = proto.tensor_content
    dtype = _BY_NUMBER.get(proto.dtype)
    if content and dtype is not None:
        shape = [dim.size for dim in dims]
        return _shaped(content, dtype, shape, name)
    if proto.tensor_shape.unknown_rank or any(dim.size < 0 for dim in dims):
        raise invalid(f"input {name} does not say its shape")
    try:
        return protos.tensor_value(proto).load()
    except (LoadError, ValueError, OverflowError) as problem:
        said = getattr(problem, "what", None) or str(problem)
        raise invalid(f"input {name}: {said.replace('a constant', 'the tensor')}") from None


def _shaped(data: bytes, dtype: np.dtype[Any], shape: Sequence[int], name: str) -> NDArray[Any]:
    """Bytes as an array of a shape that they must have."""
    if shape and min(shape) < 0:
        raise invalid(f"input {name} has a negative size in its shape {list(shape)}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise invalid(f"input {name} is said to be {dtype.name} {list(shape)}, and {len(data):,} bytes came")
    array = np.frombuffer(data, dtype).reshape(shape)
    # A byte that is neither 0 nor 1 is no bool: what counts them would write past what it has made room for.
    return array.view(np.uint8) != 0 if dtype.kind == "b" else array


def to_tensor_proto(array: NDArray[Any], proto: Any, *, as_content: bool) -> None:
    """Fills a TensorProto.

    Args:
        array: What with.
        proto: An empty one.
        as_content: Put values into `tensor_content`; otherwise, as TensorFlow Serving does unless it is told to, into the field of their
            type, where its clients look for them.
    """
    name = _name_of(array.dtype)
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
def _name_of(dtype: np.dtype[Any]) -> str:
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
_CONTENTS = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents", "INT64": "int64_contents",
    "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


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


def of_infer(tensor: Any, raw: bytes | None) -> NDArray[Any]:
    """The array of an input of a ModelInferRequest.

    Args:
        tensor: The InferInputTensor.
        raw: Its raw content, where the request has that.

    Raises:
        Refusal: Sizes, type and content do not fit each other.
    """
    name, shape = tensor.name, list(tensor.shape)
    dtype = open_dtype(tensor.datatype, name)
    if len(shape) > MOST_DIMS:
        raise invalid(f"input {name} has {len(shape):,} dimensions; {MOST_DIMS} is the most")
    if raw is not None:
        if not dtype.hasobject:
            return _shaped(raw, dtype, shape, name)
        return reshaped(_strings(_raw_strings(raw, name)), shape, name)
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(f"input {name} is {tensor.datatype}, which goes into raw_input_contents only")
    values = list(getattr(tensor.contents, field))
    try:
        array = _strings(values) if dtype.hasobject else np.array(values, dtype)
    except OverflowError:
        raise invalid(f"input {name} has values that are no {tensor.datatype}") from None
    return reshaped(array, shape, name)


def _strings(values: list[bytes]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def reshaped(array: NDArray[Any], shape: Sequence[int], name: str) -> NDArray[Any]:
    """An array in the shape that it is said to have.

    Raises:
        Refusal: It has another number of elements.
    """
    if len(shape) > MOST_DIMS or any(size < 0 for size in shape) or math.prod(shape) != array.size:
        raise invalid(f"input {name} is said to be {list(shape)[:MOST_DIMS]}, and {array.size:,} values came")
    return array.reshape(shape)


def _raw_strings(data: bytes, name: str) -> list[bytes]:
    """Strings, each behind its length in four bytes."""
    found, position = [], 0
    while position < len(data):
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if end > len(data) or position + 4 > len(data):
            raise invalid(f"input {name} has strings whose lengths do not fit the {len(data):,} bytes that came")
        found.append(data[position + 4 : end])
        position = end
    return found


def raw_content(array: NDArray[Any]) -> bytes:
    """An array as raw content of the Open Inference Protocol."""
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    strings = [as_bytes(value) for value in array.ravel().tolist()]
    return b"".join(part for value in strings for part in (len(value).to_bytes(4, "little"), value))
