"""Readers of the operations of StableHLO: each writes the ops of TensorFlow that compute the same, see `stablehlo`.

StableHLO's semantics: https://openxla.org/stablehlo/spec. Where TensorFlow's differ (shifts, integer division, indices out of range, floats
beyond an integer's range) more than one op is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from msplit.formats.stablehlo import (
    Body,
    Step,
    Value,
    constant,
    ints,
    is_float,
    known,
    numpy_type,
    padded,
    position,
    transposed,
)

Made = Value | Sequence[Value] | None
Reader = Callable[[Step], Made]


# Functions of elements.

UNARY = {
    "abs": "Abs", "ceil": "Ceil", "cosine": "Cos", "exponential": "Exp", "exponential_minus_one": "Expm1", "floor": "Floor",
    "imag": "Imag", "is_finite": "IsFinite", "log": "Log", "log_plus_one": "Log1p", "logistic": "Sigmoid", "negate": "Neg", "real": "Real",
    "round_nearest_even": "Rint", "rsqrt": "Rsqrt", "sign": "Sign", "sine": "Sin", "sqrt": "Sqrt", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
BINARY = {
    "add": ("AddV2", "LogicalOr"), "subtract": ("Sub", ""), "multiply": ("Mul", "LogicalAnd"), "maximum": ("Maximum", "LogicalOr"),
    "minimum": ("Minimum", "LogicalAnd"), "power": ("Pow", ""), "atan2": ("Atan2", ""), "complex": ("Complex", ""),
    "and": ("BitwiseAnd", "LogicalAnd"), "or": ("BitwiseOr", "LogicalOr"), "xor": ("BitwiseXor", "NotEqual"),
}  # fmt: skip
"""By operation: the op of numbers, and of truth values."""
COMPARE = {"EQ": "Equal", "NE": "NotEqual", "LT": "Less", "LE": "LessEqual", "GT": "Greater", "GE": "GreaterEqual"}


def _unary(step: Step) -> Made:
    value, name = step.args[0], step.op.operation.name.removeprefix("stablehlo.")
    if name == "sign" and is_float(value.dtype):  # NaN and -0 stay
        apart = step.body.each("Greater", step.body.each("Abs", value), step.body.like(0, value))
        return step.body.each("SelectV2", apart, step.body.each("Sign", value), value)
    if name in ("abs", "logistic") and "complex" in value.dtype:
        return None  # of an infinite complex number it is another one
    return step.body.each(UNARY[name], value)


def _binary(step: Step) -> Made:
    x, y = step.args
    name = step.op.operation.name.removeprefix("stablehlo.")
    op = BINARY[name][x.dtype == "bool"]
    if name == "power" and not is_float(x.dtype) and not (y.array is not None and np.all(y.array >= 0)):
        return None  # a negative power of an integer is 0 or 1 here, and an error in TensorFlow
    if name == "maximum" and is_float(x.dtype):
        for one, other in ((x, y), (y, x)):
            if other.array is not None and not other.array.shape and other.array == 0 and one.array is None:
                return step.body.each("Relu", one)
    return step.body.each(op, x, y) if op else None


def _not(step: Step) -> Made:
    return step.body.each("LogicalNot" if step.args[0].dtype == "bool" else "Invert", step.args[0])


def _round_away(step: Step) -> Made:
    """The nearest whole number, of two the one away from 0; the sign of -0 stays."""
    (x,), body = step.args, step.body
    size = body.each("Abs", x)
    whole = body.each("Floor", size)
    up = body.each("GreaterEqual", body.each("Sub", size, whole), body.like(0.5, x))
    found = body.each("SelectV2", up, body.each("AddV2", whole, body.like(1, x)), whole)
    signed = body.each("SelectV2", body.each("Less", x, body.like(0, x)), body.each("Neg", found), found)
    return body.each(
        "SelectV2", body.each("Equal", found, body.like(0, x)), body.each("Mul", x, body.like(0, x)), signed
    )


def _bits(step: Step) -> Made:
    """The same bits as another type of the same size."""
    (x,), dtype = step.args, step.type[0]
    plain = all(one != "bool" and "complex" not in one for one in (x.dtype, dtype))
    same = plain and numpy_type(x.dtype).itemsize == numpy_type(dtype).itemsize
    return step.body.each("Bitcast", x, type=dtype) if same else None


def _divide(step: Step) -> Made:
    """A quotient; of integers, cut towards 0. By 0 it is -1, the rest the number; the least by -1 stays. XLA's."""
    (x, y), body = step.args, step.body
    rest = step.op.operation.name.endswith("remainder")
    if is_float(x.dtype) or "complex" in x.dtype:
        return body.each("TruncateMod" if rest else "RealDiv", x, y) if is_float(x.dtype) or not rest else None
    op, zero, one = "TruncateMod" if rest else "TruncateDiv", body.like(0, x), body.like(1, x)
    if y.array is not None and np.all(y.array > 0):
        return body.each(op, x, y)
    nought = body.each("Equal", y, zero)
    odd = nought
    if not x.dtype.startswith("u"):
        minus = body.each("Equal", y, body.like(-1, x))
        odd = body.each("LogicalOr", nought, minus)
    plain = body.each(op, x, body.each("SelectV2", odd, one, y))
    ones = body.like(np.iinfo(numpy_type(x.dtype)).max if x.dtype.startswith("u") else -1, x)
    if not x.dtype.startswith("u"):
        plain = body.each("SelectV2", minus, zero if rest else body.each("Neg", x), plain)
    return body.each("SelectV2", nought, x if rest else ones, plain)


