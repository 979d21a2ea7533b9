"""Targets of a load test: a pool in this process, TensorFlow in others, and echoes, which answer without running anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msplit.assignment.model import load
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Job, TensorFlowOptions
from msplit.engines.process import Process, RemoteError, serve, told
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError
from msplit.formats.model import ReadOptions
from msplit.run.request import RunRequest
from msplit.serving.loadtest.corpus import by_steps
from msplit.serving.loadtest.dispatcher import Echo, Watch, call, drive, settled
from msplit.serving.loadtest.table import Layout, Table
from msplit.serving.pool.settings import AUTO, PoolSettings

_NAP = 2e-5
"""Seconds that the driving thread sleeps where other threads do the work, so that it does not keep Python's lock from them."""

SESSIONS = {
    "sessions": "one session, called from {threads} threads",
    "merge": "one session, {threads} threads, with stream_merge_options",
    "xla": "compiled with XLA, called from {threads} threads",
    "batcher": "{groups} sessions, requests that wait joined in front of them",
}
"""Ways to have TensorFlow answer many requests: name -> description."""

LABELS = {
    "sessions": "TensorFlow",
    "merge": "TensorFlow, merged streams",
    "xla": "TensorFlow with XLA",
    "batcher": "TensorFlow, batcher",
}


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

    def run(self, table: Table, watch: Watch, timeout: float | None, /) -> Mapping[str, int]:
        """Answers requests until no more will be sent. Returns each error message with its count."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Facts, such as the counts of a pool."""
        ...

    def close(self) -> None:
        """Gives back everything that it holds."""
        ...


ECHO, ECHO_THREADS = "echo", "echo, threads"


