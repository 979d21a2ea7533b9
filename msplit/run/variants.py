"""The ways to run a model that are compared: which engine, on which streams, with which kernels, and what outputs are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from msplit import formats, rules
from msplit.analysis.shared import inputs_called
from msplit.assignment.assignment import check_places
from msplit.assignment.model import ON_COSTS, RECORDED, Given, price, resolve
from msplit.assignment.plans import stored_job
from msplit.core.arguments import Precision, spelled
from msplit.engines import onnxruntime as onnx
from msplit.engines.base import Arrays, Engine, Job
from msplit.engines.cuda.coverage import cover, needed_nodes, shared_rows, toolchain
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode, SharedRows, rows_of_users
from msplit.engines.table_rows import ROWS, RoundedTables
from msplit.engines.tensorflow.cluster import foreign_text
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.engines.tensorflow.engine import reference as tensorflow_reference
from msplit.engines.variables import remark, rounded_tables, table_value, variable_names
from msplit.errors import INSTALL_TENSORFLOW, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.functions import holds_modules
from msplit.inputs.make import feeds_for
from msplit.inputs.reference import Reference, load_reference, save_reference
from msplit.inputs.special import RANDOM, Fresh, InputKind, kinds
from msplit.inputs.values import setting
from msplit.opset import schema
from msplit.opset.traits import DRAWN_ON_DEVICE, DRAWS, ops_with, written
from msplit.progress import Progress, phase
from msplit.run.buckets import rows_of
from msplit.run.profile import compared
from msplit.run.request import RunRequest
from msplit.run.setup import Ablation, Comparison, Setup, StreamIds, on_all, one_stream, plan_label, plural
from msplit.run.tensorflow_rows import assignments_for, list_steps, mixed, switched, tensorflow_variants
from msplit.schedule import planfile
from msplit.shapes import infer
from msplit.shapes.infer import stated_shapes
from msplit.verify.mixed_precision import errors_of, keep_within
from msplit.verify.results import Variant
from msplit.verify.tensorflow_process import fit, initial_state

_OWN_DATA = ops_with("data source")

_ON_CPU = "TensorFlow on the CPU"

_NO_VARIABLES = "the reference holds no variables: what a step makes of them was compared with the same ops one by one and between streams"

ENGINES: Mapping[str, Engine] = {"cuda": CUDA, "tensorflow": TENSORFLOW}


def as_recorded(flat: FlatGraph, request: RunRequest) -> tuple[RunRequest, tuple[str, ...]]:
    """A request with what it leaves open and the record of the model's assignment says, and that in words.

    A file of reference outputs says the batch and the shapes itself.
    """
    if flat.model.record is None:
        return request, ()
    work = request.workload
    defaults = resolve(flat, Given(None, None, work.batch, work.shapes, work.gpu, work.profile))
    found = defaults.workload
    request = request.sized(gpu=found.gpu, profile=found.profile)
    sized = request.reference is None
    if sized:
        request = request.sized(batch=found.batch, shapes=found.shapes)
    keys = ON_COSTS if sized else ("gpu", "profile")
    used = any(key in defaults.said and defaults.origin[key] == RECORDED for key in keys)
    return request, (f"run with {defaults.words(keys)}",) if used or defaults.missing else ()


@contextmanager
def naming_open_shapes(flat: FlatGraph, request: RunRequest) -> Iterator[None]:
    """Where shapes of inputs are to be looked at for an error, its way out names those inputs of which the file says none."""
    try:
        yield
    except EngineError as error:
        given = {*request.workload.shapes, *request.workload.inputs}
        stated = stated_shapes(flat)
        names = [
            name for name, shape in stated.items() if shape is None and name not in given and setting(name) is None
        ]
        if names and "--shape" in (error.fix or ""):
            error.fix = f"say the shape of {', '.join(names[:3])}, which the file does not: --shape {names[0]}=1,128"
        raise


def set_up(
    flat: FlatGraph,
    request: RunRequest,
    comparison: Comparison | None = None,
    *,
    sketch: bool = False,
    state: Arrays | None = None,
    progress: Progress | None = None,
) -> Setup:
    """Chooses engine and streams, lists what is asked for, and makes inputs and reference outputs. TensorFlow runs the model once for
    these; the cuda engine compiles nothing, see `compilation`, but to find what half precision does where an error is the limit.

    Of a `sketch`, what is listed will be compiled as far as to tell it apart and to simulate it: no kernel is timed, and none is compiled
    of fused ops. `as_it_runs` makes one of its variants whole.

    `state` are the values that variables of a training graph begin with; where it is not given, its initializers are run.

    Raises:
        EngineError: The engine can not run the model; the message names what and the way out.
        MsplitError: An input does not fit.
    """
    engine, why = choose_engine(request, flat)
    _refuse(request, comparison, engine, why)
    refuse_devices(request, engine, why)
    request, reached = _reached(request)
    stored = None if request.plan is None else planfile.load(request.plan)
    saves = None if comparison is None else comparison.save_reference
    if comparison is not None and saves is not None:
        check_places(flat, [saves], force=comparison.force)
    request, loaded, notes = _sized(flat, request)
    shared, told = _shared(flat, request, engine)
    notes += told
    request = replace(request, shared=shared or ())
    sizes, costs = price(flat, request.workload)

    def feeds_of(seed: int, kind: InputKind = RANDOM) -> Arrays:
        made = feeds_for(flat, request.workload, seed=seed, kind=kind)
        return made if shared is None else shared.repeated(made)

    with phase("making inputs"):
        feeds = feeds_of(request.seed)
    state = _state(flat, request) if state is None else state
    fresh = Fresh(feeds_of, _kinds(flat, feeds, feeds_of, request, state) if engine is CUDA else ())
    state, tables, told = _rounded(flat, request, state)
    reference, unverified = _reference(flat, engine, feeds, request, state) if loaded is None else (loaded, ())
    if tables.names and reference is not None and reference.learns:
        told += _error_of_outputs(flat, request, reference)
    if loaded is not None:
        feeds = {
            **{name: loaded.feeds[name] for name in feeds if name in loaded.feeds},
            **loaded.feeds,
        }  # in the model's order
        unverified = (_NO_VARIABLES,) if state and engine is CUDA else ()
    if comparison is not None and saves is not None:
        saved = replace(reference or _by_tensorflow(flat, feeds, request, state), source=_ON_CPU)
        save_reference(saves, saved, force=comparison.force)
    assignments, said = ([], []) if request.place is not None else assignments_for(flat, sizes, costs, request)
    refused = toolchain().refused if engine is CUDA else ()
    if request.is_fast and engine is TENSORFLOW:
        notes.append("effort fast is for the cuda engine: TensorFlow runs as it does otherwise")
    notes += [*told, *_users(shared, feeds)]
    notes += filter(
        None, [*reached, *said, formats.left_out_text(flat.model), *refused, remark(flat, needed_nodes(flat))]
    )
    if engine is TENSORFLOW and request.cluster is None:
        notes += filter(None, [foreign_text(flat.graph.devices)])
    job = Job(
        flat=flat,
        ids=np.zeros(len(flat), np.int32),
        streams=1,
        feeds=feeds,
        op_libraries=request.op_libraries,
        costs=costs,
        state=state,
        tensorflow=request.tensorflow.without_switches,
        precision=Precision(request.precision),
    )
    mixed = None
    if request.tune is not None and request.tune.max_error is not None:
        seeds = range(request.settings.seed + 1, request.settings.seed + 1 + request.settings.verify_inputs)
        own = replace(job, options=request.options)
        mixed = keep_within(own, request.tune.max_error, [feeds, *map(feeds_of, seeds)], progress)
        job = replace(job, wide=mixed.wide)
    if request.sharing:  # told before anything is compiled
        shared_rows(replace(job, options=replace(request.options, devices=request.sharing)))
    if engine is TENSORFLOW:
        variants = tensorflow_variants(job, assignments, request)
    else:
        variants = _cuda_variants(job, assignments, request, _fair(flat, comparison, tables), sketch)
    planned, plan_notes = None, list[str]()
    if stored is not None and request.plan is not None:
        own, plan_notes = stored_job(replace(job, options=request.options), stored)
        planned = Variant(plan_label(request.plan), engine, own, one_stream(variants).label)
    return Setup(
        request=request,
        engine=engine,
        why=why,
        job=job,
        priced=(sizes, costs),
        assignments=tuple(assignments),
        variants=tuple(variants),
        ablation=_ablation(variants, assignments, request) if engine is CUDA else Ablation(),
        planned=planned,
        reference=reference,
        tables=tables,
        fresh=fresh,
        notes=tuple(notes),
        plan_notes=tuple(plan_notes),
        unverified=(*unverified, *own_data(flat)),
        mixed=mixed,
    )


def _kinds(
    flat: FlatGraph, usual: Arrays, feeds_of: Callable[..., Arrays], request: RunRequest, state: Arrays
) -> tuple[InputKind, ...]:
    """Random inputs, and kinds of special ones that are others than the usual; nothing where steps differ by what they draw or read
    themselves."""
    draws = not DRAWS.isdisjoint(flat.graph.ops) and not state  # further steps draw further numbers
    if draws or own_data(flat) or not request.settings.verify_inputs:
        return ()
    with phase("making inputs"):
        rows = max((len(value) for value in usual.values() if value.ndim), default=0)

        def differs(kind: InputKind) -> bool:
            made = feeds_of(request.seed, kind)
            return any(not np.array_equal(made[name], value) for name, value in usual.items())

        return (RANDOM, *filter(differs, kinds(rows)))


def _shared(flat: FlatGraph, request: RunRequest, engine: Engine) -> tuple[SharedRows | None, list[str]]:
    """Inputs of which a step computes one row for each user, and what to tell; None where none are named, by the request or the rules.

    Raises:
        MsplitError: There is no such input, or it has no rows, or no other has any; or rows are not independent.
    """
    if isinstance(request.shared, SharedRows):
        return request.shared, []
    named, places = request.shared, dict[str, str]()
    if not named and request.ruleset is not None:
        places = dict(rules.load(request.ruleset).shared)
        if places and (engine is not CUDA or request.devices or request.split or request.cluster):
            return None, ["`shared` of the rules is for the cuda engine on one GPU: all rows are computed"]
        named = tuple(places)
    if not named:
        if request.users > 1:
            raise MsplitError(
                f"a step has {request.users} users, and no input is shared", fix="name some: shared (--shared)"
            )
        return None, []
    found, where = inputs_called(flat, named, places), next(iter(places.values()), None)
    counts, mixes = rows_of(flat, request)
    if counts is None:
        raise MsplitError(f"rows can not be shared: {mixes}", where=where, fix="leave shared out (--shared)")
    without = [name for name in found if not counts[0].get(name)]
    if without or not any(count for name, count in counts[0].items() if name not in found):
        said = f"input {without[0]} has no rows" if without else "no other input has rows"
        raise MsplitError(f"{said}, so that none can be shared", where=where, fix="name inputs of the user alone")
    return SharedRows(found, tuple(counts[0].items()), request.users), []


def _rounded(flat: FlatGraph, request: RunRequest, state: Arrays) -> tuple[Arrays, RoundedTables, list[str]]:
    """Values of variables, with tables whose rows are to be int8 or bf16 as they are then; which these are; and what to tell of it.

    Raises:
        EngineError: A row can not be kept so.
    """
    tables = rounded_tables(flat, asked := request.options.table_memory)
    if not tables.names:
        none = [f"rows={asked and asked.rows}: no table leaves the GPU whose rows are only looked up, and float32"]
        return state, tables, none if asked is not None and asked.rows else []
    with phase("rounding rows of tables"):
        state = {**state, **tables.of({name: table_value(flat, state, name) for name in tables.names})}
    most, mean = (max(errors[at] for errors in tables.errors.values()) for at in (0, 1))
    told = (
        f"rows of {plural(len(tables.names), 'table')} are {ROWS[tables.kind]}: their numbers differ from the model's by up to {most:.3g} "
        f"({mean:.3g} in the mean of a table); outputs are held against those of TensorFlow with such rows"
    )
    return state, tables, [told]


def _fair(flat: FlatGraph, comparison: Comparison | None, tables: RoundedTables) -> Comparison | None:
    """The comparison with what can be given rounded rows: XLA compiles the model's own, and TensorFlow gets constants at each step."""
    if comparison is None or not tables.names:
        return comparison
    fed = not {*variable_names(flat).values()}.issuperset(tables.names)
    return replace(comparison, compare_xla=False, compare_tensorflow=comparison.compare_tensorflow and not fed)


