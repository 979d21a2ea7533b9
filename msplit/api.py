"""What the commands do, as functions: the library's front door. The command line adds only options and printing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from msplit import rules
from msplit.assignment import analysis, assignment, model
from msplit.assignment.analysis import Analysis as Analysis
from msplit.assignment.analysis import diff as diff
from msplit.assignment.assignment import EMITS as EMITS
from msplit.assignment.assignment import Assigned as Assigned
from msplit.assignment.assignment import StreamLoad as StreamLoad
from msplit.assignment.assignment import check_places as check_places
from msplit.assignment.assignment import emit as emit
from msplit.assignment.changes import ModelDifference as ModelDifference
from msplit.assignment.cut import Cut as Cut
from msplit.assignment.cut import cut as cut
from msplit.assignment.model import load as load
from msplit.assignment.model import strip as strip
from msplit.assignment.replicate import Replicated as Replicated
from msplit.assignment.replicate import Replication as Replication
from msplit.assignment.replicate import replicate as replicate
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.cost.gpus import DEFAULT_GPU
from msplit.cost.profile import Profile, Workload
from msplit.flatten.flat import Conflict, FlatGraph
from msplit.formats.model import AssignmentRecord
from msplit.formats.writer import WriteReport
from msplit.progress import Progress
from msplit.rules.ruleset import RuleSet
from msplit.shapes import Shapes

if TYPE_CHECKING:
    from msplit.assignment.plans import ChoosesPlan
    from msplit.benchmark.benchmark import bench as bench
    from msplit.benchmark.comparison import Compared as Compared
    from msplit.benchmark.results import Bench as Bench
    from msplit.engines.cuda.engine import CompiledVariant
    from msplit.run.build import Build as Build
    from msplit.run.build import build as build
    from msplit.run.build import open as open
    from msplit.run.function import CompiledFunction as CompiledFunction
    from msplit.run.function import compile as compile
    from msplit.run.prepare import prepare as prepare
    from msplit.run.request import BenchOptions as BenchOptions
    from msplit.run.request import BuildOptions as BuildOptions
    from msplit.run.request import RunOptions as RunOptions
    from msplit.run.request import StepOptions as StepOptions
    from msplit.run.request import TuneSettings as TuneSettings
    from msplit.run.runner import Runner as Runner
    from msplit.run.tuning import Tuned as Tuned
    from msplit.schedule.search import MeasuringDevice
    from msplit.serving.pool.pool import Pool as Pool
    from msplit.serving.pool.settings import PoolSettings as PoolSettings
    from msplit.training.trainer import Trainer as Trainer
    from msplit.verify.results import Settings as Settings


_LATER = {
    "Bench": "msplit.benchmark.results",
    "bench": "msplit.benchmark.benchmark",
    "Build": "msplit.run.build",
    "build": "msplit.run.build",
    "open": "msplit.run.build",
    "Compared": "msplit.benchmark.comparison",
    "Runner": "msplit.run.runner",
    "prepare": "msplit.run.prepare",
    "Pool": "msplit.serving.pool.pool",
    "PoolSettings": "msplit.serving.pool.scheduler",
    "CompiledFunction": "msplit.run.function",
    "compile": "msplit.run.function",
    **dict.fromkeys(
        ("BenchOptions", "BuildOptions", "RunOptions", "StepOptions", "TuneSettings"), "msplit.run.request"
    ),
    "Tuned": "msplit.run.tuning",
    "Settings": "msplit.verify.results",
    "Trainer": "msplit.training.trainer",
}
"""What runs a model, by where it is: commands that only decide start without it, in a fifth less time."""


def analyze(
    flat: FlatGraph | str | os.PathLike[str],
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
) -> Analysis:
    """Analyzes a graph. Nothing of it is executed.

    Args:
        flat: From `load`, or where the model is.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on this graph, in place of the data sheet.
    """
    return analysis.analyze(flat, Workload(batch, shapes or {}, gpu=gpu, profile=profile))


def pool(
    model: FlatGraph | str | os.PathLike[str],
    *,
    groups: int | str = 4,
    max_batch: int | None = None,
    batches: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    max_delay_us: float = 0.0,
    priorities: int = 1,
    max_queue: int = 0,
    max_rows: int | None = None,
    max_memory: int | None = None,
    host_threads: int | None = None,
    workers: int | str | None = None,
    retries: int = 1,
    latency_us: float | None = None,
    progress: Progress | None = None,
    **options: Unpack[RunOptions],
) -> Pool:
    """Makes a model ready to answer many requests at once: several steps are in flight, over one set of weights.

    This executes the model.

    Args:
        model: From `load`, or where a model or a build is. A build is ready in a second or two; see `build`.
        groups: Slots, which is how many steps are in flight at once; ``auto`` measures.
        max_batch: Most rows of a step; requests that wait are joined up to it, where rows are independent. See `PoolSettings`, as of all
            that follow.
        batches: Numbers of rows to make steps for, which are filled up to the next larger one.
        lengths: Lengths of rows to make steps for, likewise, as for `prepare`; of a build those that it has.
        max_delay_us: How long a step that is not full waits for more rows, in µs.
        priorities: Levels of priority; 0 is the most urgent.
        max_queue: Most requests that may wait; 0: any number.
        max_rows: Most rows of a request; one of more rows than a step has is run in several. None: those of 256 steps.
        max_memory: Most bytes on the device.
        host_threads: Threads for what the host runs.
        workers: Processes on each GPU; ``auto`` measures. None: one on each where `devices` names several, else steps run in this process.
        retries: How often a request is run again whose process has ended.
        latency_us: Of what is ``auto``: the most that 99 of 100 requests may take, in µs.
        progress: Told what is being done and how much of it is done.
        options: As for `prepare`: see `RunOptions`.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: Rows of requests are to be joined, and are not independent; or there is not enough memory.
    """
    from msplit.run.request import RunOptions, request_of
    from msplit.serving.pool import sources
    from msplit.serving.pool.settings import PoolSettings

    settings = PoolSettings(
        groups=groups,
        max_batch=max_batch,
        batches=batches,
        lengths=lengths,
        max_delay_us=max_delay_us,
        priorities=priorities,
        max_queue=max_queue,
        max_rows=max_rows,
        max_memory=max_memory,
        host_threads=host_threads,
        workers=workers,
        retries=retries,
        latency_us=latency_us,
    )
    return sources.pool(model, request_of(pool, RunOptions, options), settings, progress=progress)


def price(
    flat: FlatGraph,
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
) -> tuple[Shapes, Costs]:
    """Shapes of all tensors and cost of all nodes, on a GPU's data sheet or as measured.

    Args:
        flat: The graph.
        batch: Size of unknown leading dimensions of inputs; 1 where it is not given.
        shapes: Whole shapes by input name.
        gpu: Name of a data sheet, see `cost.gpu_names`.
        profile: What was measured on this graph. Shapes that are not given are the profile's, and so is the data sheet if there is one
            of its GPU.

    Raises:
        MsplitError: There is no such data sheet, shapes contradict the graph, or the profile is of another graph or of other shapes.
    """
    return model.price(flat, Workload(batch, shapes or {}, gpu=gpu, profile=profile))


def assign(
    flat: FlatGraph | str | os.PathLike[str],
    ruleset: str | Path | RuleSet = rules.STANDARD,
    *,
    streams: int | None = None,
    wrap: bool = False,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
    priced: tuple[Shapes, Costs] | None = None,
    kernels: ChoosesPlan | None = None,
    keep_ids: bool | None = None,
) -> Assigned:
    """Assigns a stream id to every node by rules. The graph is not changed; `save` writes the ids.

    Nothing is executed, unless the rule `auto` shall choose kernels, too (``kernels: best``): that runs the model once, on made-up inputs.

    Args:
        flat: From `load`, or where the model is.
        ruleset: A rules file, the name of a shipped rule set, or one loaded already.
        streams: Number of streams, instead of what the rules say.
        wrap: Take ids modulo the number of streams, as the forks do, instead of refusing those out of range.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on this graph, in place of the data sheet.
        priced: What `price` gave for this graph, to spare the work.
        kernels: Chooses kernels where a rule asks for that; by default on the GPU where there is one, otherwise on the CPU.
        keep_ids: Whether the ids that are on the graph count: all of them, or none. By default those count that were set by hand, which
            are all but those that msplit's record on the model says to be its own.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph.
    """

    def chooser(flat: FlatGraph, costs: Costs, workload: Workload) -> ChoosesPlan:
        from msplit.run.compilation import chooser_of

        return kernels or chooser_of(flat, costs, workload)

    return assignment.assign(
        flat,
        ruleset,
        Workload(batch, dict(shapes or {}), gpu=gpu, profile=profile),
        streams=streams,
        wrap=wrap,
        priced=priced,
        kernels=chooser,
        keep_ids=keep_ids,
    )


def save(
    flat: FlatGraph | str | os.PathLike[str],
    ids: Ints | Assigned,
    out: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    force: bool = False,
    record: AssignmentRecord | None = None,
) -> tuple[WriteReport, tuple[Conflict, ...]]:
    """Writes the model with `_stream_id` on its nodes, in the format it came in. Host nodes get no id but one they had.

    With an assignment, ids on the model that are neither new nor set by hand are taken off, and a record of what it was made with is
    left with the model.

    Args:
        flat: The graph: from `load`, or where the model is.
        ids: What `assign` gave for `flat`, or just a stream id per node. Only an assignment brings costs and a record with it.
        out: File or folder to write; appears at once and whole, or not at all.
        costs: Decides where call sites of one function want different ids for one node: the costlier wins.
        force: Replace what is there.
        record: What the ids were made with, where they are no assignment. Ids on the model that it does not say to be set by hand go.

    Returns:
        What was written, and the nodes of functions whose call sites wanted different ids.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    if not isinstance(ids, Assigned):
        return model.save(flat, ids, out, costs=costs, force=force, record=record)
    report, _ = model.save(flat, ids.ids, out, costs=costs or ids.costs, force=force, record=assignment.record_of(ids))
    return report, ids.outcome.conflicts


