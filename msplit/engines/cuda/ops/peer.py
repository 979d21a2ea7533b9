"""Copies from one GPU to another, which only `distributed.split` puts in."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from msplit.engines.cuda.device.pools import check, runtime
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node


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