@dataclass(eq=False)
class LocalTarget:
    """Target in this process, with the functions of a `Target` as fields."""

    label: str
    about: str
    plain: Sequence[Arrays]
    run: Callable[[Table, Watch, float | None], Mapping[str, int]]
    echo: str = ""
    facts: Callable[[], Mapping[str, Any]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


def of_pool(label: str, about: str, pool: Any, feeds: Sequence[Arrays], *, on_gpu: bool) -> LocalTarget:
    """Makes a target of a pool, which is closed with it. This thread drives the pool; where it has no GPU, other threads do the work."""
    nap = 0.0 if on_gpu else _NAP
    return LocalTarget(
        label,
        about,
        by_steps(pool.step, feeds),
        lambda table, watch, timeout: drive(table, pool, feeds, watch, timeout=timeout, nap=nap),
        ECHO,
        lambda: asdict(pool.stats()),
        lambda: pool.close(finish=False),
    )


def echoes(feeds: Sequence[Arrays], answers: Sequence[Arrays], threads: int) -> list[Target]:
    """Makes the targets that measure the cost of handing requests over: to one thread that drives and, if `threads` is not 0, to so many
    threads that call."""
    echo = Echo(feeds, answers)
    found: list[Target] = [
        LocalTarget(
            ECHO,
            "answers at once, without running anything",
            answers,
            lambda table, watch, timeout: drive(table, echo, feeds, watch, timeout=timeout),
        )
    ]
    if threads:
        steps = [echo.step] * threads
        about = f"the same, from {threads} threads"
        found.append(
            LocalTarget(ECHO_THREADS, about, answers, lambda table, watch, _: call(table, steps, feeds, watch))
        )
    return found


@dataclass(frozen=True, eq=False)
class Spec:
    """Description of a target that a process of its own runs with TensorFlow.

    Attributes:
        kind: One of `SESSIONS`.
        model, choice: The model's file, and the graph and tensors chosen from it; a graph itself is not sent to another process.
        feeds: The prepared requests.
        request: Settings of the engine.
        settings: Settings of the pool, of which `batcher` uses those that apply.
        threads: Number of threads that call sessions.
        config: File with further options of sessions.
        layout, handle: Layout and descriptor of the table.
        pool: Makes a pool of a model, for `batcher`.
    """

    kind: str
    model: Path
    choice: ReadOptions
    feeds: Sequence[Arrays]
    request: RunRequest
    settings: PoolSettings
    threads: int
    config: Path | None
    layout: Layout
    handle: int
    pool: Callable[..., Any]

    @property
    def groups(self) -> int:
        """Number of sessions, for the kinds that have several."""
        return 4 if self.settings.groups == AUTO else int(self.settings.groups)

    @property
    def about(self) -> str:
        """Description for the report."""
        return SESSIONS[self.kind].format(threads=self.threads, groups=self.groups)


def sessions(spec: Spec) -> Target:
    """Makes a target of a TensorFlow session in this process, which runs no others: merged streams are shared by all.

    Raises:
        EngineError: TensorFlow can not run the model so.
    """
    label, choice = LABELS[spec.kind], spec.choice
    flat = load(spec.model, tags=choice.tags, signature=choice.signature, inputs=choice.inputs, outputs=choice.outputs)
    if spec.kind == "batcher":
        settings = replace(spec.settings, groups=spec.groups)
        request = replace(spec.request, engine=TENSORFLOW.name)
        return of_pool(label, spec.about, spec.pool(flat, request, settings=settings), spec.feeds, on_gpu=False)
    options = TensorFlowOptions(xla=spec.kind == "xla", merge_streams=spec.kind == "merge", config=spec.config)
    job = Job(
        flat=flat,
        ids=np.zeros(len(flat), np.int32),
        streams=1,
        feeds=spec.feeds[0],
        tensorflow=options,
        op_libraries=spec.request.op_libraries,
        precision=Precision(spec.request.precision),
    )
    TENSORFLOW.prepare([job])
    built = TENSORFLOW.build(job)
    plain, steps, known = by_steps(built.step, spec.feeds), [built.step] * spec.threads, built.facts()
    return LocalTarget(
        label,
        spec.about,
        plain,
        lambda table, watch, _: call(table, steps, spec.feeds, watch),
        ECHO_THREADS,
        lambda: known,
    )


class ProcessTarget:
    """Target in processes of its own, each of which answers a share of the requests."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.plain: Sequence[Arrays] = ()
        self._processes = processes

    def run(self, table: Table, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """Has the processes answer a run, and watches them meanwhile. Returns each error message with its count."""
        del table
        problems: dict[str, int] = {}
        for process in self._processes:
            process.send(timeout)
        for process in self._processes:
            while not process.said(0.01):
                watch.look()
                process.alive()
            for text, count in told(process.receive()).items():
                problems[text] = problems.get(text, 0) + count
        return problems

    def facts(self) -> Mapping[str, Any]:
        """Facts; none are known."""
        return {}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.close()


class RemoteTarget(ProcessTarget):
    """Target in one process: sessions of TensorFlow. Call `ready` before its first run."""

    def __init__(self, spec: Spec) -> None:
        self.label, self.about = LABELS[spec.kind], spec.about
        self.echo = ECHO if spec.kind == "batcher" else ECHO_THREADS
        self._known: Mapping[str, Any] = {}
        self._process = Process(__name__, self.label, [spec.handle])
        super().__init__([self._process])
        self._process.send(spec)

    def ready(self) -> None:
        """Waits until the process can answer.

        Raises:
            EngineError: It failed to start.
        """
        self.plain, self._known = told(self._process.receive())

    def facts(self) -> Mapping[str, Any]:
        """Facts of the process's target."""
        self._process.send("facts")
        return {**self._known, **told(self._process.receive())}


def main(arguments: Sequence[str]) -> None:
    """Opens the sessions of a `RemoteTarget`, and answers its runs until it ends."""
    parent = int(arguments[1])
    opened: list[tuple[Target, Table]] = []

    def alive() -> None:
        if os.getppid() != parent:
            raise EngineError("nobody waits for it any more")

    def answer(message: Any) -> Any:
        try:
            if isinstance(message, Spec):
                target = sessions(message)
                opened.append((target, Table(message.layout, message.handle)))
                return target.plain, dict(target.facts())
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
