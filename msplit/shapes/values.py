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
from msplit.shapes.registry import UNKNOWN, Node, Outputs, Shape, Value, axis_of, known, product, shape_from, total

LIMIT = 4096
"""Most elements of a tensor whose value is followed."""

ValueFunction = Callable[..., "Sequence[Value | None] | Value | None"]
"""From a node, its output shapes and the values of the first inputs, if it needs them, to the values of its outputs."""

TABLE: dict[str, ValueFunction] = {}
"""By op, from a node and its output shapes alone. A function is called if an input has a value, or the op is in `FROM_SHAPE`."""

FROM_SHAPE = ops_with("static")
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
    if not _fit(*operands):
        return None
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
    if node.op in _INTEGER_DIVISIONS and (second == 0).any():
        return None
    if node.op == "Pow" and first.dtype.kind == "i" and (second < 0).any():
        return None
    return _apply(BINARY[node.op], first, second)


value_function(*UNARY, needs=1)(lambda node, outputs, value: _apply(UNARY[node.op], value))
value_function("TensorListLength", "TensorArraySizeV3")(
    lambda node, outputs: None if node.length() is None else scalar_value(node.length())
)
value_function("ZerosLike", "OnesLike", needs=1)(
    lambda node, outputs, value: np.full(value.shape, int(node.op == "OnesLike"), dtype=value.dtype)
)
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
    if (second == 0).any():
        return None
    floating = "f" in (first.dtype.kind, second.dtype.kind)
    return _apply(np.true_divide if floating else _TRUNCATED, first, second)


@value_function("Cast", needs=1)
def cast(node: Node, outputs: Outputs, value: Value) -> Value | None:
    """Between integers and floats; to bool means "is not zero"."""
    target = str(node.attr("DstT", ""))
    if target.startswith(("float", "bfloat")):
        return _to_float(value)
    if target == "bool":
        return _apply(lambda a: a != 0, value) if value.dtype.kind == "i" else None
    if value.dtype.kind == "i":
        return value
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(value), np.nan_to_num(value).astype(np.int64), UNKNOWN)


@value_function(*ops_with("passes known values"), needs=1)
def passed(node: Node, outputs: Outputs, value: Value) -> Sequence[Value] | Value | None:
    """The first input. A loop's Enter only where the loop does not change it."""
    if node.op == "Enter" and not node.attr("is_constant", False):
        return None
    return (value, value) if node.op == "Switch" else value


@value_function("Size", "Rank")
def size_of(node: Node, outputs: Outputs) -> Value | None:
    """Number of elements, or of axes."""
    shape = node.shape(0)
    if shape is None:
        return None
    return scalar_value(len(shape) if node.op == "Rank" else product(shape))


@value_function("Pack")
def pack(node: Node, outputs: Outputs) -> Value | None:
    """Stacks; a part whose value is not known leaves its elements unknown."""
    return _joined(node.values, node.inputs, lambda parts: np.stack(parts, int(node.attr("axis", 0))))


@value_function("ConcatV2", "Concat")
def concat(node: Node, outputs: Outputs) -> Value | None:
    """Joins; a part whose value is not known leaves its elements unknown."""
    last = node.op == "ConcatV2"
    axis = node.scalar(-1 if last else 0)
    if axis is None:
        return None
    cut = slice(None, -1) if last else slice(1, None)
    return _joined(node.values[cut], node.inputs[cut], lambda parts: np.concatenate(parts, axis))


def _joined(values: list[Value | None], shapes: list[Shape], join: Callable[[list[Value]], Any]) -> Value | None:
    count = total(product(shape) if known(shape) else None for shape in shapes)
    kinds = {value.dtype.kind for value in values if value is not None}
    if count is None or count > LIMIT or len(kinds) != 1:
        return None
    filler: Any = np.nan if kinds == {"f"} else UNKNOWN
    parts: list[Value] = [
        np.full(shape, filler) if value is None and known(shape) else np.asarray(value)
        for value, shape in zip(values, shapes, strict=True)
    ]
    return np.asarray(join(parts))


