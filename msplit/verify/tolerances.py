"""Learns how far rounding carries in steps that train: the tolerances of variables, and of outputs behind several steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from ml_dtypes import finfo
from numpy.typing import NDArray

from msplit.core.arguments import Precision
from msplit.engines.base import Arrays
from msplit.verify.compare import SMALLEST_SCALE, ModelComparison, WithChanges, compare, distance, norm, tolerance_of

_STATE = {
    Precision.IEEE: (1e-4, 2.0**-15),
    Precision.TF32: (2e-1, 2.0**-8),
    Precision.FP16: (2e-1, 2.0**-8),
    Precision.BF16: (2e-1, 2.0**-6),
}
"""By precision: the tolerance of variables, and how far the values to begin with are moved, relative to each, to learn how
far rounding carries. The latter are some ten times what rounding does to an activation."""

CARRIED = 3.0
"""Most distance of a variable, as a multiple of what moved values did to it."""

_MOVES = 5
"""Number of times that values are moved to learn what that does to an output, which may be a single number."""

MORE_MOVES = range(1, _MOVES)
"""Seeds of further moves, for variables that one move does not explain. A ReLU that lets another example through moved the slots of an
expert of MMoE, which few of 128 examples reach, by 0.2 to 0.5, in 4 of 10 steps whose values were moved by a rounding of TF32."""


_TIMES_ROUNDING = 8.0
"""Quotient of how far `_STATE` moves values and of rounding in its precision."""

DECIDES = 0.5
"""Distance of a variable from itself from which on nothing but rounding decides what it is. A ReLU that lets another example through moves
one by 0.011."""

_FEWER_MOVES = 3
"""Number of times that values are moved to learn whether anything but rounding decides a variable: it has to be far away each time."""

ANY_FINITE = 1e30
"""Tolerance where all finite numbers are right."""


def state_tolerances(
    state: Arrays,
    after: Arrays,
    stepped: Callable[[Arrays], Arrays],
    *,
    draws: bool,
    precision: Precision,
    tolerance: float | None = None,
    seeds: Iterable[int] = (0,),
) -> dict[str, float]:
    """Tolerance of each variable against another computation of the same steps, relative to its root mean square.

    That is a tolerance of the type, or three times what the steps themselves make of values to begin with that are moved by little more
    than rounding, or of the same values again, whichever is most. Adam, for one, moves a weight whose gradient is zero but for rounding by
    a whole learning rate; and on a GPU TensorFlow adds some gradients up in another order each time, those of filters for one. Where
    steps that draw numbers give something else when they are repeated, as with dropout, only the former is known.

    Args:
        state: The variables before the steps.
        after: The variables after them.
        stepped: Runs the steps again: gives the variables after them, from those before.
        draws: Whether they draw random numbers.
        precision: In which the steps are made.
        tolerance: In place of the type's own.
        seeds: Seeds of the moves, each of which takes the steps once more; see `MORE_MOVES`.
    """
    amplitude = _STATE[precision][1]
    least = least_state_tolerances(state, after, precision, tolerance)
    expected = WithChanges(after, state)

    def away(begun: Arrays) -> dict[str, float]:
        other = WithChanges(stepped(begun), begun)
        return {name: distance(other[name], expected[name]) for name in least}

    again = away(state)
    if draws and any(again[name] > most for name, most in least.items()):
        return least
    carried = [again, *(away(_moved(state, amplitude, seed)) for seed in seeds)]
    return {name: max(most, CARRIED * max(one[name] for one in carried)) for name, most in least.items()}


def undetermined(
    state: Arrays, after: Arrays, stepped: Callable[[Arrays], Arrays], names: Sequence[str], *, precision: Precision
) -> list[str]:
    """Of some variables and changes, those that TensorFlow's own rounding decides: each time that the values to begin with are moved by no
    more than rounding, they come out at least half their size away. The gradient of a bias in front of a batch norm is one, which is zero
    but for rounding, and what Adam makes of it.

    Args:
        state: The variables before the steps.
        after: The variables after them.
        stepped: As `state_tolerances` has it.
        names: As `WithChanges` has them.
        precision: In which the steps are made.
    """
    expected = WithChanges(after, state)
    for seed in range(_FEWER_MOVES):
        begun = _moved(state, _STATE[precision][1] / _TIMES_ROUNDING, seed)
        other = WithChanges(stepped(begun), begun) if names else {}
        names = [name for name in names if distance(other[name], expected[name]) >= DECIDES]
    return list(names)


def least_state_tolerances(
    state: Arrays, after: Arrays, precision: Precision, tolerance: float | None = None
) -> dict[str, float]:
    """The tolerance of the type for each variable and its change, see `state_tolerances`. A change is held no closer than the variable's
    own type can hold it."""
    least = _STATE[precision][0] if tolerance is None else tolerance
    found = {}
    for name, value in WithChanges(after, state).items():
        if tolerance_of(value.dtype.name):
            found[name] = least
        if name not in after:
            whole, changed = np.asarray(after[name.removeprefix("change of ")]), value != 0
            if changed.any() and not changed.all():
                whole = whole[changed]
            places = 4 * float(finfo(value.dtype).eps) * norm(whole)
            found[name] = max(least, places / max(norm(value), SMALLEST_SCALE * value.size**0.5, 1e-300))
    return found


def output_tolerances(
    state: Arrays, expected: Arrays, stepped: Callable[[Arrays], Arrays], *, precision: Precision
) -> dict[str, float]:
    """Tolerances of the outputs of the last of several steps that train against another computation's, as `compare` measures it.

    What rounding does in one step the next one learns from: a loss is that of other variables by then. As with `state_tolerances`, it
    is three times what the same steps give when they are repeated, or begin with values that are moved by little more than rounding; these
    are moved five times, since one number may be near where it was by chance (Inception-v3's second loss: XLA was refused for 0.6 %).

    Args:
        state: The variables before the first step.
        expected: Outputs of the last.
        stepped: Runs all of them again: gives outputs of the last, from the variables before the first.
        precision: In which the steps are made.
    """
    amplitude = _STATE[precision][1]
    begun = (state, *(_moved(state, amplitude, seed) for seed in range(_MOVES)))
    return carried(compare(stepped(values), expected, precision=precision) for values in begun)


def carried(compared: Iterable[ModelComparison]) -> dict[str, float]:
    """The most that each output needs, three times."""
    found: dict[str, float] = {}
    for one in (output for comparison in compared for output in comparison.outputs):
        if np.isfinite(one.needed):
            found[one.name] = max(found.get(one.name, 0.0), CARRIED * one.needed)
    return found


def _moved(state: Arrays, amplitude: float, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Variables, each number moved by up to a share of itself; with the same seed the same ones every time."""
    generator = np.random.default_rng(seed)
    return {name: move(np.asarray(value), amplitude, generator) for name, value in state.items()}


def move(value: NDArray[Any], amplitude: float, generator: np.random.Generator) -> NDArray[Any]:
    """Numbers, each moved by up to a share of itself; of types that must be equal, as they are."""
    if tolerance_of(value.dtype.name) == 0.0:
        return value
    noise = generator.uniform(-amplitude, amplitude, value.shape)
    return np.asarray(value * (1 + noise).astype(value.dtype))
