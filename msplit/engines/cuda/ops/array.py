"""Joining and taking apart tensors along an axis."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import axis_within, integer, integers, lies_nchw


@lowering("Concat", static=(0,))
def concat(node: Node, axis: np.ndarray, *inputs: Tensor) -> Tensor:
    """The inputs one after the other along an axis (the older form, which names the axis first)."""
    return _concatenated(node, inputs, integer(axis))


@lowering("ConcatV2", static=(-1,))
def concat_v2(node: Node, *inputs: Tensor | np.ndarray) -> Tensor:
    """The inputs one after the other along an axis, the last input."""
    return _concatenated(node, inputs[:-1], integer(inputs[-1]))


def _concatenated(node: Node, tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    dim = axis_within(node, axis, tensors[0].dim())
    if len(tensors) == 1:
        return tensors[0]
    if all(lies_nchw(tensor) for tensor in tensors):
        # In NCHW order of axes the inputs are contiguous: one copy each, and the result keeps the layout that the
        # convolutions behind it read without a conversion.
        nchw_dim = (0, 2, 3, 1)[dim]
        return torch.cat([tensor.permute(0, 3, 1, 2) for tensor in tensors], nchw_dim).permute(0, 2, 3, 1)
    return torch.cat(tensors, dim)


@lowering("Pack")
def pack(node: Node, *inputs: Tensor) -> Tensor:
    """The inputs, all of one shape, along a new axis."""
    dim = axis_within(node, node.get("axis", 0), inputs[0].dim() + 1)
    return inputs[0].unsqueeze(dim) if len(inputs) == 1 else torch.stack(inputs, dim)


@lowering("Unpack")
def unpack(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    """Views of every position along an axis, which they lack."""
    dim = axis_within(node, node.get("axis", 0), x.dim())
    if x.shape[dim] != node.attrs["num"]:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} has not {node.attrs['num']} parts")
    return tuple(x.unbind(dim))


@lowering("Split", static=(0,))
def split(node: Node, axis: np.ndarray, x: Tensor) -> tuple[Tensor, ...]:
    """Views of `num_split` equal parts along an axis."""
    dim = axis_within(node, integer(axis), x.dim())
    parts = int(node.attrs["num_split"])
    size, rest = divmod(x.shape[dim], parts)
    if rest:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} has not {parts} equal parts")
    return _parts(x, dim, (size,) * parts)


@lowering("SplitV", static=(1, 2))
def split_v(node: Node, x: Tensor, sizes: np.ndarray, axis: np.ndarray) -> tuple[Tensor, ...]:
    """Views of parts of the given sizes along an axis; one size may be -1 for what is left."""
    dim = axis_within(node, integer(axis), x.dim())
    wanted = integers(sizes)
    known = sum(size for size in wanted if size != -1)
    if -1 in wanted:
        wanted = tuple(x.shape[dim] - known if size == -1 else size for size in wanted)
    if sum(wanted) != x.shape[dim] or min(wanted) < 0:
        raise Unsupported(f"{node.name}: axis {dim} of shape {tuple(x.shape)} can not be split into {integers(sizes)}")
    return _parts(x, dim, wanted)


def _parts(x: Tensor, dim: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    parts, start = [], 0
    for size in sizes:
        parts.append(x.narrow(dim, start, size))
        start += size
    return tuple(parts)


@lowering("ParallelConcat")
def parallel_concat(node: Node, *inputs: Tensor) -> Tensor:
    """The inputs, each with a first axis of size one, one after the other along it."""
    return torch.cat(inputs, 0)
