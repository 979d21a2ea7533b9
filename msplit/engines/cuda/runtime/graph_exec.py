"""The captured graphs of a program, and how to replay one with as little as possible around it."""

from __future__ import annotations

import contextlib
import ctypes
from enum import Enum

import torch

from msplit.engines.cuda.device.pools import check, holding, runtime


class CapturedGraph(Enum):
    """Captured graphs of a program. They share memory, and never run at once."""

    STEP = "fetches the inputs that are not sent ahead, runs, and delivers the outputs"
    RUN = "runs on what is on the device, and leaves its results there"
    DELIVER = "delivers what `RUN` made"


class GraphExec:
    """A captured graph, ready to run on the caller's stream with as little as possible around it.

    `CUDAGraph.replay` and `Stream.synchronize` look up streams, devices and generators of random numbers at every call. Our graphs draw
    no random numbers of PyTorch's, so the two calls of CUDA's own are enough.
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
            self._launch_holding = holding().cudaGraphLaunch
            self._launch_holding.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            self._executable = handle
        self._current, self._stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def start_on(self, stream: torch.cuda.Stream) -> None:
        """Issues one run of the graph on a stream. It keeps the interpreter's lock: to let go of it for these few µs would cost a turn."""
        if self._current() != self._index:
            with torch.cuda.device(self._device):
                self.start_on(stream)
        elif self._executable is None:
            with torch.cuda.stream(stream):
                self._graph.replay()
        else:
            check(self._launch_holding(self._executable, stream.cuda_stream))

    def start(self) -> None:
        """Issues one run of the graph on the current stream."""
        if self._executable is None or self._current() != self._index:
            self._graph.replay()
        else:
            check(self._launch(self._executable, self._stream(self._index)))

    def start_holding(self) -> None:
        """Starts like `start`, but keeps the interpreter's lock, as `start_on` does."""
        if self._executable is None or self._current() != self._index:
            self._graph.replay()
        else:
            check(self._launch_holding(self._executable, self._stream(self._index)))

    def finish_on(self, stream: torch.cuda.Stream) -> None:
        """Waits for all that is on a stream; what failed there is raised here."""
        if self._executable is None:
            stream.synchronize()
        else:
            check(self._wait(stream.cuda_stream))

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
