"""Steps of a variant that is verified: from which variables they begin, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import STEPS, Arrays, is_array
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.tensors import as_array
from msplit.errors import EngineError
from msplit.opset.traits import DRAWS
from msplit.verify.compare import (
    ANY_FINITE,
    DECIDES,
    ModelComparison,
    compare_state,
    least_state_tolerances,
    output_tolerances,
    state_tolerances,
    undetermined,
)
from msplit.verify.results import Running

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
        one.close()
        one.build(one.variant.job)
        while one.since < state[STEPS]:
            one.step(one.variant.job.feeds)


def last_of(one: Running, steps: Iterator[Arrays], state: Arrays) -> tuple[Arrays, Arrays]:
    """The last of the outputs that steps yield, and the variables after it, from the variables before the first."""
    if state:
        one.running.load_state(state)
    *_, outputs = steps
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
        known: Tolerances of variables, by precision.
    """

    truth: Running
    fed: Sequence[Arrays]
    state: Arrays
    in_tf32: Callable[[], tuple[dict[str, float], dict[str, float]]] | None
    known: dict[Precision, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def _in_tf32(self) -> tuple[dict[str, float], dict[str, float]]:
        return ({}, {}) if self.in_tf32 is None else self.in_tf32()

    def carried(self, expected: Arrays, precision: Precision, *, moved: bool) -> Iterator[dict[str, float]]:
        """Yields tolerances of the outputs of the last step, as `compare` takes them, each to be asked for where those before do not do:
        none, what inputs or variables that are moved come to, if wanted, and in TF32 what rounding comes to on these very inputs."""
        found: dict[str, float] = {}
        yield found
        if moved:
            again = partial(moved_outputs, self.truth, self.fed, self.state)
            found = output_tolerances(
                self.state if len(self.fed) > 1 else self.fed[-1], expected, again, precision=precision
            )
            yield found
        if precision is Precision.TF32:
            yield _most(found, self._in_tf32[0])

    def learned(
        self,
        mine: Arrays,
        after: Arrays,
        precision: Precision,
        tolerance: float | None,
        leave_out: Callable[[Sequence[str]], None],
    ) -> ModelComparison:
        """Compares variables after the steps with what they should be.

        Args:
            tolerance: In place of the type's own.
            leave_out: Is told the names of variables that nothing but rounding decides.
        """
        state, known = self.state, self.known
        found = compare_state(mine, after, least_state_tolerances(state, after, precision, tolerance), state)
        if found.passed:
            return found
        stepped = partial(variables_after, self.truth, self.fed)
        if precision not in known:
            known[precision] = state_tolerances(
                state, after, stepped, draws=draws(self.truth), precision=precision, tolerance=tolerance
            )
        found = compare_state(mine, after, known[precision], state)
        if not found.passed and precision is Precision.TF32:
            known[precision] = _most(known[precision], self._in_tf32[1])
            found = compare_state(mine, after, known[precision], state)
        if names := [one.name for one in found.outputs if not one.passed and one.needed < ANY_FINITE and not one.exact]:
            names = undetermined(state, after, stepped, names, precision=precision)
            known[precision] |= dict.fromkeys(names, ANY_FINITE)
            found = compare_state(mine, after, known[precision], state)
        # What passes although it is half its size away was hardly compared: the user is told.
        leave_out([one.name for one in found.outputs if one.passed and one.needed >= DECIDES])
        return found


def widened(compared: Callable[..., ModelComparison], tolerances: Iterator[Mapping[str, float]]) -> ModelComparison:
    """Compares with the first of these tolerances with which that passes, or else with the last."""
    found = compared(carried=next(tolerances))
    for carried in () if found.passed else tolerances:
        found = compared(carried=carried)
        if found.passed:
            break
    return found


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
