"""From a flat graph to a compiled one: ops that run on the device, and what the host runs before and behind them.

Example: a model looks up words in a table, multiplies, and names the best class. The look-up of strings is for the host, which runs it
with TensorFlow before the step; ``MatMul``, ``BiasAdd`` and ``Relu`` become one op for the device; the class's name is the host's
again, afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.analysis.rows.walk import walked
from msplit.analysis.shared import REPEATING, RepeatedRows, inputs_read
from msplit.core.arguments import Precision
from msplit.engines.base import BESIDE_VARIABLES, FIRST_SCALE, LOSS_SCALE, STEPS, USERS, Arrays, Job
from msplit.engines.cuda.autotune.tuner import Family, Tuner, choosing_for
from msplit.engines.cuda.device.device import Device, precision, telling_out_of_memory
from msplit.engines.cuda.frontend.functionalize import raise_control
from msplit.engines.cuda.frontend.importer import build
from msplit.engines.cuda.frontend.partition import divide, refuse
from msplit.engines.cuda.frontend.variables import keyed_contents
from msplit.engines.cuda.ir.functions import FUNCTIONAL
from msplit.engines.cuda.ir.graph import Key, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.kernels.toolchain import kept, kernel_folder
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.ops.variables import KEEPS_SHAPE
from msplit.engines.cuda.options import KernelMode, Shards, SharedRows, rows_of_users
from msplit.engines.cuda.passes.distributed.split import Split
from msplit.engines.cuda.passes.horizontal_fusion import merge_facts
from msplit.engines.cuda.passes.pipeline import Context, list_fusions, run_passes, specialized_copy
from msplit.engines.cuda.passes.pointwise_fusion import fuse
from msplit.engines.cuda.passes.pointwise_fusion.fuse import likely_groups
from msplit.engines.cuda.passes.pointwise_fusion.workers import Workers
from msplit.engines.cuda.passes.precision.mixed_precision import nodes_in_half
from msplit.engines.cuda.passes.precision.round_results import expect_rounded, takes_tf32
from msplit.engines.cuda.passes.repeated_rows import repeats
from msplit.engines.cuda.passes.shared_rows import Sharing
from msplit.engines.cuda.passes.tracing import list_choices, lookup_tables, row_variables, trace
from msplit.engines.cuda.runtime.executables import Compiled, Optimized
from msplit.engines.cuda.runtime.host import HostPart
from msplit.engines.cuda.runtime.host_stage import HostOptions
from msplit.engines.table_rows import TableOptions, divided
from msplit.engines.user_rows import UserRows
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.files import JsonValue
from msplit.opset.traits import written
from msplit.progress import phase
from msplit.shapes import infer

LAYOUTS: Family[bool] = Family("layouts", bool, JsonValue.flag, False)
"""True if a graph's convolutions run faster on data that lie as NCHW."""

LISTED: Family[bool] = Family("listed choices", bool, JsonValue.flag, False)
"""That the kernels that a graph's choices are between were compiled."""

_MOST_OF_FREE, _FOR_TABLES = 0.8, 0.6
"""Share of a GPU's free memory from which on lookup tables are too large for it, and that a cache of their rows gets then."""

FUSED: Family[bool] = Family("fused groups", bool, JsonValue.flag, False)
"""That the kernels of a graph's fused groups are on the disk, all that there was time for: no worker is started for them again."""


@dataclass(frozen=True, eq=False)
class Rewritten(Optimized):
    """A graph after the passes, with what later passes need.

    Attributes:
        context: Settings of the passes.
    """

    context: Context = field(kw_only=True)

    def at(self, stage: Stage, **options: Any) -> Rewritten:
        """A copy after the passes of a later stage, with these options of the context changed."""
        context = replace(self.context, **options)
        graph = self.graph.copy()
        run_passes(graph, context, stage)
        return replace(self, graph=graph, context=replace(context, constants=None))


Begin = Callable[[Rewritten], None]
"""Is called with a graph as soon as its shapes are known."""


def compile_job(job: Job) -> Compiled:
    """The job's graph as a program, compiled once per device, graph, shapes and options.

    Raises:
        EngineError: Something in the graph can not run; the message names it and the way out.
    """
    return _compile(job)


