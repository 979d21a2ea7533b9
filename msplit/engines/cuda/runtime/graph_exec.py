"""Replays a captured graph with as little as possible around it.

`CUDAGraph.replay` and `Stream.synchronize` look up streams, devices and generators of random numbers at every call. Our graphs draw no
random numbers of PyTorch's, so the two calls of CUDA's own are enough.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch

from msplit.engines.cuda.device.stream_pool import check, runtime


class GraphExec:
    """A captured graph, ready to run on the caller's stream.

    Args:
        graph: Captured.
        device: The device that it was captured on.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._executable: int | None = None
        with contextlib.suppress(AttributeError, RuntimeError):  # an older PyTorch keeps it to itself
            handle: int = graph.raw_cuda_graph_exec()
            library = runtime()
            self._launch, self._wait = library.cudaGraphLaunch, library.cudaStreamSynchronize
            self._launch.argtypes, self._wait.argtypes = (ctypes.c_void_p, ctypes.c_void_p), (ctypes.c_void_p,)
            self._executable = handle
        self._current, self._stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def start(self) -> None:
        """Issues one run of the graph on the current stream."""
        if self._executable is None or self._current() != self._index:
            self._graph.replay()
        else:
            check(self._launch(self._executable, self._stream(self._index)))

    def finish(self) -> None:
        """Waits for all that is on the current stream; what failed there is raised here."""
        if self._executable is None or self._current() != self._index:
            torch.cuda.current_stream(self._device).synchronize()
        else:
            check(self._wait(self._stream(self._index)))

    def reset(self) -> None:
        """Frees the graph. It can not run afterwards."""
        self._executable = None
        self._graph.reset()
