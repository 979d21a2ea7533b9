"""What answers requests: a pool here, TensorFlow in other processes, and echoes of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msplit.assignment.model import load
from msplit.core.arguments import Precision
from msplit.engines.base import Arrays, Job, TensorFlowOptions
from msplit.engines.process import Process, told
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.formats.model import ReadOptions
from msplit.run.request import RunRequest
from msplit.serving.loadtest.corpus import by_steps
from msplit.serving.loadtest.dispatcher import Driven, Echo, Step, Watch, call, drive
from msplit.serving.loadtest.table import Layout, Table
from msplit.serving.pool.settings import AUTO, PoolSettings

_NAP = 2e-5
"""Seconds that the driving thread sleeps where other threads do the work: it must not keep Python's lock from them."""

SESSIONS = {
    "sessions": "one session, called from {threads} threads",
    "merge": "one session, {threads} threads, with stream_merge_options",
    "xla": "compiled with XLA, called from {threads} threads",
    "batcher": "{groups} sessions, requests that wait joined in front of them",
}
"""Ways to have TensorFlow answer many requests: name -> what it is."""

LABELS = {
    "sessions": "TensorFlow",
    "merge": "TensorFlow, merged streams",
    "xla": "TensorFlow with XLA",
    "batcher": "TensorFlow, batcher",
}


class Pool(Driven, Protocol):
    """What a pool has, as far as it is asked for here."""

    def step(self, feeds: Arrays, *, priority: int = 0, timeout: float | None = None) -> Mapping[str, Any]:
        """The answer to a request."""
        ...

    def close(self, finish: bool = True) -> None:
        """Ends it."""
        ...


class Arm(Protocol):
    """Something that answers runs.

    Attributes:
        label: What it is called.
        about: What it is.
        echo: Label of the arm that shows what handing over to this one costs; "" for such an arm.
        plain: What it answered to the prepared requests, one after the other.
    """

    label: str
    about: str
    echo: str
    plain: Sequence[Arrays]

    def run(self, table: Table, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """Answers what comes until no more will be sent. What went wrong, with how often."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """What is known of it."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


ECHO, ECHO_THREADS = "echo", "echo, threads"


@dataclass(eq=False)
class DrivenArm:
    """A pool, or its echo, driven by this thread. See `Arm`; `stats` is asked for facts."""

    label: str
    about: str
    target: Driven
    feeds: Sequence[Arrays]
    plain: Sequence[Arrays]
    echo: str = ECHO
    nap: float = 0.0
    stats: Callable[[], Mapping[str, Any]] = field(default=dict)
    end: Callable[[], None] = field(default=lambda: None)

    def run(self, table: Table, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """See `Arm`."""
        return drive(table, self.target, self.feeds, watch, timeout=timeout, nap=self.nap)

    def facts(self) -> Mapping[str, Any]:
        """See `Arm`."""
        return self.stats()

    def close(self) -> None:
        """See `Arm`."""
        self.end()


@dataclass(eq=False)
class CalledArm:
    """Functions that are called from a thread each. See `Arm`. There is no queue, so a timeout does not apply."""

    label: str
    about: str
    steps: Sequence[Step]
    feeds: Sequence[Arrays]
    plain: Sequence[Arrays]
    echo: str = ECHO_THREADS
    known: Mapping[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = field(default=lambda: None)

    def run(self, table: Table, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """See `Arm`."""
        del timeout
        return call(table, self.steps, self.feeds, watch)

    def facts(self) -> Mapping[str, Any]:
        """See `Arm`."""
        return self.known

    def close(self) -> None:
        """See `Arm`."""
        self.end()


def of_pool(label: str, about: str, pool: Any, feeds: Sequence[Arrays], *, on_gpu: bool) -> DrivenArm:
    """An arm of a pool, which is closed with it. Where it is not on a GPU, threads of this process do the work."""
    return DrivenArm(
        label,
        about,
        pool,
        feeds,
        by_steps(pool.step, feeds),
        nap=0.0 if on_gpu else _NAP,
        stats=lambda: asdict(pool.stats()),
        end=lambda: pool.close(finish=False),
    )


def echoes(feeds: Sequence[Arrays], answers: Sequence[Arrays], threads: int) -> list[Arm]:
    """What handing over costs by itself: to a thread that drives and, where `threads` is not 0, to so many that call."""
    found: list[Arm] = [
        DrivenArm(ECHO, "answers at once, without running anything", Echo(feeds, answers), feeds, answers, echo="")
    ]
    if threads:
        about = f"the same, from {threads} threads"
        steps = [Echo(feeds, answers).step] * threads
        found.append(CalledArm(ECHO_THREADS, about, steps, feeds, answers, echo=""))
    return found


@dataclass(frozen=True, eq=False)
class Spec:
    """What a process of TensorFlow is to run.

    Attributes:
        kind: One of `SESSIONS`.
        model, choice: The model's file, and what was chosen of it: graphs do not travel.
        feeds: The prepared requests.
        settings: Of the pool, of which `batcher` takes over what it can.
        threads: That call.
        config: A file with further options of sessions.
        layout, handle: Of the table.
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

    @property
    def groups(self) -> int:
        """Sessions of the kinds that have several."""
        return 4 if self.settings.groups == AUTO else int(self.settings.groups)

    @property
    def about(self) -> str:
        """What it is, in words."""
        return SESSIONS[self.kind].format(threads=self.threads, groups=self.groups)


def sessions(spec: Spec) -> Arm:
    """A session in this process, which has no others: whether streams are merged is the process's.

    Raises:
        EngineError: TensorFlow can not run the model so.
    """
    label, choice = LABELS[spec.kind], spec.choice
    flat = load(spec.model, tags=choice.tags, signature=choice.signature, inputs=choice.inputs, outputs=choice.outputs)
    if spec.kind == "batcher":
        from msplit.serving.pool.making import pool

        settings = replace(spec.settings, groups=spec.groups)
        request = replace(spec.request, engine=TENSORFLOW.name)
        return of_pool(label, spec.about, pool(flat, request, settings=settings), spec.feeds, on_gpu=False)
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
    plain = by_steps(built.step, spec.feeds)
    return CalledArm(label, spec.about, [built.step] * spec.threads, spec.feeds, plain, known=built.facts())


class RemoteArm:
    """An arm in a process of its own. See `Arm`. `ready` waits until it is."""

    def __init__(self, spec: Spec) -> None:
        self.label, self.about, self.echo = LABELS[spec.kind], spec.about, ECHO_THREADS
        if spec.kind == "batcher":
            self.echo = ECHO
        self.plain: Sequence[Arrays] = ()
        self._known: Mapping[str, Any] = {}
        self._process = Process("msplit.serving.loadtest.remote", self.label, [spec.handle])
        self._process.send(spec)

    def ready(self) -> None:
        """Waits until it can answer.

        Raises:
            EngineError: It can not.
        """
        self.plain, self._known = told(self._process.receive())

    def run(self, table: Table, watch: Watch, timeout: float | None) -> Mapping[str, int]:
        """See `Arm`."""
        del table
        self._process.send(("run", timeout))
        while not self._process.said(0.01):
            watch.look()
            self._process.alive()
        found: Mapping[str, int] = told(self._process.receive())
        return found

    def facts(self) -> Mapping[str, Any]:
        """See `Arm`."""
        self._process.send(("facts", None))
        return {**self._known, **told(self._process.receive())}

    def close(self) -> None:
        """See `Arm`."""
        self._process.close()