def compile_apart(job: Job) -> Compiled:
    """Compiles a job's graph like `compile_job`, but keeps only the parts that jobs in other precisions share."""
    kept = Device.of(torch.device(job.options.first)).compiled.setdefault(job.flat, {})
    compile_job(replace(job, precision=Precision.IEEE))
    before = set(kept)
    try:
        return compile_job(job)
    finally:
        for key in kept.keys() - before:
            del kept[key]


def in_half(job: Job) -> list[tuple[int, ...]]:
    """The nodes of each op that runs in half precision, in topological order; none where the job's precision is another."""
    device = Device.of(torch.device(job.options.first))
    with device.entered():
        graph = _specialized(job, device).graph
    return nodes_in_half(graph, job.precision.half, job.wide) if job.precision.half else []


def _compile(job: Job, begin: Begin | None = None) -> Compiled:
    device = Device.of(torch.device(job.options.first))
    wide = job.wide if job.precision.half else frozenset()
    key = (_shapes(job), job.precision, wide, job.options.for_program(), _where(job))
    cache: dict[tuple[Any, ...], Any] = device.compiled.setdefault(job.flat, {})
    if key not in cache:
        with (
            device.entered(),
            telling_out_of_memory(),
            precision(job.precision.ieee),
            choosing_for(chain=_specialized(job, device).graph.is_chain()),
        ):
            cache[key] = _fused(job, device) if job.options.mode.fuses else _unfused(job, device, begin)
    found: Compiled = cache[key]
    return found


def _shapes(job: Job) -> tuple[Any, ...]:
    return tuple(sorted((name, value.shape, str(value.dtype)) for name, value in job.feeds.items()))


def _split(job: Job) -> Split | None:
    """GPU of each node, of a job for several GPUs."""
    return Split.of(job.ids, job.streams, job.options.split) if job.options.split else None


def _where(job: Job) -> bytes:
    """GPU of each node as a hashable key."""
    split = _split(job)
    return b"" if split is None else split.gpu.tobytes()


def _trains_scaled(job: Job) -> bool:
    """True if the job trains in float16, which scales the loss."""
    return job.precision is Precision.FP16 and any(map(written, job.flat.graph.ops))


def _key(job: Job) -> tuple[Any, ...]:
    """Key of all that a graph depends on before it has kernels and types."""
    shards, timeout = job.options.shards, job.tensorflow.timeout
    where = (job.options.split, _where(job))
    how = (job.options.mode.groups, job.options.simplify)
    rows = job.options.shared, job.options.table_memory
    return "specialized", _shapes(job), *how, shards, timeout, where, _trains_scaled(job), *rows


def _specialized(job: Job, device: Device) -> Rewritten:
    """Graph specialized to the job's inputs; see `optimize`. It asks neither how products are made nor for what is measured, so that
    whatever is compiled of a graph shares it, and constants on the device that no kernel wants in another way. What trains in float16 has
    a graph of its own."""
    cache, key = device.compiled.setdefault(job.flat, {}), _key(job)
    if key not in cache:
        state = {name: value for name, value in job.state.items() if name not in BESIDE_VARIABLES}
        cache[key] = optimize(
            job.flat,
            job.feeds,
            # Shapes are found where all weights fit: those of a split graph may be too many for one GPU.
            torch.device("cpu") if job.options.split else device.place,
            host=HostOptions(job.op_libraries, job.tensorflow.timeout, job.options.table_memory),
            simplify=job.options.simplify,
            group=job.options.mode.groups,
            state={**state, **(FIRST_SCALE if _trains_scaled(job) else {})},
            several=job.options.shards or job.options.shared or _split(job),
        )
    found: Rewritten = cache[key]
    return found


def _optimized(job: Job, device: Device) -> Rewritten:
    """Rewritten graph of a job; in half precision a copy with other types."""
    found, half = _specialized(job, device), job.precision.half
    if not half:
        return found
    emulate = job.options.emulate
    cache, key = device.compiled[job.flat], (*_key(job), half, job.wide, emulate)
    if key not in cache:
        cache[key] = found.at(Stage.TYPED, half=half, wide=job.wide, emulate=emulate)
    typed: Rewritten = cache[key]
    return typed


