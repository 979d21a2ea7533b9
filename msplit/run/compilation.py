"""The stage that compiles: of what was asked for, which variants differ in what they run, and what `auto` and tuning choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msplit import rules
from msplit.assignment.assignment import assign
from msplit.assignment.defaults import anew
from msplit.assignment.plans import ends_with_auto, with_kernels
from msplit.engines.base import Engine, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode
from msplit.errors import MsplitError
from msplit.progress import Progress, phase
from msplit.rules.auto import BEST, Auto
from msplit.run.ablation import compile_steps, predicted
from msplit.run.dedupe import distinct
from msplit.run.kernels import Chooser
from msplit.run.request import RunRequest
from msplit.run.setup import Ablation, AblationStep, Setup, on_all, one_stream, plan_label, plural
from msplit.run.tuning import TUNED, Tuned, tune
from msplit.verify.results import Variant


@dataclass(frozen=True, eq=False)
class CompiledSetup:
    """What is measured.

    Attributes:
        variants: Each plan once, named after what it uses.
        steps: From one stream to streams to larger kernels, on the cuda engine: which variant shows what.
        tuned: What tuning found, if it was asked for.
        labels: What variants were called after what was asked for -> label of the variant that runs that; see `dedupe`.
        tuned_label: Label of the variant that runs what tuning found; "" where there is none.
        notes: All that is to be told, that of the setup first.
        rows: What is to be told of variants that run the same as others, in a table of all.
    """

    variants: tuple[Variant, ...]
    steps: tuple[AblationStep, ...]
    tuned: Tuned | None
    labels: Mapping[str, str]
    tuned_label: str
    notes: tuple[str, ...]
    rows: tuple[str, ...]


def compiled(setup: Setup, progress: Progress | None = None) -> CompiledSetup:
    """Compiles what is listed, and leaves out what is no other than what is there already. Tuning, where it is asked for, measures.

    Raises:
        EngineError: The engine can not run or not capture the model.
    """
    request, variants, notes, steps = setup.request, list(setup.variants), list(setup.notes), tuple[AblationStep, ...]()
    if setup.ablation.steps:
        shown = compile_steps(one_stream(variants), setup.ablation)
        auto = _auto(setup, [*variants, *shown.variants], progress)
        variants += [*shown.variants, *auto.variants]
        steps = shown.steps + auto.steps
        notes += [*shown.notes, *auto.notes]
    if setup.planned is not None:
        variants.append(setup.planned)
        notes += setup.plan_notes
        if not CUDA.compile(setup.planned.job).runs_as_stored(setup.planned.job):
            notes.append("of the plan only the streams are used: it holds no order of the kernels that run here")
    tuned, found = None, list[Variant]()
    if request.tune is not None:
        base = replace(setup.job, options=request.options)
        given = [(f"{request.ruleset or 'rules'}-{streams}", ids) for streams, ids, _ in setup.assignments]
        how = replace(request.tune, kernels=_modes(request, request.tune.kernels))
        most = max(request.streams, default=1)
        with phase("tuning"):
            tuned = tune(base, how, streams=most, given=given, batch=request.workload.batch or 1, tell=progress)
        found = _tuned_variants(base, tuned, one_stream(variants).label, setup.engine)
        variants += found
    settled = distinct(variants, steps)
    return CompiledSetup(
        variants=settled.variants,
        steps=predicted(settled.steps, settled.variants),
        tuned=tuned,
        labels=settled.labels,
        tuned_label=settled.labels[found[-1].label] if found else "",
        notes=tuple(notes),
        rows=settled.notes,
    )


def chosen_variant(setup: Setup, made: CompiledSetup, label: str | None = None) -> Variant:
    """The variant to run: of this label; else what tuning found, the plan, or what should be the fastest by simulation.

    Raises:
        MsplitError: There is none of this label.
    """
    label = label or made.tuned_label or None
    if label is not None:
        label = made.labels.get(label, label)
        for one in made.variants:
            if label in (one.label, on_all(one, setup.request).label):
                return one
        labels = ", ".join(one.label for one in made.variants)
        raise MsplitError(f"there is no variant {label!r}", fix=f"one of: {labels}")
    if setup.engine is not CUDA:
        over = [one for one in made.variants if one.job.tensorflow.cluster is not None]
        placed = next((one for one in made.variants if one.job.tensorflow.devices), made.variants[0])
        return max(over, key=lambda one: one.job.streams, default=placed)
    if setup.request.plan is not None:
        planned = made.labels[plan_label(setup.request.plan)]
        return next(one for one in made.variants if one.label == planned)
    split = [one for one in made.variants if one.job.options.split]
    if split:  # who asks for several GPUs gets them
        return max(split, key=lambda one: one.job.streams)
    known = [step for step in made.steps if step.predicted_us is not None]
    if not known:
        return max(made.variants, key=lambda one: one.job.streams)
    best = min(known, key=lambda step: step.predicted_us or 0.0).label
    return next(one for one in made.variants if one.label == best)


def beside_float32(setup: Setup, made: CompiledSetup) -> tuple[Variant, ...]:
    """The variants; of half precision, what should be the fastest once more in float32 behind them, to show what that gains and costs."""
    if not setup.job.precision.half:
        return made.variants
    best = chosen_variant(setup, made)
    job = replace(best.job, precision=best.job.precision.wide, options=replace(best.job.options, plan=None))
    label = f"{best.label.removesuffix(best.job.precision.suffix)}, float32"
    own = [replace(one, over=(*one.over, label)) if one is best else one for one in made.variants]
    return (*own, Variant(label, best.engine, job))


def _auto(setup: Setup, variants: Sequence[Variant], progress: Progress | None) -> Ablation:
    """What the rule `auto` would run, where it has the last word and the user has asked for it."""
    request, job = setup.request, setup.job
    if request.ruleset is None:
        return Ablation()
    most = max(request.streams, default=1)
    ruleset = with_kernels(rules.load(request.ruleset, streams=most), BEST)
    modes = _modes(request, tuple(KernelMode))
    if not ends_with_auto(ruleset) or len(modes) < 2:
        return Ablation()
    if not request.capture:
        return Ablation(notes=("auto chooses kernels for CUDA graphs, so it does not choose any here",))
    ruleset = anew(ruleset, job.flat)
    one = one_stream(variants)
    chooser = Chooser(lambda: one.job, batch=request.workload.batch, names=modes, tell=progress)
    assigned = assign(job.flat, ruleset, streams=most, priced=setup.priced, kernels=lambda *_: chooser)
    if chooser.tried is None or (assigned.kernels is None and chooser.chosen is not None):
        remarks = assigned.outcome.remarks
        said = (one.text for one in remarks if one.rule == Auto.key and "kernels" in one.kind)
        return Ablation(notes=tuple(f"auto: {text}" for text in said))
    return _auto_step(one, chooser, variants)


_AUTO = "auto"
"""Name of the step that the rule `auto` would choose of all."""


def _auto_step(one: Variant, chooser: Chooser, variants: Sequence[Variant]) -> Ablation:
    """What the rule `auto` likes best of all kernels on all streams, once it has asked the chooser.

    It may be among the variants that are measured anyway: see `dedupe`.
    """
    chosen, tried = chooser.chosen, chooser.tried
    if tried is None:
        return Ablation()
    best = tried.plain.best if chosen is None else tried.favourite.best
    where = f"on {plural(best.streams, 'stream')}"
    over = f"predicted {tried.one_us / best.makespan_us:.2f} times one stream of plain ones"
    said = (
        f"auto chooses among kernels, too: {'plain' if chosen is None else chosen.planned.kernels} ones {where}, {over}"
    )
    if chosen is None:
        same = one if best.streams == 1 else max(variants, key=lambda variant: variant.job.streams)
        return Ablation((), (replace(same, label=f"msplit, {_AUTO}", asked=(_AUTO,), over=()),), (said,))
    made = chosen.planned
    label = f"msplit, {_AUTO}: {plural(made.streams, 'stream')}, {made.kernels}"
    step = AblationStep(_AUTO, label, None, chosen.predicted_us)
    return Ablation((step,), (Variant(label, one.engine, made.on(one.job), one.label, asked=(_AUTO,)),), (said,))


def _modes(request: RunRequest, wanted: Sequence[str]) -> tuple[KernelMode, ...]:
    """The kernels that may be tried."""
    return tuple(
        mode
        for mode in map(KernelMode, wanted)
        if (request.fuses or not mode.fuses) and (request.group or not mode.groups)
    )


def _tuned_variants(job: Job, tuned: Tuned, one: str, engine: Engine) -> list[Variant]:
    """The tuned plan, and one stream of its kernels if these are not what the others have."""
    if tuned.gain is None:
        return []  # one stream it stays, and that is measured
    own = tuned.on(job)
    found = []
    if tuned.kernels is not KernelMode.PLAIN and tuned.streams > 1:
        alone = replace(own.options, plan=None)
        found.append(Variant(f"msplit, 1 stream, {tuned.kernels}", engine, replace(job, options=alone), one))
    return [*found, Variant(f"{TUNED}, {plural(tuned.streams, 'stream')}", engine, own, one)]
