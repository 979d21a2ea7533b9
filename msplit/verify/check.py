"""Builds variants of one model and checks that they agree. One whose outputs are wrong is not measured at all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import STEPS, Arrays
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.table_rows import saving_beside, shareable
from msplit.engines.tensorflow.engine import REFERENCE
from msplit.errors import EngineError, OutOfMemory, WrongShape
from msplit.formats.functions import holds_modules
from msplit.inputs.special import RANDOM, InputKindName
from msplit.opset.traits import written
from msplit.progress import phase
from msplit.verify import stepping
from msplit.verify.compare import ModelComparison, best_of, compare, computed_in
from msplit.verify.mixed_precision import emulated_errors, roughness, tf32_tolerances
from msplit.verify.op_by_op import OP_BY_OP, TensorFlowValues, compare_ops
from msplit.verify.results import OutputCheck, Running, Variant
from msplit.verify.special_values import compare_special
from msplit.verify.stepping import SPECIAL, Verification, kinds_for, sets_of, without_refused
from msplit.verify.tolerances import output_tolerances

_MANY, _MANY_SECONDS = 40, 0.25
"""Steps on two sets of inputs by turns, in no period, and the most seconds for them: every 16th alone may be stale."""

LEARNED = "variables of "
Pair = tuple[Running, Running, Precision]
"""A variant, what it is held against, and the coarser of their precisions."""

Compared = Callable[..., ModelComparison]
"""Compares outputs, of what is got and what is expected, in a precision, of all that are held against each other."""

Known = dict[Precision, dict[str, float]]
"""What rounding does to the variables of a step, by precision and name."""
Emulated = dict[Callable[..., Any], Callable[[], Any]]
"""What emulating a step in a way gives, by the function that does so; it is done once, and where it is asked for."""

UNCHANGED = "the graph op by op"
"""Name of runs of our engine without any rewriting, where TensorFlow is not asked."""


@contextmanager
def verified(variants: Sequence[Variant], how: Verification) -> Iterator[list[Running]]:
    """Builds all and verifies them; what is wrong in IEEE precision is not built again. At the end, those still listed are closed.

    Raises:
        EngineError: An engine can not run a variant that is not optional.
        ValueError: Labels are not unique, or one that is named is not there.
    """
    running = [Running(variant, partner) for variant, partner in zip(variants, _partners(variants), strict=True)]
    for engine in {id(variant.engine): variant.engine for variant in variants}.values():
        engine.prepare([variant.job for variant in variants if variant.engine is engine])
    try:
        fitted = _verify_in_ieee(running, how)
        proved = any(one.checks for one in running)
        how = replace(how, rounding=_rounding(running, how), proved=proved)
        for number, one in enumerate(running):
            how.tell(f"building {one.variant.label}", number / len(running))
            if not one.skipped and one.passed:
                one.build(one.variant.job)
        if not fitted:
            _find_room(running, how)
        _verify(running, how)
        yield running
    finally:
        for one in running:
            one.close()


def rebuild(running: Sequence[Running], how: Verification) -> None:
    """Builds what is still alive anew and checks once that it agrees."""
    alive = [one for one in running if one.alive]
    for one in alive:
        one.close()
    for number, one in enumerate(alive):
        how.tell(f"building {one.variant.label} anew", number / len(alive))
        one.build(one.variant.job)
    before = [len(one.checks) for one in alive]
    once = replace(how.settings, verify_inputs=min(1, how.settings.verify_inputs))
    _verify(alive, replace(how, settings=once, reference=None, special=False))
    for one, count in zip(alive, before, strict=True):
        one.checks[count:] = [check for check in one.checks[count:] if not check.passed]


def _partners(variants: Sequence[Variant]) -> list[str | None]:
    """Partner that each variant's outputs are held against: the one it names, or its engine's first variant on one stream."""
    labels = [variant.label for variant in variants]
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"variants need labels of their own, not {labels}")
    partners: list[str | None] = []
    for number, variant in enumerate(variants):
        if variant.against is not None:
            if variant.against not in labels:
                raise ValueError(f"no variant is called {variant.against!r}")
            partners.append(variant.against)
            continue
        earlier = [v for v in variants[:number] if v.engine.name == variant.engine.name and v.job.streams == 1]
        partners.append(earlier[0].label if earlier else None)
    return partners


def _verify_in_ieee(running: Sequence[Running], how: Verification) -> bool:
    """Check, if the measured precision is TF32, everything once in IEEE float32 and its tight tolerance first, or the given one.
    True if there was memory for all side by side, as far as that was tried.

    That builds everything twice. So where what runs is to be ready at once, it is only done of the last, launch by launch, with special
    inputs.
    """
    if all(_precision(one.variant).ieee for one in running):
        return True
    ours = [one.variant.job.options for one in running if one.variant.engine.name == CudaEngine.name]
    hurried = bool(ours) and not any(options.measure for options in ours)
    if hurried and (not how.kinds or ours[-1].split or ours[-1].shards is not None):
        return True
    # It is the graph that this proves right. Kernels that are chosen by timing are held against the libraries' when they are timed, and
    # what runs is verified again below: to time them in this precision, too, takes as long as all else.
    strict = []
    one_is_chosen = hurried and len(running) <= 2  # and held against one stream below
    for one in running[-1:] if one_is_chosen else running:
        job = one.variant.job
        options = replace(job.options, measure=False)
        if hurried:  # to capture it takes longer than its steps
            options = replace(options, capture=False, devices=())
        job = replace(job, precision=Precision.IEEE, options=options)
        strict.append(Running(replace(one.variant, job=job), one.partner))
    try:
        fitted = _fit(strict, how)
        if hurried and not fitted:
            return True
        if not fitted:
            again = [how.fresh(seed) for seed in stepping.seeds_of(how.settings)]
            first = [] if how.reference is None else [how.reference.feeds]
            for one in strict:
                one.close()
            gc.collect()  # what could not be built may be held by parts of itself
            _free_memory(strict)
            for one in _built_in_turn(strict, how):
                one.answer(first, again)
                _free_memory([one])
        _verify(strict, how if fitted else replace(how, special=False))
        for one, checked in zip(running[-len(strict) :], strict, strict=True):
            one.checks += checked.checks
            one.skipped = checked.skipped
        return fitted
    finally:
        for one in strict:
            one.close()


def _fit(strict: Sequence[Running], how: Verification) -> bool:
    """Builds all, and tells whether there is memory for that. (Who handled the error would hold what could not be built.)

    Raises:
        OutOfMemory: There is not, and they change variables: those go from step to step, side by side.
    """
    try:
        list(_built_in_turn(strict, how))
    except OutOfMemory:
        if any(one.save_state() for one in strict):
            raise
        return False
    return True


def _find_room(running: Sequence[Running], how: Verification) -> None:
    """Steps each once, for some take their memory then. What finds none beside the others is closed and skipped, but for the last of an
    engine. Steps that change variables never come here (see `_fit`).

    Raises:
        OutOfMemory: There is no room for that one.
    """
    for number, one in enumerate(running):
        if one.executable is None:
            continue
        how.tell(f"a first step of {one.variant.label}", number / len(running))
        try:
            one.step(one.variant.job.feeds)
        except OutOfMemory as problem:
            if not any(
                other.alive and other.variant.engine is one.variant.engine for other in running if other is not one
            ):
                raise
            one.skipped = f"{problem.what} It has no room beside the other variants"
        if one.skipped:  # who handles the error holds what was begun
            one.close()
            _free_memory([one])


def _free_memory(closed: Sequence[Running]) -> None:
    for one in closed:
        one.variant.engine.free_memory()


def _built_in_turn(strict: Sequence[Running], how: Verification) -> Iterator[Running]:
    """Each that can run, as soon as it is built."""
    for number, one in enumerate(strict):
        how.tell(f"building {one.variant.label} in IEEE precision", number / len(strict))
        one.build(one.variant.job)
        if one.executable is not None:
            yield one


def _rounding(running: Sequence[Running], how: Verification) -> dict[Variant, Mapping[str, float]]:
    """Distance by which rounding alone moves the outputs of variants in TF32 or half precision on one GPU: what float32 gives with what
    they read and give rounded as they do, beside IEEE float32.

    Not of what is to be ready at once, not of steps that change variables, which carry rounding on from one to the next, and not where the
    user gives a tolerance.
    """
    found: dict[Variant, Mapping[str, float]] = {}
    known: dict[tuple[Precision, frozenset[int]], Mapping[str, float]] = {}
    inputs = [
        *([] if how.reference is None else [how.reference.feeds]),
        *map(how.fresh, stepping.seeds_of(how.settings)),
    ]
    for one in running if inputs and how.settings.tolerance is None else ():
        job = one.variant.job
        ours = isinstance(one.variant.engine, CudaEngine) and not one.skipped and one.passed
        if not ours or _precision(one.variant).ieee or job.options.split or not job.options.measure:
            continue
        if job.state and any(map(written, job.flat.graph.ops)):
            continue
        key = job.precision, job.wide
        if key not in known:
            how.tell(f"rounding as {one.variant.label} does", len(known) / len(running))
            with phase("emulating the precision"):
                known[key] = emulated_errors(job, inputs)
        found[one.variant] = known[key]
    return found


def _precision(variant: Variant) -> Precision:
    """Precision that a variant is computed in: on a CPU never in TF32, as far as its engine tells before it is built where it will run."""
    engine, job = variant.engine, variant.job
    on_cpu = engine.device(job).upper().startswith("CPU")
    if job.precision.ieee and job.tensorflow.cluster is not None and not on_cpu:
        return Precision.TF32  # servers of a cluster have a setting of their own, which a client can not change
    return job.precision.on(gpu=not on_cpu)


def _verify(running: Sequence[Running], how: Verification) -> None:
    """Steps all variants in lock-step on the same inputs and compares them."""
    built = [one for one in running if one.can_step]
    if not built:
        return
    settings, reference = how.settings, how.reference
    begun = built[0].variant.job.state
    with saving_beside(begun):
        state = built[0].save_state()
        state = shareable(stepping.with_scale(built, state, how), begun) if state else state
    computed = computed_in(built[0].variant.job.flat) if how.computed is None else how.computed
    own = {one: _precision(one.variant) for one in built}

    def compared(
        got: Arrays, expected: Arrays, precision: Precision, *held: Running, carried: Mapping[str, float] | None = None
    ) -> ModelComparison:
        coarsest = (one.variant for one in held if own[one] is precision)  # the other one's is less
        rounding = next((how.rounding[one] for one in coarsest if one in how.rounding), None)
        most = partial(compare, precision=precision, tolerance=settings.tolerance, computed=computed)
        return most(got, expected, rounding=rounding, carried=carried)

    truth = _truth(built, how, state) if settings.verify_inputs else None
    try:
        if how.kinds:
            with phase(SPECIAL):
                _verify_special(built, truth or built[0], state, how, own, compared)
                whole = holds_modules(built[0].variant.job.flat.model.graph.functions)
                if truth is not None and truth.variant.engine is REFERENCE and not whole:
                    _verify_ops(built, how, own)
        _verify_beside(built, truth if reference is not None and reference.learns else None, state, how, own, compared)
    finally:
        if truth is not None:
            truth.close()


def _verify_ops(built: Sequence[Running], how: Verification, own: Mapping[Running, Precision]) -> None:
    """Compares each op by itself with TensorFlow, on random inputs and on the first edges: of everything in IEEE precision that runs a
    graph of its own, whole on each device."""
    kinds = [RANDOM, *[kind for kind in how.kinds if kind.name is InputKindName.EDGES][:1]]
    refused: dict[Any, dict[str, ModelComparison]] = {}
    for one in built:
        # Each runs the whole graph, on all rows.
        options = replace(one.variant.job.options, devices=(), shared=None)
        job = replace(one.variant.job, options=options)
        several = bool(options.split) or options.shards is not None
        if not isinstance(one.variant.engine, CudaEngine) or not own[one].ieee or several or one.executable is None:
            continue
        compiled = one.variant.engine.compile(job)
        # Those of a GPU differ by what was timed; a CPU has one way to run an op.
        runs = compiled if options.on_gpu else compiled.kernels()
        if runs not in refused:
            found = {"special values": compare_special(compiled, job)}
            with TensorFlowValues(job) as tensorflow:
                for kind in filter(how.runs_on, kinds):
                    inputs = how.made(how.settings.seed + 1, kind)
                    found[f"{kind.name} inputs"] = compare_ops(compiled, job, inputs, tensorflow)
            refused[runs] = {f"{OP_BY_OP}, on {name}": result for name, result in found.items() if not result.passed}
        one.checks += [OutputCheck(name, own[one], 1, result) for name, result in refused[runs].items()]


def _verify_beside(
    built: Sequence[Running],
    truth: Running | None,
    state: Arrays,
    how: Verification,
    own: Mapping[Running, Precision],
    compared: Compared,
) -> None:
    """Compares all with the reference, and each with its partner on the same random inputs; with variables, with the truth as well."""
    settings, reference = how.settings, how.reference

    def from_the_same_values() -> Arrays:
        begun = stepping.begin(built, state) if state else {}
        for one in built if state else ():
            one.running.load_state(begun)
        return begun

    begun = from_the_same_values()
    if reference is not None:
        emulated: Emulated = {}
        for number, one in enumerate(built):
            how.tell(f"verifying {one.variant.label}", number / len(built))
            with phase("verifying outputs"):
                outputs = one.step(reference.feeds)
                steps = _steps(one, one, [reference.feeds], begun, {}, emulated)
                comparison = _held(compared, one, own[one], outputs, reference.outputs, steps)
            one.checks.append(OutputCheck(reference.source, own[one], 1, comparison))
        if truth is not None and not how.kinds and state.keys() <= {STEPS}:  # what is drawn at random in a second step
            expected = [truth.step(reference.feeds) for _ in range(2)][1]
            for one in built:
                comparison = compared(one.step(reference.feeds), expected, own[one], one)
                one.checks.append(OutputCheck(reference.source, own[one], 1, comparison))
    partner_of = {one.variant.label: one for one in built}
    # A variant without a partner that runs is held against the first that does, whatever its engine.
    partners = {one: partner_of.get(one.partner or "", built[0]) for one in built}
    pairs = [(one, partner) for one, partner in partners.items() if one is not partner]
    asked = list(pairs)
    truth = truth if state else None
    while pairs or truth:
        held = [(one, other, Precision.coarsest(own[one], own[other])) for one, other in pairs]
        for (one, other, precision), outcome in _in_lock_step(built, held, state, how, compared).items():
            one.checks.append(OutputCheck(other.variant.label, precision, settings.verify_inputs, outcome))
        if state and settings.verify_inputs:
            with phase("verifying variables"):
                if truth is not None:
                    held += [(one, truth, own[one]) for one in built if isinstance(one.variant.engine, CudaEngine)]
                _verify_state(held, state, how)
        truth = None
        # To agree with what is wrong says nothing: then it has to agree with what that was held against.
        unproved = [(one, partners[other]) for one, other in asked if one.passed and not other.passed]
        pairs = [pair for pair in unproved if pair[0] is not pair[1] and pair not in asked]
        asked += pairs
        from_the_same_values()
        how = replace(how, reference=None)  # whose step is none of theirs any more


def _in_lock_step(
    built: Sequence[Running],
    pairs: Sequence[Pair],
    state: Arrays,
    how: Verification,
    compared: Compared,
) -> dict[Pair, ModelComparison]:
    """Compare the outputs of all, step by step, on the same inputs: the first comparison that fails, or else that of the first step.

    With variables the second step is another variant's only as far as what the first learned is. So where its outputs differ, its partner
    takes the steps again, to tell how much of that is rounding.
    """
    outcomes: dict[Pair, ModelComparison] = {}
    unsure: list[tuple[Pair, int, Arrays, Arrays]] = []
    fed = [how.reference.feeds] if state and how.reference is not None else []

    def note(pair: Pair, found: ModelComparison) -> None:
        if pair not in outcomes or (outcomes[pair].passed and not found.passed):
            outcomes[pair] = found

    for number in range(how.settings.verify_inputs if pairs else 0):
        how.tell("verifying", number / how.settings.verify_inputs)
        with phase("verifying outputs"):
            feeds = how.fresh(stepping.seeds_of(how.settings)[number])
            outputs = {one: one.step(feeds) for one in built}
            for pair in pairs:
                one, partner, precision = pair
                found = compared(outputs[one], outputs[partner], precision, one, partner)
                if fed and not found.passed:
                    unsure.append((pair, len(fed) + 1, outputs[one], outputs[partner]))
                else:
                    note(pair, found)
            if state:
                fed.append(feeds)
    for pair, steps, got, expected in unsure:
        one, partner, precision = pair
        carried: Mapping[str, float] = {}
        if partner.running.keeps_state and not stepping.draws(partner):
            again = partial(stepping.moved_outputs, partner, fed[:steps], state)
            carried = output_tolerances(state, expected, again, precision=precision)
        note(pair, compared(got, expected, precision, one, partner, carried=carried))
    return outcomes


def _truth(built: Sequence[Running], how: Verification, state: Arrays) -> Running | None:
    """Reference for what the model makes of special inputs, and of variables: the outputs of a first step, such as a loss, tell nothing of
    these, and variants that share a mistake agree. That is TensorFlow on the CPU or, where it is not asked, our engine without any
    rewriting. None where neither runs the model, there is nothing to ask, or nothing runs on our engine."""
    jobs = [one.variant.job for one in built if isinstance(one.variant.engine, CudaEngine)]
    learns = how.reference is not None and how.reference.learns
    if not jobs or not (how.kinds or (learns and (state or stepping.draws(built[0])))):
        return None
    if learns and how.reference is not None:
        truth = Running(Variant(how.reference.source, REFERENCE, jobs[0]), None)
    elif how.proved or jobs[0].options.split or jobs[0].options.shards is not None:
        return None
    else:
        options = EngineOptions(jobs[0].options.device, capture=False, measure=False, simplify=False)
        job = replace(jobs[0], ids=np.zeros_like(jobs[0].ids), streams=1, options=options)
        truth = Running(Variant(UNCHANGED, ENGINE, job, optional=True), None)
    truth.build(truth.variant.job)
    return truth if truth.can_step else None


def _verify_special(
    built: Sequence[Running],
    truth: Running,
    state: Arrays,
    how: Verification,
    own: Mapping[Running, Precision],
    compared: Compared,
) -> None:
    """Compares outputs of our engine, and what a step makes of variables, on each kind of special inputs; with variables also in a second
    step, behind a random one: of those that begin with zeros the first tells little. Ours is given the arrays of the step before, with
    other values in them, and takes a step with the same strings, or with the same numbers, first: what it keeps of an input it has to know
    by all its values.

    Each kind has to pass by itself. Variables may do so with another seed, see `best_of`; nothing else may.
    """
    ours = [one for one in built if one is not truth and isinstance(one.variant.engine, CudaEngine)]
    kinds = kinds_for(how, half=any(own[one].half for one in ours))
    alone = not (state or stepping.draws(truth))
    held: list[dict[str, NDArray[Any]]] = [{}, {}, {}]
    sets = sets_of(how, kinds, alone)
    found: dict[tuple[Running, str], list[ModelComparison]] = {}
    for number, (kind, before) in enumerate(sets if ours else ()):
        how.tell(SPECIAL, number / len(sets))
        variables: dict[Running, list[ModelComparison]] = {one: [] for one in ours}
        for attempt in range(how.settings.verify_inputs if state else 1):
            left = [one for one in ours if not (variables[one] and variables[one][-1].passed)]
            fed = [*before, how.made(how.settings.seed + 1 + attempt, kind)]
            begun = stepping.begin([truth], state) if state else state
            try:
                expected, after = stepping.run_steps(truth, fed[-1:] if alone else fed, begun) if left else ({}, {})
            except EngineError as problem:
                if kind is RANDOM and not isinstance(problem, WrongShape):
                    raise
                seed = how.settings.seed + 1 + attempt
                run = partial(stepping.run_last, truth, [] if alone else before, begun)
                again = None if stepping.draws(truth) else without_refused(run, how.fresh(seed), fed[-1])
                if again is None:
                    how.refuse(kind, problem.what)
                    break
                how.leave_usual(kind, again[1], problem.what)
                fed[-1], (expected, after) = again[0], again[2]
            none = [name for name, value in expected.items() if value.dtype.kind == "f" and np.isnan(value).all()]
            if none and truth.variant.label == UNCHANGED:
                how.refuse(kind, f"{none[0]} is NaN there in every variant")
            taken = _steps(truth, ours[0], fed, begun, {}, {})
            to_come = (
                stepping.announcing(fed, come=kind is RANDOM)
                if before and not alone
                else [(0, feeds, None) for feeds in fed]
            )
            for one in left:
                try:
                    steps = stepping.run_announcing(one, held, to_come)
                    outputs, mine = stepping.last_of(one, steps, begun)
                except WrongShape as problem:  # the host made something longer, or shorter, of them
                    how.refuse(kind, problem.what)
                    continue
                refused = not all(each.passed for what in ("", LEARNED) for each in found.get((one, what), ()))
                if not attempt:
                    far = kind.name is InputKindName.LARGE or bool(state and before)
                    held_against = partial(compared, outputs)
                    comparison = taken.compared(held_against, expected, own[one], one, moved=far, refused=refused)
                    found.setdefault((one, ""), []).append(comparison)
                if state:
                    tolerance = how.settings.tolerance
                    learned = taken.learned(mine, after, own[one], tolerance, how.leave_out, refused=refused)
                    variables[one].append(learned)
        for one, tried in variables.items():
            if tried:
                found.setdefault((one, LEARNED), []).append(best_of(tried))
    right = [one for one in ours if all(each.passed for each in found.get((one, ""), ()))]
    for one, comparison in _announced(right if alone else [], truth, how, own, compared):
        found.setdefault((one, ""), []).append(comparison)
    _note(found, truth, own)


def _note(
    found: Mapping[tuple[Running, str], Sequence[ModelComparison]], truth: Running, own: Mapping[Running, Precision]
) -> None:
    """Adds the checks that comparisons with the reference come to: one of outputs, and one of variables."""
    for (one, what), comparisons in found.items():
        failed = [each for each in comparisons if not each.passed]
        worst = failed[0] if failed else max(comparisons, key=lambda each: each.needed)
        one.checks.append(OutputCheck(f"{what}{truth.variant.label}", own[one], len(comparisons), worst))


def _announced(
    ours: Sequence[Running], truth: Running, how: Verification, own: Mapping[Running, Precision], compared: Compared
) -> Iterator[tuple[Running, ModelComparison]]:
    """Compares steps for which something was prepared during the step before, as `announced` has them, with the reference."""
    if not ours:
        return
    sets = [how.fresh(seed) for seed in (how.settings.seed, how.settings.seed + 1)]
    try:
        expected = {id(feeds): (stepping.run_steps(truth, [feeds], {})[0], Emulated()) for feeds in sets}
        for one in ours:
            steps, mine = stepping.announced(*sets), dict[int, Arrays]()
            outputs = stepping.run_announcing(one, [{}, {}, {}], steps)
            refused = False
            for (_, feeds, _), got in zip(steps, outputs, strict=True):
                right, asked = expected[id(feeds)]
                taken = _steps(one, one, [feeds], {}, {}, asked)
                comparison = _held(compared, one, own[one], got, right, taken, refused=refused)
                refused = refused or not comparison.passed
                yield one, comparison
                mine[id(feeds)] = got
            until, order = time.monotonic() + _MANY_SECONDS, np.random.default_rng(0).integers(2, size=_MANY)
            before: list[tuple[Arrays, int]] = []
            for index in order:
                # What a step gave is held once the next one has run: it may lie in memory that every step uses.
                before = [*before[-1:], (one.step(sets[index]), index)]
                again = (compared(got, mine[id(sets[which])], own[one], one) for got, which in before)
                yield from ((one, found) for found in again if not found.passed)
                if time.monotonic() > until:
                    break
    except (WrongShape, OutOfMemory) as problem:  # what is sent before its step takes memory of its own
        how.refuse(RANDOM, problem.what)


def _held(
    compared: Compared,
    one: Running,
    precision: Precision,
    outputs: Arrays,
    expected: Arrays,
    taken: stepping.Steps,
    *,
    refused: bool = False,
) -> ModelComparison:
    """Compares outputs of a step with TensorFlow's; where they differ, as closely as rough functions allow."""
    return replace(taken, in_tf32=None).compared(
        partial(compared, outputs), expected, precision, one, moved=False, refused=refused
    )