def _shift(step: Step) -> Made:
    """A shift. By more than there are bits it gives 0, or the sign where it is arithmetic; TensorFlow leaves that open."""
    (x, y), body = step.args, step.body
    name = step.op.operation.name
    bits, signed = numpy_type(x.dtype).itemsize * 8, not x.dtype.startswith("u")
    arithmetic = name.endswith("arithmetic")
    if x.dtype == "bool" or (arithmetic and not signed):
        return None
    inside = body.each(
        "LogicalAnd", body.each("GreaterEqual", y, body.like(0, y)), body.each("Less", y, body.like(bits, y))
    )
    amount = body.each("SelectV2", inside, y, body.like(bits - 1 if arithmetic else 0, y))
    if name.endswith("logical") and signed:  # the sign's bit is taken off with the first step
        top = body.like(np.iinfo(numpy_type(x.dtype)).max, x)
        first = body.each("BitwiseAnd", body.each("RightShift", x, body.like(1, x)), top)
        rest = body.each("Maximum", body.each("Sub", amount, body.like(1, x)), body.like(0, x))
        found = body.each(
            "SelectV2", body.each("Equal", amount, body.like(0, x)), x, body.each("RightShift", first, rest)
        )
    else:
        found = body.each("LeftShift" if name.endswith("left") else "RightShift", x, amount)
    return found if arithmetic else body.each("SelectV2", inside, found, body.like(0, found))


def _compare(step: Step) -> Made:
    x, y = step.args
    way, kind = step.text("comparison_direction"), step.text("compare_type")
    if kind == "TOTALORDER" or ("complex" in x.dtype and way not in ("EQ", "NE")):
        return None
    if x.dtype == "bool" and way not in ("EQ", "NE"):
        x, y = (step.body.each("Cast", one, DstT="int32") for one in (x, y))
    return step.body.each(COMPARE[way], x, y)


def _select(step: Step) -> Made:
    return step.body.each("SelectV2", *step.args, shape=step.shape)


def _clamp(step: Step) -> Made:
    low, value, high = step.args
    return step.body.each("Minimum", step.body.each("Maximum", value, low), high, shape=step.shape)


def _convert(step: Step) -> Made:
    """Another type. A float beyond an integer's range becomes its end, and NaN 0, as XLA has it; TensorFlow leaves that open."""
    (x,), body, (dtype, _) = step.args, step.body, step.type
    if x.dtype == dtype:
        return x
    if "complex" in x.dtype and "complex" not in dtype:
        x = body.each("Real", x)
    if x.array is not None and not (is_float(x.dtype) and not is_float(dtype)):
        return replace(x, dtype=dtype, source=None, array=x.array.astype(numpy_type(dtype)))
    if dtype == "bool":
        return body.each("NotEqual", x, body.like(0, x))
    if not is_float(x.dtype) or is_float(dtype) or "complex" in dtype:
        return body.each("Cast", x, DstT=dtype)
    if x.dtype in ("float16", "bfloat16"):
        x = body.each("Cast", x, DstT="float32")
    ends = np.iinfo(numpy_type(dtype))
    low, high = body.like(ends.min, x), body.like(ends.max, x)  # the upper end may be rounded up, out of range
    inside = body.each("LogicalAnd", body.each("GreaterEqual", x, low), body.each("Less", x, high))
    found = body.each("Cast", body.each("SelectV2", inside, x, body.like(0, x)), DstT=dtype)
    found = body.each("SelectV2", body.each("GreaterEqual", x, high), constant(np.asarray(ends.max, dtype)), found)
    return body.each("SelectV2", body.each("Less", x, low), constant(np.asarray(ends.min, dtype)), found)


