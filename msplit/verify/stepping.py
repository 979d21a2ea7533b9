"""Steps of a variant that is verified: on which inputs, from which variables they begin, and what they make of them.

`Verification` has the settings; then come the kinds of inputs in their order, and what is left of a kind that a model refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import FIRST_SCALE, LOSS_SCALE, STEPS, Arrays, is_array
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.table_rows import saving_beside
from msplit.engines.tensors import as_array
from msplit.errors import EngineError
from msplit.inputs.reference import Reference
from msplit.inputs.special import RANDOM, Fresh, InputKind, InputKindName
from msplit.opset.traits import DRAWS
from msplit.progress import Progress, Sums
from msplit.verify.compare import ModelComparison, compare_state
from msplit.verify.results import Roughness, Running, Settings, Variant
from msplit.verify.tolerances import (
    ANY_FINITE,
    DECIDES,
    MORE_MOVES,
    least_state_tolerances,
    output_tolerances,
    state_tolerances,
    undetermined,
)

_Asked = tuple[Precision, float | None, bool]
"""Precision and tolerance of a comparison of variables, and True where the variant was refused already."""

Announcing = tuple[int, Arrays, tuple[int, Arrays] | None]
"""A step that may say what the next one will be fed: which of some mappings it is given, filled with what, and the same of the next."""


def announced(first: Arrays, second: Arrays) -> list[Announcing]:
    """Steps on two sets of inputs, for which the engine may prepare one step during the other (`Executable.step_prefetching`).

    What was prepared must serve the step that is given the mapping that was announced, and no other: not one that is given another
    mapping, and none after it, whose values come in the same mapping.
    """
    return [
        (0, first, (1, second)),
        (1, second, (0, first)),  # as announced
        (1, first, None),  # comes before the one that was announced, in the mapping of the step before
        (0, second, (1, first)),  # in the mapping that was announced, which holds other values by now
        (0, second, (1, second)),  # announces what was announced already, with other values
        (1, second, None),
    ]


def announcing(fed: Sequence[Arrays], *, come: bool) -> list[Announcing]:
    """Two steps, of which the first announces the second; or, in the mapping of the last second one, inputs that do not come."""
    first, second = fed
    if come:
        return [(0, first, (1, second)), (1, second, None)]
    return [(1, first, (2, first)), (0, second, None)]


def run_announcing(
    one: Running, held: Sequence[dict[str, NDArray[Any]]], steps: Iterable[Announcing]
) -> Iterator[Arrays]:
    """The outputs of each of some steps, of which the second and the third leave them on the device."""
    for number, (index, feeds, following) in enumerate(steps):
        given, on_device = refill(held[index], feeds), number in (1, 2)
        outputs: Mapping[str, Any]
        if following is not None:
            then = partial(refill, held[following[0]], following[1])
            outputs = one.running.step_prefetching(given, then, on_device=on_device)
        else:
            outputs = one.running.step_on_device(given) if on_device else one.step(given)
        yield {name: np.array(value if is_array(value) else as_array(name, value)) for name, value in outputs.items()}


def run_steps(one: Running, fed: Iterable[Arrays], state: Arrays) -> tuple[Arrays, Arrays]:
    """The outputs of the last of some steps, and the variables after it, from the variables before the first.

    Where they draw random numbers, these are the ones of the steps behind `STEPS`, also of a session that has drawn them before.
    """
    wind_back(one, state)
    return last_of(one, ({name: np.array(value) for name, value in one.step(feeds).items()} for feeds in fed), state)


def run_last(truth: Running, before: Sequence[Arrays], begun: Arrays, feeds: Arrays) -> tuple[Arrays, Arrays] | None:
    """The outputs of a step behind others, and the variables after it; None where the model does not run on it."""
    try:
        return run_steps(truth, [*before, feeds], begun)
    except EngineError:
        return None


def wind_back(one: Running, state: Arrays) -> None:
    """Opens a session of TensorFlow anew that has drawn the random numbers of a step already, and takes the steps before that one: what
    it draws depends on nothing but how many steps came before."""
    if STEPS in state and one.since > state[STEPS] and draws(one) and not isinstance(one.variant.engine, CudaEngine):
        one.reopen()
        while one.since < state[STEPS]:
            one.step(one.variant.job.feeds)


def last_of(one: Running, steps: Iterator[Arrays], state: Arrays) -> tuple[Arrays, Arrays]:
    """The last of the outputs that steps yield, and the variables after it, from the variables before the first."""
    if state:
        one.running.load_state(state)
    *_, outputs = steps
    with saving_beside(state):
        return outputs, one.save_state() if state else {}


def variables_after(one: Running, fed: Sequence[Arrays], state: Arrays) -> Arrays:
    """The variables after some steps, from those before the first; none where it does not tell."""
    return run_steps(one, fed, state)[1] if one.running.keeps_state else {}


def moved_outputs(truth: Running, fed: Sequence[Arrays], state: Arrays, moved: Arrays) -> Arrays:
    """Outputs of the last of some steps, from moved variables or, of one step alone, on moved inputs."""
    return run_steps(truth, fed, moved)[0] if len(fed) > 1 else run_steps(truth, [moved], state)[0]


@dataclass(eq=False)
class Steps:
    """Steps from some values of variables, and how far rounding may carry what they give: asked where something differs, and once.

    Attributes:
        truth: What gives the right values.
        fed: Inputs of each step.
        state: Variables before the first.
        in_tf32: Gives the tolerances of outputs and of variables that rounding to TF32 comes to on these steps; None where nobody can.
        rough: Gives what rough functions come to on them; None where nobody can.
        known: Tolerances of variables, by precision.

    What steps gave that agree to the bit is compared once: variants that differ in nothing but their streams run the same kernels.
    """

    truth: Running
    fed: Sequence[Arrays]
    state: Arrays
    in_tf32: Callable[[], tuple[dict[str, float], dict[str, float]]] | None
    rough: Callable[[], Roughness] | None
    known: dict[Precision, dict[str, float]] = field(default_factory=dict)
    _moved: dict[Precision, dict[str, float]] = field(default_factory=dict, init=False)
    _seen: list[tuple[_Asked, Arrays, ModelComparison]] = field(default_factory=list, init=False)

    @cached_property
    def _in_tf32(self) -> tuple[dict[str, float], dict[str, float]]:
        return ({}, {}) if self.in_tf32 is None else self.in_tf32()

    @cached_property
    def _roughness(self) -> Roughness | None:
        try:
            return None if self.rough is None else self.rough()
        except EngineError:  # what runs with rewriting need not do so without
            return None

    def compared(
        self,
        compared: Callable[..., ModelComparison],
        expected: Arrays,
        precision: Precision,
        *held: Running,
        moved: bool,
        refused: bool = False,
    ) -> ModelComparison:
        """Compares with the first of what may be expected, and of its tolerances, with which that passes, or else with the last.

        Args:
            refused: True of a variant that is refused already: what rough functions come to, which takes long, would not save it.
        """
        for right, carried in self._allowed(expected, precision, moved=moved, refused=refused):
            found = compared(right, precision, *held, carried=carried)
            if found.passed:
                break
        return found

    def _allowed(
        self, expected: Arrays, precision: Precision, *, moved: bool, refused: bool
    ) -> Iterator[tuple[Arrays, dict[str, float]]]:
        """Yields outputs that the last step should give, and tolerances, as `compare` takes them, each to be asked for where others do not
        do: none, what inputs or variables that are moved come to, if wanted, in TF32 what rounding comes to on these very inputs, and what
        rough functions come to."""
        found: dict[str, float] = {}
        yield expected, found
        if moved:
            if precision not in self._moved:
                again = partial(moved_outputs, self.truth, self.fed, self.state)
                begun = self.state if len(self.fed) > 1 else self.fed[-1]
                self._moved[precision] = output_tolerances(begun, expected, again, precision=precision)
            found = self._moved[precision]
            yield expected, found
        if precision is Precision.TF32:
            found = _most(found, self._in_tf32[0])
            yield expected, found
        if not refused and (rough := self._roughness) is not None:
            yield rough.settled(expected, 0), _most(found, rough.of_outputs)

    def learned(
        self,
        mine: Arrays,
        after: Arrays,
        precision: Precision,
        tolerance: float | None,
        leave_out: Callable[[Sequence[str]], None],
        *,
        refused: bool = False,
    ) -> ModelComparison:
        """Compares variables after the steps with what they should be.

        Args:
            after: What they should be, the same each time.
            tolerance: In place of the type's own.
            refused: See `compared`.
            leave_out: Is told the names of variables that rounding decides: those that pass although they are half their size away.
        """
        asked = precision, tolerance, refused
        for known_as, earlier, found in self._seen:
            if known_as == asked and _agree(mine, earlier):
                return found
        found = self._compare_learned(mine, after, asked, leave_out)
        self._seen.append((asked, mine, found))
        return found

    def _compare_learned(
        self, mine: Arrays, after: Arrays, asked: _Asked, leave_out: Callable[[Sequence[str]], None]
    ) -> ModelComparison:
        precision, tolerance, refused = asked
        state, known = self.state, self.known
        found = compare_state(mine, after, least_state_tolerances(state, after, precision, tolerance), state)
        if found.passed:
            return found
        stepped = partial(variables_after, self.truth, self.fed)
        moved = partial(
            state_tolerances, state, after, stepped, draws=draws(self.truth), precision=precision, tolerance=tolerance
        )
        if precision not in known:
            known[precision] = moved()
        found = compare_state(mine, after, known[precision], state)
        if not (found.passed or refused):
            known[precision] = _most(known[precision], moved(seeds=MORE_MOVES))
            found = compare_state(mine, after, known[precision], state)
        if not found.passed and precision is Precision.TF32:
            known[precision] = _most(known[precision], self._in_tf32[1])
            found = compare_state(mine, after, known[precision], state)
        if not (found.passed or refused) and (rough := self._roughness) is not None:
            after, known = rough.settled(after, 1), {precision: _most(known[precision], rough.of_variables)}
            found = compare_state(mine, after, known[precision], state)
        if names := [one.name for one in found.outputs if not one.passed and one.needed < ANY_FINITE and not one.exact]:
            names = undetermined(state, after, stepped, names, precision=precision)
            known[precision] |= dict.fromkeys(names, ANY_FINITE)
            found = compare_state(mine, after, known[precision], state)
        # What passes although it is half its size away was hardly compared: the user is told.
        leave_out([one.name for one in found.outputs if one.passed and one.needed >= DECIDES])
        return found


def _agree(one: Arrays, other: Arrays) -> bool:
    """True if all values of two steps are equal, and none is NaN."""
    pairs = ((np.asarray(value), np.asarray(other[name])) for name, value in one.items() if name in other)
    return one.keys() == other.keys() and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def _most(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The larger tolerance of each."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}


def begin(held: Sequence[Running], state: Arrays) -> Arrays:
    """The values of variables to begin with, and under `STEPS` how many steps are behind them, for random ops to count.

    Sessions of TensorFlow that draw random numbers can not be told how many: all of them take as many steps as the one that took most.
    """
    sessions = [one for one in held if not isinstance(one.variant.engine, CudaEngine) and draws(one)]
    most = max((one.since for one in sessions), default=0)
    for one in sessions:
        for _ in range(most - one.since):
            one.step(one.variant.job.feeds)
    return {**state, STEPS: np.array(most, np.int64)}


def draws(one: Running) -> bool:
    """Tell whether its steps draw random numbers, as far as its functions are not known to be left out."""
    graph = one.variant.job.flat.graph
    bodies = (function.body.ops for function in graph.functions.values())
    return any(not DRAWS.isdisjoint(ops) for ops in (graph.ops, *bodies))


def refill(held: dict[str, NDArray[Any]], feeds: Arrays) -> Arrays:
    """Inputs, in the arrays that were given before where they fit in."""
    for name, value in feeds.items():
        fits = name in held and (held[name].dtype, held[name].shape) == (value.dtype, value.shape)
        held[name] = held[name] if fits else np.array(value)
        held[name][...] = value
    return held


@dataclass(frozen=True, eq=False)
class Verification:
    """Settings of verification: on inputs that `fresh` makes from a seed and, if there is one, against a reference.

    `computed` is as `Reference` has it. `rounding` is, for those that are held to it, as `compare` has it. Where it is `proved` that the
    rewritten graph does what it did op by op, only streams and kernels are left to verify.
    """

    fresh: Callable[[int], Arrays] | Fresh
    settings: Settings
    reference: Reference | None
    tell: Progress
    computed: Mapping[str, str] | None = None
    rounding: Mapping[Variant, Mapping[str, float]] = field(default_factory=dict)
    special: bool = True
    proved: bool = False

    @property
    def kinds(self) -> tuple[InputKind, ...]:
        """Those of special inputs."""
        return self.fresh.kinds if self.special and isinstance(self.fresh, Fresh) else ()

    def made(self, seed: int, kind: InputKind) -> Arrays:
        """Inputs of a kind."""
        return self.fresh(seed, kind) if isinstance(self.fresh, Fresh) else self.fresh(seed)

    def refuse(self, kind: InputKind, why: str) -> None:
        """Notes that nothing can be verified on a kind of inputs."""
        if isinstance(self.fresh, Fresh):
            self.fresh.refused.setdefault(kind.name.value, why)

    def leave_usual(self, kind: InputKind, names: Iterable[str], why: str) -> None:
        """Notes inputs that have usual values in a kind of inputs."""
        if isinstance(self.fresh, Fresh):
            self.fresh.usual.setdefault(kind.name.value, ({}, why))[0].update(dict.fromkeys(names))

    def runs_on(self, kind: InputKind) -> bool:
        """True if the model takes all special values of a kind of inputs."""
        told = (self.fresh.refused, self.fresh.usual) if isinstance(self.fresh, Fresh) else ()
        return all(kind.name.value not in one for one in told)

    def leave_out(self, variables: Iterable[str]) -> None:
        """Notes variables that are not compared since rounding decides what TensorFlow makes of them."""
        if isinstance(self.fresh, Fresh):
            self.fresh.undetermined.update(dict.fromkeys(variables))


SPECIAL = "verifying special inputs"
"""The phase in which that is done."""


def seconds_of(sums: Sums) -> float:
    """Sum up the seconds that special inputs took."""
    return sum(one.seconds for one in sums.phases if one.phase == SPECIAL)


def kinds_for(how: Verification, *, half: bool) -> list[InputKind]:
    """Kinds of inputs for a precision: in half precision those of ordinary size, within float16's range."""
    return [kind for kind in how.kinds if not half or kind.name not in (InputKindName.LARGE, InputKindName.SMALL)]


