"""Results of a bench of one model, and of several batches: plain data for reports.

Also a measurement held against an earlier one, which `msplit bench --format json` wrote: what has become slower, beyond noise?
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msplit.assignment.model import DisplayMixin, Facts
from msplit.benchmark.diagnose import Limits
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Timeline
from msplit.engines.tensorflow.session import Placement
from msplit.errors import MsplitError
from msplit.formats.files import JsonValue
from msplit.inputs.examples import Hits
from msplit.progress import Sums
from msplit.run.setup import AblationStep
from msplit.run.tuning import Tuned
from msplit.verify.results import BenchResult, MixedPrecision, VariantResult


@dataclass(frozen=True, eq=False)
class Traced:
    """One step of a variant as it ran, the stream of each node of the flat graph, and which rules decided that, if any did."""

    label: str
    timeline: Timeline
    ids: Ints
    assignment: Assignment | None

    def stream_of(self, position: int) -> int:
        """Stream id of a span: that of its node, as the plan numbers streams without gaps."""
        span = self.timeline.spans[position]
        return next((int(self.ids[node]) for node in span.nodes if node < len(self.ids)), span.stream)


@dataclass(frozen=True, eq=False, repr=False)
class Bench(DisplayMixin):
    """A measured model.

    Attributes:
        why: Why this engine.
        notes: What was done to the assignment, and what was not verified.
        tuned: What tuning found, if it was asked for.
        traced: Timelines, where they were asked for, of the variants whose engine can tell.
        layers: From one stream to streams to larger kernels, on the cuda engine: which variant shows what.
        limits: What bounds the kernels, where a device told times.
        lookups: What share of the inputs' ids and strings is in the model's tables.
        labels: What variants would be called after what was asked for -> label of the variant that runs that. Several may come to one.
        workload: What sized and priced the model. Its batch is None where nobody says one.
        inputs: Dtype and shape of what was fed.
        mixed: What stays in float32 so that errors are as small as asked for, if that was asked for.
        placements: Where TensorFlow put each node, by label, if that was asked for.
        preparation: Where time went before the first step that was measured, by what was done.
    """

    result: BenchResult
    engine: str
    why: str
    notes: tuple[str, ...]
    tuned: Tuned | None = None
    costs: Costs | None = None
    traced: tuple[Traced, ...] = ()
    layers: tuple[AblationStep, ...] = ()
    limits: Limits | None = None
    lookups: tuple[Hits, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)
    inputs: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    mixed: MixedPrecision | None = None
    placements: Mapping[str, Placement] = field(default_factory=dict)
    preparation: Sums = field(default_factory=lambda: Sums(0.0, ()))

    @property
    def batch(self) -> int | None:
        """Size of unknown leading dimensions."""
        return self.workload.batch

    def _facts(self) -> Facts:
        times = [
            (one.label, f"{(one.device or one.host).median * 1e6:,.1f} µs")
            for one in self.result.variants
            if one.host is not None
        ]
        return [("engine", self.engine), *times]


@dataclass(frozen=True, eq=False)
class BatchSweep:
    """Benches of one model by batch, in the order asked for, and why a batch could not be run."""

    runs: Mapping[int, Bench]
    failed: Mapping[int, str]


@dataclass(frozen=True, eq=False)
class Line:
    """One way to run the model, over the batches.

    Attributes:
        name: The variant's label; where that differs from batch to batch, what was asked for.
        variants: Batch -> what was measured; batches where it was left out, or gave wrong outputs, are missing.
    """

    name: str
    variants: Mapping[int, VariantResult]


def lines(found: BatchSweep) -> list[Line]:
    """Each way to run the model, over the batches; ways that ran as the same variants throughout once."""
    names: dict[str, dict[int, str]] = {}
    for batch, run in found.runs.items():
        asked = run.labels or {variant.label: variant.label for variant in run.result.variants}
        for name, label in asked.items():
            names.setdefault(re.sub(r"^(msplit, \w+): .*", r"\1", name), {})[batch] = label
    result: dict[tuple[tuple[int, str], ...], Line] = {}
    for name, labels in names.items():
        key = tuple(labels.items())
        if key in result:
            continue
        used = set(labels.values())
        variants = {}
        for batch, label in labels.items():
            variant = next(one for one in found.runs[batch].result.variants if one.label == label)
            if variant.host is not None:
                variants[batch] = variant
        result[key] = Line(used.pop() if len(used) == 1 else name, variants)
    return list(result.values())


_MAX_BYTES = 1 << 30
_SLACK = 1e-9  # 105 is not more than 5 % above 100
_FIX = "give what `msplit bench --format json` printed"


@dataclass(frozen=True)
class Timed:
    """Times of one variant for a batch (None where none was asked for), by the "device" or the "host" clock.

    `asked` is what was asked for that it stands for, `iqr_us` the distance of the quartiles.
    """

    batch: int | None
    label: str
    asked: tuple[str, ...]
    clock: str
    median_us: float
    iqr_us: float


@dataclass(frozen=True)
class Baseline:
    """An earlier measurement: its file, what it was measured on and with by what a person calls that, and all times."""

    path: Path
    circumstances: Mapping[str, Any]
    times: tuple[Timed, ...]


@dataclass(frozen=True)
class Change:
    """Change of one variant: its times in the baseline, and now."""

    then: Timed
    now: Timed

    @property
    def slower(self) -> float:
        """By what share of its time it is slower now; below 0 it is faster."""
        return self.now.median_us / self.then.median_us - 1

    @property
    def noise(self) -> float:
        """Share of its time below which a difference says nothing: where the middle halves of both measurements overlap."""
        return (self.now.iqr_us + self.then.iqr_us) / 2 / self.then.median_us

    def fails(self, limit: float) -> bool:
        """True if it is slower by more than a share of its time, and by more than noise."""
        return self.slower > limit + _SLACK and self.slower > self.noise


@dataclass(frozen=True)
class BaselineComparison:
    """A measurement beside its baseline.

    Attributes:
        changes: Of each variant that both have, in the order of now.
        missing: Variants that only the baseline has.
        new: Variants that only the measurement has.
        differs: What else is not the same as then, in words.
        limit: The share from which a variant fails; None where none was asked for.
    """

    baseline: Baseline
    changes: tuple[Change, ...]
    missing: tuple[Timed, ...]
    new: tuple[Timed, ...]
    differs: tuple[str, ...]
    limit: float | None

    @property
    def failing(self) -> tuple[Change, ...]:
        """Changes that are slower than allowed."""
        return () if self.limit is None else tuple(change for change in self.changes if change.fails(self.limit))


def load(path: Path) -> Baseline:
    """Reads what `msplit bench --format json` printed, for one batch or for several.

    Raises:
        MsplitError: It can not be read, or is something else.
    """
    source = str(path)
    data = JsonValue.read(path, _MAX_BYTES, what="baseline", fix=_FIX).value
    wrong = MsplitError("the baseline is no result of `msplit bench`", where=source, fix=_FIX)
    if not isinstance(data, dict) or data.get("command") != "bench":
        raise wrong
    if data.get("schema_version") != 1:
        raise MsplitError("the baseline has another schema_version than 1", where=source, fix="measure it anew")
    try:
        runs = data.get("runs", [data])
        times = tuple(one for run in runs for one in timed(run["result"], run.get("batch")))
        found = Baseline(path, circumstances(runs), times)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise wrong from None
    if not times:
        raise MsplitError("the baseline holds no times", where=source, fix="measure it anew")
    return found


def timed(result: Mapping[str, Any], batch: int | None) -> Iterator[Timed]:
    """The times of each variant of a result as plain data (`BenchResult.to_dict`), by the device's clock where there is one."""
    for variant in result["variants"]:
        clock = "device" if variant["device"] else "host"
        summary = variant[clock]
        if summary is None:
            continue
        median, iqr = float(summary["median"]) * 1e6, float(summary["iqr"]) * 1e6
        if not (math.isfinite(median) and math.isfinite(iqr) and median > 0 and iqr >= 0):
            raise ValueError("these are no times")
        asked = tuple(map(str, variant.get("asked", ())))
        yield Timed(None if batch is None else int(batch), str(variant["label"]), asked, clock, median, iqr)