def _error_of_outputs(flat: FlatGraph, request: RunRequest, reference: Reference) -> list[str]:
    """What rounded rows do to outputs: TensorFlow's with them, beside its own with the model's rows."""
    errors = errors_of([reference.outputs], [_by_tensorflow(flat, reference.feeds, request, {}).outputs])
    each = ", ".join(f"{name} {error:.2g}" for name, error in sorted(errors.items(), key=lambda one: -one[1])[:5])
    rows = request.options.table_memory and request.options.table_memory.rows
    return [f"rows of {rows} move outputs by so much of their size (root mean square): {each}"]


def _users(shared: SharedRows | None, feeds: Arrays) -> list[str]:
    """Remark on the users of a step."""
    if shared is None or shared.users == 1:
        return []
    rows = shared.rows(feeds)
    if rows_of_users(shared.users, rows) == rows:
        return [f"{rows} rows are fewer than two for each of {shared.users} users: all of them are computed"]
    return [f"the {rows} rows of a step are of {shared.users} users, who have as many each, one behind the other"]


def _state(flat: FlatGraph, request: RunRequest) -> Arrays:
    """What variables begin with, where steps change them, or other processes have to be given them."""
    if request.cluster is None and not any(map(written, flat.graph.ops)):
        return {}
    return initial_state(flat, op_libraries=request.op_libraries)


