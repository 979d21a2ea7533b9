"""Variants of a model, and what is known of each while it is built, verified and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle

import numpy as np

from msplit.engines.base import Arrays, Engine, Executable, Job, Timeline
from msplit.errors import EndOfData, EngineError
from msplit.verify.results import Check


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run the model.

    Attributes:
        label: Its name in the report.
        job: What it runs; `job.feeds` are the measured inputs.
        against: Label of the variant whose outputs it must give, and over which its gain is told; None for the first variant before
            it of the same engine on one stream. Where there is none, outputs are held against the first variant.
        optional: Whether an engine that can not run it is no error: it is then reported as skipped.
        over: Labels of further variants over which its gain is told.
        asked: What was asked for that it stands for, such as ``16 streams``.
        used: How many streams do something; None where nobody has looked, and `job.streams` is taken for it.
    """

    label: str
    engine: Engine
    job: Job
    against: str | None = None
    optional: bool = False
    over: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    used: int | None = None


FEWEST = 5
"""Steps that data of a graph's own must be enough for: what begins anew more often measures beginnings."""


@dataclass(eq=False)
class Running:
    """A variant on its way, and the label of the one that it is held against.

    Seconds of each step are kept by build and round; `launch` is of steps without copies, `burst` how many steps a round has. `since` are
    steps since its own data began, `ends` how often they came to their end. `answers` are as `answer` has them.
    """

    variant: Variant
    partner: str | None
    executable: Executable | None = None
    checks: list[Check] = field(default_factory=list)
    skipped: str = ""
    burst: int = 1
    host: list[list[list[float]]] = field(default_factory=list)
    device: list[list[list[float]]] = field(default_factory=list)
    launch: list[float] = field(default_factory=list)
    timeline: Timeline | None = None
    utilization_percent: float | None = None
    since: int = 0
    ends: int = 0
    answers: Iterator[Arrays] | None = None

    @property
    def passed(self) -> bool:
        """Whether its outputs are right, as far as they were checked."""
        return all(check.passed for check in self.checks)

    @property
    def alive(self) -> bool:
        """Whether it is built and right."""
        return self.executable is not None and self.passed

    @property
    def running(self) -> Executable:
        """What is built.

        Raises:
            EngineError: Nothing is.
        """
        if self.executable is None:
            raise EngineError(f"variant {self.variant.label!r} is not built")
        return self.executable

    def step(self, feeds: Arrays) -> Arrays:
        """The outputs of a step. Where the data that the graph reads itself are at their end, they begin anew.

        Raises:
            EndOfData: There are too few of them.
        """
        if self.answers is not None:
            return next(self.answers)
        try:
            outputs = self.running.step(feeds)
        except EndOfData as problem:
            self.begin_anew(problem)
            outputs = self.running.step(feeds)
        self.since += 1
        return outputs

    def begin_anew(self, problem: EndOfData) -> None:
        """Opens again what has come to the end of its data, with the variables that it has by now, and runs a first step.

        Raises:
            EndOfData: It ended after fewer steps than that is worth.
        """
        if self.since < FEWEST:
            fix = f"{problem.fix}; a bench takes {FEWEST} steps or more from one beginning to the next"
            raise EndOfData(problem.what, where=problem.where, fix=fix) from problem
        state = self.save_state()
        self.close()
        self.build(self.variant.job)
        if state:
            self.running.load_state(state)
        self.ends += 1
        self.since = 1
        self.running.step(self.variant.job.feeds)

    def build(self, job: Job) -> None:
        """Builds it. Where an engine can not run what is optional, that is noted."""
        self.since, self.skipped = 0, ""
        try:
            self.executable = self.variant.engine.build(job)
        except EngineError as error:
            if not self.variant.optional:
                raise
            self.skipped = error.what

    def answer(self, first: Sequence[Arrays], again: Sequence[Arrays]) -> None:
        """Steps on all inputs that it will be stepped on, and is closed: for others there is room on the device then. Nothing that changes
        variables can be asked so.

        Args:
            first: Inputs that come once, before all others.
            again: Inputs that come over and over, in this order.
        """
        once, always = (
            [{name: np.array(value) for name, value in self.step(feeds).items()} for feeds in inputs]
            for inputs in (first, again)
        )
        self.answers = chain(once, cycle(always))
        self.close()

    @property
    def can_step(self) -> bool:
        """Whether there is anything to step on."""
        return self.executable is not None or self.answers is not None

    def save_state(self) -> Arrays:
        """What its variables hold."""
        return {} if self.executable is None else self.executable.save_state()

    def close(self) -> None:
        """Closes what is built."""
        if self.executable is not None:
            self.executable.close()
            self.executable = None