# Shapes.


def _constant(step: Step) -> Made:
    dtype, shape = step.type
    size = numpy_type(dtype) if re.fullmatch(r"(u?int|float)\d+|bool|bfloat16", dtype) else None
    if size is None:
        return None  # of complex numbers jaxlib does not give the elements
    found = step.op.attributes["value"]
    if getattr(found, "is_splat", False) and shape:
        scalar = np.asarray(found.get_splat_value().value, size)
        return replace(constant(scalar), shape=shape, sizes=ints(*map(int, map(known, shape))))
    if dtype in ("bfloat16", "float16") and not shape:
        return constant(np.asarray(found.get_splat_value().value, size))
    raw = _bfloat16s(str(found)) if dtype == "bfloat16" else np.array(found)
    array = raw.view(size) if raw.dtype.itemsize == np.dtype(size).itemsize and raw.dtype != size else raw.astype(size)
    return constant(array.reshape(tuple(map(known, shape))))


def _bfloat16s(text: str) -> NDArray[Any]:
    """Elements of a constant of bfloat16, of which jaxlib gives text alone: of many all bits, of few numbers, and the bits of NaN."""
    inside = text[text.index("<") + 1 : text.rindex("> :")]
    if inside.startswith('"'):
        return np.frombuffer(bytes.fromhex(inside.strip('"')[2:]), bfloat16)
    words = re.findall(r"[^\s,\[\]]+", inside)
    return np.array([np.uint16(int(one, 16)).view(bfloat16) if "x" in one else float(one) for one in words], bfloat16)


def _broadcast(step: Step) -> Made:
    """Broadcasting, which waits: most ops broadcast themselves. The operand gets axes of size 1 up to its first one."""
    x, body, shape = step.args[0], step.body, step.shape
    dims = step.numbers("broadcast_dimensions")
    sizes = step.args[1] if len(step.args) > 1 else ints(*map(known, shape))
    if None not in shape and shape == x.shape and dims == list(range(len(shape))):
        return x
    if x.sizes is not None and x.source is None and x.array is not None and not x.array.shape:
        return replace(x, shape=shape, sizes=sizes)
    if sorted(dims) != dims:
        x, dims = transposed(body, x, sorted(range(len(dims)), key=dims.__getitem__)), sorted(dims)
    if x.array is not None and not x.shape:
        return replace(x, shape=shape, sizes=sizes)
    made = x if x.sizes is None else body.whole(x)  # a constant stays one, also for regions that read it
    for axis in range(dims[0], len(shape)) if dims else ():
        if axis not in dims:
            at = axis - dims[0]
            made = body.add("ExpandDims", [made, position(at)], (*made.shape[:at], 1, *made.shape[at:]))
    if None not in made.shape and made.shape == shape:
        return made
    return replace(made, shape=shape, sizes=sizes)


def _reshape(step: Step) -> Made:
    x, shape = step.args[0], step.shape
    if len(step.args) > 1:
        return step.body.add("Reshape", [x, step.args[1]], shape)
    if x.array is not None and x.fixed and not x.array.shape and x.shape:
        return replace(x, shape=shape, sizes=ints(*map(known, shape)))
    if x.array is not None and x.sizes is None:
        return constant(x.array.reshape(tuple(map(known, shape))))
    sizes = ints(*map(known, shape))
    return x if x.shape == shape and None not in shape else step.body.add("Reshape", [x, sizes], shape)