def _unfused(job: Job, device: Device, begin: Begin | None) -> Compiled:
    """Traced in the layout asked for or, for "auto", in the one that measures faster. Where `begin` is given, it will be fused."""
    groups = job.options.mode.groups
    optimized = _optimized(job, device)
    if begin is not None:
        begin(optimized)
    has_choice = any(
        op.op in FILTERS and op.attrs.get("data_format", "NHWC") in ("NHWC", "NDHWC")
        for op in optimized.graph.ops.values()
    )
    wanted = {"nhwc": [False], "nchw": [True]}.get(job.options.layout, [False, True])
    measure = job.options.measure
    if not has_choice or not device.is_gpu or not measure or job.options.split:
        wanted = wanted[:1]

    def laid_out(nchw: bool) -> Compiled:
        held = _choices_ahead(optimized, job, device, nchw, will_fuse=begin is not None) if measure else {}
        own = optimized.at(Stage.LAID_OUT, nchw=nchw, measure=measure, device=device.place)
        gpus = job.options.split
        program = trace(own.graph, optimized.feeds, device.place, nchw=nchw, measure=measure, held=held, gpus=gpus)
        facts = {**own.graph.facts, **(merge_facts(own.graph.merges) if groups else {})}
        return Compiled(program, "nchw" if nchw else "nhwc" if has_choice else "none", own, facts)

    if len(wanted) == 1:
        return laid_out(wanted[0])
    candidates: dict[bool, Compiled] = {}

    def faster() -> bool:
        candidates.update({nchw: laid_out(nchw) for nchw in wanted})
        with phase("timing memory layouts"):
            return min(wanted, key=lambda nchw: candidates[nchw].one_stream_seconds(job))

    # Where it was measured before, in another process too, only that layout is traced.
    nchw = device.owned(Tuner).choose(LAYOUTS, (optimized.graph.signature(), groups, job.precision.ieee), faster)
    return candidates.get(nchw) or laid_out(nchw)


def _choices_ahead(
    optimized: Rewritten, job: Job, device: Device, nchw: bool, *, will_fuse: bool
) -> Mapping[Key, torch.Tensor]:
    """Compiles the kernels that all choices of a graph will time, where choices were not made before. Meanwhile, what compiles fused
    groups is imported. Gives constants that are on the device then.
    """
    groups, tuner = job.options.mode.groups, device.owned(Tuner)
    held: dict[Key, torch.Tensor] = {}

    def listed() -> bool:
        graph = optimized.graph.copy()
        if not nchw and takes_tf32(device.place):
            expect_rounded(graph)  # as what will be timed does
        with phase("compiling kernels to choose from"), tuner.listing(_load_compiler if will_fuse else None):
            list_fusions(graph, device.place, nchw=nchw, group=groups)
            held.update(list_choices(graph, optimized.feeds, device.place, nchw=nchw))
        return True

    if tuner.can_list() and not job.options.split:
        tuner.choose(LISTED, (optimized.graph.signature(), groups, nchw, job.precision.ieee), listed)
    return held


def _load_compiler() -> None:
    with contextlib.suppress(Exception), kept():  # what is wrong with it is told when there is a group to compile
        fuse.load()


def _fused(job: Job, device: Device) -> Compiled:
    """Program with groups of pointwise ops as one kernel each, in the memory layout of the plain one. Both share weights.

    Workers that compile these kernels start while the rest is still being compiled.
    """
    unfused = replace(job, options=replace(job.options, mode=KernelMode.of(groups=job.options.mode.groups)))
    # What the compiler makes belongs to one GPU.
    compiles = (device.is_gpu and not job.options.split) if job.options.compile is None else job.options.compile
    workers, tuner = device.owned(Workers), device.owned(Tuner)
    asked: dict[tuple[Any, ...], bool] = {}

    def begin(optimized: Rewritten) -> None:
        key = (optimized.graph.signature(), job.precision.ieee, str(kernel_folder()[0]))
        asked[key] = tuner.known(FUSED, key) is not None
        if not any(asked.values()) and not len(workers):
            workers.start(likely_groups(optimized.graph))

    try:
        plain = _compile(unfused, begin if compiles else None)
        assert isinstance(plain.optimized, Rewritten)  # it was compiled here
        if compiles:
            begin(plain.optimized)
        held = plain.program.constants
        optimized = plain.optimized.at(Stage.FUSED, fuse=True, compile=compiles, constants=held)
    finally:
        workers.stop()
    for key in asked:
        tuner.choose(FUSED, key, lambda: True)
    nchw, measure = plain.layout == "nchw", job.options.measure
    gpus = job.options.split
    program = trace(optimized.graph, optimized.feeds, device.place, nchw=nchw, measure=measure, held=held, gpus=gpus)
    return Compiled(program, plain.layout, optimized, {**plain.facts, **optimized.graph.facts})


