"""Static values of small tensors: the shape arithmetic of exported graphs (Shape, StridedSlice, Pack, Prod, ConcatV2, …).

A value is an int64 or float64 array in which single elements may be unknown, so that `[batch, 7 * 7 * 64]` tells what it can. Only
tensors of up to `LIMIT` elements are followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.opset.traits import ops_with
from msplit.shapes.array import broadcast_axes, strided_spec
from msplit.shapes.registry import (
    UNKNOWN,
    Node,
    Outputs,
    Shape,
    Value,
    axis_of,
    known,
    product,
    require,
    shape_from,
    sure,
    total,
)

LIMIT = 4096
"""Most elements of a tensor whose value is followed."""

ValueFunction = Callable[..., "Sequence[Value | None] | Value | None"]
"""From a node, its output shapes and the values of the first inputs, if it needs them, to the values of its outputs."""

TABLE: dict[str, ValueFunction] = {}
"""By op, from a node and its output shapes alone. A function is called if an input has a value, or the op is in `FROM_SHAPE`."""

FILLED = ops_with("filled")
FROM_SHAPE = ops_with("static") | FILLED
_INTEGER_DIVISIONS, _NEEDS_ELEMENTS = ops_with("integer division"), ops_with("needs elements")


def value_function(*ops: str, needs: int = 0) -> Callable[[ValueFunction], ValueFunction]:
    """Registers the function for the named ops. It gets the values of the first `needs` inputs, and is called if all of them are known."""

    def register(function: ValueFunction) -> ValueFunction:
        def called(node: Node, outputs: Outputs) -> Sequence[Value | None] | Value | None:
            values = node.values[:needs]
            for value in values:
                if value is None:
                    return None
            return function(node, outputs, *values)

        for op in ops:
            if op in TABLE:
                raise ValueError(f"{op} has a value function already")
            TABLE[op] = called if needs else function
        return function

    return register


def as_value(array: NDArray[Any]) -> Value | None:
    """An array as a value; None for one that is too large or not made of real numbers."""
    if array.size > LIMIT or array.dtype.kind not in "biuf":
        return None
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def from_shape(shape: Shape) -> Value | None:
    """A shape as a vector of sizes."""
    if shape is None:
        return None
    return np.array([UNKNOWN if size is None else size for size in shape], dtype=np.int64)


def scalar_value(size: int | None) -> Value:
    """A size as a scalar."""
    return np.array(UNKNOWN if size is None else size, dtype=np.int64)


def missing(value: Value) -> NDArray[np.bool_]:
    """Mask of the elements that are unknown."""
    result: NDArray[np.bool_] = np.isnan(value) if value.dtype.kind == "f" else value == UNKNOWN
    return result


def _fit(*operands: Value) -> bool:
    """True if what operands broadcast to is small enough to be followed."""
    if math.prod(operand.size for operand in operands) <= LIMIT:
        return True
    return math.prod(np.broadcast_shapes(*(operand.shape for operand in operands))) <= LIMIT


def _apply(function: Callable[..., Any], *operands: Value) -> Value | None:
    """Calls a ufunc; an element is unknown where one of its operands is, or where the result is not a number."""
    require(_fit(*operands))
    floating = any(operand.dtype.kind == "f" for operand in operands)
    if floating:
        operands = tuple(_to_float(operand) for operand in operands)
    with np.errstate(all="ignore"):
        result = np.asarray(function(*operands))
    hidden: Any = False
    for operand in operands:
        hidden = hidden | missing(operand)
    if result.dtype.kind == "f" and floating:
        return np.where(hidden, np.nan, result)
    if result.dtype.kind == "f":
        hidden = hidden | ~np.isfinite(result)  # the root of -1
    with np.errstate(all="ignore"):
        return np.where(hidden, UNKNOWN, result.astype(np.int64))


def _to_float(value: Value) -> Value:
    return value if value.dtype.kind == "f" else np.where(missing(value), np.nan, value.astype(np.float64))


_TRUNCATED: Callable[[Value, Value], Any] = lambda a, b: np.trunc(a / np.where(b == 0, 1, b))  # noqa: E731
BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "Maximum": np.maximum, "Minimum": np.minimum,
    "RealDiv": np.true_divide, "FloorDiv": lambda a, b: np.floor_divide(a, np.where(b == 0, 1, b)), "TruncateDiv": _TRUNCATED,
    "FloorMod": lambda a, b: np.mod(a, np.where(b == 0, 1, b)), "Mod": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "TruncateMod": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)), "Less": np.less, "LessEqual": np.less_equal,
    "Greater": np.greater, "GreaterEqual": np.greater_equal, "Equal": np.equal, "NotEqual": np.not_equal,
    "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "Pow": np.power,
}  # fmt: skip
UNARY: dict[str, Callable[..., Any]] = {
    "Neg": np.negative, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Rint": np.rint, "Round": np.rint, "Sqrt": np.sqrt,
    "Square": np.square, "LogicalNot": np.logical_not, "Sign": np.sign,
}  # fmt: skip


@value_function(*BINARY, needs=2)
def binary(node: Node, outputs: Outputs, first: Value, second: Value) -> Value | None:
    """Elementwise arithmetic."""
    require(node.op not in _INTEGER_DIVISIONS or (second != 0).all())
    require(node.op != "Pow" or first.dtype.kind != "i" or not (second < 0).any())
    return _apply(BINARY[node.op], first, second)


value_function(*UNARY, needs=1)(lambda node, outputs, value: _apply(UNARY[node.op], value))
value_function("TensorListLength", "TensorArraySizeV3")(lambda node, outputs: scalar_value(sure(node.length())))


@value_function(*FILLED)
def ones_like(node: Node, outputs: Outputs) -> Value:
    """Ones or zeros in the shape of a value that need not be known."""
    shape, kind = [sure(size) for size in sure(outputs[0])], str(node.attr("T"))
    require(math.prod(shape) <= LIMIT and kind.startswith(("float", "bfloat", "int", "uint", "bool")))
    return np.full(shape, node.op == "OnesLike", np.float64 if "float" in kind else np.int64)


@value_function("MatrixBandPart", needs=3)
def band_part(node: Node, outputs: Outputs, value: Value, below: Value, above: Value) -> Value:
    """Diagonals of matrices around the main one; all on a side of which a negative number is asked for."""
    require(not (missing(below).any() or missing(above).any()))
    rows, columns = np.indices(value.shape[-2:])
    kept = ((below < 0) | (rows - columns <= below)) & ((above < 0) | (columns - rows <= above))
    return np.where(kept, value, np.zeros_like(value))


value_function("Reshape", "ExpandDims", "Squeeze", needs=1)(
    lambda node, outputs, value: value.reshape(outputs[0]) if known(outputs[0]) else None
)
value_function("Transpose", needs=2)(lambda node, outputs, value, order: value.transpose(node.whole(1)))
value_function("InvertPermutation", needs=1)(
    lambda node, outputs, value: None if missing(value).any() else np.argsort(value)
)
value_function("IdentityN")(lambda node, outputs: node.values)
value_function("Shape", "ShapeN")(lambda node, outputs: [from_shape(shape) for shape in node.inputs])
value_function("VariableShape", "TensorListElementShape")(lambda node, outputs: from_shape(node.element()))


@value_function("Div", needs=2)
def old_division(node: Node, outputs: Outputs, first: Value, second: Value) -> Value | None:
    """Truncates on integers, divides on floats."""
    require((second != 0).all())
    floating = "f" in (first.dtype.kind, second.dtype.kind)
    return _apply(np.true_divide if floating else _TRUNCATED, first, second)


@value_function("Cast", needs=1)
def cast(node: Node, outputs: Outputs, value: Value) -> Value | None:
    """Between integers and floats; to bool means "is not zero"."""
    target = str(node.attr("DstT", ""))
    if target.startswith(("float", "bfloat")):
        return _to_float(value)
    if target == "bool":
        # What is not whole may be 0 in the float's own type.
        require(value.dtype.kind == "i" or (np.rint(value) == value).all())
        return _apply(lambda a: a != 0, value)
    if value.dtype.kind == "i":
        return value
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(value), np.nan_to_num(value).astype(np.int64), UNKNOWN)


@value_function(*ops_with("passes known values"), needs=1)
def passed(node: Node, outputs: Outputs, value: Value) -> Sequence[Value] | Value | None:
    """The first input. A loop's Enter only where the loop does not change it."""
    require(node.op != "Enter" or node.attr("is_constant", False))
    return (value, value) if node.op == "Switch" else value


