"""An arena on a GPU: captured graphs of all batches of a model, of which one is in flight at a time, over weights that all arenas share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import STEPS, Feeds
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.runtime.executable import CudaExecutable


class CudaArena:
    """Runs one step at a time, on streams of its own. The graphs share memory for what they compute.

    Args:
        executables: By batch.
        entries: Of each input, how many entries of its first axis belong to a row; 0 where it has none.
        streams: What the executables share; given back at the end.
        numbers: Of steps, where a model has random ops: all of its arenas count together.
    """

    def __init__(
        self,
        executables: Mapping[int, CudaExecutable],
        entries: Mapping[str, int],
        device: Device,
        streams: list[torch.cuda.Stream],
        numbers: Iterator[int],
    ) -> None:
        self._executables, self._entries = executables, {**entries, STEPS: 0}
        self._device, self._streams, self._numbers = device, streams, numbers
        self._counts = any(STEPS in one.program.feeds for one in executables.values())
        self._current = next(iter(executables.values()))

    def start(self, bucket: int, feeds: Sequence[Feeds]) -> None:
        """Begins a step of `bucket` rows on the rows of all these requests, one behind the other."""
        if self._counts:
            feeds = [{**feeds[0], STEPS: np.asarray(next(self._numbers), np.int64)}, *feeds[1:]]
        self._current = self._executables[bucket]
        self._current.start(feeds, self._entries)

    def over(self) -> bool:
        """Tell whether it is over. A fault of the device is raised as PyTorch has it."""
        return self._current.over()

    def wait(self) -> None:
        """Returns when it is over, without the interpreter's lock. See `over`."""
        self._current.wait()

    def outputs(self) -> dict[str, NDArray[Any]]:
        """Outputs of the step that is over, of the caller's own."""
        return self._current.outputs()

    def outputs_on_device(self) -> dict[str, Any]:
        """The same as tensors on the device."""
        return self._current.outputs_on_device()

    def facts(self) -> Mapping[str, Any]:
        """Those of the largest batch, and the bytes of all."""
        every = [one.facts() for one in self._executables.values()]
        return {**every[0], "pool_bytes": sum(int(one["pool_bytes"]) for one in every)}

    def close(self) -> None:
        """Frees graphs and memory, all at once: one that is destroyed may take with it what another one on its streams still uses."""
        # Of a device that failed nothing can be given back.
        with contextlib.suppress(torch.AcceleratorError, torch.cuda.CudaError):
            for one in self._executables.values():
                one.close()
        self._device.streams.give_back(self._streams)
        self._streams = []
