"""The end of a captured step: its outputs come to pinned host memory by one kernel, which then tells the host that the step is over."""

from __future__ import annotations

import functools
import select
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.kernels.copy import OutputCopy
from msplit.engines.cuda.kernels.launch import can_launch
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
        self._block = Block(like, [[name] for name in like], device)
        self._copies: dict[str, Callable[[], NDArray[Any]]] = {
            name: functools.partial(device.owned(Memcpy).copy_of, array) for name, array in self._block.arrays.items()
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
    def seen(self) -> Callable[[], bool]:
        """Function that tells, without waiting, whether the replay that was announced last is over; false where only CUDA can tell."""
        if self._output_copy is None or not CAN_POLL:
            return lambda: False
        number = self._output_copy.number
        return lambda: bool(number[0] == self._number)

    def settle(self) -> None:
        """Everything that was issued is over: the number that the next replay raises is the one that stands there."""
        if self._output_copy is not None:
            self._number = self._output_copy.number[0]

    def read(self) -> dict[str, NDArray[Any]]:
        """Copies of the outputs."""
        return {name: copy() for name, copy in self._copies.items()}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor that starts at a whole word."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 4 == 0 else tensor.clone()
