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

from msplit.formats.stablehlo import (
    Body,
    Shape,
    Step,
    Value,
    constant,
    ints,
    known,
    numpy_type,
    position,
    top_k,
    typed,
    word,
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
CUSTOM = {
    "mhlo.erf": "Erf", "mhlo.tan": "Tan", "mhlo.acos": "Acos", "mhlo.asin": "Asin", "mhlo.atan": "Atan", "mhlo.sinh": "Sinh",
    "mhlo.cosh": "Cosh",
    "mhlo.asinh": "Asinh", "mhlo.acosh": "Acosh", "mhlo.atanh": "Atanh", "mhlo.erf_inv": "Erfinv",
}  # fmt: skip
PASSED = (
    "Sharding",
    "xla.sdy.",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
    "shape_assertion",
)
"""Custom calls that say where values are or what is so, and compute nothing."""


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _unary(step: Step) -> Made:
    value, name = step.args[0], step.op.operation.name.removeprefix("stablehlo.")
    if name == "sign" and _is_float(value.dtype):  # NaN and -0 stay
        signed = step.body.each("Sign", value)
        return step.body.each("SelectV2", step.body.each("IsNan", value), value, signed)
    return step.body.each(UNARY[name], value)


def _binary(step: Step) -> Made:
    x, y = step.args
    name = step.op.operation.name.removeprefix("stablehlo.")
    op = BINARY[name][x.dtype == "bool"]
    if name == "power" and not _is_float(x.dtype) and not (y.array is not None and np.all(y.array >= 0)):
        return None  # a negative power of an integer is 0 or 1 here, and an error in TensorFlow
    if name == "maximum" and _is_float(x.dtype):
        for one, other in ((x, y), (y, x)):
            if other.array is not None and not other.array.shape and other.array == 0 and one.array is None:
                return step.body.each("Relu", one)
    return step.body.each(op, x, y) if op else None


def _not(step: Step) -> Made:
    return step.body.each("LogicalNot" if step.args[0].dtype == "bool" else "Invert", step.args[0])


def _divide(step: Step) -> Made:
    """A quotient; of integers, cut towards 0. By 0 it is -1, the rest the number; the least by -1 stays. XLA's."""
    (x, y), body = step.args, step.body
    rest = step.op.operation.name.endswith("remainder")
    if _is_float(x.dtype) or "complex" in x.dtype:
        return body.each("TruncateMod" if rest else "RealDiv", x, y) if _is_float(x.dtype) or not rest else None
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
    if x.array is not None and not (_is_float(x.dtype) and not _is_float(dtype)):
        return replace(x, dtype=dtype, source=None, array=x.array.astype(numpy_type(dtype)))
    if dtype == "bool":
        return body.each("NotEqual", x, body.like(0, x))
    if not _is_float(x.dtype) or _is_float(dtype) or "complex" in dtype:
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
    found, (dtype, shape) = step.op.attributes["value"], step.type
    size = numpy_type(dtype) if re.fullmatch(r"(u?int|float|complex)\d+|bool|bfloat16", dtype) else None
    if size is None:
        return None
    if "complex" in dtype and not hasattr(found, "__array__"):
        return None
    if getattr(found, "is_splat", False) and shape and "complex" not in dtype:
        scalar = np.asarray(found.get_splat_value().value, size)
        return replace(constant(scalar), shape=shape, sizes=ints(*map(int, map(known, shape))))
    if dtype in ("bfloat16", "float16") and not shape:
        return constant(np.asarray(found.get_splat_value().value, size))
    raw = np.array(found)
    array = raw.view(size) if raw.dtype.itemsize == np.dtype(size).itemsize and raw.dtype != size else raw.astype(size)
    return constant(array.reshape(tuple(map(known, shape))))


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
        return None
    if x.array is not None and not x.shape:
        return replace(x, shape=shape, sizes=sizes)
    made = body.whole(x)
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
    return _padded(step.body, x, value, low, high, inside, step.shape)


def _padded(
    body: Body, x: Value, value: Value, low: Sequence[int], high: Sequence[int], inside: Sequence[int], shape: Shape
) -> Value:
    if not any(low) and not any(high) and not any(inside):
        return x
    if any(inside) or min(*low, *high) < 0:
        return body.add("XlaPad", [x, value, ints(*low), ints(*high), ints(*inside)], shape)
    pairs = constant(np.array(list(zip(low, high, strict=True)), np.int32))
    return body.add("PadV2", [x, pairs, value], shape)


def _transpose(step: Step) -> Made:
    order = step.numbers("permutation")
    return _transposed(step.body, step.args[0], order)


def _transposed(body: Body, x: Value, order: Sequence[int]) -> Value:
    if list(order) == list(range(len(order))):
        return x
    return body.add("Transpose", [x, ints(*order)], tuple(x.shape[axis] for axis in order))


def _reverse(step: Step) -> Made:
    return step.body.add("ReverseV2", [step.args[0], ints(*step.numbers("dimensions"))], step.shape)


def _passed(step: Step) -> Made:
    return list(step.args)


# Products, convolutions and windows.


def _dot(step: Step) -> Made:
    """A product. Axes of the result: those of batches, those left of the first operand, those left of the second."""
    from jaxlib.mlir.dialects import stablehlo

    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.DotDimensionNumbers(step.op.attributes["dot_dimension_numbers"])
    batch = [list(dims.lhs_batching_dimensions), list(dims.rhs_batching_dimensions)]
    summed = [list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions)]
    if dtype == "bool":
        return None
    x, y = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in step.args)
    ranks, count = (len(x.shape), len(y.shape)), len(batch[0])
    leads = batch == [list(range(count))] * 2 and len(summed[0]) == 1
    if leads and ranks == (count + 2, count + 2):
        turned = summed[0][0] == count, summed[1][0] == count + 1
        if not count:
            return body.add("MatMul", [x, y], shape, transpose_a=turned[0], transpose_b=turned[1])
        return body.add("BatchMatMulV2", [x, y], shape, adj_x=turned[0], adj_y=turned[1])
    if sum(ranks) > 26:
        return None
    letters = "abcdefghijklmnopqrstuvwxyz"
    left, right = list(letters[: ranks[0]]), list(letters[ranks[0] : sum(ranks)])
    for mine, its in ((batch[0], batch[1]), (summed[0], summed[1])):
        for a, b in zip(mine, its, strict=True):
            right[b] = left[a]
    gone = {left[axis] for axis in summed[0]}
    result = [left[axis] for axis in batch[0]] + [
        one for axis, one in enumerate(left) if axis not in batch[0] and one not in gone
    ]
    result += [one for one in right if one not in left]
    return body.add("Einsum", [[x, y]], shape, equation=f"{''.join(left)},{''.join(right)}->{''.join(result)}")


