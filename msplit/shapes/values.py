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
from msplit.shapes.array import broadcast_axes, slice_value
from msplit.shapes.registry import UNKNOWN, Node, Outputs, Shape, Value, axis_of, known, product, shape_from

LIMIT = 4096
"""Most elements of a tensor whose value is followed."""

ValueFunction = Callable[[Node, Outputs], "Sequence[Value | None] | Value | None"]
"""From a node whose input values are (partly) known and its output shapes to the values of its outputs."""

TABLE: dict[str, ValueFunction] = {}
"""Value functions by op. A function is called if at least one input has a value, or the op is in `FROM_SHAPE`."""

FROM_SHAPE = ops_with("static")
_INTEGER_DIVISIONS, _NEEDS_ELEMENTS = ops_with("integer division"), ops_with("needs elements")


def value_function(*ops: str) -> Callable[[ValueFunction], ValueFunction]:
    """Registers the function for the named ops."""

    def register(function: ValueFunction) -> ValueFunction:
        for op in ops:
            if op in TABLE:
                raise ValueError(f"{op} has a value function already")
            TABLE[op] = function
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
    """Which elements are unknown."""
    result: NDArray[np.bool_] = np.isnan(value) if value.dtype.kind == "f" else value == UNKNOWN
    return result


def _fit(*operands: Value) -> bool:
    """Whether what operands broadcast to is small enough to be followed."""
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


def _all(node: Node, count: int | None = None) -> list[Value] | None:
    values = node.values[:count]
    found = [value for value in values if value is not None]
    return found if len(found) == len(values) else None


_TRUNCATED: Callable[[Value, Value], Any] = lambda a, b: np.trunc(a / np.where(b == 0, 1, b))  # noqa: E731
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "Maximum": np.maximum, "Minimum": np.minimum,
    "RealDiv": np.true_divide, "FloorDiv": lambda a, b: np.floor_divide(a, np.where(b == 0, 1, b)), "TruncateDiv": _TRUNCATED,
    "FloorMod": lambda a, b: np.mod(a, np.where(b == 0, 1, b)), "Mod": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "TruncateMod": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)), "Less": np.less, "LessEqual": np.less_equal,
    "Greater": np.greater, "GreaterEqual": np.greater_equal, "Equal": np.equal, "NotEqual": np.not_equal,
    "LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "Pow": np.power,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "Neg": np.negative, "Abs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Rint": np.rint, "Round": np.rint, "Sqrt": np.sqrt,
    "Square": np.square, "LogicalNot": np.logical_not, "Sign": np.sign,
}  # fmt: skip


@value_function(*_BINARY)
def binary(node: Node, outputs: Outputs) -> Value | None:
    """Elementwise arithmetic."""
    values = _all(node, 2)
    if values is None:
        return None
    if node.op in _INTEGER_DIVISIONS and bool((values[1] == 0).any()):
        return None
    if node.op == "Pow" and values[0].dtype.kind == "i" and bool((values[1] < 0).any()):
        return None
    return _apply(_BINARY[node.op], *values)


@value_function("Div")
def old_division(node: Node, outputs: Outputs) -> Value | None:
    """Truncates on integers, divides on floats."""
    values = _all(node, 2)
    if values is None or bool((values[1] == 0).any()):
        return None
    floating = any(value.dtype.kind == "f" for value in values)
    return _apply(np.true_divide if floating else _TRUNCATED, *values)


@value_function(*_UNARY)
def unary(node: Node, outputs: Outputs) -> Value | None:
    """Elementwise functions of one operand."""
    value = node.value(0)
    return None if value is None else _apply(_UNARY[node.op], value)


@value_function("Cast")
def cast(node: Node, outputs: Outputs) -> Value | None:
    """Between integers and floats; to bool means "is not zero"."""
    value = node.value(0)
    if value is None:
        return None
    target = str(node.attr("DstT", ""))
    if target.startswith(("float", "bfloat")):
        return _to_float(value)
    if target == "bool":
        return _apply(lambda a: a != 0, value) if value.dtype.kind == "i" else None
    if value.dtype.kind == "i":
        return value
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(value), np.nan_to_num(value).astype(np.int64), UNKNOWN)


@value_function(
    "Identity", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape", "Enter", "Switch", "CheckNumerics"
)
def passed(node: Node, outputs: Outputs) -> Sequence[Value | None] | Value | None:
    """The first input. A loop's Enter only where the loop does not change it."""
    if node.op == "Enter" and not node.attr("is_constant", False):
        return None
    value = node.value(0)
    return (value, value) if node.op == "Switch" else value


