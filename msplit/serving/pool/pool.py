"""A pool: several steps of one model in flight at once, over one set of weights, for requests from any number of threads.

Who waits does the work. There is no thread that requests are handed to: to hand one over and back takes 19 µs, and a small step takes 46.
The thread that brings a request starts its step if an arena is free; the one that waits for an answer looks after all that is in flight,
ends what is over, and starts what waits. Where nobody waits, a thread of the pool does so.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from msplit.assignment.display import Facts, Shown
from msplit.core.arguments import number, whole
from msplit.engines.base import Executable, Feeds, device_lost
from msplit.errors import DeviceLost, EngineError
from msplit.serving.pool.drivers import NAP, Attendance
from msplit.serving.pool.future import Pending
from msplit.serving.pool.ports import Port, Ports
from msplit.serving.pool.queue import NEVER, Request
from msplit.serving.pool.scheduler import Answer, Arena, Flights, Stats
from msplit.serving.pool.settings import PoolSettings
from msplit.verify.results import Check


@dataclass(frozen=True, eq=False)
class About:
    """What a pool runs.

    Attributes:
        label: What it is called in a bench.
        outputs: Type and shape of every output by name. A first dimension of None has the rows of a request.
        checks: What outputs were held against, for each arena and batch.
        notes: What is worth knowing.
        facts: Streams of an arena, bytes: whatever is known.
    """

    label: str
    outputs: Mapping[str, Port]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    facts: Mapping[str, Any]


class Pool(Shown):
    """Several steps of one model in flight at once. See `msplit.pool`. Close it, or use it in a ``with`` statement.

    Any thread may call it.

    Attributes:
        about: What runs.
        inputs: Type and shape of every input by name. A first dimension of None has the rows of a request.
        outputs: Likewise.
        batches: Rows of the steps that there are, ascending; empty where the shapes of a model are fixed.
        joins: Whether requests that wait share a step, and a step is filled up: where rows are independent. Otherwise each request is one
            of `batches`.
        settings: How it answers requests; `groups` is a number, also where it was ``auto``.
        polls: Whether steps are over when somebody looks, as those of a GPU are, and `drive` is of use.
    """

    def __init__(
        self,
        ports: Ports,
        arenas: Sequence[tuple[int, Arena]],
        settings: PoolSettings,
        about: About,
        *,
        threads: int = 0,
        owned: Sequence[Executable] = (),
        gpus: Sequence[int] = (),
    ) -> None:
        """Arenas come with their levels of priority. With `threads`, each step keeps one of so many threads busy until it is over. What is
        `owned` is closed when they are. `gpus` says of each arena where it is, where there are several."""
        self.about, self.inputs, self.outputs, self.settings = about, ports.inputs, about.outputs, settings
        self.batches, self.joins, self.polls = ports.batches, ports.joins, not threads
        self._owned: list[Arena | Executable] = [*(arena for _, arena in arenas), *owned]
        self._ports = ports
        self._flights = Flights(ports, arenas, settings, threads, gpus)
        self._attendance = Attendance(self._flights, polls=self.polls)
        _OPEN.add(self)
        weakref.finalize(self, self._attendance.dismiss).atexit = False

    def _facts(self) -> Facts:
        ends = [(f"input {name}", f"{port.dtype} {list(port.shape)}") for name, port in self.inputs.items()]
        batches = ", ".join(map(str, self.batches)) or "as the model says"
        return [("runs", self.about.label), ("groups", str(self.settings.groups)), ("batches", batches), *ends]

    def step(self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None, on_device: bool = False) -> Answer:
        """The answer to a request. See `submit`, which does not wait for it."""
        if not self.polls or timeout is not None or self.settings.max_delay_us or on_device:
            answer: Answer = self.submit(feeds, priority=priority, timeout=timeout, on_device=on_device).result()
            return answer
        if type(priority) is not int or priority:
            priority = whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, key = self._ports.check(feeds)
        flight = self._flights.take(priority, rows)
        if flight is not None:
            return self._ports.cut(self._attendance.alone(flight, arrays), (rows,))[0]
        waited: Answer = self._put(arrays, rows, key, priority, NEVER).result()
        return waited

    def submit(
        self, feeds: Feeds, *, priority: int = 0, timeout: float | None = None, on_device: bool = False
    ) -> Future[Answer]:
        """Takes a request. Its arrays must stay as they are until it is answered.

        Args:
            feeds: Inputs by name: arrays, or tensors that speak DLPack. Those on the GPU are copied there, after what this thread's current
                stream was given before, which is waited for; others are brought to the host, and so is what has no rows.
            priority: 0 is the most urgent, `settings.priorities` - 1 the least.
            timeout: Seconds after which it is too late to start it.
            on_device: Leave outputs on the GPU.

        Returns:
            Gives outputs by name, the caller's own: arrays or, `on_device`, PyTorch tensors. `cancel` it to have it not run, as long as it
            waits. Functions that it is to call when it is done are called by whatever thread ends the step, and must be short.

        Raises:
            EngineError: An input is missing, or has another type or shape than it must.
            Busy: As many requests wait as may.
            Closed: The pool is closed.
            DeviceLost: The GPU failed.
        """
        if type(priority) is not int or priority:
            priority = whole("the priority", priority, 0, self.settings.priorities - 1)
        arrays, rows, key = self._ports.check(feeds)
        if on_device:
            if not self.polls:
                raise EngineError("this pool's outputs are on the host", fix="leave out on_device")
            key = None if key is None else ("on the device", key)
        patience = NEVER if timeout is None else number("the timeout", timeout)
        return self._put(arrays, rows, key, priority, patience, on_device=on_device)

    def _put(
        self, feeds: Feeds, rows: int, key: Any, level: int, patience: float, *, on_device: bool = False
    ) -> Pending:
        """Takes a request that is looked at."""
        now = time.perf_counter()
        pending = Pending(self._attendance)
        self._flights.put(Request({**feeds}, rows, key, level, now, now + patience, pending, on_device=on_device))
        self._attendance.glance(now)
        return pending

    def drive(self, seconds: float = 0.0) -> bool:
        """Does what there is to do: ends steps that are over, and starts what waits. An event loop calls it again and again, so that no
        thread has to be woken.

        Args:
            seconds: How long to go on, while there is anything to do.

        Returns:
            Whether there is.
        """
        return self._attendance.drive(seconds if type(seconds) is float else number("the seconds", seconds))

    def stats(self) -> Stats:
        """What it has done so far."""
        return self._flights.stats()

    @property
    def lost(self) -> str | None:
        """What the GPU said when it failed. The pool answers nothing any more then, and neither does another one of this process."""
        return None if self.failure is None else self.failure.what

    @property
    def failure(self) -> DeviceLost | None:
        """The same as an error."""
        return self._flights.lost

    def close(self, finish: bool = True) -> None:
        """Takes no more requests, and gives streams and memory back. Steps in flight are waited for.

        Args:
            finish: Answer requests that wait first; otherwise they fail with `Closed`.
        """
        self.stop(finish)
        while self._owned:
            try:
                self._owned.pop(0).close()
            except Exception as problem:
                if device_lost(problem) is None:  # a device that failed takes nothing back
                    raise
        _OPEN.discard(self)

    def stop(self, finish: bool = True) -> None:
        """What `close` does first; arenas stay as they are."""
        self._flights.refuse()
        if not finish:
            self._flights.clear()
        while self._flights.busy:
            self.drive()
            if not (self._flights.tells and self._flights.run()):
                time.sleep(NAP)
        while not (self._flights.told or self._flights.tells):
            time.sleep(NAP)
        self._attendance.end()
        self._flights.end()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finish=kind is None)

    def lose(self) -> None:
        """Forgets all, in the child of the process that it belongs to: threads, locks and the device are the parent's."""
        self._owned.clear()
        self._flights.lose()


_OPEN: weakref.WeakSet[Pool] = weakref.WeakSet()


def _lose() -> None:
    for pool in [*_OPEN]:
        pool.lose()


os.register_at_fork(after_in_child=_lose)
