"""Moving elements to other places: transposes, repeats, reversals, blocks of space."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integers


@lowering("Transpose", "ConjugateTranspose", static=(1,))
def transpose(node: Node, x: Tensor, perm: np.ndarray) -> Tensor:
    """A view with the axes in another order; Conjugate: of the complex conjugate."""
    return (torch.conj_physical(x) if node.op.startswith("Conjugate") else x).permute(integers(perm))


@lowering("Tile", static=(1,))
def tile(node: Node, x: Tensor, multiples: np.ndarray) -> Tensor:
    """The tensor repeated along every axis; a view where only axes of size one are repeated."""
    repeats = integers(multiples)
    if all(size == 1 or repeat == 1 for size, repeat in zip(x.shape, repeats, strict=True)):
        return x.expand([size * repeat for size, repeat in zip(x.shape, repeats, strict=True)])
    return x.repeat(repeats)


@lowering("Reverse", "ReverseV2", static=(1,))
def reverse(node: Node, x: Tensor, dims: np.ndarray) -> Tensor:
    """The order of the elements turned around along the axes whose flag is set; V2: along those that are named."""
    given = integers(dims)
    if node.op.endswith("V2"):
        axes = [axis_within(node, dim, x.dim()) for dim in given]
    else:
        axes = [dim for dim, flag in enumerate(given) if flag]
    return x.flip(axes) if axes else x


@lowering("ReverseSequence")
def reverse_sequence(node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    """For every entry of the batch axis, its first `lengths` elements along the sequence axis turned around."""
    sequence = axis_within(node, node.attrs["seq_dim"], x.dim())
    batch = axis_within(node, node.get("batch_dim", 0), x.dim())
    steps = torch.arange(x.shape[sequence], device=x.device)
    lengths = lengths.to(torch.int64).unsqueeze(1)
    source = torch.where(steps < lengths, lengths - 1 - steps, steps)
    # A length beyond the axis is the caller's error; clamped, it can not read outside of the tensor.
    source = source.clamp(0, max(x.shape[sequence] - 1, 0))
    if batch > sequence:
        source = source.t()
    source = source.reshape([size if dim in (batch, sequence) else 1 for dim, size in enumerate(x.shape)])
    return x.gather(sequence, source.expand(x.shape))


@lowering("Roll", static=(1, 2))
def roll(node: Node, x: Tensor, shift: np.ndarray, axis: np.ndarray) -> Tensor:
    """Elements moved along the axes by the shifts, those that leave at one end entering at the other."""
    axes = [axis_within(node, dim, x.dim()) for dim in integers(axis)]
    return torch.roll(x, integers(shift), axes) if axes else x


@lowering("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Tensor:
    """Every block of `block_size`² positions becomes one position with that many times the channels."""
    block = int(node.attrs["block_size"])
    if _channels_first(node):
        n, c, h, w = x.shape
        blocks = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
        return blocks.reshape(n, block * block * c, h // block, w // block)
    n, h, w, c = x.shape
    blocks = x.reshape(n, h // block, block, w // block, block, c).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, h // block, w // block, block * block * c)


@lowering("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Tensor:
    """Every position becomes a block of `block_size`² positions, with that much fewer channels."""
    block = int(node.attrs["block_size"])
    if _channels_first(node):
        n, c, h, w = x.shape
        depth = c // (block * block)
        blocks = x.reshape(n, block, block, depth, h, w).permute(0, 3, 4, 1, 5, 2)
        return blocks.reshape(n, depth, h * block, w * block)
    n, h, w, c = x.shape
    depth = c // (block * block)
    blocks = x.reshape(n, h, w, block, block, depth).permute(0, 1, 3, 2, 4, 5)
    return blocks.reshape(n, h * block, w * block, depth)


def _channels_first(node: Node) -> bool:
    data_format = node.get("data_format", "NHWC")
    if data_format not in ("NHWC", "NCHW"):
        raise Unsupported(f"{node.name}: {node.op} with data format {data_format}; NHWC and NCHW are possible")
    return bool(data_format == "NCHW")


@lowering("SpaceToBatch", static=(1,))
@lowering("SpaceToBatchND", static=(1, 2))
def space_to_batch(node: Node, x: Tensor, *given: np.ndarray) -> Tensor:
    """Blocks of the padded axes behind the first moved into the batch axis; square ones of height and width without ND."""
    block, pairs = _blocks(node, given)
    if any(low or high for low, high in pairs):
        # `pad` counts axes from the last one back.
        widths = [0, 0] * (x.dim() - 1 - len(pairs)) + [width for low, high in reversed(pairs) for width in (low, high)]
        x = torch.nn.functional.pad(x, widths)
    count = len(block)
    for axis, width in reversed([*enumerate(block, 1)]):  # each axis becomes two, the blocks and what lies in one
        x = x.unflatten(axis, (x.shape[axis] // width, width))
    inside, blocks = range(2, 2 * count + 1, 2), range(1, 2 * count, 2)
    return x.permute(*inside, 0, *blocks, *range(2 * count + 1, x.dim())).flatten(0, count)


@lowering("BatchToSpace", static=(1,))
@lowering("BatchToSpaceND", static=(1, 2))
def batch_to_space(node: Node, x: Tensor, *given: np.ndarray) -> Tensor:
    """Undoes SpaceToBatch: parts of the batch axis become blocks, of which the crops are cut off."""
    block, pairs = _blocks(node, given)
    count = len(block)
    x = x.unflatten(0, (*block, x.shape[0] // math.prod(block)))
    pairs_of_axes = [axis for place in range(count) for axis in (count + 1 + place, place)]
    x = x.permute(count, *pairs_of_axes, *range(2 * count + 1, x.dim()))
    for axis in range(1, count + 1):
        x = x.flatten(axis, axis + 1)
    for axis, (low, high) in enumerate(pairs, start=1):
        x = x.narrow(axis, low, x.shape[axis] - low - high)
    return x


def _blocks(node: Node, given: tuple[np.ndarray, ...]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """The sizes of a block, an input or an attribute, and the paddings or crops at both ends of its axes."""
    *shape, pairs = given
    block = integers(shape[0]) if shape else (int(node.attrs["block_size"]),) * 2
    return block, [(int(low), int(high)) for low, high in pairs.reshape(-1, 2)]
