"""Results of a bench: plain data that reports print and JSON keeps.

Variants of a model, and what is known of each while it is built, verified and measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import number, whole
from msplit.core.statistics import Ratio, Summary
from msplit.engines.base import Arrays, Engine, Executable, Feeds, Job, Timeline, is_array
from msplit.engines.user_rows import UserRows
from msplit.errors import EndOfData, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.verify.compare import ModelComparison, compare, compare_state
from msplit.verify.tolerances import carried

SCHEMA_VERSION = 1


NewValues = FlatGraph | str | os.PathLike[str] | Mapping[str, NDArray[Any]]
"""A model with other values, its path or that of a checkpoint, a build in place of another one, or values of variables by name."""

NewRows = Mapping[str, tuple[Any, Any]]
"""Name of a variable -> numbers of rows, and their values."""


@dataclass(frozen=True)
class Settings:
    """Settings of measuring.

    Attributes:
        duration: Seconds of measuring, all variants together.
        warmup: Seconds of warming up per variant.
        min_rounds: Fewest rounds, however long they take.
        builds: How many times everything is built anew while it is measured: see `Ratio.builds`.
        seed: Seed of the inputs that verification makes.
        verify_inputs: Sets of fresh inputs that variants are compared on.
        tolerance: In place of the types' own in the measured precision.
        burst: Seconds that one variant runs on in a round, so that caches are as warm as in a loop of its own.
        max_burst: Most steps of a burst.
    """

    duration: float = 3.0
    warmup: float = 0.2
    min_rounds: int = 10
    builds: int = 3
    seed: int = 0
    verify_inputs: int = 3
    tolerance: float | None = None
    burst: float = 0.005
    max_burst: int = 50

    def __post_init__(self) -> None:
        for name in ("duration", "warmup", "burst"):
            number(name, getattr(self, name))
        for name, least in (("min_rounds", 1), ("builds", 1), ("seed", 0), ("verify_inputs", 0), ("max_burst", 1)):
            whole(name, getattr(self, name), least)
        if self.tolerance is not None:
            number("tolerance", self.tolerance)

    def to_dict(self) -> dict[str, Any]:
        """As plain data: seconds, also with the unit in the key."""
        times = {f"{key}_s": getattr(self, key) for key in ("duration", "warmup", "burst")}
        return {**asdict(self), **times}


@dataclass(frozen=True)
class OutputCheck:
    """One comparison of a variant's outputs.

    Attributes:
        against: What with: a variant's label, or where the reference comes from.
        precision: "ieee" or "tf32".
        inputs: Sets of inputs it covers.
        comparison: How it went; the first failing one where one fails.
    """

    against: str
    precision: str
    inputs: int
    comparison: ModelComparison

    @property
    def passed(self) -> bool:
        """True if the outputs agree."""
        return self.comparison.passed

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        about = {"against": self.against, "precision": self.precision, "inputs": self.inputs}
        return {**about, **self.comparison.to_dict()}


@dataclass(frozen=True)
class ValueUpdate:
    """Result of other values for a model that runs.

    Attributes:
        bytes: Size on the device of what has changed, of constants that were made of it, too.
        captured: True if more than values differed, so that another program runs from now on.
        checks: What the first answers were held against.
    """

    bytes: int
    captured: bool
    checks: tuple[OutputCheck, ...]


@dataclass(frozen=True)
class VariantResult:
    """Result of one variant.

    Attributes:
        streams: Streams that do something.
        asked: What was asked for that it stands for, such as ``16 streams``: several requests may come to one plan.
        facts: What the engine tells.
        checks: How its outputs compare.
        skipped: Why it did not run; "" where it did.
        host: A user's step, by the host's clock.
        launch: A step on inputs that are on the device already, by the host's clock; None where there is no device clock.
        device: Back-to-back steps by the device's own clock, None where there is no such clock.
        ratios: How many times faster it is, and over what.
        timeline: One step as it ran, where that was asked for and the engine can tell.
        utilization_percent: How much of the time a kernel ran on the GPU while steps followed each other, as the driver tells; None where
            it was not asked.
        host_times, launch_times, device_times: Every measured step, seconds.
    """

    label: str
    engine: str
    streams: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[OutputCheck, ...] = ()
    skipped: str = ""
    host: Summary | None = None
    launch: Summary | None = None
    device: Summary | None = None
    ratios: tuple[Ratio, ...] = ()
    timeline: Timeline | None = None
    host_times: tuple[float, ...] = ()
    launch_times: tuple[float, ...] = ()
    device_times: tuple[float, ...] = ()
    asked: tuple[str, ...] = ()
    utilization_percent: float | None = None

    @property
    def failed(self) -> bool:
        """True if its outputs are wrong."""
        return not all(check.passed for check in self.checks)

    def ratio_over(self, label: str, clock: str = "host") -> Ratio | None:
        """The ratio over another variant."""
        return next((ratio for ratio in self.ratios if ratio.over == label and ratio.clock == clock), None)

    def to_dict(self) -> dict[str, Any]:
        """By the keys of JSON; `report.document.plain` makes the rest of it."""
        clocks = {"host": self.host, "launch": self.launch, "device": self.device}
        measured = {clock: getattr(self, f"{clock}_times") for clock in clocks}
        return {
            **{
                name: getattr(self, name)
                for name in ("label", "engine", "streams", "asked", "facts", "checks", "failed")
            },
            "skipped": self.skipped or None,
            **clocks,
            "utilization_percent": self.utilization_percent,
            "ratios": self.ratios,
            **{f"{clock}_times": times for clock, times in measured.items()},
            **{f"{clock}_times_us": _micros(times) for clock, times in measured.items()},
        }


@dataclass(frozen=True)
class BenchResult:
    """Everything that a bench found out of its variants, in the order in which they were given.

    Ratios are over the one whose label is `baseline`; `warnings` say what makes the measurement doubtful, `diagnosis` why it is as fast
    as it is.
    """

    variants: tuple[VariantResult, ...]
    baseline: str
    settings: Settings
    environment: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if the outputs of a variant are wrong: the run must exit with 1."""
        return any(variant.failed for variant in self.variants)

    def describe_failures(self) -> str:
        """Failures of variants, a line per output; empty where nothing is wrong."""
        return "\n".join(
            f"{variant.label} against {check.against} ({check.precision}): {line}"
            for variant in self.variants
            for check in variant.checks
            for line in check.comparison.describe().splitlines()
        )

    def to_dict(self) -> dict[str, Any]:
        """By the keys of JSON; `report.document.plain` makes the rest of it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench",
            "failed": self.failed,
            **{name: getattr(self, name) for name in ("baseline", "settings", "environment")},
            **{name: getattr(self, name) for name in ("variants", "warnings", "diagnosis")},
        }


def _micros(seconds: Sequence[float]) -> list[float]:
    """In µs, to the nanosecond, which no clock here tells apart."""
    return [round(value * 1e6, 3) for value in seconds]


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
    `last` are the outputs of the last step, and their bytes then.
    """

    variant: Variant
    partner: str | None
    executable: Executable | None = None
    checks: list[OutputCheck] = field(default_factory=list)
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
    last: dict[str, tuple[NDArray[Any], bytes]] = field(default_factory=dict)

    @cached_property
    def feeds(self) -> Feeds:
        """Inputs of a step that is timed, as requests give them: of what is shared one row for each user."""
        job = self.variant.job
        shared = job.options.shared
        return job.feeds if shared is None else UserRows.of_step(shared, shared.rows(job.feeds)).by_row(job.feeds)

    @property
    def passed(self) -> bool:
        """True if its outputs are right, as far as they were checked."""
        return all(check.passed for check in self.checks)

    @property
    def alive(self) -> bool:
        """True if it is built and right."""
        return self.executable is not None and self.passed

    @property
    def running(self) -> Executable:
        """The executable that was built.

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
            EngineError: What the step before gave has changed: it lies in memory that this one writes.
        """
        if self.answers is not None:
            return next(self.answers)
        try:
            outputs = self.running.step(feeds)
        except EndOfData as problem:
            self.begin_anew(problem)
            outputs = self.running.step(feeds)
        self.since += 1
        for name, (value, was) in self.last.items():
            if value.tobytes() != was:
                raise EngineError(
                    f"internal error: {name}, an output of a step of {self.variant.label}, is another once the next step has run",
                    fix="please report this; run the model with another engine meanwhile",
                )
        self.last = {name: (value, value.tobytes()) for name, value in outputs.items() if is_array(value)}
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

    def reopen(self) -> None:
        """Has it begin anew with the variables of its job."""
        if self.running.reopen():
            self.since = 0
            self.running.load_state(self.variant.job.state)
        else:
            self.close()
            self.build(self.variant.job)

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
        """True if there is anything to step on."""
        return self.executable is not None or self.answers is not None

    def save_state(self) -> Arrays:
        """What its variables hold."""
        return {} if self.executable is None else self.executable.save_state()

    def close(self) -> None:
        """Closes what is built."""
        if self.executable is not None:
            self.executable.close()
            self.executable = None


