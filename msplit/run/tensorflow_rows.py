"""Rows of a bench that need stream ids: TensorFlow's, and those of each number of streams.

The rows of stock TensorFlow: on one stream, on logical devices, on devices that somebody names, and with NVIDIA's switches.

Stream ids for each number of streams that a bench asks for: by rules, or those of the graph, folded where they are too many.

Those that show what larger kernels add to streams, each one step more than the one before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit import formats, rules
from msplit.assignment.assignment import assign, present_ids
from msplit.assignment.model import anew
from msplit.assignment.plans import with_kernels
from msplit.core.arguments import Precision
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.engines.base import ClusterOptions, Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode
from msplit.engines.tensorflow.cluster import Function, places
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import JsonValue
from msplit.inputs.make import calling, imported, is_function
from msplit.rules.auto import PLAIN
from msplit.run.request import RunRequest
from msplit.run.setup import Ablation, AblationStep, StreamIds, plural
from msplit.shapes import Shapes
from msplit.verify.results import Variant
from msplit.verify.tensorflow_process import OWN_PROCESS

_MOST_BYTES = 256 << 20
"""Of a file of devices: a million nodes with long names."""

_FIX = "give module:function, or what `msplit assign --emit placement` writes"


def tensorflow_variants(job: Job, assignments: Sequence[StreamIds], request: RunRequest) -> list[Variant]:
    """What TensorFlow runs for a request, the model as it is first.

    Raises:
        EngineError: A switch says something of logical devices that no row has.
        MsplitError: Where nodes are to go is not told.
    """
    variants = [Variant(f"TensorFlow, 1 stream{job.precision.suffix}", TENSORFLOW, job)]
    if request.cluster is not None:
        return [*variants, *_over(job, assignments, request.cluster)]
    for streams, ids, _ in assignments:
        label = f"TensorFlow, {plural(streams, 'logical device')}{job.precision.suffix}"
        asked = (plural(streams, "stream"),)
        variants.append(Variant(label, TENSORFLOW, replace(job, ids=ids, streams=streams), asked=asked))
    if request.place is not None:
        variants.append(_placed(job, request.place))
    return [*variants, *switched(variants, request)]


def _over(job: Job, assignments: Sequence[StreamIds], cluster: ClusterOptions) -> list[Variant]:
    """A cluster on one of its devices and on several."""
    # What is measured leaves others' variables alone.
    own = replace(job.tensorflow, cluster=replace(cluster, container=None))
    variants = []
    for streams, ids in [(1, job.ids), *((streams, ids) for streams, ids, _ in assignments)]:
        if streams > len(cluster.devices):
            continue  # a graph's own ids, on a cluster of one device
        on = plural(streams, "stream")
        over = replace(job, ids=ids, streams=streams, tensorflow=own)
        variants.append(
            Variant(
                f"TensorFlow on the cluster, {on}",
                TENSORFLOW,
                over,
                f"TensorFlow, 1 stream{job.precision.suffix}",
                asked=(on,),
            )
        )
    return variants


def switched(variants: Sequence[Variant], request: RunRequest) -> list[Variant]:
    """A row for each of NVIDIA's switches that is on: of the most logical devices, or of as many as it says something of.

    Raises:
        EngineError: There is no row with as many.
    """
    found = []
    for name, options in request.tensorflow.switches.items():
        wanted = len(options.priorities or options.limits)
        of = next((one for one in reversed(variants) if wanted in (0, one.job.streams)), None)
        if of is None:
            raise EngineError(
                f"{name}: that is {plural(wanted, 'logical device')}, and no row has as many",
                fix=f"ask for them: --engine tensorflow --streams {wanted}",
            )
        job = replace(of.job, tensorflow=replace(options, devices=of.job.tensorflow.devices))
        found.append(Variant(f"{of.label}, {name}", OWN_PROCESS, job, of.label, optional=True))
    return found


def mixed(plain: Variant) -> list[Variant]:
    """TensorFlow's row with its own mixed precision, which is float16 on a GPU."""
    job = replace(plain.job, precision=Precision.FP16)
    return [Variant(f"{plain.label}, mixed precision", TENSORFLOW, job, plain.label, optional=True)]


def _placed(job: Job, place: str | Function) -> Variant:
    """The model with each node on the device that a function or a file gives it."""
    if isinstance(place, str):
        name, function = place, _named(place)
    else:
        name, function = getattr(place, "__qualname__", "a function"), place
    with calling(name):
        found = places(job.flat, function, name)
    own = replace(job.tensorflow, devices=found.devices)
    placed = replace(job, ids=found.ids, streams=len(found.devices), tensorflow=own)
    return Variant(f"TensorFlow, placed by {name}", TENSORFLOW, placed)


def _named(place: str) -> Function:
    """The function of a ``module:function``, or one that looks nodes up in a file."""
    if os.path.lexists(place):
        devices = _devices(place)
        return lambda node: devices.get(node.name)
    if not is_function(place):
        raise MsplitError(f"{place!r} is no file and names no function", where="--place", fix=_FIX)
    return imported(place, "that gives a node its device")


