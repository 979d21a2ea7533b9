"""Arenas that are not a GPU's own: executables that do a step from beginning to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from msplit.engines.base import Executable, Feeds
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.scheduler import Answer, Arena


class StepArena:
    """An arena whose steps executables do from beginning to end.

    Args:
        steps: By batch; what is under 0 runs any.
        owned: What is closed with it.
    """

    def __init__(
        self, steps: Mapping[int, Callable[[Feeds], Answer]], ports: Ports, owned: Sequence[Executable] = ()
    ) -> None:
        self._steps, self._ports, self._owned = steps, ports, owned
        self._outputs: Answer = {}

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """See `Arena`."""
        step = self._steps[rung if rung in self._steps else 0]
        self._outputs = step(self._ports.join(feeds, rung))

    def over(self) -> bool:
        """See `Arena`."""
        return True

    def wait(self) -> None:
        """See `Arena`."""

    def outputs(self) -> Answer:
        """See `Arena`."""
        return self._outputs

    def outputs_on_device(self) -> dict[str, Any]:
        """See `Arena`."""
        raise EngineError("outputs are on the host here")

    def facts(self) -> Mapping[str, Any]:
        """See `Arena`."""
        return self._owned[-1].facts() if self._owned else {}

    def close(self) -> None:
        """See `Arena`."""
        for executable in self._owned:
            executable.close()


class SimulatedArena:
    """An arena whose steps a thread runs, so that they are begun and looked after as those of a GPU are."""

    def __init__(self, arena: Arena) -> None:
        self._arena, self._thread = arena, ThreadPoolExecutor(1, thread_name_prefix="msplit-simulated")
        self._running: Future[None] | None = None

    def start(self, rung: int, feeds: Sequence[Feeds]) -> None:
        """See `Arena`."""
        self._running = self._thread.submit(self._arena.start, rung, feeds)

    def over(self) -> bool:
        """See `Arena`."""
        assert self._running is not None
        if not self._running.done():
            return False
        self._running.result()
        return True

    def wait(self) -> None:
        """See `Arena`."""
        assert self._running is not None
        self._running.exception()

    def outputs(self) -> Answer:
        """See `Arena`."""
        return self._arena.outputs()

    def outputs_on_device(self) -> dict[str, Any]:
        """See `Arena`. The CPU stands in for the device."""
        return {
            name: value if value.dtype.kind in "OSU" else ENGINE.tensor(name, value)
            for name, value in self.outputs().items()
        }

    def facts(self) -> Mapping[str, Any]:
        """See `Arena`."""
        return self._arena.facts()

    def close(self) -> None:
        """See `Arena`."""
        self._thread.shutdown()
        self._arena.close()