@value_function("Size", "Rank")
def size_of(node: Node, outputs: Outputs) -> Value | None:
    """Number of elements, or of axes."""
    shape = node.ranked(0)
    return scalar_value(len(shape) if node.op == "Rank" else product(shape))


@value_function("Pack")
def pack(node: Node, outputs: Outputs) -> Value | None:
    """Stacks; a part whose value is not known leaves its elements unknown."""
    return _joined(node.values, node.inputs, lambda parts: np.stack(parts, int(node.attr("axis", 0))))


@value_function("ConcatV2", "Concat")
def concat(node: Node, outputs: Outputs) -> Value | None:
    """Joins; a part whose value is not known leaves its elements unknown."""
    last = node.op == "ConcatV2"
    axis = sure(node.scalar(-1 if last else 0))
    cut = slice(None, -1) if last else slice(1, None)
    return _joined(node.values[cut], node.inputs[cut], lambda parts: np.concatenate(parts, axis))


def _joined(values: list[Value | None], shapes: list[Shape], join: Callable[[list[Value]], Any]) -> Value | None:
    count = total(product(shape) if known(shape) else None for shape in shapes)
    kinds = {value.dtype.kind for value in values if value is not None}
    require(sure(count) <= LIMIT and len(kinds) == 1)
    filler: Any = np.nan if kinds == {"f"} else UNKNOWN
    parts: list[Value] = [
        np.full(shape, filler) if value is None and known(shape) else np.asarray(value)
        for value, shape in zip(values, shapes, strict=True)
    ]
    return np.asarray(join(parts))


