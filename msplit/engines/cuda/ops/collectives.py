"""Exchange between processes that train together: see `distributed.allreduce`, which puts these ops in front of updates.

Each op is one collective on one flat buffer, and hands a token to the next one: all processes have to say the same in the same order,
whatever the order is in which each has what it says.

Copies from one GPU to another, which only `distributed.split` puts in.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from msplit.engines.cuda.device.device import Device, check, runtime
from msplit.engines.cuda.device.ranks import ProcessGroup, Ranks
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_ALIGNED = 16
"""Bytes: every value begins at a multiple of it in a flat buffer, since kernels read 16 bytes at a time."""


@lowering("_AllReduce", own=True)
def all_reduce(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The mean over all ranks of each of `count` values, which lie side by side. Behind them comes the token of the op before, if any."""
    values = inputs[: node.attrs["count"]]
    step = _ALIGNED // values[0].element_size()
    sizes = [-(-max(value.numel(), 1) // step) * step for value in values]
    flat = values[0].new_empty(sum(sizes))
    parts = [
        part[: value.numel()].view(value.shape) for part, value in zip(torch.split(flat, sizes), values, strict=True)
    ]
    torch._foreach_copy_(parts, list(values))
    group = _group(flat)
    if group is not None:
        group.average(flat)
    return *parts, _token(flat)


@lowering("_AllGather", own=True)
def all_gather(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The rows of all ranks of each of `count` values, one rank's behind the other's. Behind the values comes the token of the op before.

    Those that `scaled` says are divided by the number of ranks: rows of a gradient of a mean over fewer rows.
    """
    ranks, values = node.attrs["ranks"], inputs[: node.attrs["count"]]
    raw = [value.contiguous().view(-1).view(torch.uint8) for value in values]
    sizes = [-(-max(one.numel(), 1) // _ALIGNED) * _ALIGNED for one in raw]
    own = raw[0].new_empty(sum(sizes))
    torch._foreach_copy_([part[: one.numel()] for part, one in zip(torch.split(own, sizes), raw, strict=True)], raw)
    group = _group(own)
    if group is None:
        every = own.repeat(ranks, 1)
    else:
        every = own.new_empty((ranks, own.numel()))
        group.gather(every, own)
    found = []
    for part, one, value, scaled in zip(torch.split(every, sizes, 1), raw, values, node.attrs["scaled"], strict=True):
        rows = part[:, : one.numel()].contiguous().view(-1).view(value.dtype)
        rows = rows.view(ranks * value.shape[0], *value.shape[1:])
        found.append(rows / ranks if scaled else rows)
    return *found, _token(own)


@lowering("_OwnSteps", own=True)
def own_steps(node: Node, steps: Tensor) -> Tensor:
    """A number of a step that no other rank has, so that each draws other random numbers for its rows."""
    group = _group(steps)
    return steps * node.attrs["ranks"] + (0 if group is None else group.rank)


def _group(tensor: Tensor) -> ProcessGroup | None:
    """The processes that take part; none where only shapes are wanted."""
    return None if tensor.is_meta else Device.of(tensor.device).owned(Ranks).group


def _token(like: Tensor) -> Tensor:
    """Says nothing but what comes behind what."""
    return like.new_empty(0, dtype=torch.uint8)


@lowering("_PeerCopy", own=True)
def peer_copy(node: Node, tensor: Tensor) -> Tensor:
    """The tensor on the GPU whose number is the attribute `device`, copied on the current stream, which is that GPU's.

    PyTorch's own copy runs on the current streams of both GPUs and makes each wait for the other; here the plan orders them. On the CPU,
    where devices are simulated, it is a copy.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    place = torch.device("cuda", int(node.get("device")))
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
    if tensor.numel():
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        copy = runtime().cudaMemcpyPeerAsync
        pointer, whole = ctypes.c_void_p, ctypes.c_int
        copy.argtypes = (pointer, whole, pointer, whole, ctypes.c_size_t, pointer)
        stream = torch.cuda.current_stream(place).cuda_stream
        size = span * tensor.element_size()
        check(copy(made.data_ptr(), place.index, tensor.data_ptr(), tensor.device.index, size, stream))
    return made
