"""Compilation of what a bench or `prepare` asks for: variants, choices of the simulator, and rows that would be the same.

The stage that compiles: of what was asked for, which variants differ in what they run, and what `auto` and tuning choose.

Kernels and streams are chosen together, in the simulator: for the rule `auto` with `kernels: best`, and for `bench`.

Labels that say what is used, and each plan once: what several requests come to is compiled and measured as one variant.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from msplit import progress, rules
from msplit.assignment.assignment import assign
from msplit.assignment.model import anew
from msplit.assignment.plans import Chosen, Planned, ends_with_auto, planned, with_kernels
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Engine, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.errors import INSTALL_PYTORCH, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.make import feeds_for
from msplit.progress import Progress, phase
from msplit.rules.auto import BEST, NOT_CHOSEN, PLAIN, Auto
from msplit.rules.base import KernelStreams, Remark
from msplit.run.request import RunRequest
from msplit.run.setup import Ablation, AblationStep, Setup, on_all, one_stream, plan_label, plural
from msplit.run.tensorflow_rows import compile_steps, predicted
from msplit.run.tuning import TUNED, Tuned, tune
from msplit.verify.results import Variant

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import SimulatedVariant, SimulatedVariants


@dataclass(frozen=True, eq=False)
class Deduped:
    """Variants of which no two run the same.

    Attributes:
        variants: In their order, named after what they use.
        steps: Those that still add something.
        labels: The label that a variant was given before -> that of the variant that runs it.
        notes: Which variant stands for what else was asked for, in sentences.
    """

    variants: tuple[Variant, ...]
    steps: tuple[AblationStep, ...]
    labels: Mapping[str, str]
    notes: tuple[str, ...]


def dedupe(variants: Sequence[Variant], steps: Sequence[AblationStep] = ()) -> Deduped:
    """Of variants that run the same kernels in the same order on the same streams, the first only, and the steps that they show.

    Variants are named after what was asked for. Each is compiled to tell.
    """
    alike: dict[Hashable, list[Variant]] = {}
    used: dict[Hashable, int] = {}
    for variant in variants:
        key, streams = _runs(variant)
        alike.setdefault(key, []).append(variant)
        used.setdefault(key, streams)
    labels: dict[str, str] = {}
    notes: list[str] = []
    found: dict[str, Variant] = {}
    for key, members in alike.items():
        variant = members[0]
        label = _label(variant, used[key], found)
        labels |= {member.label: label for member in members}
        asked = tuple(dict.fromkeys(one for member in members for one in member.asked or _own_name(member, variant)))
        others = [one for one in asked if one not in label]
        if others:
            too = ", too" if len(others) < len(asked) or not variant.asked else ""
            notes.append(f"the row '{label}' is what runs for {_joined(others)}{too}")
        found[label] = replace(variant, label=label, asked=asked, used=used[key])
    before = {variant.label: variant for variant in variants}
    kept: dict[str, AblationStep] = {}
    for step in steps:
        label = labels[step.label]
        name = _with_used(step.name, before[step.label], found[label].used or 1)
        below = None if step.before is None else labels[step.before]
        kept.setdefault(label, replace(step, name=name, label=label, before=below))
    pointing = tuple(_pointing(variant, labels) for variant in found.values())
    return Deduped(pointing, tuple(kept.values()), labels, tuple(notes))


def _runs(variant: Variant) -> tuple[Hashable, int]:
    """What tells whether two variants run the same, and how many streams do something."""
    job = variant.job
    if variant.engine is not CUDA:
        streams = _numbered(job.ids[~job.flat.host])
        return (variant.engine, job.tensorflow, job.precision, streams.tobytes()), int(streams.max(initial=0)) + 1
    compiled = CUDA.compile(job)
    plan = compiled.plan(job)
    order = (plan.order.tobytes(), _numbered(plan.stream[plan.order]).tobytes())
    how = (job.options.capture, job.options.split, compiled.layout, job.precision)
    return (variant.engine.name, how, compiled.kernels(), order), max(plan.streams, 1)


def _numbered(streams: Ints) -> Ints:
    """Streams numbered as they come: two assignments that differ in the numbers only are the same."""
    _, first, inverse = np.unique(streams, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)].astype(np.int32)


def _label(variant: Variant, used: int, taken: Collection[str]) -> str:
    """The label with the streams that are used; with those asked for behind it where another has it."""
    if not variant.asked:
        return variant.label
    label = _with_used(variant.label, variant, used)
    return f"{label} ({variant.asked[0]} asked for)" if label in taken else label


def _own_name(variant: Variant, kept: Variant) -> tuple[str, ...]:
    """What to call a variant that nobody asked for in streams, such as that of a plan file, where another runs it."""
    return () if variant is kept else (variant.label.removeprefix("msplit, "),)


def _with_used(text: str, variant: Variant, used: int) -> str:
    unit = "stream" if variant.engine is CUDA else "logical device"
    return text.replace(plural(variant.job.streams, unit), plural(used, unit), 1)


def _pointing(variant: Variant, labels: Mapping[str, str]) -> Variant:
    """The variant with the labels that others have now; it is compared with each of them once, and not with itself."""
    against = None if variant.against is None else labels[variant.against]
    over = dict.fromkeys(labels[label] for label in variant.over)
    return replace(
        variant,
        against=None if against == variant.label else against,
        over=tuple(label for label in over if label not in (variant.label, against)),
    )


def _joined(words: Sequence[str]) -> str:
    return " and for ".join([", for ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
    settled = dedupe(variants, steps)
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
    variants = {one.label: one for one in made.variants}
    best = min(known, key=lambda step: _predicted(step, variants[step.label]))
    return variants[best.label]


_WORTH = 1.05
"""Predicted times of the same step on all rows before its rows are computed once. Of seven rankers of 512 items on an H200 those that were
less, 3.6 and 1.4 %, took 8 and 3 % longer (`benchmarks/ranking.md`)."""


def _predicted(step: AblationStep, variant: Variant) -> float:
    shared = variant.job.options.shared
    return (step.predicted_us or 0.0) / (_WORTH if shared is not None and shared.whole else 1.0)


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


MADE_HERE = ("gpu", "driver", "torch")
"""Conditions that a plan does not depend on if no GPU had a part in it."""


def why_not() -> str | None:
    """The reason why larger kernels can not be looked for here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch, which tells what kernels a model becomes, is not installed: {INSTALL_PYTORCH}"
    return None


