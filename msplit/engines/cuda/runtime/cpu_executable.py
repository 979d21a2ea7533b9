"""The engine without a GPU: the same program and the same instructions on CPU tensors, for tests and for `RunRequest(device="cpu")`.

It proves lowerings, plans, waits and frees; its timings mean nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.base import Executable, Feeds, Following, Timeline, is_array, refuse_fed
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.device.ranks import Group, ProcessGroup, Ranks
from msplit.engines.cuda.ir.dtypes import own_copy, to_numpy, to_torch
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.ir.state import StateMemory
from msplit.engines.cuda.runtime.input_staging import taken
from msplit.engines.cuda.runtime.several_gpus import SeparateMemory
from msplit.engines.cuda.runtime.stream_program import StreamProgram, Tap, simulate
from msplit.engines.cuda.runtime.timeline import HostTap, timeline
from msplit.errors import EngineError


class SimulatedExecutable(Executable):
    """See `engines.base.Executable`. Streams are interleaved at random, as their events allow, another way at every step."""

    keeps_state = True
    joins_others = True

    def __init__(
        self, program: Program, stream_program: StreamProgram, facts: Mapping[str, Any], *, seed: int = 0
    ) -> None:
        self.program, self.stream_program = program, stream_program
        self._facts, self._seed = dict(facts), seed
        self._feeds: Feeds = {}
        self._prefetched: tuple[Feeds | None, Feeds] = (None, {})  # what was sent, and its values then
        self.state = StateMemory(program.state, torch.device("cpu"))
        self._ranks = Device.of(torch.device("cpu")).owned(Ranks)
        self._group: Group | None = None

    def step(self, feeds: Feeds) -> dict[str, NDArray[Any]]:
        """One step."""
        results = self._run(feeds, None)
        return {**{name: to_numpy(value).copy() for name, value in results.items()}, **self.program.known_outputs()}

    def begin(self, feeds: Feeds) -> bool:
        """See `engines.base.Executable`. There is nothing that runs beside the host."""
        self._begun = self.step(feeds)
        return True

    def end(self) -> dict[str, NDArray[Any]]:
        """See `engines.base.Executable`."""
        return self._begun

    def step_on_device(self, feeds: Feeds) -> dict[str, Any]:
        """One step whose outputs are tensors: see `engines.base.Executable`."""
        own = {name: own_copy(value) for name, value in self._run(feeds, None).items()}
        return own | self.program.known_tensors(torch.device("cpu"))

    def step_prefetching(self, feeds: Feeds, then: Following, *, on_device: bool = False) -> dict[str, Any]:
        """See `engines.base.Executable`: the next step has the values that its arrays have now."""
        outputs = self.step_on_device(feeds) if on_device else self.step(feeds)
        following = then()
        with contextlib.suppress(EngineError):
            if following is not None:
                self._refuse(following)
                if all(is_array(following[name]) for name in self.program.fed):
                    self._prefetched = (following, {name: np.array(following[name]) for name in self.program.fed})
        return outputs

    def _refuse(self, feeds: Feeds) -> None:
        refuse_fed(feeds, {name: (dtype, shape) for name, (shape, dtype) in self.program.fed.items()})

    def _run(self, feeds: Feeds, tap: Tap | None) -> dict[str, torch.Tensor]:
        (own, sent), self._prefetched = self._prefetched, (None, {})
        feeds = sent if own is feeds else feeds
        self._refuse(feeds)
        self._feeds = feeds
        self._seed += 1
        values = {key: _own(name, feeds[name]) for name, key in self.program.feeds.items()}
        values |= self.state.values()
        with torch.no_grad(), self._ranks.talking(self._group):
            if self.program.gpus is None:
                simulate(self.program, self.stream_program, values, self._seed, tap)
            else:
                memory = SeparateMemory(self.program)
                memory.fed(values)
                simulate(self.program, self.stream_program, values, self._seed, tap, memory.run)
        return self.program.results(values)

    def launch(self) -> None:
        """One step on the last inputs."""
        self.step(self._feeds)

    def device_times(self, count: int) -> None:
        """There is no device."""

    def timeline(self) -> Timeline:
        """One step by the host's clock: one kernel at a time, streams taking turns at random."""
        tap = HostTap()
        with self.state.kept():
            self._run(self._feeds, tap)
        clock = "the host's, of streams simulated on the CPU, one kernel at a time: these times say nothing about a GPU"
        return timeline(self.program, self.stream_program, tap.times_us(), clock)

    def join(self) -> None:
        """See `engines.base.Executable`."""
        self._group = self._ranks.group or ProcessGroup()
        self.state.spread(self._group.spread)

    def save_state(self) -> dict[str, NDArray[Any]]:
        """The values of variables."""
        return self.state.save()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Gives variables other values."""
        self.state.load(state)

    def facts(self) -> Mapping[str, Any]:
        """Streams, waits, kernels, memory."""
        return self._facts

    def close(self) -> None:
        """Nothing to free."""


def _own(name: str, value: Any) -> torch.Tensor:
    """An input as a tensor that steps may keep."""
    return to_torch(np.array(value)) if is_array(value) else own_copy(taken(name, value).cpu())