def _reached(request: RunRequest) -> tuple[RunRequest, tuple[str, ...]]:
    """The request with the devices of its cluster, and streams for which there are as many, and what to tell of it.

    Raises:
        EngineError: A task of the cluster can not be reached.
    """
    if request.cluster is None:
        return request, ()
    from msplit.engines.tensorflow.cluster import connect

    devices = request.cluster.devices or connect(request.cluster.cluster)
    streams = tuple(dict.fromkeys(min(count, len(devices)) for count in request.streams))
    request = replace(request, streams=streams, cluster=replace(request.cluster, devices=devices))
    return request, (f"the cluster has {plural(len(devices), 'device')} to compute on, one for each stream",)


def _sized(flat: FlatGraph, request: RunRequest) -> tuple[RunRequest, Reference | None, list[str]]:
    """The request with batch and shapes of its reference or its profile where it names none itself, that reference, and what to tell."""
    notes: list[str] = []
    loaded = None
    work = request.workload
    if work.profile is not None:
        notes += compared(work.profile, precision=request.precision, layout=request.layout)
    if request.reference is not None:
        loaded = load_reference(request.reference)
        batch, shapes = fit(flat, loaded, request.reference, batch=work.batch, shapes=work.shapes)
        if batch != work.batch:
            notes.append(f"the batch is {batch}, as in {request.reference}")
        work = replace(work, batch=batch, shapes=shapes)
    if work.profile is not None and work.batch is None:
        work = replace(work, shapes={**work.profile.shapes, **work.shapes})
    return replace(request, workload=work), loaded, notes