@value_function("StridedSlice", needs=2)
def strided_slice(node: Node, outputs: Outputs, data: Value, begin: Value) -> Value | None:
    """NumPy's basic indexing, with masks."""
    return data[tuple(sure(strided_spec(node, data.shape)[1]))]


@value_function("Slice", needs=3)
def cut(node: Node, outputs: Outputs, data: Value, begin: Value, size: Value) -> Value:
    """Begin and size, where -1 is the rest."""
    starts, lengths = node.whole(1), node.whole(2)
    return data[tuple(slice(b, None if n == -1 else b + n) for b, n in zip(starts, lengths, strict=True))]


@value_function("Gather", "GatherV2", needs=2)
def gather(node: Node, outputs: Outputs, data: Value, indices: Value) -> Value | None:
    """Entries along an axis."""
    axis = 0 if node.op == "Gather" else sure(node.scalar(2))
    require(not node.attr("batch_dims", 0) and not missing(indices).any())
    require(indices.size * data.size <= LIMIT * data.shape[axis_of(axis, data.ndim)])
    return np.asarray(np.take(data, indices, axis=axis))


@value_function("Fill", "BroadcastTo")
def filled(node: Node, outputs: Outputs) -> Value | None:
    """One value, or a smaller one, repeated."""
    value, shape = sure(node.value(1 if node.op == "Fill" else 0)), [sure(size) for size in sure(outputs[0])]
    require(math.prod(shape) <= LIMIT)
    return np.broadcast_to(value, shape).copy()


