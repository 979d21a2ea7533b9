"""Replays of captured graphs, and the way of their outputs to the host.

The end of a captured step: its outputs come to pinned host memory by one kernel, which then tells the host that the step is over.

The captured graphs of a program, and how to replay one with as little as possible around it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import select
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import Device, check, holding, runtime
from msplit.engines.cuda.kernels.host_tables import HostTables
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.memory import OutputCopy
from msplit.engines.cuda.runtime.input_staging import Block
from msplit.engines.cuda.runtime.memcpy import CAN_POLL, Memcpy

_LOOKS = 16
"""Number of times that the host looks, 0.6 µs in all, before it lets go of the interpreter's lock."""
_PATIENCE = 1e-3
"""Seconds that it looks for before it asks CUDA to wait. The 2 to 4 µs that it gains are nothing to a longer step."""


GRAPHS = 2
"""Graphs of a program that deliver its outputs: the whole step, and one that does nothing else."""


class OutputStaging:
    """A step's outputs in pinned host memory.

    A kernel that writes there takes half as long as the copy engine, which is slow to start in a graph, and one kernel serves all
    outputs. What the host watches is a number that the kernel raises by one at the end of every step: on an H200 that is seen 2.3 µs
    before CUDA says that the graph is over. Without Triton, or launched without a graph, the copy engine brings the outputs.

    With `captured`, graphs deliver them.
    """

    def __init__(
        self, like: Mapping[str, torch.Tensor], device: Device, *, captured: bool, own_kernel: bool = True
    ) -> None:
        self._block, self._memcpy = Block(like, [[name] for name in like], device), device.owned(Memcpy)
        self._copies: dict[str, Callable[[], NDArray[Any]]] = {
            name: functools.partial(self._memcpy.copy_of, array) for name, array in self._block.arrays.items()
        }
        self._output_copy: Any = None
        self._sources: dict[int, list[torch.Tensor]] = {}  # of each captured kernel
        self._number = 0
        self._look_up = select.poll().poll  # lets go of the interpreter's lock and is back at once
        if captured and own_kernel and can_launch(device.place):
            arrays, base = self._block.arrays, self._block.host.data_ptr()
            targets = [base + self._block.starts[name] for name in arrays]
            sizes = [array.nbytes for array in arrays.values()]
            self._output_copy = OutputCopy(sizes, targets, device.place, tables=GRAPHS)
            self.to_host(like)  # compiles it

    @property
    def has_any(self) -> bool:
        """True if there is anything to deliver: CUDA refuses to run a graph of nothing."""
        return self._output_copy is not None or any(array.nbytes for array in self._block.arrays.values())

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Issues copies of tensors on the device, by name, to the host, on the current stream. Wait for them, then `settle`."""
        for name, place in self._block.arrays.items():
            target = self._block.host[self._block.starts[name] :][: place.nbytes]
            source = tensors[name].contiguous()
            target.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)

    def to_host(self, tensors: Mapping[str, torch.Tensor], graph: int = 0) -> None:
        """Issues the same in a capture, as the last kernel of one of `GRAPHS` graphs. `aim` before it is replayed."""
        if self._output_copy is None:
            self.copy(tensors)
            return
        sources = self._sources[graph] = [_aligned(tensors[name]) for name in self._block.arrays]
        self._output_copy.issue([source.data_ptr() for source in sources], graph)

    def aim(self) -> None:
        """Issues what tells captured kernels where the outputs are and go to. Wait for it, then `settle`."""
        for graph, sources in self._sources.items():
            self._output_copy.aim([source.data_ptr() for source in sources], graph)

    def expect(self) -> None:
        """Announces a replay. Call it before, so that a replay that was interrupted is never taken for the next."""
        self._number += 1

    def arrived(self) -> bool:
        """Waits a while for the replay that was announced; whether it is over. If not, let CUDA wait for it and call `settle`.

        The processor is never given away: beside processes that want it, `sched_yield` once in a while cost every step of 50 µs a slice
        or more of the scheduler's time, 16 ms. The interpreter's lock is let go of every µs: another thread would otherwise get it
        when it has waited for 5 ms, over many steps, and so gets it in 80 µs.
        """
        if self._output_copy is None or not CAN_POLL:
            return False
        number, expected, look_up = self._output_copy.number, self._number, self._look_up
        end = time.perf_counter() + _PATIENCE
        while True:
            for _ in range(_LOOKS):
                if number[0] == expected:
                    return True
            look_up(0)
            if time.perf_counter() > end:
                return False

    @property
    def seen(self) -> Callable[[], bool] | None:
        """Function that tells, without waiting, whether the replay that was announced last is over; None where only CUDA can tell."""
        if self._output_copy is None or not CAN_POLL:
            return None
        number = self._output_copy.number
        return lambda: bool(number[0] == self._number)

    def settle(self) -> None:
        """Everything that was issued is over: the number that the next replay raises is the one that stands there."""
        if self._output_copy is not None:
            self._number = self._output_copy.number[0]

    def read(self, into: Mapping[str, NDArray[Any]] | None = None) -> dict[str, NDArray[Any]]:
        """Copies of the outputs: in arrays of the caller's, where these have their shape and type, else in new ones."""
        found = dict[str, NDArray[Any]]()
        for name, place in (into or {}).items():
            array = self._block.arrays.get(name)
            if array is not None and (array.shape, array.dtype) == (place.shape, place.dtype):
                self._memcpy.copy(array, place)
                found[name] = place
        return {name: found[name] if name in found else copy() for name, copy in self._copies.items()}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that starts at a whole word."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()


class CapturedGraph(Enum):
    """Captured graphs of a program. They share memory, and never run at once."""

    STEP = "fetches the inputs that are not sent ahead, runs, and delivers the outputs"
    RUN = "runs on what is on the device, and leaves its results there"
    DELIVER = "delivers what `RUN` made"
    GATHER = "copies inputs that are tensors on the device to where `RUN` reads them"


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


class LookupGraph(GraphExec):
    """A captured graph that looks rows up in tables of the host, which it must not do while their cache is refreshed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device, tables: HostTables) -> None:
        super().__init__(graph, device)
        self._tables = tables

    def start_on(self, stream: torch.cuda.Stream) -> None:
        """Issues one run of the graph on a stream."""
        with self._tables.step(stream):
            super().start_on(stream)

    def start(self) -> None:
        """Issues one run of the graph on the current stream."""
        with self._tables.step(torch.cuda.current_stream(self._device)):
            super().start()