def optimize(
    flat: FlatGraph,
    feeds: Arrays,
    device: torch.device,
    *,
    host: HostOptions | None = None,
    simplify: bool = True,
    group: bool = False,
    state: Arrays | None = None,
    several: Shards | Split | SharedRows | None = None,
) -> Rewritten:
    """Imports a graph and runs the passes that every layout and mode has in common.

    Args:
        feeds: An array per input: they fix the shapes.
        host: How the host part runs, and which tables the host keeps; None: as TensorFlow does by itself, and none.
        simplify: Whether to fold constants' work into its neighbours and to use the libraries' epilogues.
        group: Whether alike independent branches run as one batched branch.
        state: See `Job`; where there is a `LOSS_SCALE` in it, the loss is scaled.
        several: Of a graph for several GPUs, how the batch is split over processes, or where nodes run; or inputs of which one row is
            computed.

    Raises:
        EngineError: Something in the graph can not run; the message names it and the way out.
    """
    whole, own, host = flat, feeds, host or HostOptions()
    with phase("importing the graph"):
        raised = raise_control(flat)
        flat = raised.flat
        shapes = {name: value.shape for name, value in feeds.items()}
        partition = divide(raised, functools.cache(lambda: infer(whole, shapes=shapes)))
        refuse(flat, partition)
    fed: Mapping[str, tuple[int, int]] = {tensor.name: (tensor.node, tensor.port) for tensor in flat.inputs}
    part = None
    if partition.frontier or partition.fetched or partition.host_outputs:
        with phase("running the host part"):
            part = HostPart.of(whole, partition, host, raised.origin)
            feeds, _ = part.run(feeds)
            with contextlib.suppress(MsplitError):  # sizes of inputs go with no number of rows
                part = replace(part, apart={} if several else _apart(part, whole, shapes))
        fed = {**fed, **part.feeds}
        others = {*partition.fetched, *partition.host_outputs}
        flat = replace(flat, outputs=(*(tensor for tensor in flat.outputs if tensor.name not in others), *part.handed))
    with phase("importing the graph"):
        keyed = keyed_contents(flat, partition.keyed)
        graph = build(flat, fed, state=state, constants=partition.shapes, keyed=keyed)
    _place_tables(graph, device, host.table_memory, alone=several is None)
    if STEPS in graph.feeds:
        feeds = {**feeds, STEPS: np.zeros((), np.int64)}
    graph.streamless = frozenset(np.flatnonzero(whole.host).tolist())
    graph.unrolled = {node: raised.frames.get(node, ()) for node, op in graph.ops.items() if op.op in FUNCTIONAL}
    shards = several if isinstance(several, Shards) else None
    split = several if isinstance(several, Split) else None
    context = Context(
        feeds, device, len(flat), raised.bodies, simplify=simplify, group=group, shards=shards, split=split
    )
    if shards is not None and LOSS_SCALE in graph.state:
        fix = "train in bfloat16 (--precision bf16), or on one GPU"
        raise EngineError("losses are scaled for float16 in one process only", fix=fix)
    if shards is not None:
        context = replace(context, resized=_resized(graph, context, _half(own, shards.inputs), part))
    if isinstance(several, SharedRows):
        return _sharing(graph, context, several, own, part, whole, host, raised.origin)
    if several is None:
        context = replace(context, shared=_finds(graph, context, own, part, whole))
    run_passes(graph, context, Stage.IMPORTED, Stage.SPECIALIZED)
    return _rewritten(graph, part, replace(context, shared=None))