def _refuse(request: RunRequest, comparison: Comparison | None, engine: Engine, why: str) -> None:
    """Raises what is asked for and the engine can not do.

    Raises:
        EngineError: That.
    """
    asked = {"tune": request.tune is not None, "plan": request.plan is not None, "shared": bool(request.shared)}
    if engine is not CUDA and any(asked.values()):
        option = next(name for name, given in asked.items() if given)
        raise EngineError(f"{spelled(option)} is for the cuda engine; {why}", fix="see `msplit doctor`")
    logs = comparison is not None and comparison.log_placement
    if engine is not TENSORFLOW and (request.place is not None or logs):
        option = spelled("place" if request.place is not None else "log_placement")
        raise EngineError(f"{option} is for TensorFlow, which puts nodes on devices", fix="give --engine tensorflow")
    if engine is not CUDA and request.split:
        raise EngineError(
            f"{spelled('split')} is for the cuda engine; {why}",
            fix="give TensorFlow devices: `msplit assign --rules device --emit placement`",
        )
    if comparison is not None and comparison.timelines and engine is TENSORFLOW and _tensorflow_sees_gpu():
        raise EngineError(
            "TensorFlow tells no times of single kernels on a GPU, so its steps can not be traced",
            fix="trace the cuda engine (--engine cuda), or run on the CPU (CUDA_VISIBLE_DEVICES='')",
        )


