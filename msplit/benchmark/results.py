"""Results of a bench of one model, and of several batches: plain data for reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from msplit.assignment.model import DisplayMixin, Facts
from msplit.benchmark.diagnose import Limits
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Timeline
from msplit.engines.tensorflow.session import Placement
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
