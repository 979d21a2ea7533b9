"""A model ready to run: what a service calls, after `bench` has said what it gains."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

from msplit.analysis.rows.lengths import positions_of, sized_shapes
from msplit.assignment.cut import with_lengths
from msplit.assignment.model import opened
from msplit.core import statistics
from msplit.core.arguments import Precision, listed, whole
from msplit.core.statistics import Ratio
from msplit.engines.base import MASKED_LOOPS, Arrays, Executable, TensorFlowOptions, side_by_side
from msplit.engines.cuda.coverage import masked_loops
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.tensorflow.engine import session_on_cpu
from msplit.engines.user_rows import UserRows
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.build import LengthInputs
from msplit.inputs.make import feeds_for
from msplit.progress import Progress, prepared, silent, timing
from msplit.run.buckets import Buckets, Lengths, RowProof, rows_of
from msplit.run.compilation import CompiledSetup, chosen_variant, compiled
from msplit.run.renew import RunnerValues
from msplit.run.request import FAST, FULL, RunOptions, RunRequest, refuse_exclusions, request_of
from msplit.run.runner import Runner, runner_of
from msplit.run.setup import Setup
from msplit.run.tensorflow_rows import on_one_stream
from msplit.run.tuning import Tuned
from msplit.run.upgrade import Inputs, hurrying, one_at_a_time, start_improving
from msplit.run.variants import as_it_runs, naming_open_shapes, set_up
from msplit.verify.check import verified
from msplit.verify.compare import compare, computed_in
from msplit.verify.results import OutputCheck, Running, Variant
from msplit.verify.stepping import Verification, seconds_of
from msplit.verify.tolerances import output_tolerances

ROUNDS = 11
"""Of a step on several streams beside one on one stream. In all but one of them several must be faster to be taken."""

_ON_ONE = "TensorFlow runs the model on one stream; several are for the cuda engine"


def prepare(
    flat: FlatGraph | str | os.PathLike[str],
    *,
    lengths: Sequence[int] = (),
    variant: str | None = None,
    progress: Progress | None = None,
    improve: bool = False,
    state: Arrays | None = None,
    **options: Unpack[RunOptions],
) -> Runner:
    """Makes a model ready to run, and verifies it once, with the options that `bench` took.

    This executes the model.

    Example::

        with msplit.prepare("model.pb", batch=128, streams=4, precision="bf16") as model:
            outputs = model(x=batch)

    Args:
        flat: From `load`, or where the model is.
        lengths: Sizes of an unknown second dimension, each prepared by itself: rows of any length up to the largest are filled up to
            the next one, and outputs are cut. What they are filled up with is hidden from other positions, which is proved.
        variant: Label of the variant of the bench to run, or what it were called if all streams asked for were used. By
            default the plan, where there is one, else that of the layers of the bench
            (one stream, streams, fused, grouped, what `auto` takes) which should be the fastest by simulation, on one stream unless
            several measure faster. TensorFlow runs on one stream, where it is the fastest, or over its cluster.
        progress: Told what is being done and how much of it is done.
        improve: Be ready as soon as with ``effort="fast"``, whatever the request's, and prepare in full meanwhile, in a thread: what
            that makes is verified, against the first one, too, and takes over between two steps if it is faster (`Runner.improved`).
        state: Of a graph that trains, the values that its variables begin with, in place of the model's own.
        options: The engine, the largest number of streams, the rules or the plan, batch and shapes: see `RunOptions`.

    Raises:
        EngineError: The engine can not run the model, or its outputs are not those of the reference.
        MsplitError: An input does not fit, or there is no such variant.
    """
    request = request_of(prepare, RunOptions, options)
    if lengths:
        own = {"lengths": lengths, "improve": improve, "variant": variant, "state": state is not None}
        refuse_exclusions({**request.given, **{name: value for name, value in own.items() if value}})
        return _for_lengths(opened(flat), replace(request, engine=CUDA.name), lengths, progress)
    return prepare_for(flat, request, variant=variant, progress=progress, improve=improve, state=state)


def prepare_for(
    flat: FlatGraph | str | os.PathLike[str],
    request: RunRequest,
    *,
    variant: str | None = None,
    progress: Progress | None = None,
    improve: bool = False,
    state: Arrays | None = None,
) -> Runner:
    """`prepare`, with its options as a request."""
    own = {"improve": improve, "variant": variant}
    refuse_exclusions({**request.given, **{name: value for name, value in own.items() if value}})
    if not improve:
        with hurrying() if request.is_fast else one_at_a_time():
            ready = make_ready(flat, request, variant, progress, state=state)
            CUDA.forget(ready.setup.job.flat)  # weights of other kernels, and in another precision
            return _with_rows(ready)
    with hurrying():
        ready = make_ready(flat, replace(request, effort=FAST), None, progress)
    runner, flat = _with_rows(ready), ready.setup.job.flat
    if runner.engine != CUDA.name:
        note = "improve is for the cuda engine: TensorFlow runs the model as it does otherwise, and nothing takes over"
        runner.notes = (*runner.notes, note)
        return runner

    def in_full() -> tuple[Runner, Inputs]:
        try:
            better = make_ready(flat, replace(request, effort=FULL))
        finally:
            CUDA.forget(flat)
        place = f"{request.device}:{request.devices[0]}" if request.devices else request.device
        return better.runner, Inputs(
            better.setup.fresh, request.settings, Precision(request.precision), computed_in(flat), place
        )

    start_improving(runner, in_full)
    return runner


def _for_lengths(flat: FlatGraph, request: RunRequest, lengths: Sequence[int], progress: Progress | None) -> Runner:
    """`prepare` for each of several lengths."""
    made, checks, notes = dict[int, Executable](), list[OutputCheck](), dict[str, None]()
    with WithLengths.of(flat, lengths, request) as model, one_at_a_time(), timing() as phases, ExitStack() as errors:
        for length in model.lengths:
            ready = make_ready(model.flat, model.sized(request, length), None, progress)
            errors.enter_context(ready.runner)
            made[length], check = model.check(ready, request, length)
            checks += [*ready.runner.checks, check]
            notes |= dict.fromkeys(ready.runner.notes)
            CUDA.forget(model.flat)
        errors.pop_all()
    feeds = {name: value for name, value in ready.chosen.job.feeds.items() if name != model.about.name}
    same: dict[str, Any] = {name: getattr(ready.runner, name) for name in ("outputs", "engine", "label", "why")}
    told: dict[str, Any] = {"checks": tuple(checks), "notes": tuple(notes), "preparation": phases.stop()}
    return runner_of(Lengths(made, model.about), feeds, **same, **told)


def _with_rows(ready: Ready) -> Runner:
    """The runner, which knows whether it may cut rows and fill them up, and what it was made of."""
    job = ready.chosen.job
    rows, shared = rows_of(job.flat, ready.setup.request), job.options.shared
    ready.runner.rows = RowProof.of(*rows, job.feeds, UserRows.of_step(shared))
    ready.runner.renews = RunnerValues(ready.runner, ready.chosen.engine, job, ready.setup.request, ready.setup.tables)
    return ready.runner


@dataclass(frozen=True, eq=False)
class WithLengths:
    """A model that is told the length of each row, as one more input.

    Attributes:
        own: As it came.
        flat: With that input.
        about: What has positions.
        lengths: Those to prepare, ascending.
    """

    own: FlatGraph
    flat: FlatGraph
    about: LengthInputs
    lengths: tuple[int, ...]

    @classmethod
    @contextmanager
    def of(cls, flat: FlatGraph, lengths: Sequence[int], request: RunRequest) -> Iterator[WithLengths]:
        """Proves that sequences may be padded, and writes the model anew in a folder that is there as long as this is entered. Without
        lengths it is the model as it came, with the one length 0.

        Raises:
            MsplitError: They may not, or lengths make no sense.
        """
        if not lengths:
            yield cls(flat, flat, LengthInputs("", (), {}), (0,))
            return
        wanted = tuple(sorted({whole("a length", one, 1) for one in listed("lengths", lengths)}))
        proof = positions_of(flat, wanted[-1], request.workload.shapes)
        with TemporaryDirectory(prefix="msplit-lengths-") as folder:
            made, name = with_lengths(flat, proof, Path(folder))
            yield cls(flat, made, LengthInputs(name, proof.inputs, proof.outputs), wanted)

    def sized(self, request: RunRequest, length: int) -> RunRequest:
        """The request for rows of some length. Files are for inputs of one shape."""
        work, inputs = request.workload, self.about.inputs
        if not length:
            return request
        shapes = sized_shapes(self.flat, inputs, work.shapes, work.batch or 1, length)
        files = {name: path for name, path in work.inputs.items() if name not in inputs}
        return request.sized(shapes=shapes, inputs=files)

    def check(self, ready: Ready, request: RunRequest, length: int) -> tuple[Executable, OutputCheck]:
        """Holds what runs rows of up to some length against TensorFlow, which runs the model as it came, without a padded position.

        Returns:
            What runs any number of such rows, and how the check went.

        Raises:
            EngineError: It gives other outputs.
        """
        before = max((one for one in self.lengths if one < length), default=0)
        rows = RowProof.of(*rows_of(self.flat, ready.setup.request), ready.chosen.job.feeds, UserRows())
        made = Buckets({request.workload.batch or 1: ready.runner.executable}, rows)
        tried, door = sorted({1, before + 1, (before + 1 + length) // 2, length}), Lengths({length: made}, self.about)
        precision = Precision(request.precision).on(gpu=request.device != "cpu")
        with closing(session_on_cpu(self.own, op_libraries=request.op_libraries)) as session:
            for seed, size in enumerate(tried, request.seed):
                work = self.sized(request, size).workload
                shapes = {name: shape for name, shape in work.shapes.items() if name != self.about.name}
                feeds = feeds_for(self.own, replace(work, shapes=shapes), seed=seed)
                got, expected = door.step(feeds), session.step(feeds)
                held = partial(compare, got, expected, precision=precision, computed=computed_in(self.own))
                found = held()
                if not found.passed:  # rounding decides what cancels, as the variance of equal values does
                    found = held(carried=output_tolerances(feeds, expected, session.step, precision=precision))
                if not found.passed:
                    what = f"rows that are {size} long give other outputs, padded to {length}, than in TensorFlow at their own length:"
                    raise EngineError(what, details=found.describe().splitlines(), fix="prepare fixed shapes (--shape)")
        return made, OutputCheck(f"TensorFlow at lengths {', '.join(map(str, tried))}", precision, len(tried), found)


@dataclass(frozen=True, eq=False)
class Ready:
    """A model that is ready to run, with what was made on the way.

    Attributes:
        chosen: What runs.
        setup: What the request meant.
        tuned: What tuning found, if it was asked for.
        why: Why this was chosen.
    """

    runner: Runner
    chosen: Variant
    setup: Setup
    tuned: Tuned | None
    why: str


def make_ready(
    flat: FlatGraph | str | os.PathLike[str],
    request: RunRequest,
    variant: str | None = None,
    progress: Progress | None = None,
    *,
    state: Arrays | None = None,
) -> Ready:
    """See `prepare`, which does so. Here the request may ask for tuning: then what that finds runs. What was compiled is kept."""
    with timing() as phases, ExitStack() as errors:
        flat = opened(flat)
        errors.enter_context(naming_open_shapes(flat, request))
        # Only what is chosen gets kernels that are timed and compiled. A plan was made for such kernels, and tuning times them.
        setup = set_up(
            flat, request, sketch=request.plan is None and request.tune is None, state=state, progress=progress
        )
        made = compiled(setup, progress)
        sketched = chosen_variant(setup, made, variant)
        # Streams and larger kernels are held against one stream of plain kernels on changing inputs, as in a bench.
        one = next(one for one in made.variants if one.engine is sketched.engine and one.against is None)
        chosen, why = as_it_runs(sketched, request), _why(made, sketched.label)
        how = Verification(setup.fresh, request.settings, setup.reference, progress or silent)
        ready, outrun = _built(chosen, one, how), tuple[str, ...]()
        if variant is None and made.tuned is None and _can_be_outrun(sketched, request):
            alone = as_it_runs(on_one_stream(sketched, one), request)
            gain = _gain_over(ready, alone)
            if gain is not None and not gain.low > 1:
                why = f"measured, {chosen.label} is {gain.value:.2f} times as fast as one stream of the same kernels, which runs"
                outrun = (why,)
                ready.close()
                chosen, ready = alone, _built(alone, one, how)
        _share(ready, request)
        prepared(flat.model.path)
    own = chosen.job.tensorflow
    spread = chosen.job.streams > 1 or own.devices or own.cluster is not None
    notes = made.notes if chosen.engine is CUDA or spread else (_ON_ONE,)
    sums = phases.stop()
    covered = setup.fresh.covered(seconds_of(sums)) if chosen.engine is CUDA else ()
    runner = runner_of(
        ready.running,
        chosen.job.feeds,
        label=chosen.label,
        engine=setup.engine.name,
        why=setup.why,
        outputs=tuple(output.name for output in setup.job.flat.outputs),
        checks=tuple(ready.checks),
        notes=(*notes, *outrun, *_about(ready.running.facts()), *setup.unverified, *covered),
        preparation=sums,
    )
    return Ready(runner, chosen, setup, made.tuned, why)


def _about(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on loops that run up to a bound, and on lookup tables that are not on the GPU."""
    notes = masked_loops(facts.get(MASKED_LOOPS, {}))
    if "host_state_bytes" in facts:
        trained = facts["host_state_bytes"] / 1e9
        notes += [f"tables that are trained, and slots of optimizers, of {trained:.3g} GB stay in the host's memory"]
    if "host_table_bytes" in facts:
        tables, cache = facts["host_table_bytes"] / 1e9, facts["table_cache_bytes"] / 1e9
        notes += [
            f"lookup tables of {tables:.3g} GB stay in the host's memory ({facts['host_tables']}); "
            f"a cache on the GPU has {cache:.3g} GB of it"
        ]
    return tuple(notes)