def refuse_devices(request: RunRequest, engine: Engine, why: str) -> None:
    """Raises where GPUs are asked for that are not there, or that the engine does not choose.

    Raises:
        EngineError: That.
    """
    if not request.devices:
        return
    if engine is not CUDA:
        fix = "choose what TensorFlow sees with CUDA_VISIBLE_DEVICES; see `msplit doctor`"
        raise EngineError(f"{spelled('devices')} is for the cuda engine; {why}", fix=fix)
    if lost := CUDA.unavailable(request.places):
        raise EngineError(lost, fix="see `msplit doctor`; CUDA_VISIBLE_DEVICES may hide some")


def choose_engine(request: RunRequest, flat: FlatGraph | None = None) -> tuple[Engine, str]:
    """The engine to run on, and why. Where none is asked for, one that can run a graph, if it is given.

    Raises:
        EngineError: The engine asked for can not run here.
    """
    if request.cluster is not None or (request.engine is None and request.place is not None):
        request = replace(request, engine=TENSORFLOW.name)
    if request.engine is not None:
        if request.engine not in ENGINES:
            raise MsplitError(f"there is no engine {request.engine!r}", fix=f"one of: {', '.join(ENGINES)}")
        engine = ENGINES[request.engine]
        why_not = engine.unavailable() if request.device == "cuda" or request.engine != "cuda" else None
        if why_not:
            raise EngineError(f"the {engine.name} engine can not run here: {why_not}", fix="see `msplit doctor`")
        return engine, "asked for"
    why_not = CUDA.unavailable()
    if why_not is None:
        reasons = (
            []
            if flat is None
            else cover(flat, infer(flat, batch=request.workload.batch, shapes=request.workload.shapes)).reasons
        )
        if reasons and request.tune is None and request.plan is None:
            return TENSORFLOW, f"the cuda engine can not run this model: {'; '.join(reasons)}"
        return CUDA, "there are a CUDA device and PyTorch"
    neither = TENSORFLOW.unavailable()
    if neither:
        raise EngineError(
            f"no engine can run here: {neither}; and for the cuda engine, {why_not}",
            fix=f"{INSTALL_TENSORFLOW} runs models on the CPU; `msplit doctor --for bench` says what else there is",
        )
    return TENSORFLOW, f"the cuda engine can not run here: {why_not}"


def as_it_runs(variant: Variant, request: RunRequest) -> Variant:
    """A variant of a sketch with kernels that are chosen and compiled, on all GPUs that are asked for."""
    options = replace(variant.job.options, measure=not request.is_fast, compile=None)
    whole = replace(variant, job=replace(variant.job, options=options))
    return on_all(whole, request) if request.sharing else whole


def _cuda_variants(
    job: Job, assignments: Sequence[StreamIds], request: RunRequest, comparison: Comparison | None, sketch: bool
) -> list[Variant]:
    how = ("CUDA graph" if request.capture else "eager") + job.precision.suffix
    variants = []
    others = comparison is not None and comparison.compare_tensorflow and request.device == "cuda"
    if others and _tensorflow_sees_gpu():
        stock = replace(job, precision=job.precision.wide)
        variants.append(Variant("TensorFlow", TENSORFLOW, stock, optional=True))
        if (
            comparison is not None and comparison.compare_xla and DRAWN_ON_DEVICE.isdisjoint(job.flat.graph.ops)
        ):  # XLA draws others
            xla = replace(stock, tensorflow=replace(job.tensorflow, xla=True))
            variants.append(Variant("TensorFlow with XLA", TENSORFLOW, xla, "TensorFlow", optional=True))
        variants += [*switched(variants[:1], request), *mixed(variants[0])[: bool(job.precision.half)]]
    options = request.options
    if sketch:
        options = replace(options, measure=False, compile=False)
    one = f"msplit, 1 stream, {how}"
    if others and onnx.runs_on_gpu() and not onnx.why_not(job.flat):
        against = variants[0].label if variants else one
        for label, captured in (("ONNX Runtime", False), ("ONNX Runtime, CUDA graph", True)):
            variants.append(Variant(label, onnx.OnnxRuntime(captured), job, against, optional=True))
    if request.capture and request.device == "cuda":
        eager = replace(job, options=replace(options, capture=False))
        variants.append(Variant("msplit, 1 stream, eager", CUDA, eager, one))
    variants.append(Variant(one, CUDA, replace(job, options=options)))
    for streams, ids, _ in assignments:
        label, asked = f"msplit, {plural(streams, 'stream')}, {how}", (plural(streams, "stream"),)
        own = replace(job, ids=ids, streams=streams, options=options)
        variants.append(Variant(label, CUDA, own, one, asked=asked))
        if request.split:
            where = f"{plural(streams, 'stream')} on {len(request.split)} GPUs"
            label = f"msplit, {where}, {how}"
            over = replace(own, options=replace(options, split=tuple(request.split)))
            variants.append(Variant(label, CUDA, over, one, asked=(where,)))
    return [*variants, *([] if comparison is None else _on_all_rows(variants[-1].job, one, request))]