@value_function("IdentityN")
def passed_each(node: Node, outputs: Outputs) -> Sequence[Value | None]:
    """Every input."""
    return node.values


@value_function("Shape", "ShapeN")
def shape_of(node: Node, outputs: Outputs) -> Sequence[Value | None]:
    """The shapes of the inputs."""
    return [from_shape(shape) for shape in node.inputs]


@value_function("Size")
def size_of(node: Node, outputs: Outputs) -> Value | None:
    """Number of elements."""
    shape = node.shape(0)
    return None if shape is None else scalar_value(product(shape))


@value_function("Rank")
def rank_of(node: Node, outputs: Outputs) -> Value | None:
    """Number of axes."""
    shape = node.shape(0)
    return None if shape is None else scalar_value(len(shape))


@value_function("VariableShape", "TensorListElementShape")
def handle_shape(node: Node, outputs: Outputs) -> Value | None:
    """Shape of what the handle refers to."""
    handle = node.handle(0)
    return None if handle is None else from_shape(handle.shape)


@value_function("TensorListLength", "TensorArraySizeV3")
def list_length(node: Node, outputs: Outputs) -> Value | None:
    """Length of a list."""
    handle = node.handle(0)
    return None if handle is None or handle.length is None else scalar_value(handle.length)


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
    count = 0
    for shape in shapes:
        size = product(shape) if shape is not None and known(shape) else None
        if size is None or (count := count + size) > LIMIT:
            return None
    kinds = {value.dtype.kind for value in values if value is not None}
    if len(kinds) != 1:
        return None
    filler: Any = np.nan if kinds == {"f"} else UNKNOWN
    parts: list[Value] = [
        value if value is not None else np.full([size or 0 for size in shape or ()], filler)
        for value, shape in zip(values, shapes, strict=True)
    ]
    result: Value = np.asarray(join(parts))
    return result


@value_function("StridedSlice")
def strided_slice(node: Node, outputs: Outputs) -> Value | None:
    """NumPy's basic indexing, with masks."""
    return slice_value(node)


@value_function("Slice")
def cut(node: Node, outputs: Outputs) -> Value | None:
    """Begin and size."""
    data, begin, size = node.value(0), node.ints(1), node.ints(2)
    if data is None or begin is None or size is None or None in begin or None in size:
        return None
    where = [
        slice(b, None if s == -1 else b + s)
        for b, s in zip(begin, size, strict=True)
        if b is not None and s is not None
    ]
    return data[tuple(where)]


@value_function("Gather", "GatherV2")
def gather(node: Node, outputs: Outputs) -> Value | None:
    """Entries along an axis."""
    data, indices = node.value(0), node.value(1)
    axis = 0 if node.op == "Gather" else node.scalar(2)
    if data is None or indices is None or axis is None or node.attr("batch_dims", 0) or bool(missing(indices).any()):
        return None
    if indices.size * data.size > LIMIT * data.shape[axis_of(axis, data.ndim)]:
        return None
    result: Value = np.take(data, indices, axis=axis)
    return result


@value_function("Reshape", "ExpandDims", "Squeeze")
def reshape(node: Node, outputs: Outputs) -> Value | None:
    """The same elements in the output's shape."""
    data = node.value(0)
    return data.reshape(outputs[0]) if data is not None and known(outputs[0]) else None  # type: ignore[arg-type]


@value_function("Fill", "BroadcastTo")
def filled(node: Node, outputs: Outputs) -> Value | None:
    """One value, or a smaller one, repeated."""
    value = node.value(1 if node.op == "Fill" else 0)
    if value is None or not known(outputs[0]) or (product(outputs[0] or ()) or 0) > LIMIT:
        return None
    return np.broadcast_to(value, outputs[0]).copy()  # type: ignore[arg-type]


@value_function("ZerosLike", "OnesLike")
def constant_like(node: Node, outputs: Outputs) -> Value | None:
    """Zeros or ones."""
    value = node.value(0)
    return None if value is None else np.full(value.shape, int(node.op == "OnesLike"), dtype=value.dtype)