def compare(
    flat: FlatGraph | str | os.PathLike[str],
    *,
    streams: int | None = None,
    ruleset: str | Path | RuleSet = rules.STANDARD,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = DEFAULT_GPU,
    profile: Profile | None = None,
    measure: bool = True,
    device: Callable[[Mapping[str, CompiledVariant]], MeasuringDevice] | None = None,
    tell: Progress | None = None,
) -> Compared:
    """Tries every way to choose streams, and to make kernels. Ids that are on the graph do not count.

    Args:
        flat: From `load`, or where the model is.
        streams: Most streams, instead of what the rules say.
        ruleset: Rules to show beside the algorithms.
        batch: Size of unknown leading dimensions.
        shapes: Whole shapes by input name.
        gpu: Data sheet that prices the nodes.
        profile: What was measured on this graph, in place of the data sheet.
        measure: Whether to measure, and to lower the model to learn what kernels it becomes, where there are a GPU and PyTorch. This
            executes the model.
        device: Makes what measures, in place of the GPU.
        tell: Told what is being done and how much of it is done.

    Raises:
        RulesError: The rules file is wrong.
        AssignError: The rules contradict each other on this graph.
    """
    from msplit.benchmark import comparison

    workload = Workload(batch, dict(shapes or {}), gpu=gpu, profile=profile)
    return comparison.compare(flat, ruleset, workload, streams=streams, measure=measure, device=device, tell=tell)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value