def _on_all_rows(job: Job, against: str, request: RunRequest) -> list[Variant]:
    """The model as it is, beside one that shares rows."""
    if job.options.shared is None:
        return []
    kernels = KernelMode.of(fuses=request.fuses, groups=request.group)
    whole = replace(job, options=replace(job.options, shared=None, mode=kernels))
    return [Variant(f"msplit, {plural(job.streams, 'stream')}, all rows", CUDA, whole, against)]


def _ablation(variants: Sequence[Variant], assignments: Sequence[StreamIds], request: RunRequest) -> Ablation:
    """The steps above one stream, for the largest number of streams."""
    most = None
    if assignments:
        streams, ids, _ = max(assignments, key=lambda found: found.streams)
        most = (streams, ids, next(variant.label for variant in variants if variant.job.ids is ids))
    larger = [KernelMode.FUSED] if request.fuses else []
    if request.group:
        larger.append(KernelMode.of(fuses=request.fuses, groups=True))
    return list_steps(one_stream(variants), most, larger)


def own_data(flat: FlatGraph) -> tuple[str, ...]:
    """What to tell of a graph that brings its data itself: nobody can give two runs of it the same."""
    graph = flat.graph
    fed = {(tensor.node, tensor.port) for tensor in flat.inputs}

    def read(node: int) -> set[tuple[int, int]]:
        edges = graph.out_edges(node)
        return {(node, port) for port in graph.edges.port[edges].tolist()}

    sources = [node for node, op in enumerate(graph.ops) if op in _OWN_DATA and not read(node) <= fed]
    if not sources:
        return ()
    node = sources[0]
    count = schema.output_count(graph.ops[node], graph.attrs[node]) or 1
    name = graph.names[node]
    tensors = ",".join([name, *(f"{name}:{port}" for port in range(1, min(count, 4)))]) + (",…" if count > 4 else "")
    return (
        f"the model takes its data from {name} ({graph.ops[node]}) itself, so that every step has another batch: outputs are held "
        "against those of other batches, and may differ for that alone; to verify and measure on the same data, feed it: "
        f"--part inputs={tensors}",
    )


def _tensorflow_sees_gpu() -> bool:
    if TENSORFLOW.unavailable():
        return False
    from msplit.engines.tensorflow import runtime

    return runtime.has_gpu()


def _by_tensorflow(flat: FlatGraph, feeds: Arrays, request: RunRequest, state: Arrays) -> Reference:
    made = tensorflow_reference(flat, feeds, op_libraries=request.op_libraries, state=state)
    return Reference(feeds, made, _ON_CPU, learns=not own_data(flat))


_OWN_READING = (
    "JAX wrote a part of this model (XlaCallModule), and outputs were held against msplit's own reading of it only: install TensorFlow, "
    "which runs the original"
)


def _reference(
    flat: FlatGraph, engine: Engine, feeds: Arrays, request: RunRequest, state: Arrays
) -> tuple[Reference | None, tuple[str, ...]]:
    """What outputs are held against where no file was given: TensorFlow on the CPU. TensorFlow itself is its own reference, unless it is to
    run in half precision. A translated module is held against its original with effort fast too: nothing else tells of a wrong one."""
    module = holds_modules(flat.model.graph.functions)
    if engine is TENSORFLOW:
        if not Precision(request.precision).half:
            return None, ()
    elif request.is_fast and (TENSORFLOW.unavailable() or not module):
        return None, (
            "with effort fast outputs were held against the same ops one by one and between streams, not against TensorFlow: bring a "
            "reference with --reference",
            *([_OWN_READING] if module else []),
        )
    if TENSORFLOW.unavailable():
        return None, (
            "TensorFlow is not here, so outputs were held against the same ops and between streams: bring a reference with --reference",
            *([_OWN_READING] if module else []),
        )
    return _by_tensorflow(flat, feeds, request, state), ()