def _built(chosen: Variant, one: Variant, how: Verification) -> Running:
    """What runs a variant, verified: held against one stream of plain kernels, too, where it is another and one GPU can hold it.

    Raises:
        EngineError: It gives other outputs than it must.
    """
    alone = bool(chosen.job.options.split) or chosen.label == one.label
    beside = [replace(chosen, against=None)] if alone else [one, replace(chosen, against=one.label, over=())]
    with verified(beside, how) as running:
        _refuse_wrong(running)
        return running.pop()  # what is still listed is closed


def _can_be_outrun(chosen: Variant, request: RunRequest) -> bool:
    """Whether msplit has put a step on several streams, which one stream might outrun. Who asks for a plan or for several GPUs gets them,
    and what is to be ready in a hurry is not measured."""
    options, streams = chosen.job.options, chosen.used or chosen.job.streams
    settled = request.plan is not None or request.is_fast or options.split or options.shards is not None
    return chosen.engine is CUDA and streams > 1 and not settled


def _gain_over(ready: Running, alone: Variant) -> Ratio | None:
    """How many times faster a step is than one on one stream, by the device's clock; None where there is none. Variables, and what random
    ops count, are afterwards what they were before.

    Raises:
        EngineError: One stream of these kernels can not be built.
    """
    executable = ready.running
    state = executable.save_state()
    try:
        if executable.device_times(1) is None:
            return None
        with closing(alone.engine.build(alone.job)) as other:
            ours, theirs = side_by_side([executable, other], ROUNDS, random.Random(0))
    except BaseException:
        ready.close()
        raise
    executable.load_state(state)
    return statistics.ratio([theirs], [ours], over=alone.label, clock="device")