@value_function("StridedSlice", needs=2)
def strided_slice(node: Node, outputs: Outputs, data: Value, begin: Value) -> Value | None:
    """NumPy's basic indexing, with masks."""
    _, index = strided_spec(node, data.shape)
    return None if index is None else data[tuple(index)]


@value_function("Slice", needs=3)
def cut(node: Node, outputs: Outputs, data: Value, begin: Value, size: Value) -> Value:
    """Begin and size, where -1 is the rest."""
    starts, lengths = node.whole(1), node.whole(2)
    return data[tuple(slice(b, None if n == -1 else b + n) for b, n in zip(starts, lengths, strict=True))]


@value_function("Gather", "GatherV2", needs=2)
def gather(node: Node, outputs: Outputs, data: Value, indices: Value) -> Value | None:
    """Entries along an axis."""
    axis = 0 if node.op == "Gather" else node.scalar(2)
    if axis is None or node.attr("batch_dims", 0) or missing(indices).any():
        return None
    if indices.size * data.size > LIMIT * data.shape[axis_of(axis, data.ndim)]:
        return None
    return np.asarray(np.take(data, indices, axis=axis))


@value_function("Fill", "BroadcastTo")
def filled(node: Node, outputs: Outputs) -> Value | None:
    """One value, or a smaller one, repeated."""
    value = node.value(1 if node.op == "Fill" else 0)
    if value is None or not known(outputs[0]) or (product(outputs[0]) or 0) > LIMIT:
        return None
    return np.broadcast_to(value, outputs[0]).copy()


@value_function("Range", needs=3)
def arange(node: Node, outputs: Outputs, start: Value, limit: Value, step: Value) -> Value | None:
    """Start, limit, step."""
    size = product(outputs[0] or (None,))
    if size is None or size > LIMIT:
        return None
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
    value, axis = node.value(1 if even else 0), node.scalar(0 if even else 2)
    if value is None or axis is None or not all(known(shape) for shape in outputs):
        return None
    place = axis_of(axis, value.ndim)
    sizes = [shape[place] for shape in outputs[: node.outputs] if known(shape)]
    parts: list[Value] = np.split(value, np.cumsum(sizes), place)
    return parts[: len(sizes)]


@value_function("Select", "SelectV2", needs=3)
def select(node: Node, outputs: Outputs, condition: Value, yes: Value, no: Value) -> Value | None:
    """One or the other; an unknown condition leaves its elements unknown."""
    if yes.dtype.kind != no.dtype.kind or not _fit(condition, yes, no):
        return None
    chosen: Value = np.where(condition != 0, yes, no)
    return np.where(missing(condition), np.nan if chosen.dtype.kind == "f" else UNKNOWN, chosen)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min, "All": np.all, "Any": np.any, "Mean": np.mean,
}  # fmt: skip


@value_function(*_REDUCTIONS, needs=2)
def reduction(node: Node, outputs: Outputs, value: Value, axes: Value) -> Value | None:
    """Over given axes. One unknown element makes the results that it enters unknown."""
    if node.op in _NEEDS_ELEMENTS and not value.size:
        return None
    if node.op == "Mean" and value.dtype.kind != "f":
        return None
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
    if missing(first).any() or missing(second).any():
        return None
    return np.array(np.broadcast_shapes(tuple(first.tolist()), tuple(second.tolist())), dtype=np.int64)


@value_function("BroadcastGradientArgs", needs=2)
def broadcast_gradient_args(node: Node, outputs: Outputs, first: Value, second: Value) -> Sequence[Value] | None:
    """The axes over which each operand was broadcast."""
    one, other = shape_from(node.ints(0)), shape_from(node.ints(1))
    if not known(one) or not known(other):
        return None
    return [np.array(axes, dtype=np.int64) for axes in broadcast_axes(one, other)]


@value_function("SparseReshape")
def sparse_reshape(node: Node, outputs: Outputs) -> Sequence[Value | None] | None:
    """The new dense shape, in which one -1 stands for what is left."""
    old, new = node.ints(1), node.ints(2)
    if new is None or None in new:
        return None
    if -1 in new:
        count, rest = product(old or (None,)), product(size for size in new if size != -1)
        new[new.index(-1)] = None if count is None or not rest else count // rest
    return [None, from_shape(tuple(new))]
