"""Ops that make and change shapes, and helpers of lowerings.

Shapes as values, changes of shape that move nothing, new tensors, and ops that hand on their inputs.

What is `shape_only` depends on no values, so its result is made on the CPU, whatever the input's device: it is known before anything
runs.

Without an input on a device a new tensor is on the CPU: such a node is a constant, which the engine evaluates once.

Helpers of several lowerings: attributes, axes and sizes that arrive as NumPy arrays, values of a maximum. No lowerings here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering, table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.program import BUFFER, JOINED, PART, Part
from msplit.opset.traits import ops_with


def integers(array: np.ndarray) -> tuple[int, ...]:
    """The array's elements as Python integers, in order; a scalar gives one."""
    return tuple(map(int, np.asarray(array).reshape(-1).tolist()))


def integer(array: np.ndarray | int) -> int:
    """The only element of the array."""
    return int(np.asarray(array).reshape(()))


def own_attribute(node: Node, *names: str) -> Any:
    """The first of these attributes that the node has. A graph can name the engine's own ops, but not give them what they need.

    Raises:
        Unsupported: It has none of them.
    """
    found = next((node.attrs[name] for name in names if node.get(name) is not None), None)
    if found is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    return found


def axis_within(node: Node, axis: int, rank: int) -> int:
    """The axis in [0, rank), counted from the end if it is negative.

    Raises:
        Unsupported: There is no such axis.
    """
    if not -rank <= axis < rank:
        raise Unsupported(f"{node.name}: axis {axis} is outside of a tensor of rank {rank}")
    return axis % rank


def reduced_axes(node: Node, axes: np.ndarray, rank: int) -> tuple[int, ...]:
    """Axes of a reduction in [0, rank), in order.

    Raises:
        Unsupported: An axis does not exist or is named twice.
    """
    found = sorted(axis_within(node, axis, rank) for axis in integers(axes))
    if len(set(found)) != len(found):
        raise Unsupported(f"{node.name}: an axis is named twice in {integers(axes)}")
    return tuple(found)


def lies_nchw(tensor: Tensor) -> bool:
    """Returns whether a tensor of logical shape NHWC lies in memory as NCHW, and not as NHWC too."""
    return tensor.dim() == 4 and not tensor.is_contiguous() and tensor.permute(0, 3, 1, 2).is_contiguous()


def without_nan(values: Tensor, how: str) -> Tensor:
    """The values of a scattered maximum (`how` is ``"amax"``) or minimum, without NaN, which TensorFlow's kernels pass over."""
    if not values.is_floating_point():
        return values
    loses = -math.inf if how == "amax" else math.inf
    return torch.nan_to_num(values, nan=loses, posinf=math.inf, neginf=-math.inf)


@lowering("Shape", "VariableShape", shape_only=True)
def shape(node: Node, x: Tensor) -> Tensor:
    """The input's (for VariableShape: the variable's value's) shape as a vector of `out_type`, on the CPU."""
    return torch.tensor(list(x.shape), dtype=torch_dtype(node.get("out_type", "int32")), device="cpu")