def circumstances(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Circumstances of runs that decide on times beside the plan, as plain data. Not the model's path, and no versions of msplit."""
    first = runs[0]
    environment = first["result"]["environment"]
    gpus = [gpu.get("name") for gpu in environment.get("gpus") or ()]
    found: dict[str, Any] = {"engine": first["engine"], "GPU": gpus or ["none"]}
    if not gpus:
        found["processor"] = environment["cpu"]["model"]
    checks = [check for run in runs for variant in run["result"]["variants"] for check in variant["checks"]]
    found["precision"] = sorted({check["precision"] for check in checks}) or None
    found["inputs"] = {run.get("batch"): run["inputs"] for run in runs if "inputs" in run} or None
    return {name: value for name, value in found.items() if value is not None}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between the circumstances of two runs, in words; a fact that one side does not know is no difference."""

    def told(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    said = [
        f"another {name}: {told(then[name])} then, {told(now[name])} now"
        for name in then
        if name != "inputs" and name in now and then[name] != now[name]
    ]
    before, after = then.get("inputs", {}), now.get("inputs", {})
    if any(before[batch] != after[batch] for batch in before if batch in after):
        said.append("inputs of other shapes")
    return said


def compare(baseline: Baseline, runs: Sequence[Mapping[str, Any]], limit: float | None) -> BaselineComparison:
    """Holds runs against a baseline. Variants are matched by batch and label; else by what was asked for, where that is one of each.

    Runs are payloads of `msplit bench`, one per batch; `limit` is the share of its time by which a variant may be slower.
    """
    now = [one for run in runs for one in timed(run["result"], run.get("batch"))]
    left = list(baseline.times)
    changes, new = [], []
    for one in now:
        then = _partner(one, left)
        if then is None:
            new.append(one)
            continue
        left.remove(then)
        changes.append(Change(then, one))
    differs = differences(baseline.circumstances, circumstances(runs))
    return BaselineComparison(baseline, tuple(changes), tuple(left), tuple(new), tuple(differs), limit)


def _partner(one: Timed, left: Sequence[Timed]) -> Timed | None:
    alike = [other for other in left if (other.batch, other.clock) == (one.batch, one.clock)]
    for other in alike:
        if other.label == one.label:
            return other
    as_asked = [other for other in alike if set(one.asked) & set(other.asked)]
    return as_asked[0] if len(as_asked) == 1 else None