def _finds(
    graph: OpGraph, context: Context, feeds: Arrays, part: HostPart | None, whole: FlatGraph
) -> Callable[[OpGraph], Sharing | None] | None:
    """Finds rows that a graph repeats itself; None where it has no op that does, trains, or is to stay as it is."""
    if not context.simplify or graph.state or REPEATING.isdisjoint(whole.graph.ops):
        return None
    imported, shapes = graph.copy(), {name: value.shape for name, value in feeds.items()}

    def find(specialized: OpGraph) -> Sharing | None:
        found = RepeatedRows.of(whole, shapes)
        if found is None or not repeats(specialized, found.inputs, found.rows):
            return None
        first = {
            name: value if name in found.inputs else value[: len(value) // found.rows] for name, value in feeds.items()
        }
        small = _resized(imported, context, first, part)
        return None if small is None else Sharing(found.inputs, small, 1, found.rows, found.entries)

    return find


def _place_tables(graph: OpGraph, device: torch.device, given: TableOptions | None, *, alone: bool) -> None:
    """Says which tables of a graph lie in the host's memory: those that are larger than the bytes that were given, or that do not fit.

    Raises:
        EngineError: Some were given, and a variable would be one of those that has to lie on the device.
    """
    variables = row_variables(graph)
    if not alone:
        variables = dict.fromkeys(variables, "several GPUs train it")
    free, times = Device.of(device).free_bytes() or 0, 1
    memory, rows = given or TableOptions(int(_FOR_TABLES * free))
    if given is None:
        # Two ways to run a model are held against each other, and each has variables of its own.
        times = 2
        variables = {name: why for name, why in variables.items() if not why}
    constants = [graph.constants[key].nbytes for key in lookup_tables(graph)]
    trained = {name: times * graph.initial[name].nbytes for name in variables}
    sizes = [*constants, *trained.values()]
    if given is None and (not free or sum(sizes) <= _MOST_OF_FREE * free):
        return
    hosted, _ = divided(sizes, memory, None if constants else memory)
    graph.hosted = frozenset(name for number, name in enumerate(variables, len(constants)) if number in hosted)
    _refuse_hosted(graph, variables, rows)
    if not graph.state or any(number < len(constants) for number in hosted):
        on_device = sum(size for name, size in trained.items() if name not in graph.hosted)
        graph.table_memory = TableOptions(memory - on_device, rows)


def _refuse_hosted(graph: OpGraph, variables: Mapping[str, str], rows: str) -> None:
    """Refuses a variable in the host's memory that has to lie on the device, or of which rows would be rounded.

    Raises:
        EngineError: There is one.
    """
    if graph.hosted and rows:
        said = f"rows of the table {min(graph.hosted)} are trained, and can not be {rows}"
        raise EngineError(said, fix=f"leave rows={rows} out (--table-memory; in Python table_memory)")
    for name, why in variables.items():
        if why and name in graph.hosted:
            raise EngineError(
                f"the table {name} of {graph.initial[name].nbytes / 1e9:.3g} GB can not stay in the host's memory: {why}",
                fix="train it by an optimizer that changes the rows of a step alone, such as Adagrad, or leave more memory to tables "
                "(--table-memory)",
            )


def _sharing(
    graph: OpGraph,
    context: Context,
    shared: SharedRows,
    feeds: Arrays,
    part: HostPart | None,
    whole: FlatGraph,
    host: HostOptions,
    origin: Mapping[Key, Key],
) -> Rewritten:
    """Runs the passes on a graph of which some rows are computed once.

    Raises:
        EngineError: Of an input that was to be shared all rows are read.
    """
    rows = shared.rows(feeds)
    users, entries = rows_of_users(shared.users, rows), {name: count for name, count in shared.entries if count}
    own = {name: entries[name] for name in shared.inputs}
    alone = None if part is None or users == rows else _made_of(shared, feeds, whole)
    if users < rows:
        small = _resized(graph, context, shared.first(feeds, users), part)
        if small is not None:
            made = {} if part is None else part.feeds
            handed = (name for name, key in made.items() if alone is not None and alone(origin.get(key, key)))
            context = replace(context, shared=Sharing((*own, *handed), small, users, rows, whole=shared.whole))
    run_passes(graph, context, Stage.IMPORTED, Stage.SPECIALIZED)
    if part is not None:
        counted = next((name, count) for name, count in entries.items() if name not in own)
        part = replace(part, shared=UserRows(own, shared.users, rows), counted=counted)
    found = _rewritten(graph, part, context, users, rows)
    if part is not None and alone is not None:
        found = replace(found, host=part.by_user(whole, host, origin, alone, found.once.entries.keys()))
    if users == rows:  # all rows are read, of which one may be given for each user
        own = {name: one for name, one in own.items() if name in graph.feeds}
        return replace(found, once=UserRows(own, shared.users, rows))
    _refuse_all_rows(shared, feeds, found)
    return found


def _made_of(shared: SharedRows, feeds: Arrays, flat: FlatGraph) -> Callable[[Key], int]:
    """Gives of a value that depends on shared inputs alone, and whose rows are apart and lie along the first axis, the entries of a row; 0
    of any other."""
    wanted = sum(1 << place for place, one in enumerate(flat.inputs) if one.name in shared.inputs)
    alone = [bool(mask) and not mask & ~wanted for mask in inputs_read(flat, control=True)]
    states, _ = walked(flat, shared.rows(feeds), {name: value.shape for name, value in feeds.items()})
    return lambda key: states.entries(*key) if key[0] < len(alone) and alone[key[0]] else 0


def _apart(part: HostPart, flat: FlatGraph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Entries of a row of what a host part makes for the device, where that needs no other rows and is all that it does; else none."""
    states, _ = walked(flat, None, shapes)
    apart = {name: states.entries(*key) for name, key in part.feeds.items() if key[0] < len(flat)}
    alone = part.repeatable and not any((part.behind, *part.made, *part.handed_on, *part.handed))
    return apart if alone and all(map(apart.get, part.feeds)) else {}


def _refuse_all_rows(shared: SharedRows, feeds: Arrays, found: Rewritten) -> None:
    """Refuses an input that was to be shared, and of which all rows are read.

    Raises:
        EngineError: There is one.
    """
    few = shared.first(feeds, shared.users)
    for name in shared.inputs:
        if (
            name not in found.once.entries
            and len(few[name]) < len(feeds[name])
            and (found.host is None or name in found.graph.feeds)
        ):
            said = "the graph fixes the number of rows"
            if name not in found.graph.feeds:
                said = "nothing reads it"
            elif found.context.shared is not None:
                said = "what reads it needs all of its rows, side by side with others"
            raise EngineError(f"input {name} can not be shared: {said}", fix="leave it out of shared (--shared)")


def _rewritten(graph: OpGraph, part: HostPart | None, context: Context, users: int = 1, rows: int = 0) -> Rewritten:
    """The graph with inputs for it, of which it may read one row for each user where all are given."""
    feeds = {name: context.feeds[name] for name in graph.feeds if name != USERS}
    shapes = {name: graph.shapes[graph.feeds[name]] for name in feeds}
    few = {name: shape[0] // users for name, shape in shapes.items() if shape != feeds[name].shape}
    once = UserRows(few, users, rows)
    feeds = {**once.of(feeds)}
    return Rewritten(graph, feeds, part, once, context=replace(context, feeds=feeds))


def _half(feeds: Arrays, inputs: Sequence[str]) -> Arrays:
    """Inputs with half of the rows; with twice as many, where there is no half."""
    whole = any(len(feeds[name]) % 2 for name in inputs)

    def resized(value: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([value, value]) if whole else value[: len(value) // 2]

    return {name: resized(value) if name in inputs else value for name, value in feeds.items()}


def _resized(graph: OpGraph, context: Context, feeds: Arrays, host: HostPart | None) -> OpGraph | None:
    """The graph as other feeds specialize it, and what the host makes of them; None where it takes no other number of rows.

    Raises:
        EngineError: A variable takes them, so that it would be another one for each process.
    """
    if host is not None:
        feeds, _ = host.run(feeds)
    if STEPS in graph.feeds:
        feeds = {**feeds, STEPS: np.zeros((), np.int64)}
    try:
        return specialized_copy(graph, replace(context, feeds=feeds, shards=None))
    except EngineError as error:
        if KEEPS_SHAPE in error.what:
            fix = "train on one GPU, or leave that update out: --target"
            raise EngineError(
                "a variable takes rows of the batch, and several processes have others of them each",
                where=error.where,
                fix=fix,
            ) from None
        return None