def sets_of(how: Verification, kinds: Sequence[InputKind], alone: bool) -> list[tuple[InputKind, list[Arrays]]]:
    """Kinds of inputs to verify on, and what is stepped on before each: where a step says nothing of the next (`alone`) the same strings
    beside other numbers, and the same numbers beside other strings; else, of some, a random one."""
    usual, other = how.fresh(how.settings.seed + 1), how.fresh(how.settings.seed + 2)
    words = {name for name, value in usual.items() if value.dtype.kind == "O"}
    parts = (words, usual.keys() - words) if words and alone else ()
    mixed: list[Arrays] = [{**other, **{name: usual[name] for name in part}} for part in parts if part]
    again = [] if alone else [RANDOM, *[kind for kind in kinds if kind.name is InputKindName.EDGES][:1]]
    return [*[(RANDOM, mixed)][: len(mixed)], *((kind, []) for kind in kinds), *((kind, [other]) for kind in again)]


_MOST_RUNS = 24
"""Runs that find which inputs a kind of inputs is refused for: one of 100 takes 14."""

Ran = tuple[Arrays, Arrays]
"""Outputs, and variables after a step."""


def without_refused(
    run: Callable[[Arrays], Ran | None], usual: Arrays, special: Arrays
) -> tuple[Arrays, list[str], Ran] | None:
    """Special inputs as far as the model runs on them: usual values for those that it refuses, their names, and what it gives. None
    where nothing special is left.

    What it refuses is found by halves: a few inputs of many, as a rule.
    """
    kept, refused, found = usual, list[str](), None
    differ = [name for name, value in special.items() if not np.array_equal(value, usual[name])]
    # Numbers first: ids are what is refused most often.
    differ.sort(key=lambda name: special[name].dtype.kind in "iuO")
    waiting = [differ[len(differ) // 2 :], differ[: len(differ) // 2]]
    for _ in range(_MOST_RUNS):
        if not waiting:
            break
        names = waiting.pop()
        tried = {**kept, **{name: special[name] for name in names}}
        made = run(tried) if names else None
        if made is not None:
            kept, found = tried, made
        elif len(names) > 1:
            waiting += [names[len(names) // 2 :], names[: len(names) // 2]]
        else:
            refused += names
    refused += [name for names in waiting for name in names]
    return None if found is None else (kept, refused, found)


def seeds_of(settings: Settings) -> range:
    """Seeds of the inputs that variants are held against each other on."""
    return range(settings.seed + 1, settings.seed + 1 + settings.verify_inputs)


def with_scale(built: Sequence[Running], state: Arrays, how: Verification) -> Arrays:
    """Gives the state with a loss scale with which no gradient overflows in the steps that verify, and half as much to be sure; the state
    itself where no loss is scaled. A step that is left out is right, and gives other variables than that of another precision."""
    for one in built:
        if LOSS_SCALE in one.running.save_state():
            inputs = [] if how.reference is None else [how.reference.feeds]
            inputs += [
                how.made(seed, kind)
                for kind in kinds_for(how, half=True) or [RANDOM]
                for seed in seeds_of(how.settings)
            ]
            scale = FIRST_SCALE[LOSS_SCALE]
            while scale > 1:
                one.running.load_state({**state, **FIRST_SCALE, LOSS_SCALE: scale})
                for feeds in inputs:
                    one.step(feeds)
                if one.running.save_state()[LOSS_SCALE] == scale:
                    break
                scale = np.array(scale / 2, scale.dtype)
            return {**state, **FIRST_SCALE, LOSS_SCALE: np.array(scale / 2, scale.dtype)}
    return state
