"""Ops that stand for one operation of XLA: what models write that come from JAX, or that Keras compiles."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.shape import integers


@lowering("XlaDynamicSlice", static=(2,))
def dynamic_slice(node: Node, x: Tensor, start: Tensor, sizes: np.ndarray) -> Tensor:
    """The elements from a place on that only the run knows. A place too far out is moved until the slice is inside."""
    wanted = integers(sizes)
    _check(node, x, start, wanted)
    for dim, size in enumerate(wanted):
        if size != x.shape[dim]:
            x = x.index_select(dim, _places(start, dim, size, x.shape[dim]))
    return x


@lowering("XlaDynamicUpdateSlice")
def dynamic_update_slice(node: Node, x: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """A copy of x with the update from a place on that only the run knows: how caches of decoders are written.

    A place too far out is moved until the update is inside.
    """
    sizes = tuple(update.shape)
    _check(node, x, start, sizes)
    partial = [dim for dim, size in enumerate(sizes) if size != x.shape[dim]]
    if not partial:
        return update
    result = x.clone(memory_format=torch.contiguous_format)
    if update.numel() == 0:
        return result
    if len(partial) == 1:
        return result.index_copy_(
            partial[0], _places(start, partial[0], sizes[partial[0]], x.shape[partial[0]]), update
        )
    mesh = []
    for dim, size in enumerate(sizes):
        places = _places(start, dim, size, x.shape[dim])
        mesh.append(places.reshape([-1 if other == dim else 1 for other in range(x.dim())]))
    return result.index_put_(tuple(mesh), update)


def _check(node: Node, x: Tensor, start: Tensor, sizes: tuple[int, ...]) -> None:
    fits = len(sizes) == x.dim() and all(0 <= size <= whole for size, whole in zip(sizes, x.shape, strict=True))
    if not fits or tuple(start.shape) != (x.dim(),):
        raise Unsupported(f"{node.name}: {sizes} elements from {start.numel()} indices on, of shape {tuple(x.shape)}")


def _places(start: Tensor, dim: int, size: int, whole: int) -> Tensor:
    """Places of `size` elements on an axis, as int64."""
    # A slice of the index, not an element of it: an element would be read by the host.
    first = start.narrow(0, dim, 1).to(torch.int64).clamp(0, whole - size)
    return first + torch.arange(size, device=start.device)


@lowering("XlaPad", static=(2, 3, 4))
def xla_pad(node: Node, x: Tensor, value: Tensor, low: np.ndarray, high: np.ndarray, interior: np.ndarray) -> Tensor:
    """A value put before, behind and between the elements along every axis; a negative number takes elements away."""
    edges = list(zip(integers(low), integers(high), integers(interior), strict=True))
    if len(edges) != x.dim() or any(between < 0 for _, _, between in edges):
        raise Unsupported(f"{node.name}: paddings {edges} do not fit a tensor of shape {tuple(x.shape)}")
    spread = [max(0, size + (size - 1) * between) for size, (_, _, between) in zip(x.shape, edges, strict=True)]
    shape = [size + before + behind for size, (before, behind, _) in zip(spread, edges, strict=True)]
    if min(shape, default=0) < 0:
        raise Unsupported(f"{node.name}: paddings {edges} take away more than shape {tuple(x.shape)} has")
    result = value.reshape(()).expand(shape).clone(memory_format=torch.contiguous_format)
    inside = result
    for dim, (before, _, between) in enumerate(edges):
        step = between + 1
        # Element k goes to before + k * step: the first and the last that are inside.
        first = max(0, -(before // step))
        last = min(x.shape[dim] - 1, (shape[dim] - 1 - before) // step)
        count = max(0, last - first + 1)
        x = x.narrow(dim, first if count else 0, count)
        place = before + first * step if count else 0
        inside = inside[
            (slice(None),) * dim + (slice(place, place + max(0, (count - 1) * step + 1) if count else place, step),)
        ]
    inside.copy_(x)
    return result


@lowering("XlaSort")
def xla_sort(node: Node, x: Tensor) -> Tensor:
    """The elements along the last axis, rising."""
    return torch.sort(x, dim=-1).values


@lowering("XlaKeyValueSort")
def xla_key_value_sort(node: Node, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The keys along the last axis, rising, and the values in the keys' order."""
    ordered, positions = torch.sort(keys, dim=-1, stable=True)
    return ordered, values.gather(-1, positions)
