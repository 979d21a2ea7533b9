"""One memory for all graphs that are only timed: they never run at once, nobody reads what they make, and mapping memory takes long."""

from __future__ import annotations

import functools
from typing import Any

import torch


def pool() -> Any:
    """The pool to capture such graphs in."""
    return _anchored()[0]


@functools.cache
def _anchored() -> tuple[Any, torch.cuda.CUDAGraph, torch.Tensor]:
    """A pool with a graph that stays: PyTorch refuses a pool that no graph uses any more as long as anything lies in it."""
    handle, graph, stream = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.zeros(1, device="cuda")
        stream.synchronize()
        graph.capture_begin(pool=handle, capture_error_mode="relaxed")
        kept = torch.ones(1, device="cuda")
        graph.capture_end()
    return handle, graph, kept
