"""What larger kernels add to streams: the variants of bench that show it, each one step more than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msplit.core.graph import Ints
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode
from msplit.errors import EngineError
from msplit.run.setup import Ablation, AblationStep, plural
from msplit.verify.results import Variant


def list_steps(one: Variant, most: tuple[int, Ints, str] | None, modes: Sequence[KernelMode]) -> Ablation:
    """The steps above one stream that are asked for: more streams, then larger kernels, whether they change anything or not.

    Args:
        most: The largest number of streams that is measured, its ids, and its label.
        modes: The larger kernels, each with what those before it have.
    """
    steps = [AblationStep("1 stream", one.label, None)]
    job = one.job
    if most is not None:
        streams, ids, label = most
        steps.append(AblationStep(plural(streams, "stream"), label, one.label))
        job = replace(job, ids=ids, streams=streams)
    added: list[Variant] = []
    for mode in modes:
        own = replace(job, options=replace(job.options, mode=mode))
        label, asked = _label(own, mode), (f"{plural(job.streams, 'stream')}, {mode}",)
        added.append(Variant(label, one.engine, own, one.label, over=(steps[-1].label,), asked=asked))
        steps.append(AblationStep(mode, label, steps[-1].label))
    return Ablation(tuple(steps), tuple(added))


def compile_steps(one: Variant, listed: Ablation) -> Ablation:
    """Of the steps that `list_steps` gave, those that change what runs, and the last of them on one stream, too.

    The graph is compiled for each.
    """
    larger = {variant.label: variant for variant in listed.variants}
    steps = [step for step in listed.steps if step.label not in larger]
    added: list[Variant] = []
    notes: list[str] = []
    kernels = ENGINE.compile(one.job).kernels() if larger else ()
    for step in listed.steps[len(steps) :]:
        variant = larger[step.label]
        try:
            its = ENGINE.compile(variant.job).kernels()
        except EngineError as problem:
            notes.append(f"{step.name} is left out: {problem.what}")
            continue
        if its == kernels:
            notes.append(f"{step.name} is left out: {_NOTHING[variant.job.options.mode.groups]}")
            continue
        kernels = its
        added.append(replace(variant, over=(steps[-1].label,)))
        steps.append(replace(step, before=steps[-1].label))
    if added and ENGINE.compile(added[-1].job).streams(added[-1].job.ids) > 1:
        alone = on_one_stream(added[-1], one)
        added[-1] = replace(added[-1], over=(*added[-1].over, alone.label))
        added.append(alone)
        steps.append(AblationStep("the same, 1 stream", alone.label, None))
    return Ablation(tuple(steps), tuple(added), tuple(notes))


def on_one_stream(variant: Variant, one: Variant) -> Variant:
    """The same kernels as a variant's on one stream, given one stream of plain ones."""
    if variant.job.options.mode is KernelMode.PLAIN:
        return one
    job = replace(one.job, options=replace(variant.job.options, plan=None))
    return Variant(_label(job, variant.job.options.mode), one.engine, job, one.label)


_NOTHING = {
    False: "no pointwise ops can share a kernel",
    True: "running alike branches as one saves no kernels here",
}
"""By whether branches are grouped: why larger kernels change nothing."""


def predicted(steps: Sequence[AblationStep], variants: Sequence[Variant]) -> tuple[AblationStep, ...]:
    """The steps with simulated times; as they are where steps can not be captured, which the simulator knows nothing of."""
    jobs = {variant.label: variant.job for variant in variants}
    found = []
    for step in steps:
        job = jobs[step.label]
        known = step.predicted_us is not None or not job.options.captures or ENGINE.compile(job).dynamic
        found.append(step if known else replace(step, predicted_us=ENGINE.compile(job).predicted_us(job)))
    return tuple(found)


def _label(job: Job, name: str) -> str:
    return f"msplit, {plural(job.streams, 'stream')}, {name}{'' if job.options.captures else ', eager'}{job.precision.suffix}"