def _dimension_size(step: Step) -> Made:
    (x,), axis, body = step.args, step.number("dimension"), step.body
    size = x.shape[axis]
    if size is not None:
        return position(size)
    sizes = x.sizes or body.add("Shape", [x], (len(x.shape),), out_type="int32")
    found = body.add("StridedSlice", [sizes, ints(axis), ints(axis + 1), ints(1)], (), shrink_axis_mask=1)
    return found if found.dtype == "int32" else body.each("Cast", found, DstT="int32")


def _iota(step: Step) -> Made:
    body, (dtype, shape) = step.body, step.type
    axis = step.number("iota_dimension")
    sizes = step.args[0] if step.args else ints(*map(known, shape))
    size = shape[axis]
    if dtype == "bool" or "complex" in dtype:
        return None
    if size is not None and size <= 1 << 20:
        made = constant(np.arange(size).astype(numpy_type(dtype)))
    else:
        end = body.add("StridedSlice", [sizes, ints(axis), ints(axis + 1), ints(1)], (), shrink_axis_mask=1)
        made = body.add("Range", [body.like(0, end), end, body.like(1, end)], (size,))
        made = made if made.dtype == dtype else body.each("Cast", made, DstT=dtype)
    if len(shape) == 1:
        return made
    column = (size, *[1] * (len(shape) - axis - 1))
    if made.array is not None:
        made = constant(made.array.reshape(tuple(map(known, column))))
    elif len(column) > 1:
        made = body.add("Reshape", [made, ints(-1, *[1] * (len(column) - 1))], column)
    return replace(made, shape=shape, sizes=sizes)


def _concatenate(step: Step) -> Made:
    args, axis = list(step.args), step.number("dimension")
    if len(args) == 1:
        return args[0]
    return step.body.add("ConcatV2", [args, position(axis)], step.shape)


def _slice(step: Step) -> Made:
    begin, end, strides = (step.numbers(key) for key in ("start_indices", "limit_indices", "strides"))
    return step.body.add("StridedSlice", [step.args[0], ints(*begin), ints(*end), ints(*strides)], step.shape)


def _real_slice(step: Step) -> Made:
    return step.body.add("StridedSlice", list(step.args), step.shape)


def _dynamic_slice(step: Step) -> Made:
    x, *starts = step.args
    sizes = ints(*step.numbers("slice_sizes"))
    return step.body.add("XlaDynamicSlice", [x, _packed(step.body, starts), sizes], step.shape) if starts else x


def _dynamic_update_slice(step: Step) -> Made:
    x, update, *starts = step.args
    return (
        step.body.add("XlaDynamicUpdateSlice", [x, update, _packed(step.body, starts)], step.shape)
        if starts
        else update
    )


def _packed(body: Body, scalars: Sequence[Value]) -> Value:
    if all(one.array is not None for one in scalars):
        return constant(np.array([one.array for one in scalars], numpy_type(scalars[0].dtype)))
    return body.add("Pack", [list(scalars)], (len(scalars),), axis=0)


def _pad(step: Step) -> Made:
    x, value = step.args
    low, high, inside = (step.numbers(key) for key in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    return padded(step.body, x, value, low, high, inside, step.shape)


def _transpose(step: Step) -> Made:
    order = step.numbers("permutation")
    return transposed(step.body, step.args[0], order)


def _reverse(step: Step) -> Made:
    return step.body.add("ReverseV2", [step.args[0], ints(*step.numbers("dimensions"))], step.shape)


def _passed(step: Step) -> Made:
    return list(step.args)


ELEMENTS: Mapping[str, Reader] = {
    **dict.fromkeys(UNARY, _unary), **dict.fromkeys(BINARY, _binary), "not": _not, "bitcast_convert": _bits,
    "round_nearest_afz": _round_away, "divide": _divide, "remainder": _divide,
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), _shift), "compare": _compare, "select": _select,
    "clamp": _clamp, "convert": _convert, "constant": _constant, "broadcast_in_dim": _broadcast, "dynamic_broadcast_in_dim": _broadcast,
    "reshape": _reshape, "dynamic_reshape": _reshape, "get_dimension_size": _dimension_size, "iota": _iota, "dynamic_iota": _iota,
    "concatenate": _concatenate, "slice": _slice, "real_dynamic_slice": _real_slice, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "pad": _pad, "transpose": _transpose, "reverse": _reverse,
    "optimization_barrier": _passed,
}  # fmt: skip
"""By operation. A reader that gives None leaves the operation as it is."""
