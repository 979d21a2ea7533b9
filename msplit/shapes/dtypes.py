"""Sizes and names of element types, and the types of a graph's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from msplit.opset import schema

_SIZES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4, "qint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "qint16": 2, "quint16": 2, "int8": 1, "uint8": 1, "bool": 1, "qint8": 1,
    "quint8": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of one element on the device; 0 for strings, handles and unknown types."""
    dtype = dtype.removesuffix("_ref")
    return _SIZES.get(dtype, 1 if dtype.startswith(("float8", "float4", "int4", "uint4", "int2", "uint2")) else 0)


def is_float(dtype: str) -> bool:
    """Whether arithmetic on it is floating-point."""
    return dtype.startswith(("float", "bfloat", "complex"))


@cache
def _rule(op: str) -> tuple[str, str, str] | None:
    """(fixed type, attribute, default) of an op that has exactly one output; None for the others."""
    info = schema.lookup(op)
    if info is None or len(info.outputs) != 1:
        return None
    output = info.outputs[0]
    if output.number_attr or output.type_list_attr:
        return None
    return output.dtype, output.type_attr, str(info.defaults.get(output.type_attr, ""))


def output_dtypes(op: str, attrs: Mapping[str, Any], most: int = schema.MAX_TENSORS) -> tuple[str, ...]:
    """Types of a node's outputs, of the first `most` at least; references count as what they refer to.

    One that neither the op table nor an attribute says is "".
    """
    rule = _rule(op)
    if rule is not None:
        fixed, attribute, default = rule
        given = fixed or attrs.get(attribute)
        return (given if isinstance(given, str) else default,)
    try:
        known = schema.output_dtypes(op, attrs, most)
    except TypeError:
        # An attribute that is not what the op says it is.
        known = None
    if known is not None:
        return tuple(dtype.removesuffix("_ref") if isinstance(dtype, str) else "" for dtype in known)
    for name in ("Tout", "output_types", "out_type", "dtype", "T", "Tparams"):
        given = attrs.get(name)
        if isinstance(given, str) and given:
            return (given,)
        if isinstance(given, tuple) and given and all(isinstance(item, str) for item in given):
            return given
    return ()
