"""Targets of a load test: a pool in this process, TensorFlow in others, and echoes, which answer without running anything."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Protocol

from msplit.engines.base import Arrays
from msplit.engines.process import Process, RemoteError, serve, told
from msplit.errors import EngineError
from msplit.serving.loadtest.corpus import by_steps
from msplit.serving.loadtest.dispatcher import Echo, Watch, call, drive, settled
from msplit.serving.loadtest.generator import Layout, RequestTable

NAP = 2e-5
"""Seconds that the driving thread sleeps where other threads do the work, so that it does not keep Python's lock from them."""

SESSIONS = {
    "sessions": ("TensorFlow", "one session, called from {threads} threads"),
    "merge": ("TensorFlow, merged streams", "one session, {threads} threads, with stream_merge_options"),
    "xla": ("TensorFlow with XLA", "compiled with XLA, called from {threads} threads"),
    "batcher": ("TensorFlow, batcher", "{groups} sessions, requests that wait joined in front of them"),
}
"""Ways to have TensorFlow answer many requests: name -> label and description in the report."""


class Target(Protocol):
    """Something that answers the requests of a run.

    Attributes:
        label: Name in the report.
        about: Description.
        echo: Label of the target that measures the cost of handing requests over to this one; "" for such a target.
        plain: Answers to the prepared requests, sent one after the other.
    """

    label: str
    about: str
    echo: str
    plain: Sequence[Arrays]

    def run(self, table: RequestTable, watch: Watch, timeout: float | None, /) -> Mapping[str, int]:
        """Answers requests until no more will be sent. Returns each error message with its count."""

    def facts(self) -> Mapping[str, Any]:
        """Facts, such as the counts of a pool."""

    def close(self) -> None:
        """Gives back everything that it holds."""


ECHO, ECHO_THREADS = "echo", "echo, threads"

Answering = Callable[[RequestTable, Watch, float | None], Mapping[str, int]]
"""A function as `Target.run`."""


@dataclass(eq=False)
class LocalTarget:
    """Target in this process, with the functions of a `Target` as fields."""

    label: str
    about: str
    plain: Sequence[Arrays]
    run: Answering
    echo: str = ""
    facts: Callable[[], Mapping[str, Any]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


def of_pool(label: str, about: str, pool: Any, feeds: Sequence[Arrays], *, on_gpu: bool) -> LocalTarget:
    """Makes a target of a pool, which is closed with it. This thread drives the pool; where it has no GPU, other threads do the work."""
    nap = 0.0 if on_gpu else NAP

    def run(table: RequestTable, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        return drive(table, pool, feeds, watch, timeout=timeout, nap=nap)

    plain, close = by_steps(pool.step, feeds), partial(pool.close, finish=False)
    memory = {"memory_bytes": pool.about.facts["bytes"]} if on_gpu and "bytes" in pool.about.facts else {}
    return LocalTarget(label, about, plain, run, ECHO, lambda: asdict(pool.stats()) | memory, close)


def echoes(feeds: Sequence[Arrays], answers: Sequence[Arrays], threads: int) -> list[Target]:
    """Makes the targets that measure the cost of handing requests over: to one thread that drives and, if `threads` is not 0, to so many
    threads that call."""
    echo = Echo(feeds, answers)

    def driven(table: RequestTable, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        return drive(table, echo, feeds, watch, timeout=timeout)

    def called(table: RequestTable, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        return call(table, [echo.step] * threads, feeds, watch)

    found: list[Target] = [LocalTarget(ECHO, "answers at once, without running anything", answers, driven)]
    if threads:
        found.append(LocalTarget(ECHO_THREADS, f"the same, from {threads} threads", answers, called))
    return found


@dataclass(frozen=True, eq=False)
class ProcessTask(ABC):
    """Description of a target that a process of its own opens; it is sent there.

    Attributes:
        layout, handle: Layout and descriptor of the table.
    """

    layout: Layout
    handle: int

    @abstractmethod
    def open(self) -> Target:
        """Opens the target, in the process that is to answer."""


class ProcessTarget:
    """Target in processes of its own, each of which has a task and answers a share of the requests. Call `ready` before its first run.

    Args:
        name: Name of a process in messages.
    """

    def __init__(self, label: str, about: str, echo: str, name: str, tasks: Sequence[ProcessTask]) -> None:
        self.label, self.about, self.echo = label, about, echo
        self.plain: Sequence[Arrays] = ()
        self._processes = [Process(__name__, name, [task.handle]) for task in tasks]
        for process, task in zip(self._processes, tasks, strict=True):
            process.send(task)

    def ready(self) -> None:
        """Waits until all processes can answer.

        Raises:
            EngineError: One of them failed to start.
        """
        self.plain, *_ = [told(process.receive()) for process in self._processes]

    def run(self, table: RequestTable, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """Has the processes answer a run, and watches them meanwhile. Returns each error message with its count."""
        problems = Counter[str]()
        for process in self._processes:
            process.send(timeout)
        for process in self._processes:
            while not process.said(0.01):
                watch.look()
                process.alive()
            problems.update(told(process.receive()))
        return problems

    def facts(self) -> Mapping[str, Any]:
        """Facts of the first process's target."""
        self._processes[0].send("facts")
        facts: Mapping[str, Any] = told(self._processes[0].receive())
        return facts

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.close()


def main(arguments: Sequence[str]) -> None:
    """Opens what one process of a `ProcessTarget` has for a task, and answers its runs until that ends."""
    parent = int(arguments[1])
    opened: list[tuple[Target, RequestTable]] = []

    def alive() -> None:
        if os.getppid() != parent:
            raise EngineError("nobody waits for it any more")

    def answer(message: Any) -> Any:
        try:
            if not opened:
                opened.append((message.open(), RequestTable(message.layout, message.handle)))
                return opened[0][0].plain
            ((target, table),) = opened
            if message == "facts":
                return dict(target.facts())
            with settled():
                return dict(target.run(table, Watch(table, alive), message))
        except Exception as problem:  # noqa: BLE001  the other process reports it
            return RemoteError.of(problem)

    serve(arguments, answer)
    for target, _ in opened:
        target.close()


if __name__ == "__main__":
    from msplit.serving.loadtest import (
        targets,  # so that classes of objects that are received are the ones of the module
    )

    targets.main(sys.argv[1:])
