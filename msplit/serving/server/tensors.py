"""Types of the protocols, and arrays as answers carry them: TensorFlow's TensorProto, and the tensors of the Open Inference Protocol.

Reasons why a request is not answered, as the protocols say them.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from msplit import escape
from msplit.errors import (
    Busy,
    Closed,
    DeviceLost,
    EngineError,
    InvalidInput,
    LoadError,
    MsplitError,
    ProcessLost,
    TimedOut,
    WrongShape,
)
from msplit.formats import tensors as protos
from msplit.serving.server import messages


class StatusCode(Enum):
    """gRPC's number and HTTP's."""

    CANCELLED = (1, 499)
    INVALID_ARGUMENT = (3, 400)
    DEADLINE_EXCEEDED = (4, 504)
    NOT_FOUND = (5, 404)
    RESOURCE_EXHAUSTED = (8, 429)
    FAILED_PRECONDITION = (9, 412)
    UNIMPLEMENTED = (12, 501)
    INTERNAL = (13, 500)
    UNAVAILABLE = (14, 503)
    UNAUTHENTICATED = (16, 401)

    @property
    def grpc(self) -> int:
        """Number of the status in gRPC."""
        return self.value[0]

    @property
    def http(self) -> int:
        """Status in HTTP."""
        return self.value[1]


LONGEST = 1_000
"""Most characters of a message: what it tells of may be as long as the client likes."""


class Refusal(Exception):
    """A request is refused, or has failed.

    Args:
        code: Kind of failure.
        said: For whoever sent it; made one line in which nothing is hidden.
    """

    def __init__(self, code: StatusCode, said: str) -> None:
        said = escape.line(said[: LONGEST + 1])
        self.code, self.said = code, said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"
        super().__init__(self.said)


def invalid(said: str) -> Refusal:
    """The request is wrong."""
    return Refusal(StatusCode.INVALID_ARGUMENT, said)


def refusal(problem: BaseException, *, ran: bool = False) -> Refusal:
    """Refusal to send to the client whose request raised an error.

    Args:
        problem: The error.
        ran: True if the model had been run, so that the error is not the client's.
    """
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, MsplitError):
        # Not the fix: it is for whoever runs the server, and names what only they can change.
        other = StatusCode.INTERNAL if ran else StatusCode.INVALID_ARGUMENT
        return Refusal(next((code for kind, code in _CODES if isinstance(problem, kind)), other), problem.what)
    if isinstance(problem, asyncio.CancelledError):
        return Refusal(StatusCode.CANCELLED, "the request was cancelled")
    if isinstance(problem, MemoryError):
        return Refusal(StatusCode.RESOURCE_EXHAUSTED, "there is not enough memory for this request")
    return Refusal(StatusCode.INTERNAL, "internal error; the server's log has more")


_CODES: tuple[tuple[type[EngineError], StatusCode], ...] = (
    (Busy, StatusCode.RESOURCE_EXHAUSTED),
    (TimedOut, StatusCode.DEADLINE_EXCEEDED),
    (Closed, StatusCode.UNAVAILABLE),
    (DeviceLost, StatusCode.UNAVAILABLE),
    (ProcessLost, StatusCode.UNAVAILABLE),
    (InvalidInput, StatusCode.INVALID_ARGUMENT),
    (
        WrongShape,
        StatusCode.INVALID_ARGUMENT,
    ),  # of what the host makes of a request's values; its own shapes are compared before
)


def is_internal(problem: BaseException) -> bool:
    """True for a fault of the server, which goes to its log."""
    return not isinstance(problem, Refusal | MsplitError | asyncio.CancelledError)


MOST_DIMS = 32
"""NumPy knows no more than 64, and no model has as many as this."""
_MOST_VALUES = sys.maxsize // 16
"""Most values of a tensor: as many as an array of the largest type can have."""

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

PIECE = 1 << 16
"""Values that are written at once: while more are, no other thread gets its turn."""

_PACKED = {"float32": 5, "float64": 6, "bool": 11, "complex64": 9, "complex128": 12}
"""Numbers of the fields of a TensorProto whose packed values are the array's own bytes."""
_LISTED = {
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "float16": "half_val",
    "bfloat16": "half_val",
}
_SMALL = frozenset({"int8", "int16", "int32", "uint8", "uint16"})
"""Types whose values are in the field `int_val`."""


def dtype_number(name: str) -> int:
    """TensorFlow's number of one of NumPy's types, 0 where it has none."""
    return _NUMBERS.get(name, 0)


def dtype_of(number: int) -> np.dtype[Any] | None:
    """NumPy's type for one of TensorFlow's numbers, None where there is none."""
    return _BY_NUMBER.get(number)