def _devices(path: str) -> dict[str, str]:
    """Node -> device, as the file says."""
    data = JsonValue.read(path, _MOST_BYTES, what="placement", fix=_FIX).object(("schema_version", "devices"))
    return {name: device.text() for name, device in data.at("devices").entries()}


def assignments_for(
    flat: FlatGraph, sizes: Shapes, costs: Costs, request: RunRequest
) -> tuple[list[StreamIds], list[str]]:
    """Ids for each number of streams asked for, 1 left out, and what to tell the user."""
    wanted = sorted({streams for streams in request.streams if streams > 1})
    notes: list[str] = []
    found: list[StreamIds] = []
    annotated = bool(flat.graph.nodes_with(formats.STREAM_ID))
    if request.ruleset is None and annotated:
        ids = present_ids(flat)
        highest = int(ids.max(initial=0)) + 1
        used = plural(len(np.unique(ids)), "stream")
        notes.append(f"the graph runs as it is annotated, on {used}; --rules assigns anew")
        for streams in sorted({min(streams, highest) for streams in wanted} or {highest}):
            folded = fold_ids(ids, costs.time_us, streams)
            if folded.note:
                notes.append(folded.note)
            found.append(StreamIds(folded.streams, folded.ids))
        return found, notes
    name = request.ruleset or rules.STANDARD
    for streams in wanted:
        ruleset = with_kernels(rules.load(name, streams=streams), PLAIN)
        if annotated:
            ruleset = anew(ruleset, flat)
        assigned = assign(flat, ruleset, streams=streams, priced=(sizes, costs))
        found.append(StreamIds(streams, assigned.ids, assigned.outcome.assignment))
    in_place = ", in place of the ids in the file" if annotated else ""
    notes.append(f"streams are assigned by the rule set {name}{in_place}")
    return found, notes


@dataclass(frozen=True, eq=False)
class Folded:
    """Stream id per node, on at most as many streams as were asked for. `note` says what was done, "" where nothing was."""

    ids: Ints
    streams: int
    note: str = ""


def fold_ids(ids: Ints, costs_time: NDArray[np.float64], streams: int) -> Folded:
    """Packs ids onto fewer streams so that their loads are even: the most loaded id first, each to the least loaded stream.

    Longest processing time first (Graham 1969), by the time of each node in any unit. Id 0 stays on stream 0. An assignment with few
    enough ids stays as it is.

    Raises:
        ValueError: `streams` is not positive.
    """
    if streams < 1:
        raise ValueError(f"streams must be at least 1, not {streams}")
    used = np.unique(ids)
    highest = int(used[-1]) + 1 if len(used) else 1
    if highest <= streams:
        return Folded(ids, highest)
    number = np.searchsorted(used, ids)
    # Nodes that cost nothing still count a little, so that ids of an unknown graph spread.
    load = np.bincount(number, weights=np.maximum(costs_time, 0.0), minlength=len(used))
    nodes = np.bincount(number, minlength=len(used))
    order = sorted(range(len(used)), key=lambda i: (-load[i], -nodes[i], int(used[i])))
    total = np.zeros(streams)
    count = np.zeros(streams, dtype=np.int64)
    target = np.zeros(len(used), dtype=np.int32)
    for i in order:
        stream = min(range(streams), key=lambda s: (total[s], count[s], s))
        target[i] = stream
        total[stream] += load[i]
        count[stream] += nodes[i]
    if used[0] == 0 and target[0] != 0:
        home = int(target[0])
        target = np.where(target == home, 0, np.where(target == 0, home, target)).astype(np.int32)
    note = f"the graph uses {len(used)} stream ids up to {highest - 1}; they are folded onto {streams} by load"
    return Folded(target[number].astype(np.int32), int(target.max()) + 1, note)


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
    """Of the steps that `list_steps` gave, those that change what runs, and the last of them on one stream, too. Where rows are shared
    also all rows, users repeated first: a small model can be faster so, since alike branches of as many rows run as one.

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
    if (shared := one.job.options.shared) is not None:
        most = (
            listed.variants[-1] if listed.variants else one
        )  # grouped, whether that changes anything of fewer rows or not
        every = replace(most.job, options=replace(most.job.options, shared=replace(shared, whole=True)))
        label, asked = f"{_label(every, every.options.mode)}, users repeated", ("users repeated",)
        added.append(Variant(label, one.engine, every, one.label, over=(steps[-1].label,), asked=asked))
        steps.append(AblationStep("users repeated", label, steps[-1].label))
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
        known = step.predicted_us is not None or not job.options.captures_alone or ENGINE.compile(job).dynamic
        found.append(step if known else replace(step, predicted_us=ENGINE.compile(job).predicted_us(job)))
    return tuple(found)


def _label(job: Job, name: str) -> str:
    return f"msplit, {plural(job.streams, 'stream')}, {name}{'' if job.options.capture else ', eager'}{job.precision.suffix}"
