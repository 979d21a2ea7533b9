"""Attributes of ops and small arrays as JSON, and back. A closed list of types: nothing that is read can name another."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.program import Part
from msplit.engines.cuda.kernels.embedding import Columns, Segment, Term
from msplit.engines.cuda.kernels.tiles import Tile, Tiles

_PLAIN = (bool, int, str, type(None))

_RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (Tile, Tiles, Part, Columns, Segment, Term)}
"""Dataclasses and named tuples of the engine's own: a list of their fields, in order."""


def encode(value: Any) -> Any:
    """A value of an attribute as JSON data. Tuples become lists, and all that JSON does not have an object of one key.

    Raises:
        TypeError: It is of a type that no op has.
    """
    kind = type(value)
    if kind.__name__ in _RECORDS and kind is _RECORDS[kind.__name__]:
        names = (
            kind._fields if isinstance(value, tuple) else [one.name for one in dataclasses.fields(value) if one.init]
        )
        return {kind.__name__: [encode(getattr(value, name)) for name in names]}
    if isinstance(value, np.generic):
        return encode(value.item())
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return [encode(one) for one in value]
    if isinstance(value, list):
        return {"list": [encode(one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": {str(name): encode(one) for name, one in value.items()}}
    if isinstance(value, np.ndarray):
        return {"array": encode_array(value)}
    raise TypeError(f"an attribute of type {kind.__name__} can not be stored")


def decode(value: Any) -> Any:
    """Decodes a value that `encode` has made JSON data of.

    Raises:
        ValueError, TypeError, KeyError: That is no such data.
    """
    if isinstance(value, list):
        return tuple(decode(one) for one in value)
    if not isinstance(value, dict):
        return value
    ((kind, data),) = value.items()
    if kind in _RECORDS:
        return _RECORDS[kind](*map(decode, data))
    return _DECODERS[kind](data)


def encode_array(array: NDArray[Any]) -> list[Any]:
    """Type, shape and bytes of an array of numbers.

    Raises:
        TypeError: It holds something else.
    """
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"an array of type {array.dtype} can not be stored")
    native = np.ascontiguousarray(array).reshape(array.shape)
    return [native.dtype.name, list(native.shape), base64.b64encode(native.tobytes()).decode()]


def decode_array(data: Any) -> NDArray[Any]:
    """Decodes an array that `encode_array` has made JSON data of, into memory of its own."""
    name, shape, content = data
    return np.frombuffer(base64.b64decode(content, validate=True), numpy_dtype(name)).reshape(shape).copy()


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "list": lambda data: [decode(one) for one in data],
    "bytes": lambda data: base64.b64decode(data, validate=True),
    "dict": lambda data: {name: decode(one) for name, one in data.items()},
    "array": decode_array,
}