def _steps(
    truth: Running, one: Running, fed: Sequence[Arrays], begun: Arrays, known: Known, asked: Emulated
) -> stepping.Steps:
    """Steps that one is held to, and what rounding to TF32 does to them on our engine, if it runs them alone; `asked` of the same steps of
    another variant is the same."""
    job = one.variant.job
    if not isinstance(one.variant.engine, CudaEngine) or job.options.split or job.options.shards is not None:
        return stepping.Steps(truth, fed, begun, None, None, known)
    if not asked:
        asked |= {emulate: cache(partial(emulate, job, fed, begun)) for emulate in (tf32_tolerances, roughness)}
    return stepping.Steps(truth, fed, begun, asked[tf32_tolerances], asked[roughness], known)


def _verify_state(pairs: Sequence[Pair], state: Arrays, how: Verification) -> None:
    """Compares what one step makes of the variables, on several inputs, each time from the same values: after more steps, what rounding
    did in one is what the next learns from."""
    found: dict[int, list[ModelComparison]] = {}
    known: dict[Running, Known] = {}
    for feeds in map(how.fresh, stepping.seeds_of(how.settings)):
        held = list(dict.fromkeys(each for pair in pairs for each in pair[:2]))
        begun = stepping.begin(held, state)
        made = {each: stepping.variables_after(each, [feeds], begun) for each in held}
        asked, steps = Emulated(), dict[tuple[Running, bool], stepping.Steps]()
        for index, (one, partner, precision) in enumerate(pairs):
            taken = _steps(partner, one, [feeds], begun, known.setdefault(partner, {}), asked)
            taken = steps.setdefault((partner, taken.rough is None), taken)
            compared = taken.learned(made[one], made[partner], precision, how.settings.tolerance, how.leave_out)
            found.setdefault(index, []).append(compared)
    for index, comparisons in found.items():
        one, partner, precision = pairs[index]
        together = best_of(comparisons)
        if together.outputs:
            name = f"variables of {partner.variant.label}"
            one.checks.append(OutputCheck(name, precision, len(comparisons), together))