@lowering("ShapeN", shape_only=True)
def shape_n(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Every input's shape as a vector of `out_type`, on the CPU."""
    return tuple(shape(node, x) for x in inputs)


@lowering("Size", "Rank", shape_only=True)
def size(node: Node, x: Tensor) -> Tensor:
    """Number of elements (axes) as a scalar of `out_type` (int32), on the CPU."""
    number = x.numel() if node.op == "Size" else x.dim()
    return torch.tensor(number, dtype=torch_dtype(node.get("out_type", "int32")), device="cpu")


@lowering("Reshape", static=(1,))
def reshape(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """The elements in the same order, in another shape; one size may be -1 for what is left."""
    sizes = integers(shape)
    count = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or (count != x.numel() if -1 not in sizes else count == 0 or x.numel() % count):
        raise Unsupported(f"{node.name}: {tuple(x.shape)} can not be reshaped to {sizes}")
    return x.reshape(sizes)


@lowering("ExpandDims", static=(1,))
def expand_dims(node: Node, x: Tensor, axis: np.ndarray) -> Tensor:
    """A view with an axis of size one put in."""
    return x.unsqueeze(axis_within(node, integer(axis), x.dim() + 1))


@lowering("Squeeze")
def squeeze(node: Node, x: Tensor) -> Tensor:
    """A view without the axes of size one, or without those of `squeeze_dims`."""
    axes = sorted({axis_within(node, axis, x.dim()) for axis in node.get("squeeze_dims", ())})
    if not axes:
        return x.squeeze()
    for axis in axes:
        if x.shape[axis] != 1:
            raise Unsupported(f"{node.name}: axis {axis} of shape {tuple(x.shape)} can not be squeezed away")
    return x.squeeze(axes)


@lowering("EnsureShape")
def ensure_shape(node: Node, x: Tensor) -> Tensor:
    """The input itself, if it has the shape of the attribute."""
    wanted = node.attrs["shape"]
    if wanted is not None and (
        len(wanted) != x.dim() or any(w not in (None, -1, s) for w, s in zip(wanted, x.shape, strict=True))
    ):
        raise Unsupported(f"{node.name}: the input has shape {tuple(x.shape)}, the graph asks for {wanted}")
    return x


@lowering("BroadcastTo", static=(1,))
def broadcast_to(node: Node, x: Tensor, shape: np.ndarray) -> Tensor:
    """A view in which axes of size one are repeated."""
    sizes = integers(shape)
    added = len(sizes) - x.dim()
    if added < 0 or any(old not in (1, new) for old, new in zip(x.shape, sizes[added:], strict=True)):
        raise Unsupported(f"{node.name}: shape {tuple(x.shape)} can not be broadcast to {sizes}")
    return x.expand(sizes)


@lowering("BroadcastArgs", static=(0, 1))
def broadcast_args(node: Node, first: np.ndarray, second: np.ndarray) -> Tensor:
    """The shape that two shapes broadcast to, on the CPU."""
    sizes = (integers(first), integers(second))
    try:
        result = np.broadcast_shapes(*sizes)
    except ValueError:
        raise Unsupported(f"{node.name}: shapes {sizes[0]} and {sizes[1]} do not broadcast") from None
    return torch.tensor(result, dtype=torch_dtype(first.dtype.name), device="cpu")


@lowering("InvertPermutation")
def invert_permutation(node: Node, x: Tensor) -> Tensor:
    """The permutation that undoes the input, a permutation of 0..n-1."""
    return torch.argsort(x).to(x.dtype)


@lowering("ConcatOffset", static=(0,))
def concat_offset(node: Node, axis: np.ndarray, *shapes: Tensor) -> tuple[Tensor, ...]:
    """For tensors of these shapes, where each one begins in their concatenation along the axis."""
    rank = shapes[0].shape[0]
    position = axis_within(node, integer(axis), rank)
    on_axis = torch.arange(rank, device=shapes[0].device) == position
    offsets = [torch.zeros_like(shapes[0])]
    for previous in shapes[:-1]:
        offsets.append(offsets[-1] + torch.where(on_axis, previous, 0))
    return tuple(offsets)


@lowering("UnravelIndex", static=(1,))
def unravel_index(node: Node, indices: Tensor, dims: np.ndarray) -> Tensor:
    """Positions in a flat tensor as one row of coordinates per axis of `dims`."""
    rows = []
    rest = indices
    for size in reversed(integers(dims)):
        rows.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    return torch.stack(rows[::-1])


@lowering("Const")
def const(node: Node) -> Tensor:
    """The array of the attribute `value`, on the CPU."""
    return to_torch(node.attrs["value"])


@lowering("Fill", static=(0,))
def fill(node: Node, dims: np.ndarray, value: Tensor) -> Tensor:
    """A scalar repeated in the given shape, as a view: nothing is written."""
    return value.expand(integers(dims))


@lowering("Empty", static=(0,))
def empty(node: Node, shape: np.ndarray) -> Tensor:
    """Zeros of the given shape, on the CPU. TensorFlow promises them only for `init`."""
    return torch.zeros(integers(shape), dtype=torch_dtype(node.attrs["dtype"]), device="cpu")


@lowering("Range", static=(0, 1, 2))
def range_(node: Node, start: np.ndarray, limit: np.ndarray, delta: np.ndarray) -> Tensor:
    """Numbers from `start` on, `delta` apart, up to `limit` and without it, on the CPU."""
    first, last, step = start.reshape(()), limit.reshape(()), delta.reshape(())
    if step == 0:
        raise Unsupported(f"{node.name}: a range with delta 0")
    dtype = first.dtype
    if dtype.kind in "iu":
        return to_torch(np.arange(int(first), int(last), int(step), dtype=dtype))
    # The count comes from the exact distance, the values from the dtype's own arithmetic.
    wide = np.float32 if dtype.itemsize < 4 else dtype
    count = max(int(np.ceil(np.abs((last.astype(wide) - first.astype(wide)) / step.astype(wide)))), 0)
    if (last < first) != (step < 0) or last == first:
        count = 0
    return to_torch((first.astype(wide) + np.arange(count, dtype=wide) * step.astype(wide)).astype(dtype))


@lowering("LinSpace", static=(2,))
def lin_space(node: Node, start: Tensor, stop: Tensor, num: np.ndarray) -> Tensor:
    """`num` numbers at equal distances from `start` to `stop`, both included."""
    count = integer(num)
    if count < 1:
        raise Unsupported(f"{node.name}: LinSpace of {count} numbers")
    if count == 1:
        return start.reshape(1)
    steps = torch.arange(count - 1, dtype=start.dtype, device=start.device)
    inner = start + (stop - start) / (count - 1) * steps
    return torch.cat([inner, stop.reshape(1)])


@lowering("OneHot", static=(1,))
def one_hot(node: Node, indices: Tensor, depth: np.ndarray, on: Tensor, off: Tensor) -> Tensor:
    """`on` where a new axis of size `depth` has the index, `off` elsewhere; no `on` for an index outside of the axis."""
    axis = axis_within(node, node.get("axis", -1), indices.dim() + 1)
    size = integer(depth)
    places = torch.arange(size, device=indices.device)
    places = places.reshape([size if dim == axis else 1 for dim in range(indices.dim() + 1)])
    return torch.where(indices.unsqueeze(axis) == places, on, off)


@lowering(*sorted(ops_with("gives its input")))
def identity(node: Node, x: Tensor) -> Tensor:
    """The input itself. CheckNumerics stops TensorFlow at NaN or infinity; looking for them would stop the device, so they pass."""
    return x


@lowering("IdentityN", "XlaOptimizationBarrier")
def identity_n(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs themselves."""
    return inputs


_HANDS_ON = (identity, identity_n)


def hands_on(op: str, attrs: Mapping[str, Any]) -> bool:
    """True if an op gives its inputs back, so that it vanishes from a graph."""
    if op == "Cast" and attrs.get("SrcT") == attrs.get("DstT"):
        return True
    return op in table() and table()[op].function in _HANDS_ON


@lowering("NoOp", "ControlTrigger", "Assert")
def no_op(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Nothing: the node only orders others; or asserts a condition, which on the device can not stop the run."""
    return ()


@lowering("_Copy", own=True)
def copy(node: Node, tensor: Tensor) -> Tensor:
    """Copies values to other memory: a variable that is wanted after it is overwritten, or a part of a buffer."""
    room = node.room.get(0)
    return tensor.clone() if room is None else room.copy_(tensor)


@lowering(BUFFER, own=True)
def buffer(node: Node, after: Tensor) -> Tensor:
    """Memory that others write parts of; it is taken where `after` is made."""
    return torch.empty(node.attrs["shape"], dtype=torch_dtype(node.attrs["T"]), device=after.device)


@lowering(JOINED, own=True)
def joined(node: Node, buffer: Tensor, *parts: Tensor) -> Tensor:
    """View of the part of a buffer in which others lie, all written by then."""
    part: Part = own_attribute(node, PART)
    return part.of(buffer)
