"""Labels that say what is used, and each plan once: what several requests come to is compiled and measured as one variant."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from msplit.core.graph import Ints
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.run.setup import AblationStep, plural
from msplit.verify.results import Variant


@dataclass(frozen=True, eq=False)
class Distinct:
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


def distinct(variants: Sequence[Variant], steps: Sequence[AblationStep] = ()) -> Distinct:
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
    return Distinct(pointing, tuple(kept.values()), labels, tuple(notes))


def _runs(variant: Variant) -> tuple[Hashable, int]:
    """What tells whether two variants run the same, and how many streams do something."""
    job = variant.job
    if variant.engine is not CUDA:
        streams = _numbered(job.ids[~job.flat.host])
        return (variant.engine, job.tensorflow, job.precision, streams.tobytes()), int(streams.max(initial=0)) + 1
    compiled = CUDA.compile(job)
    plan = compiled.plan(job)
    order = (plan.order.tobytes(), _numbered(plan.stream[plan.order]).tobytes())
    how = (job.options.captures, compiled.layout, job.precision)
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