def _share(ready: Running, request: RunRequest) -> None:
    """Has what was verified with variables of its own go on with those that others use, where that is asked for."""
    cluster = ready.variant.job.tensorflow.cluster
    if cluster is None or request.cluster is None or request.cluster.container is None:
        return
    ready.close()
    shared = TensorFlowOptions(cluster=replace(cluster, container=request.cluster.container))
    ready.build(replace(ready.variant.job, tensorflow=shared))


def _why(made: CompiledSetup, label: str) -> str:
    """Why a variant was chosen, in a sentence."""
    if made.tuned is not None:
        return made.tuned.why
    known = {step.label: step.predicted_us for step in made.steps if step.predicted_us is not None}
    if label not in known:
        return "it is what was asked for"
    others = "; ".join(f"{name} {time:,.1f} µs" for name, time in known.items() if name != label)
    return f"predicted {known[label]:,.1f} µs a step" + (f" ({others})" if others else "")


def _refuse_wrong(running: Sequence[Running]) -> None:
    """Raises what is wrong with outputs.

    Raises:
        EngineError: A variant gives other outputs than it must.
    """
    for one in running:
        for check in one.checks:
            if not check.passed:
                raise EngineError(
                    f"{one.variant.label} gives other outputs than {check.against} ({check.precision}):",
                    details=check.comparison.describe().splitlines(),
                    fix="see `msplit bench`, which compares every way to run the model",
                )
