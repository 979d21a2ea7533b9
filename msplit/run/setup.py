"""Request of a bench, and what a request comes to before anything is compiled: inputs, stream ids, and the variants that are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from msplit.core.arguments import path
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.engines.base import Engine, Job
from msplit.engines.table_rows import RoundedTables
from msplit.inputs.reference import Reference
from msplit.inputs.special import Fresh
from msplit.run.request import RunRequest, given_of, refuse_exclusions
from msplit.shapes import Shapes
from msplit.verify.results import MixedPrecision, Variant


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a bench compares and keeps, beside what runs.

    Attributes:
        compare_tensorflow: Measure TensorFlow beside the cuda engine, where it sees the GPU, and ONNX Runtime, where it and tf2onnx are
            installed.
        compare_xla: And with XLA, which compiles for seconds to minutes.
        save_reference: Where to save inputs and reference outputs.
        force: Whether that may replace what is there.
        timelines: Also time the parts of one step of every variant.
        log_placement: Also ask where TensorFlow put each node.
        command: The command line, for the record.
    """

    compare_tensorflow: bool = True
    compare_xla: bool = True
    save_reference: Path | None = None
    force: bool = False
    timelines: bool = False
    log_placement: bool = False
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.save_reference is not None:
            object.__setattr__(self, "save_reference", path(self.save_reference))


@dataclass(frozen=True)
class BenchRequest:
    """What runs, and what is compared.

    Attributes:
        run: What runs. Where node placements are asked for and no engine, TensorFlow.
        comparison: What it is compared with, and what is kept.
    """

    run: RunRequest = field(default_factory=RunRequest)
    comparison: Comparison = field(default_factory=Comparison)

    @classmethod
    def of(cls, **keywords: Any) -> BenchRequest:
        """The request of keywords as `bench` has them, all beside each other."""
        own = {one.name: keywords.pop(one.name) for one in fields(Comparison) if one.name in keywords}
        return cls(RunRequest.of(**keywords), Comparison(**own))

    def __post_init__(self) -> None:
        if self.comparison.log_placement and self.run.engine is None:
            object.__setattr__(self, "run", replace(self.run, engine="tensorflow"))
        refuse_exclusions(self.given)

    @property
    def given(self) -> dict[str, Any]:
        """Options of `EXCLUSIONS` that have another value than their default."""
        return {**self.run.given, **given_of(self.comparison)}


class StreamIds(NamedTuple):
    """Ids of a graph's nodes on so many streams; `assignment` says which rule decided each, None where no rules did."""

    streams: int
    ids: Ints
    assignment: Assignment | None = None


@dataclass(frozen=True)
class AblationStep:
    """One step from one stream to everything.

    Attributes:
        name: What it adds, such as ``"8 streams"`` or ``"fused"``.
        label: The variant that has it and all before it.
        before: Label of the variant without it; None for the first, and for what stands beside the others.
        predicted_us: Simulated time of a step; None where the simulator can not tell.
    """

    name: str
    label: str
    before: str | None
    predicted_us: float | None = None


@dataclass(frozen=True, eq=False)
class Ablation:
    """The steps in order, the variants that show them beside those that are measured anyway, and which steps are left out."""

    steps: tuple[AblationStep, ...] = ()
    variants: tuple[Variant, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Setup:
    """What a request means for a model.

    Attributes:
        request: The request, with batch and shapes of the reference or the profile where it names none itself.
        why: Why this engine.
        job: The model on one stream.
        priced: Shapes of its tensors and costs of its nodes.
        assignments: Ids for each number of streams above one.
        variants: What is compared, before larger kernels.
        ablation: What shows what larger kernels add, on the cuda engine, as far as it is known before anything is compiled.
        planned: What runs the plan file, if there is one.
        reference: What outputs are held against; None where there is nothing.
        tables: Those whose rows are rounded; `job` has their values.
        fresh: Makes sets of inputs from seeds.
        mixed: What stays in float32 so that errors are as small as asked for; None where nothing is asked.
        notes: What was done to the assignment.
        unverified: What can not be verified.
        plan_notes: What does not fit the plan file.
    """

    request: RunRequest
    engine: Engine
    why: str
    job: Job
    priced: tuple[Shapes, Costs]
    assignments: tuple[StreamIds, ...]
    variants: tuple[Variant, ...]
    ablation: Ablation
    planned: Variant | None
    reference: Reference | None
    fresh: Fresh
    notes: tuple[str, ...]
    plan_notes: tuple[str, ...]
    unverified: tuple[str, ...]
    mixed: MixedPrecision | None = None
    tables: RoundedTables = field(default_factory=RoundedTables)


def plural(count: int, unit: str) -> str:
    """1 stream, 2 streams."""
    return f"{count} {unit}{'s' * (count != 1)}"


def plan_label(plan: Path) -> str:
    """What the variant of a plan file is called."""
    return f"msplit, {plan}"


def one_stream(variants: Sequence[Variant]) -> Variant:
    """What plans are compared with: one stream, as the others run."""
    alone = [variant for variant in variants if variant.engine.name == "cuda" and variant.job.streams == 1]
    return next((variant for variant in alone if variant.against is None), alone[0])


def on_all(variant: Variant, request: RunRequest) -> Variant:
    """A variant of which all GPUs that are asked for share the rows."""
    options = replace(variant.job.options, devices=request.sharing)
    label = f"{variant.label}, {len(request.sharing)} {'GPUs' if options.on_gpu else 'simulated GPUs'}"
    return replace(
        variant, label=label, job=replace(variant.job, options=options), against=variant.label, over=(variant.label,)
    )