def field(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """A field of a message, in parts, with these as its bytes. To join parts takes a copy of all; `bytes.join` lets other threads run."""
    return [_varint(number << 3 | 2) + _varint(sum(map(len, parts))), *parts]


def pieces(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The values of an array in order, `PIECE` at a time."""
    flat = array.reshape(-1)
    return (flat[start : start + PIECE] for start in range(0, flat.size, PIECE))


def text_bytes(array: NDArray[Any]) -> int:
    """Bytes of the strings of an array, 0 of numbers."""
    return sum(map(len, array.reshape(-1).tolist())) if array.dtype.hasobject else 0


def to_tensor_proto(array: NDArray[Any], proto: Any, *, as_content: bool) -> None:
    """Fills an empty TensorProto. See `tensor_proto`."""
    proto.MergeFromString(b"".join(tensor_proto(array, as_content=as_content)))


def tensor_proto(array: NDArray[Any], *, as_content: bool) -> list[bytes]:
    """A TensorProto, in parts. A field of many values may be there several times, each time with some of them, as protobuf allows.

    Args:
        array: Its values.
        as_content: Put values into `tensor_content`; otherwise, as TensorFlow Serving does unless it is told to, into the field of their
            type, where its clients look for them.
    """
    name = name_of(array.dtype)
    head = messages.TensorProto(dtype=_NUMBERS.get(name, 0))
    dims = head.tensor_shape.dim
    for size in array.shape:
        dims.add().size = size
    if name == "object":
        parts = _strings(array, lambda length: b"\x42" + _varint(length))
    elif as_content or not (name in _PACKED or name in _LISTED or name in _SMALL):
        parts = field(4, _values(array))
    elif name in _PACKED:
        parts = field(_PACKED[name], _values(array))
    else:
        kept = array.view(np.uint16) if array.dtype.itemsize == 2 and name in _LISTED else array
        values = _LISTED.get(name, "int_val")
        parts = [messages.TensorProto(**{values: one.tolist()}).SerializeToString() for one in pieces(kept)]
    return [head.SerializeToString(), *parts]


def is_plain(array: NDArray[Any], *, as_content: bool) -> bool:
    """True if the values of a tensor are written as the bytes of the array, in one part, the last one."""
    name = name_of(array.dtype)
    own = name in _PACKED or as_content or not (name in _LISTED or name in _SMALL)
    return own and name != "object" and 0 < array.size <= PIECE


def _values(array: NDArray[Any]) -> list[bytes]:
    return [piece.tobytes() for piece in pieces(array)]


def _strings(array: NDArray[Any], head: Callable[[int], bytes]) -> list[bytes]:
    """Strings, each behind what tells its length."""
    parts = []
    for piece in pieces(array):
        values = map(as_bytes, piece.tolist())
        parts.append(b"".join([part for value in values for part in (head(len(value)), value)]))
    return parts


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


def raw_content(array: NDArray[Any]) -> list[bytes]:
    """An array as raw content of the Open Inference Protocol, in parts."""
    strings = array.dtype.kind in "OSU"
    return _strings(array, lambda length: length.to_bytes(4, "little")) if strings else _values(array)


def parsed(kind: Any, data: bytes) -> Any:
    """A message of one kind.

    Raises:
        Refusal: It is none.
    """
    try:
        return kind.FromString(data)
    except (DecodeError, RecursionError, UnicodeDecodeError):
        raise invalid(f"what came is no {kind.DESCRIPTOR.name}") from None


def checked_shape(sizes: Sequence[int], name: str) -> tuple[int, ...]:
    """Sizes of an input that a client describes.

    Raises:
        Refusal: They are too many or too large, or one is negative.
    """
    if len(sizes) > MOST_DIMS:
        raise invalid(f"input {name} has {len(sizes):,} dimensions; {MOST_DIMS} is the most")
    if min(sizes, default=0) < 0:
        raise invalid(f"input {name} has a negative size in its shape {list(sizes)}")
    refuse_vast(sizes, name)
    return tuple(sizes)


AT_ONCE = 1 << 18
"""Bytes of numbers of changing length that are decoded at once, which takes up to thirty times as many."""


def varints(numbers: NDArray[np.uint8], count: int, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Numbers of changing length, decoded many at once: a byte of each is added at a time.

    Raises:
        Refusal: One is out of range of the type, or longer than any.
    """
    halves = dtype.name in ("float16", "bfloat16")  # their bits, as an integer
    kept = np.dtype(np.uint16) if halves else dtype
    low, high = (0, 1) if kept.kind == "b" else (int(ml_dtypes.iinfo(kept).min), int(ml_dtypes.iinfo(kept).max))
    found = np.empty(count, kept)
    start = done = 0
    while start < len(numbers):
        part = numbers[start : start + AT_ONCE]
        ends = np.flatnonzero(part < 0x80)
        lengths = np.diff(ends, prepend=-1)
        if not len(ends) or (longest := int(lengths.max())) > 10:
            raise invalid(f"input {name} has a number of more than 64 bits")
        values = np.zeros(len(ends), np.uint64)
        for place in range(longest):
            long = lengths > place
            bits = (part[(ends - lengths + 1)[long] + place] & 0x7F).astype(np.uint64)
            if place == 9 and (bits > 1).any():
                raise invalid(f"input {name} has a number of more than 64 bits")
            values[long] |= bits << np.uint64(7 * place)
        whole: NDArray[Any] = values.view(np.int64) if low < 0 else values
        if int(whole.min()) < low or int(whole.max()) > high:
            raise invalid(f"input {name} has numbers that are no {dtype.name}, which are {low:,} to {high:,}")
        found[done : done + len(ends)] = whole.astype(kept)
        done += len(ends)
        start += int(ends[-1]) + 1
    return found.view(dtype) if halves else found
