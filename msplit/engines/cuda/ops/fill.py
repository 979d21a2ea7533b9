"""New tensors: constants, fills, ranges, one-hot vectors.

Without an input on a device the result is on the CPU: such a node is a constant, which the engine evaluates once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integer, integers


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
