"""What larger kernels add to streams: the variants of bench that show it, each one layer more than the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msplit.core.graph import Ints
from msplit.engines.base import Job
from msplit.engines.cuda import engine as cuda
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode
from msplit.errors import EngineError
from msplit.measure.measure import Variant

if TYPE_CHECKING:
    from msplit.decide.kernels import Chooser


@dataclass(frozen=True)
class Layer:
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
class Layers:
    """What is to be measured for the layers, beside what is measured anyway.

    Attributes:
        layers: In order.
        variants: Those to add.
        notes: Which layers change nothing, and are left out.
    """

    layers: tuple[Layer, ...]
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]


AUTO = "auto"
"""Name of the layer that the rule `auto` would choose of all."""


def layers_of(one: Variant, most: tuple[int, Ints, str] | None, *, fuse: bool, group: bool, suffix: str = "") -> Layers:
    """The layers above one stream: more streams, fused pointwise ops, grouped branches; and all of it on one stream.

    Both graphs are lowered here, to see whether there is anything to fuse or to group.

    Args:
        one: The variant on one stream.
        most: The largest number of streams that is measured, its ids, and its label.
        fuse: Whether to show fusion.
        group: Whether to show grouping.
        suffix: Ends the labels of what is added.
    """
    found = [Layer("1 stream", one.label, None)]
    job = one.job
    if most is not None:
        streams, ids, label = most
        found.append(Layer(plural(streams, "stream"), label, one.label))
        job = replace(job, ids=ids, streams=streams)
    added: list[Variant] = []
    notes: list[str] = []
    wanted: list[tuple[KernelMode, str]] = []
    if fuse:
        wanted.append((KernelMode.FUSED, "no pointwise ops can share a kernel"))
    if group:
        mode = KernelMode.of(fuses=fuse, groups=True)
        wanted.append((mode, "running alike branches as one saves no kernels here"))
    kernels = _kernels(job) if wanted else ()
    for name, why in wanted:
        own = replace(job, options=replace(job.options, mode=name))
        try:
            its = _kernels(own)
        except EngineError as problem:
            notes.append(f"{name} is left out: {problem.what}")
            continue
        if its == kernels:
            notes.append(f"{name} is left out: {why}")
            continue
        kernels = its
        label = _label(job.streams, name, suffix)
        asked = (f"{plural(job.streams, 'stream')}, {name}",)
        added.append(Variant(label, one.engine, own, one.label, over=(found[-1].label,), asked=asked))
        found.append(Layer(name, label, found[-1].label))
    if added and most is not None and _uses_streams(added[-1].job):
        last = found[-1]
        alone = replace(added[-1].job, ids=job.ids * 0, streams=1)
        label = _label(1, last.name, suffix)
        added.append(Variant(label, one.engine, alone, one.label))
        found.append(Layer("the same, 1 stream", label, None))
    return Layers(tuple(found), tuple(added), tuple(notes))


def predicted(layers: Sequence[Layer], variants: Sequence[Variant]) -> tuple[Layer, ...]:
    """The layers with simulated times; as they are where steps can not be captured, which the simulator knows nothing of.

    Args:
        layers: The layers.
        variants: Those that they name, and perhaps more.
    """
    if not layers:
        return ()
    jobs = {variant.label: variant.job for variant in variants}
    found = []
    for layer in layers:
        job = jobs[layer.label]
        known = layer.predicted_us is not None or not job.options.capture or _program(job).dynamic
        found.append(layer if known else replace(layer, predicted_us=cuda.predicted_us(job)))
    return tuple(found)


def auto_layer(one: Variant, chooser: Chooser, variants: Sequence[Variant]) -> Layers:
    """What the rule `auto` likes best of all kernels on all streams. It may be measured anyway: see `measure.distinct`.

    Args:
        one: The variant on one stream.
        chooser: After the rule has asked it.
        variants: Those that are measured.
    """
    chosen, ways = chooser.chosen, chooser.ways
    if ways is None:
        return Layers((), (), ())
    best = ways.plain.best if chosen is None else ways.favourite.best
    where = f"on {plural(best.streams, 'stream')}"
    over = f"predicted {ways.one_us / best.makespan_us:.2f} times one stream of plain ones"
    said = (
        f"auto chooses among kernels, too: {'plain' if chosen is None else chosen.planned.kernels} ones {where}, {over}"
    )
    if chosen is None:
        same = one if best.streams == 1 else max(variants, key=lambda variant: variant.job.streams)
        return Layers((), (replace(same, label=f"msplit, {AUTO}", asked=(AUTO,), over=()),), (said,))
    made = chosen.planned
    label = f"msplit, {AUTO}: {plural(made.streams, 'stream')}, {made.kernels}"
    layer = Layer(AUTO, label, None, chosen.predicted_us)
    return Layers((layer,), (Variant(label, one.engine, made.on(one.job), one.label, asked=(AUTO,)),), (said,))


def plural(count: int, unit: str) -> str:
    """1 stream, 2 streams."""
    return f"{count} {unit}{'s' * (count != 1)}"


def _label(streams: int, name: str, suffix: str) -> str:
    return f"msplit, {plural(streams, 'stream')}, {name}{suffix}"


def _kernels(job: Job) -> Sequence[Any]:
    """What runs, to see whether two jobs run the same."""
    return [(step.op.op, tuple(step.op.source_nodes)) for step in _program(job).steps]


def _uses_streams(job: Job) -> bool:
    """Whether there is anything left to spread over several streams."""
    return bool(_program(job).lanes(job.ids)[1] > 1)


def _program(job: Job) -> Any:
    return ENGINE.compile(job).program