@dataclass(frozen=True)
class MixedPrecision:
    """Choice of the ops that are in half precision.

    Attributes:
        most: The largest error that was allowed.
        error: The largest that an output has: the distance from IEEE float32 (see `OutputComparison`).
        errors: That of each output.
        ops: How many ops half precision was for.
        in_half: How many of them run in it.
        wide: Nodes whose ops stay in float32.
        evaluations: How many choices were tried.
    """

    most: float
    error: float
    errors: Mapping[str, float]
    ops: int
    in_half: int
    wide: frozenset[int]
    evaluations: int

    @property
    def holds(self) -> bool:
        """True if the bound is kept. Where it is not, all ops are in float32, and that is too far away already."""
        return self.error <= self.most


Ran = tuple[Arrays, Arrays]
"""Outputs of the last of some steps, and variables after it."""


@dataclass(frozen=True, eq=False)
class Roughness:
    """Effect of functions that are as rough as TensorFlow's kernels may be, on certain steps: see `RoughFunctions`.

    Each op of the graph runs by itself in our engine, in IEEE precision, with such functions and without. Where TensorFlow's `tanh` is
    1 and the exact one nearly so, its gradient is 0 and nearly so, and Adam takes a whole step of the one and none of the other.

    Attributes:
        state: Variables before the steps.
        exact: What the steps give with functions as they are.
        rough: What they give with rough ones, several times.
    """

    state: Arrays
    exact: Ran
    rough: Sequence[Ran]

    @cached_property
    def of_outputs(self) -> dict[str, float]:
        """Tolerance of each output: three times as far as rough functions move it."""
        return carried(compare(outputs, self.exact[0]) for outputs, _ in self.rough)

    @cached_property
    def of_variables(self) -> dict[str, float]:
        """Tolerance of each variable and its change."""
        return carried(compare_state(after, self.exact[1], {}, self.state) for _, after in self.rough)

    def settled(self, expected: Arrays, part: int) -> Arrays:
        """Gives TensorFlow's values without infinities and NaN that come of numbers below the least normal one, which it makes zero: where
        our engine gives them too if it does so, and not otherwise, the latter is expected.

        Args:
            part: 0 for outputs, 1 for variables.
        """
        found = dict(expected)
        for name, value in expected.items():
            ours, flushed = (np.asarray(ran[part].get(name, value)) for ran in (self.exact, self.rough[0]))
            if value.dtype.kind == "f" and value.shape == ours.shape == flushed.shape:
                alike = (value == flushed) | (np.isnan(value) & np.isnan(flushed))
                found[name] = np.where(~np.isfinite(value) & alike & np.isfinite(ours), ours, value)
        return found
