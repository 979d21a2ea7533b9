"""Host ops that move values of any type, strings included, and the arithmetic of shapes around them.

Numbers could run through the engine's own lowerings, which are made for large tensors: a call of NumPy takes a tenth of their time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.table import HostNode, NotOurs, Run, check, check_size, host_op
from msplit.formats.tensors import numpy_dtype

Array = NDArray[Any]

_PLAIN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "float32", "float64")


def _plain(node: HostNode, *names: str) -> None:
    """Refuses types of which NumPy's functions do not give TensorFlow's values."""
    if not all(node.dtype(name) in _PLAIN for name in names):
        raise NotOurs


@host_op("Identity", "Snapshot", "StopGradient", "PreventGradient", native="")
def identity(node: HostNode) -> Run:
    """The value as it is."""
    return lambda x: x


@host_op("NoOp", native="")
def nothing(node: HostNode) -> Run:
    """Nothing: an order of other nodes."""
    return lambda: ()


@host_op("Assert", native="")
def assertion(node: HostNode) -> Run:
    """Refuses values for which a condition does not hold, and says what is with it."""

    def run(condition: Array, *data: Array) -> tuple[()]:
        check(condition.all(), f"assertion failed: {' '.join(str(x.reshape(-1)[:3].tolist()) for x in data)}")
        return ()

    return run


@host_op("Shape", native="out_type")
def shape(node: HostNode) -> Run:
    """The sizes of all axes."""
    dtype = np.dtype(node.dtype("out_type"))
    return lambda x: np.array(x.shape, dtype)


@host_op("Size", native="out_type")
def size(node: HostNode) -> Run:
    """The number of elements."""
    dtype = np.dtype(node.dtype("out_type"))
    return lambda x: np.array(x.size, dtype)


@host_op("Rank", native="")
def rank(node: HostNode) -> Run:
    """The number of axes."""
    return lambda x: np.array(x.ndim, np.int32)


@host_op("Reshape", native="")
def reshape(node: HostNode) -> Run:
    """Gives the elements another shape, of which one size may be -1."""
    return lambda x, shape: x.reshape(shape.tolist())


@host_op("ExpandDims", native="")
def expand_dims(node: HostNode) -> Run:
    """One more axis, of one element."""
    return lambda x, axis: np.expand_dims(x, int(axis.reshape(-1)[0]))


@host_op("Squeeze", native="squeeze_dims")
def squeeze(node: HostNode) -> Run:
    """The value without axes of one element."""
    axes = tuple(node.attrs.get("squeeze_dims", ())) or None
    return lambda x: np.squeeze(x, axes)


@host_op("GatherV2", native="")
def gather(node: HostNode) -> Run:
    """Slices by index along an axis."""
    if node.attrs.get("batch_dims", 0):
        raise NotOurs

    def run(params: Array, indices: Array, axis: Array) -> Array:
        along = int(axis)
        if indices.min(initial=0) < 0:
            raise ValueError(f"index {indices.min()} is not in [0, {params.shape[along]})")
        return np.asarray(params.take(indices, along), params.dtype)

    return run


@host_op("ConcatV2", native="")
def concat(node: HostNode) -> Run:
    """Values behind each other along an axis."""
    return lambda *inputs: np.concatenate(inputs[:-1], int(inputs[-1]))


@host_op("Pack", native="axis")
def pack(node: HostNode) -> Run:
    """Values side by side along a new axis."""
    axis, dtype = int(node.attrs["axis"]), numpy_dtype(node.dtype("T"))

    def run(*inputs: Array) -> Array:
        # Sizes, most of all, for which `stack` takes three times as long.
        return np.stack(inputs, axis) if inputs[0].ndim else np.array([x[()] for x in inputs], dtype)

    return run


@host_op("BroadcastTo", native="")
def broadcast_to(node: HostNode) -> Run:
    """The value again and again along axes of one element."""

    def run(x: Array, shape: Array) -> Array:
        check_size(*shape.tolist())
        return np.broadcast_to(x, shape.tolist())

    return run


@host_op("Tile", native="")
def tile(node: HostNode) -> Run:
    """The value again and again along each axis."""

    def run(x: Array, multiples: Array) -> Array:
        times = multiples.tolist()
        check(min(times, default=0) >= 0, "a multiple is negative")
        # NumPy does not see that a size wraps around, and writes past its memory.
        check_size(*(one for one in (*x.shape, *times) if one))
        return np.tile(x, times)

    return run


@host_op("Fill", native="")
def fill(node: HostNode) -> Run:
    """One value in every place."""

    def run(shape: Array, value: Array) -> Array:
        check_size(*shape.tolist())
        return np.full(shape.tolist(), value, value.dtype)

    return run


@host_op("Slice", native="")
def slice_(node: HostNode) -> Run:
    """A part of the value, from the first index on, of such sizes; -1 is all that is left."""

    def run(x: Array, begin: Array, sizes: Array) -> Array:
        where = []
        for start, size, count in zip(begin.tolist(), sizes.tolist(), x.shape, strict=True):
            stop = count if size == -1 else start + size
            check(0 <= start <= stop <= count, f"[{start}, {stop}) is not inside of {count}")
            where.append(slice(start, stop))
        return x[tuple(where)]

    return run


@host_op("StridedSlice", native="begin_mask end_mask shrink_axis_mask ellipsis_mask new_axis_mask")
def strided_slice(node: HostNode) -> Run:
    """A part of the value as Python's slices give it, with TensorFlow's masks."""
    masks = {name: int(node.attrs[f"{name}_mask"]) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}

    def indices(begin: Array, end: Array, strides: Array) -> tuple[Any, ...]:
        where: list[Any] = []
        for number, (start, stop, step) in enumerate(zip(begin.tolist(), end.tolist(), strides.tolist(), strict=True)):
            bit = 1 << number
            if masks["ellipsis"] & bit:
                where.append(Ellipsis)
            elif masks["new_axis"] & bit:
                where.append(None)
            elif masks["shrink_axis"] & bit:
                where.append(start)
            else:
                where.append(slice(None if masks["begin"] & bit else start, None if masks["end"] & bit else stop, step))
        return tuple(where)

    def run(x: Array, begin: Array, end: Array, strides: Array) -> Array:
        return np.asarray(x[indices(begin, end, strides)], x.dtype)

    given = [value for value in node.known[1:] if value is not None]
    if len(given) == 3:
        fixed = indices(*given)
        if len(fixed) == 1 and isinstance(fixed[0], int):  # an element of a shape
            return lambda x, *_: np.asarray(x[fixed[0]], x.dtype)
        return lambda x, *_: np.asarray(x[fixed], x.dtype)
    return run


@host_op("Select", "SelectV2", native="")
def select(node: HostNode) -> Run:
    """One value or the other, by a truth value."""
    whole_rows = node.op == "Select"

    def run(condition: Array, yes: Array, no: Array) -> Array:
        if whole_rows and condition.ndim == 1 and yes.ndim > 1:
            condition = condition.reshape(-1, *[1] * (yes.ndim - 1))
        return np.where(condition, yes, no)

    return run


@host_op("Cast", native="DstT")
def cast(node: HostNode) -> Run:
    """The value in another type."""
    _plain(node, "SrcT", "DstT")
    if node.dtype("SrcT").startswith("float") and not node.dtype("DstT").startswith("float"):
        raise NotOurs  # beyond the range of integers each processor has a value of its own
    dtype = np.dtype(node.dtype("DstT"))
    return lambda x: x.astype(dtype)


@host_op("Equal", "NotEqual", native="")
def equal(node: HostNode) -> Run:
    """Comparison of any values."""
    if node.dtype("T") != "string":
        _plain(node, "T")
    if not node.attrs.get("incompatible_shape_error", True):
        raise NotOurs
    compare: Callable[..., Any] = np.equal if node.op == "Equal" else np.not_equal
    if node.dtype("T") == "string":
        return lambda a, b: np.asarray(compare(a, b), np.bool_)
    return lambda a, b: np.asarray(compare(a, b))


# Of equal numbers the first, and NaN where one is.
_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "Less": np.less, "LessEqual": np.less_equal,
    "Greater": np.greater, "GreaterEqual": np.greater_equal,
    "Maximum": lambda a, b: np.where((b > a) | (b != b), b, a), "Minimum": lambda a, b: np.where((b < a) | (b != b), b, a),
}  # fmt: skip
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "RealDiv": np.true_divide,
    "DivNoNan": lambda a, b: np.where(b == 0, b.dtype.type(0), a / b),
}
_OF_WHOLE_NUMBERS: dict[str, Callable[..., Any]] = {"FloorDiv": np.floor_divide, "FloorMod": np.mod}


@host_op(*_BINARY, *_OF_FLOATS, *_OF_WHOLE_NUMBERS, native="")
def binary(node: HostNode) -> Run:
    """Arithmetic and comparison of numbers."""
    _plain(node, "T")
    of_type = _OF_FLOATS if node.dtype("T").startswith("float") else _OF_WHOLE_NUMBERS
    function, divides = (_BINARY | of_type)[node.op], node.op in _OF_WHOLE_NUMBERS  # KeyError: not of such numbers

    def run(a: Array, b: Array) -> Array:
        check(not divides or not a.size or b.all(), "division by zero")
        return np.asarray(function(a, b))

    return run


_UNARY = {"Neg": np.negative, "Square": np.square, "Sqrt": np.sqrt}


@host_op(*_UNARY, native="")
def unary(node: HostNode) -> Run:
    """Arithmetic of one number."""
    _plain(node, "T")
    function: Callable[..., Any] = _UNARY[node.op]
    return lambda x: np.asarray(function(x))


_LOGICAL = {"LogicalAnd": np.logical_and, "LogicalOr": np.logical_or, "LogicalNot": np.logical_not}


@host_op(*_LOGICAL, native="")
def logical(node: HostNode) -> Run:
    """Logic of truth values."""
    function: Callable[..., Any] = _LOGICAL[node.op]
    return lambda *values: np.asarray(function(*values))


_REDUCTIONS = {
    "Sum": np.add, "Prod": np.multiply, "All": np.logical_and, "Any": np.logical_or, "Max": np.maximum, "Min": np.minimum,
}  # fmt: skip


@host_op(*_REDUCTIONS, native="keep_dims")
def reduce(node: HostNode) -> Run:
    """Sum, product or logic along axes."""
    function: Callable[..., Any] = _REDUCTIONS[node.op].reduce
    keep = bool(node.attrs["keep_dims"])
    if "T" in node.attrs:
        _plain(node, "T")
    begin: dict[str, Any] = {}
    if _REDUCTIONS[node.op] in (np.maximum, np.minimum):
        dtype = np.dtype(node.dtype("T"))
        limits = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        begin["initial"] = limits[node.op == "Min"]

    def run(x: Array, axes: Array) -> Array:
        return np.asarray(function(x, tuple(axes.reshape(-1).tolist()), x.dtype, None, keep, **begin), x.dtype)

    return run


@host_op("ZerosLike", "OnesLike", native="")
def constant_like(node: HostNode) -> Run:
    """Zeros or ones in the shape of a value."""
    _plain(node, "T")
    return np.zeros_like if node.op == "ZerosLike" else np.ones_like


@host_op("OneHot", native="")
def one_hot(node: HostNode) -> Run:
    """A row for each index, with one value in its place and another in all others."""
    if node.attrs["axis"] != -1 or node.dtype("T") not in _PLAIN:
        raise NotOurs

    def run(indices: Array, depth: Array, on: Array, off: Array) -> Array:
        return np.where(indices[..., None] == np.arange(int(depth)), on, off)

    return run