@value_function("Range", needs=3)
def arange(node: Node, outputs: Outputs, start: Value, limit: Value, step: Value) -> Value | None:
    """Start, limit, step."""
    size = sure(product(outputs[0] or (None,)))
    require(size <= LIMIT)
    return np.asarray(start.reshape(-1)[0] + np.arange(size) * step.reshape(-1)[0])


@value_function("Tile", needs=2)
def tile(node: Node, outputs: Outputs, value: Value, times: Value) -> Value | None:
    """Repeats along every axis."""
    repeats = node.whole(1)
    return np.tile(value, repeats) if value.size * math.prod(repeats) <= LIMIT else None


@value_function("Unpack", needs=1)
def unpack(node: Node, outputs: Outputs, value: Value) -> Sequence[Value]:
    """Takes an axis apart."""
    moved = np.moveaxis(value, int(node.attr("axis", 0)), 0)
    return [moved[index] for index in range(min(len(moved), node.outputs))]


@value_function("Split", "SplitV")
def split(node: Node, outputs: Outputs) -> Sequence[Value] | None:
    """Cuts along an axis."""
    even = node.op == "Split"
    value, axis = sure(node.value(1 if even else 0)), sure(node.scalar(0 if even else 2))
    require(all(known(shape) for shape in outputs))
    place = axis_of(axis, value.ndim)
    sizes = [shape[place] for shape in outputs[: node.outputs] if known(shape)]
    parts: list[Value] = np.split(value, np.cumsum(sizes), place)
    return parts[: len(sizes)]


@value_function("Select", "SelectV2", needs=3)
def select(node: Node, outputs: Outputs, condition: Value, yes: Value, no: Value) -> Value | None:
    """One or the other; an unknown condition leaves its elements unknown."""
    require(yes.dtype.kind == no.dtype.kind and _fit(condition, yes, no))
    chosen: Value = np.where(condition != 0, yes, no)
    return np.where(missing(condition), np.nan if chosen.dtype.kind == "f" else UNKNOWN, chosen)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min, "All": np.all, "Any": np.any, "Mean": np.mean,
}  # fmt: skip


@value_function(*_REDUCTIONS, needs=2)
def reduction(node: Node, outputs: Outputs, value: Value, axes: Value) -> Value | None:
    """Over given axes. One unknown element makes the results that it enters unknown."""
    require(value.size or node.op not in _NEEDS_ELEMENTS)
    require(node.op != "Mean" or value.dtype.kind == "f")
    places = tuple(axis_of(axis, value.ndim) for axis in node.whole(1))
    keep = bool(node.attr("keep_dims", False))
    result = np.asarray(_REDUCTIONS[node.op](value, axis=places, keepdims=keep))
    if value.dtype.kind == "f":
        return result
    hidden = np.any(missing(value), axis=places, keepdims=keep)
    return np.where(hidden, UNKNOWN, result.astype(np.int64))


@value_function("BroadcastArgs", needs=2)
def broadcast_args(node: Node, outputs: Outputs, first: Value, second: Value) -> Value | None:
    """The shape that two shapes broadcast to."""
    return np.array(np.broadcast_shapes(tuple(node.whole(0)), tuple(node.whole(1))), dtype=np.int64)


@value_function("BroadcastGradientArgs", needs=2)
def broadcast_gradient_args(node: Node, outputs: Outputs, first: Value, second: Value) -> Sequence[Value] | None:
    """The axes over which each operand was broadcast."""
    sides = [tuple(map(sure, sure(shape_from(node.ints(slot))))) for slot in (0, 1)]
    return [np.array(axes, dtype=np.int64) for axes in broadcast_axes(*sides)]


@value_function("SparseReshape")
def sparse_reshape(node: Node, outputs: Outputs) -> Sequence[Value | None] | None:
    """The new dense shape, in which one -1 stands for what is left."""
    old, new = node.ints(1), list[int | None](node.whole(2))
    if -1 in new:
        count, rest = product(old or (None,)), product(size for size in new if size != -1)
        new[new.index(-1)] = None if count is None or not rest else count // rest
    return [None, from_shape(tuple(new))]