def job_of(flat: FlatGraph, costs: Costs, workload: Workload) -> Job:
    """The model on one stream with made-up inputs, on the GPU where there is one, otherwise on the CPU."""
    if workload.profile is not None and workload.batch is None:
        workload = replace(workload, shapes={**workload.profile.shapes, **workload.shapes})
    feeds = feeds_for(flat, workload)
    device = "cpu" if CUDA.unavailable() else "cuda"
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions(device))


def chooser_of(flat: FlatGraph, costs: Costs, workload: Workload) -> Chooser:
    """The chooser of kernels for a model, on the GPU where there is one, otherwise on the CPU."""
    return Chooser(lambda: job_of(flat, costs, workload), batch=workload.batch)


class Chooser:
    """Chooses kernels and streams for the rule `auto`; see `rules.base.ChoosesKernels`. Afterwards it tells what it found.

    Args:
        job: Makes the model, its inputs, its costs, and the engine's options, once that is asked for.
        batch: For the plan.
        names: Kernel modes that may be tried, plain ones first.
        tell: Told what is being done, in place of whoever listens to `msplit.progress`.

    Attributes:
        tried: All that was tried; None before, and where nothing could be.
        chosen: The best; None where that is plain kernels.
    """

    def __init__(
        self,
        job: Callable[[], Job],
        *,
        batch: int | None = None,
        names: Sequence[str] = tuple(KernelMode),
        tell: Progress | None = None,
    ) -> None:
        self._job, self._batch, self._names, self._tell = job, batch, names, tell
        self.tried: SimulatedVariants | None = None
        self.chosen: Chosen | None = None

    def __call__(
        self,
        streams: int,
        *,
        tied: Ints,
        candidates: Sequence[str] | None = None,
        wait_us: float | None = None,
    ) -> KernelStreams | Remark:
        """Choose kernels, as `rules.base.ChoosesKernels` says."""
        self.tried = self.chosen = None
        if (missing := why_not()) is not None:
            return _not(missing)
        job = self._job()
        try:
            with progress.telling() as tell:
                tell = self._tell or tell
                compiled = CUDA.variants(job, tied, self._names, tell=tell)
                found = compiled.simulate(streams, candidates=candidates, wait_us=wait_us, tell=tell)
        except EngineError as error:
            return _not(error.what)
        if found is None:
            return _not("nothing launches a kernel")
        self.tried = found
        if found.dynamic:
            return _not("shapes depend on values, so the model can not be captured")
        taken = found.favourite
        plain = found.plain
        if taken is plain:
            larger = [name for name in found.variants if name != PLAIN]
            better = (
                f"in the simulator neither {' nor '.join(larger)} ones gain" if larger else "larger ones are the same"
            )
            return Remark(Auto.key, "kernels", f"kernels stay plain: {better}")
        variant = taken.compiled
        bound = variant.bind(taken.candidate())
        made = planned(variant.job, bound, layout=variant.compiled.layout, batch=self._batch)
        if not job.options.on_gpu:
            made = _portable(made)
        self.chosen = Chosen(made, taken.best.name, taken.best.makespan_us, found.one_us, plain.best.makespan_us)
        ids = np.where(job.flat.host, -1, made.node_ids).astype(np.int32)
        return KernelStreams(ids, describe(taken, plain))


def describe(taken: SimulatedVariant, plain: SimulatedVariant) -> str:
    """A sentence about what is taken, beside plain kernels."""
    best, other = taken.best, plain.best
    where = f"on {best.streams} streams" if best.streams > 1 else "on one stream"
    text = f"{taken.name} kernels {where} ('{best.name}') are fastest in the simulator: {best.makespan_us:.0f} µs"
    beside = f", {other.makespan_us:.0f} on {other.streams}" if other.streams > 1 else ""
    return f"{text}; plain ones take {plain.one.makespan_us:.0f} on one stream{beside}"


def _portable(made: Planned) -> Planned:
    """Without what only says how it was lowered: no GPU was there to choose a memory layout, say."""
    made_for = {key: value for key, value in made.made_for.items() if key not in MADE_HERE}
    options = {key: value for key, value in made_for.get("options", {}).items() if key != "layout"}
    return replace(made, made_for={**made_for, "options": options})


def _not(why: str) -> Remark:
    return Remark(Auto.key, NOT_CHOSEN, f"kernels stay plain: {why}")
