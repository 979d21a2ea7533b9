"""What a bench gives: plain data that reports print and JSON keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from msplit.core.arguments import number, whole
from msplit.core.statistics import Ratio, Summary
from msplit.engines.base import Timeline
from msplit.verify.compare import Comparison

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Settings:
    """How to measure.

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
class Check:
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
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Whether the outputs agree."""
        return self.comparison.passed

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        about = {"against": self.against, "precision": self.precision, "inputs": self.inputs}
        return {**about, **self.comparison.to_dict()}


@dataclass(frozen=True)
class VariantResult:
    """What is known of one variant.

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
    checks: tuple[Check, ...] = ()
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
        """Whether its outputs are wrong."""
        return not all(check.passed for check in self.checks)

    def ratio_over(self, label: str, clock: str = "host") -> Ratio | None:
        """The ratio over another variant."""
        return next((ratio for ratio in self.ratios if ratio.over == label and ratio.clock == clock), None)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "label": self.label,
            "engine": self.engine,
            "streams": self.streams,
            "asked": list(self.asked),
            "facts": {key: plain(value) for key, value in self.facts.items()},
            "checks": [check.to_dict() for check in self.checks],
            "failed": self.failed,
            "skipped": self.skipped or None,
            "host": self.host.to_dict() if self.host else None,
            "launch": self.launch.to_dict() if self.launch else None,
            "device": self.device.to_dict() if self.device else None,
            "utilization_percent": self.utilization_percent,
            "ratios": [ratio.to_dict() for ratio in self.ratios],
            "host_times": list(self.host_times),
            "launch_times": list(self.launch_times),
            "device_times": list(self.device_times),
            "host_times_us": _micros(self.host_times),
            "launch_times_us": _micros(self.launch_times),
            "device_times_us": _micros(self.device_times),
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
        """Whether the outputs of a variant are wrong: the run must exit with 1."""
        return any(variant.failed for variant in self.variants)

    def describe_failures(self) -> str:
        """What is wrong with which variant, a line per output; empty where nothing is."""
        return "\n".join(
            f"{variant.label} against {check.against} ({check.precision}): {line}"
            for variant in self.variants
            for check in variant.checks
            for line in check.comparison.describe().splitlines()
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "bench",
            "failed": self.failed,
            "baseline": self.baseline,
            "settings": self.settings.to_dict(),
            "environment": dict(self.environment),
            "variants": [variant.to_dict() for variant in self.variants],
            "warnings": list(self.warnings),
            "diagnosis": list(self.diagnosis),
        }


def _micros(seconds: Sequence[float]) -> list[float]:
    """In µs, to the nanosecond, which no clock here tells apart."""
    return [round(value * 1e6, 3) for value in seconds]


def plain(value: Any) -> Any:
    """A fact as JSON can hold it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