@value_function("Range")
def arange(node: Node, outputs: Outputs) -> Value | None:
    """Start, limit, step."""
    values = _all(node, 3)
    size = product(outputs[0] or (None,))
    if values is None or size is None or size > LIMIT:
        return None
    start, _, step = (value.reshape(-1)[0] for value in values)
    return np.asarray(start + np.arange(size) * step)


@value_function("Tile")
def tile(node: Node, outputs: Outputs) -> Value | None:
    """Repeats along every axis."""
    value, times = node.value(0), node.ints(1)
    if value is None or times is None or None in times:
        return None
    repeats = [time for time in times if time is not None]
    return np.tile(value, repeats) if value.size * math.prod(repeats) <= LIMIT else None


@value_function("Transpose")
def transpose(node: Node, outputs: Outputs) -> Value | None:
    """Permutes axes."""
    value, order = node.value(0), node.ints(1)
    if value is None or order is None or None in order:
        return None
    return value.transpose([axis for axis in order if axis is not None])


@value_function("Unpack")
def unpack(node: Node, outputs: Outputs) -> Sequence[Value | None] | None:
    """Takes an axis apart."""
    value = node.value(0)
    if value is None:
        return None
    moved = np.moveaxis(value, int(node.attr("axis", 0)), 0)
    return [moved[index] for index in range(min(len(moved), node.outputs))]


@value_function("Split", "SplitV")
def split(node: Node, outputs: Outputs) -> Sequence[Value | None] | None:
    """Cuts along an axis."""
    even = node.op == "Split"
    value, axis = node.value(1 if even else 0), node.scalar(0 if even else 2)
    if value is None or axis is None or not all(known(shape) for shape in outputs):
        return None
    place = axis_of(axis, value.ndim)
    sizes = [shape[place] or 0 for shape in outputs[: node.outputs] if shape is not None]
    parts: list[Value] = np.split(value, np.cumsum(sizes), place)
    return parts[: len(sizes)]


@value_function("Select", "SelectV2")
def select(node: Node, outputs: Outputs) -> Value | None:
    """One or the other; an unknown condition leaves its elements unknown."""
    values = _all(node, 3)
    if values is None or values[1].dtype.kind != values[2].dtype.kind:
        return None
    if not _fit(*values):
        return None
    chosen: Value = np.where(values[0] != 0, values[1], values[2])
    return np.where(missing(values[0]), np.nan if chosen.dtype.kind == "f" else UNKNOWN, chosen)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "Prod": np.prod, "Sum": np.sum, "Max": np.max, "Min": np.min, "All": np.all, "Any": np.any, "Mean": np.mean,
}  # fmt: skip


@value_function(*_REDUCTIONS)
def reduction(node: Node, outputs: Outputs) -> Value | None:
    """Over given axes. One unknown element makes the results that it enters unknown."""
    value, axes = node.value(0), node.ints(1)
    if value is None or axes is None or None in axes or (node.op in _NEEDS_ELEMENTS and not value.size):
        return None
    if node.op == "Mean" and value.dtype.kind != "f":
        return None
    places = tuple(axis_of(axis, value.ndim) for axis in axes if axis is not None)
    keep = bool(node.attr("keep_dims", False))
    result = np.asarray(_REDUCTIONS[node.op](value, axis=places, keepdims=keep))
    if value.dtype.kind == "f":
        return result
    hidden = np.any(missing(value), axis=places, keepdims=keep)
    return np.where(hidden, UNKNOWN, result.astype(np.int64))


@value_function("BroadcastArgs")
def broadcast_args(node: Node, outputs: Outputs) -> Value | None:
    """The shape that two shapes broadcast to."""
    values = _all(node, 2)
    if values is None or any(bool(missing(value).any()) for value in values):
        return None
    return np.array(np.broadcast_shapes(*(tuple(value.tolist()) for value in values)), dtype=np.int64)


@value_function("BroadcastGradientArgs")
def broadcast_gradient_args(node: Node, outputs: Outputs) -> Sequence[Value | None] | None:
    """The axes over which each operand was broadcast."""
    first, second = shape_from(node.ints(0)), shape_from(node.ints(1))
    if first is None or second is None or None in first or None in second:
        return None
    return [np.array(axes, dtype=np.int64) for axes in broadcast_axes(first, second)]


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


@value_function("InvertPermutation")
def invert(node: Node, outputs: Outputs) -> Value | None:
    """The permutation that undoes another."""
    value = node.value(0)
    return None if value is None or bool(missing(value).any()) else np.argsort(value)