def _convolution(step: Step) -> Made:
    """A convolution over one or two axes, with the channels last; its operands are turned, and the result back."""
    from jaxlib.mlir.dialects import stablehlo

    x, kernel, *_ = step.args
    body, (dtype, shape) = step.body, step.type
    dims = stablehlo.ConvDimensionNumbers(step.op.attributes["dimension_numbers"])
    axes = list(dims.input_spatial_dimensions)
    count = len(axes)
    strides, spread, dilation = (
        step.numbers(key, [1] * count) for key in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    padding = step.numbers("padding", [0] * 2 * count)
    groups = step.number("feature_group_count", 1)
    turns = any(step.numbers("window_reversal")) or step.number("batch_group_count", 1) != 1
    if count not in (1, 2) or turns or len(step.args) > 2 or not _is_float(dtype):
        return None
    x, kernel = (one if one.dtype == dtype else body.each("Cast", one, DstT=dtype) for one in (x, kernel))
    x = _transposed(body, x, [dims.input_batch_dimension, *axes, dims.input_feature_dimension])
    kernel = _transposed(
        body,
        kernel,
        [*dims.kernel_spatial_dimensions, dims.kernel_input_feature_dimension, dims.kernel_output_feature_dimension],
    )
    turned = [dims.output_batch_dimension, *dims.output_spatial_dimensions, dims.output_feature_dimension]
    if count == 1:
        x = body.add("ExpandDims", [x, position(1)], (x.shape[0], 1, *x.shape[1:]))
        kernel = body.add("ExpandDims", [kernel, position(0)], (1, *kernel.shape))
        strides, spread, dilation, padding = [1, *strides], [1, *spread], [1, *dilation], [0, 0, *padding]
    low, high = padding[::2], padding[1::2]
    result: Shape = tuple(shape[axis] for axis in turned)
    result = result if count == 2 else (result[0], 1, *result[1:])
    if any(one != 1 for one in spread) or min(padding) < 0:
        wider = [
            None if size is None else (size - 1) * by + 1 + a + b
            for size, by, a, b in zip(x.shape[1:3], spread, low, high, strict=True)
        ]
        inside = [0, *(by - 1 for by in spread), 0]
        x = _padded(body, x, body.like(0, x), [0, *low, 0], [0, *high, 0], inside, (x.shape[0], *wider, x.shape[3]))
        low, high = [0, 0], [0, 0]
    made = _image_convolution(body, x, kernel, groups, result, (strides, dilation, low, high))
    if count == 1:
        made = body.add("Squeeze", [made], (made.shape[0], *made.shape[2:]), squeeze_dims=(1,))
    return _transposed(body, made, [turned.index(axis) for axis in range(count + 2)])


def _image_convolution(body: Body, x: Value, kernel: Value, groups: int, result: Shape, window: Sequence[Any]) -> Value:
    """A convolution of an image: by channel where each has a kernel of its own, which TensorFlow takes for equal strides only."""
    strides, dilation, low, high = window
    edges = (0, 0, *(edge for pair in zip(low, high, strict=True) for edge in pair), 0, 0)
    attrs: dict[str, Any] = {"strides": (1, *strides, 1), "dilations": (1, *dilation, 1), "data_format": "NHWC"}
    attrs |= {"padding": "EXPLICIT", "explicit_paddings": edges} if any(edges) else {"padding": "VALID"}
    channels = x.shape[3]
    if groups > 1 and groups == channels and kernel.shape[2] == 1 and strides[0] == strides[1]:
        size = (*kernel.shape[:2], channels, (kernel.shape[3] or 0) // groups)
        kernel = body.add("Reshape", [kernel, ints(*map(known, size))], size)
        return body.add("DepthwiseConv2dNative", [x, kernel], result, **attrs)
    return body.add("Conv2D", [x, kernel], result, **attrs)


REDUCED = {"add": "Sum", "multiply": "Prod", "maximum": "Max", "minimum": "Min", "and": "All", "or": "Any"}


def _kind(region: Any) -> str:
    """The operation that a region is, which takes its two arguments; "" for another one."""
    block = region.blocks[0]
    operations = list(block.operations)
    if len(operations) != 2 or len(block.arguments) != 2:
        return ""
    op, end = operations
    same = set(op.operands) == set(block.arguments) and list(end.operands) == list(op.results)
    return str(op.operation.name.removeprefix("stablehlo.")) if same else ""


def _identity(kind: str, start: Value) -> bool:
    """True if a start of a reduction changes nothing."""
    if start.array is None or start.array.size != 1:
        return False
    number, dtype = start.array.reshape(()), start.dtype
    if kind in ("maximum", "minimum") and dtype != "bool":
        info = None if _is_float(dtype) else np.iinfo(numpy_type(dtype))
        low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
        return bool(number == (low if kind == "maximum" else high))
    return bool(number == {"add": 0, "or": 0, "maximum": 0, "multiply": 1, "and": 1, "minimum": 1}.get(kind, np.nan))


def _reduce(step: Step) -> Made:
    """A reduction over axes; with two operands, the place of the largest or least of a row."""
    axes, body = step.numbers("dimensions"), step.body
    if len(step.args) == 4:
        return _arg_extreme(step, axes)
    kind = _kind(step.op.regions[0])
    if len(step.args) != 2 or kind not in REDUCED:
        return None
    x, start = step.args
    op = REDUCED[kind]
    if x.dtype == "bool":
        op = {"maximum": "Any", "add": "Any", "minimum": "All", "multiply": "All"}.get(kind, op)
    elif kind in ("and", "or"):
        return None
    made = body.add(op, [x, ints(*axes)], step.shape, keep_dims=False)
    if _identity(kind, start):
        return made
    return body.each(BINARY[kind][x.dtype == "bool"], made, start, shape=step.shape)


def _arg_extreme(step: Step, axes: Sequence[int]) -> Made:
    """The largest or least of an axis, and its first place; NaN comes before all else, as JAX has it."""
    body = step.body
    x, places, start, first = step.args
    block = step.op.regions[0].blocks[0]
    said = [one.operation.name.removeprefix("stablehlo.") for one in block.operations][:-1]
    ways = [way for one in block.operations if (way := word(one, "comparison_direction"))]
    owner = step.op.operands[1].owner
    counts = (
        getattr(owner, "name", "") in ("stablehlo.iota", "stablehlo.dynamic_iota")
        and int(owner.attributes["iota_dimension"].value) == axes[0]
    )
    wanted = ["compare", "compare", "or", "compare", "compare", "and", "or", "select", "select"]
    largest = ways[:1] == ["GT"]
    ends = _identity("maximum" if largest else "minimum", start) and first.array is not None and not first.array.any()
    if (
        len(axes) != 1
        or said != wanted
        or ways[1:] != ["NE", "EQ", "LT"]
        or ways[0] not in ("GT", "LT")
        or not counts
        or not ends
    ):
        return None
    if not _same_extreme(block):
        return None
    value = body.add("Max" if largest else "Min", [x, ints(*axes)], step.shape, keep_dims=False)
    at = position(axes[0])
    place = body.add("ArgMax" if largest else "ArgMin", [x, at], step.shape, output_type="int64")
    if _is_float(x.dtype):
        nan = body.each("IsNan", x)
        odd = body.add("ArgMax", [body.each("Cast", nan, DstT="float32"), at], step.shape, output_type="int64")
        place = body.each("SelectV2", body.add("Any", [nan, ints(*axes)], step.shape, keep_dims=False), odd, place)
    return [value, body.each("Cast", place, DstT=places.dtype) if places.dtype != "int64" else place]


def _same_extreme(block: Any) -> bool:
    """True if the operations of a region are wired as JAX wires those of `argmax` and `argmin`."""
    a, i, b, j = (block.arguments[n] for n in (0, 1, 2, 3))
    ops = list(block.operations)
    beyond, odd, either, level, before, tie, take, value, place, end = ops
    r = [one.results[0] for one in ops[:-1]]
    wired = [
        (beyond, [a, b]), (odd, [a, a]), (either, [r[0], r[1]]), (level, [a, b]), (before, [i, j]), (tie, [r[3], r[4]]),
        (take, [r[2], r[5]]), (value, [r[2], a, b]), (place, [r[6], i, j]), (end, [r[7], r[8]]),
    ]  # fmt: skip
    return all(list(one.operands) == operands for one, operands in wired)


def _cumulative(
    step: Step, kind: str, window: Sequence[int], strides: Sequence[int], padding: Sequence[int]
) -> Value | None:
    """A cumulative sum, whose windows are as long as the one axis that they are of; None where they are others."""
    x, rank = step.args[0], len(window)
    (moved, *more) = [axis for axis in range(rank) if window[axis] != 1] or [0]
    size, edges = x.shape[moved], tuple(padding[2 * moved : 2 * moved + 2])
    if more or kind != "add" or any(one != 1 for one in strides) or size is None or window[moved] != size:
        return None
    if edges not in ((size - 1, 0), (0, size - 1)) or sum(padding) != sum(edges) or min(padding) < 0:
        return None
    # A reversed sum would be (0, size - 1); both are the same for one element.
    return step.body.add("Cumsum", [x, position(moved)], step.shape, reverse=bool(edges[1]) and size > 1)


def _reduce_window(step: Step) -> Made:
    """Pooling over windows of an image, and cumulative sums, which JAX writes as windows as long as the axis."""
    if len(step.args) != 2:
        return None
    (x, start), body, shape = step.args, step.body, step.shape
    kind, rank = _kind(step.op.regions[0]), len(x.shape)
    ones = [1] * rank
    window, strides = step.numbers("window_dimensions"), step.numbers("window_strides", ones)
    dilated = step.numbers("base_dilations", ones) != ones or step.numbers("window_dilations", ones) != ones
    padding = step.numbers("padding", [0] * 2 * rank)
    low, high = padding[::2], padding[1::2]
    if dilated or not _identity(kind, start):
        return None
    made = _cumulative(step, kind, window, strides, padding)
    if made is not None:
        return made
    outside = [axis for axis in (0, rank - 1) if window[axis] != 1 or strides[axis] != 1 or low[axis] or high[axis]]
    if kind not in ("maximum", "add") or rank not in (3, 4) or outside or not _is_float(x.dtype) or min(padding) < 0:
        return None
    fill, padded = body.like(0, x) if start.shape else start, (x.shape[0], *[None] * (rank - 2), x.shape[-1])
    x = _padded(body, x, fill, low, high, [0] * rank, padded)
    return _pooled(body, x, kind, window, strides, shape)


def _pooled(body: Body, x: Value, kind: str, window: list[int], strides: list[int], shape: Shape) -> Value:
    """The largest or the sum of each window of an image, or of a row as an image of one row."""
    rank = len(shape)
    if rank == 3:
        x = body.add("ExpandDims", [x, position(1)], (x.shape[0], 1, *x.shape[1:]))
        window, strides = [1, 1, *window[1:]], [1, 1, *strides[1:]]
    result = shape if rank == 4 else (shape[0], 1, *shape[1:])
    attrs: dict[str, Any] = {"strides": tuple(strides), "padding": "VALID", "data_format": "NHWC"}
    made = body.add("MaxPool" if kind == "maximum" else "AvgPool", [x], result, ksize=tuple(window), **attrs)
    if kind == "add":
        made = body.each("Mul", made, body.like(int(np.prod(window)), made))
    return made if rank == 4 else body.add("Squeeze", [made], shape, squeeze_dims=(1,))


def _gather(step: Step) -> Made:
    """Rows of a table, elements along an axis, or slices at positions along the first axes. Positions out of range are moved into it."""
    from jaxlib.mlir.dialects import stablehlo

    x, at = step.args[:2]
    body, shape = step.body, step.shape
    dims = stablehlo.GatherDimensionNumbers(step.op.attributes["dimension_numbers"])
    sizes = _slice_sizes(step)
    offset, gone, axes = list(dims.offset_dims), list(dims.collapsed_slice_dims), list(dims.start_index_map)
    batch = [list(dims.operand_batching_dims), list(dims.start_indices_batching_dims)]
    rank, inner = len(x.shape), len(at.shape)
    vector = dims.index_vector_dim
    kept = [axis for axis in range(rank) if axis not in gone and axis not in batch[0]]
    last = at.shape[-1] if vector == inner - 1 else 1
    if vector not in (inner - 1, inner) or last != len(axes) or not _takes_single(x, sizes, kept, gone, axes):
        return None
    ends = [(x.shape[axis] or 0) - 1 for axis in axes]
    if at.dtype not in ("int32", "int64") or min(ends) < 0:
        return None
    top = constant(np.array(ends if len(ends) > 1 else ends[0], numpy_type(at.dtype)))
    lead = list(range(len(batch[0])))
    places = body.whole(at)
    places = body.each("Minimum", body.each("Maximum", places, body.like(0, at)), replace(top, shape=()))
    trailing = list(range(len(shape) - len(offset), len(shape)))
    if len(axes) > 1:
        if axes != list(range(len(axes))) or batch[0] or vector == inner or offset != trailing:
            return None
        return body.add("GatherNd", [x, places], shape)
    if batch != [lead, lead]:
        return None
    if vector == inner - 1:
        places = body.add("Squeeze", [places], at.shape[:-1], squeeze_dims=(inner - 1,))
    made = body.add("GatherV2", [x, places, position(axes[0])], (None,) * len(shape), batch_dims=len(lead))
    turned = _gathered_axes(lead, kept, len(places.shape) - len(lead), axes[0], offset)
    return replace(_transposed(body, made, turned), shape=shape)


def _takes_single(
    x: Value, sizes: Sequence[int], kept: Sequence[int], gone: Sequence[int], axes: Sequence[int]
) -> bool:
    """True if a gather takes single positions of the axes that it indexes, and all of those that it keeps."""
    full = all(sizes[axis] == x.shape[axis] or (x.shape[axis] is None and sizes[axis] < 0) for axis in kept)
    return bool(axes) and full and sorted(gone) == sorted(axes) and all(sizes[axis] == 1 for axis in axes)


def _slice_sizes(step: Step) -> list[int]:
    """Sizes of the slices of a gather, -1 for those that only the run knows."""
    if len(step.args) < 3:
        return step.numbers("slice_sizes")
    given = step.args[2].array
    return [-1] * len(step.args[0].shape) if given is None else [int(one) for one in given]


def _gathered_axes(lead: Sequence[int], kept: Sequence[int], count: int, axis: int, offset: Sequence[int]) -> list[int]:
    """Per axis of the gather's result that of GatherV2, which puts the axes of positions where the axis was; `offset`: of slices."""
    slices = [("slice", a) for a in kept]
    places = [("at", n) for n in range(count)]
    made = [*lead, *(one for one in slices if one[1] < axis), *places, *(one for one in slices if one[1] > axis)]
    next_slice, others = iter(slices), iter([*lead, *places])
    wanted = [next(next_slice) if number in offset else next(others) for number in range(len(made))]
    return [made.index(one) for one in wanted]


def _sort(step: Step) -> Made:
    """Sorting along an axis, rising, of what has no NaN and -0 behind: numbers that are integers."""
    dims = step.number("dimension", len(step.shape) - 1)
    kind = step.op.regions[0].blocks[0]
    ops = list(kind.operations)
    simple = (
        len(ops) == 2
        and list(ops[0].operands) == [kind.arguments[0], kind.arguments[1]]
        and list(ops[1].operands) == list(ops[0].results)
    )
    if not simple or len(step.args) > 2 or dims != len(step.shape) - 1 or _is_float(step.args[0].dtype):
        return None
    if word(ops[0], "comparison_direction") != "LT":
        return None
    if len(step.args) == 1:
        return step.body.add("XlaSort", [step.args[0]], step.shape)
    keys = step.body.add("XlaKeyValueSort", list(step.args), step.shape)
    return [keys, Value(step.args[1].dtype, step.args[1].shape, ((keys.source or (0, 0))[0], 1))]


def _custom_call(step: Step) -> Made:
    target = step.text("call_target_name")
    if target.startswith(PASSED):
        return list(step.args) if len(step.op.results) == len(step.args) else [] if not len(step.op.results) else None
    if target in CUSTOM and len(step.args) == 1:
        return step.body.each(CUSTOM[target], step.args[0])
    if target in ("mhlo.topk", "stablehlo.dynamic_top_k"):
        said = str(step.op.attributes["mhlo.attributes"]) if "mhlo.attributes" in step.op.attributes else ""
        found = re.search(r"\bk = (\d+)", said)
        count = int(found[1]) if found else step.shape[-1] if step.shape else None
        if count is not None and "largest = false" not in said and typed(step.op.results[1].type)[0] == "int32":
            return top_k(step, count)
    return None


READERS: Mapping[str, Reader] = {
    **dict.fromkeys(UNARY, _unary), **dict.fromkeys(BINARY, _binary), "not": _not, "divide": _divide, "remainder": _divide,
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), _shift), "compare": _compare, "select": _select,
    "clamp": _clamp, "convert": _convert, "constant": _constant, "broadcast_in_dim": _broadcast, "dynamic_broadcast_in_dim": _broadcast,
    "reshape": _reshape, "dynamic_reshape": _reshape, "get_dimension_size": _dimension_size, "iota": _iota, "dynamic_iota": _iota,
    "concatenate": _concatenate, "slice": _slice, "real_dynamic_slice": _real_slice, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "pad": _pad, "transpose": _transpose, "reverse": _reverse,
    "optimization_barrier": _passed,
    "dot_general": _dot, "convolution": _convolution, "reduce": _reduce, "reduce_window": _reduce_window, "gather": _gather,
    "dynamic_gather": _gather, "sort": _sort, "custom_call": _custom_call,

}  # fmt: skip
"""By operation. A reader that gives None leaves the operation as it is."""
