"""Ops that stay in float32 so that half precision keeps within an error that the user allows.

What an op's rounding does to the outputs is learned from steps in which only a few ops are in half precision. Then ops return to it,
those first that do the least for the time that they save, as long as every output stays within the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from msplit.core.arguments import Precision, number
from msplit.engines.base import Arrays, Job
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.options import KernelMode
from msplit.progress import Progress, phase
from msplit.verify.compare import compare, compare_state
from msplit.verify.results import MixedPrecision, Roughness
from msplit.verify.tolerances import carried

MOST = 32
"""Evaluations. Each compiles the model without timing a kernel, and runs a step per set of inputs."""


def keep_within(job: Job, most: float, inputs: Sequence[Arrays], tell: Progress | None = None) -> MixedPrecision:
    """Chooses which nodes of a job in half precision stay in float32, on the cuda engine. The choice is the same each time.

    Args:
        most: The largest error of an output.
        inputs: What it has to hold for; more than one set is a check that it does so in general.

    Raises:
        MsplitError: The bound is no number above zero.
        EngineError: The engine can not run the model.
    """
    most = number("the largest error", most, above=True)
    own = replace(_plain(job), wide=frozenset())
    units = CUDA.in_half(own)
    times = [1.0 if own.costs is None else max(float(own.costs.time_us[list(nodes)].sum()), 1e-3) for nodes in units]
    expected = CUDA.try_out(replace(own, precision=Precision.IEEE), inputs)
    seen: dict[frozenset[int], Mapping[str, float]] = {}

    def wide(chosen: frozenset[int]) -> frozenset[int]:
        half = {node for unit in chosen for node in units[unit]}
        return frozenset(node for nodes in units for node in nodes) - half

    def error(chosen: frozenset[int]) -> float:
        if chosen not in seen:
            if tell:
                tell("choosing what stays in float32", len(seen) / MOST)
            seen[chosen] = errors_of(CUDA.try_out(replace(own, wide=wide(chosen)), inputs), expected)
        return max(seen[chosen].values(), default=0.0)

    with phase("choosing what stays in float32"):
        chosen = choose(times, error, most)
    return MixedPrecision(
        most=most,
        error=error(chosen),
        errors=seen[chosen],
        ops=len(units),
        in_half=len(CUDA.in_half(replace(own, wide=wide(chosen)))),
        wide=wide(chosen),
        evaluations=len(seen),
    )


def emulated_errors(job: Job, inputs: Sequence[Arrays]) -> dict[str, float]:
    """Error against IEEE float32 of each output of a job in half precision, or in TF32, if its ops compute in float32, and only round as
    they do; the root mean square over several inputs.

    Raises:
        EngineError: The engine can not run the model.
    """
    own = _plain(job)
    wide = replace(own, precision=Precision.IEEE)
    rounding = own if job.precision.half else wide
    emulated = CUDA.try_out(replace(rounding, options=replace(own.options, emulate=True)), inputs)
    exact = CUDA.try_out(wide, inputs)
    each = [errors_of([one], [other]) for one, other in zip(emulated, exact, strict=True)]
    return {name: math.hypot(*(errors[name] for errors in each)) / len(each) ** 0.5 for name in each[0]}


_RUNS = 8
"""Number of times that functions are rough, or numbers are rounded another way, to learn how far that carries: it may be 1 in 2 that what
they are moved by decides the sign of a gradient."""


def tf32_tolerances(job: Job, fed: Sequence[Arrays], state: Arrays) -> tuple[dict[str, float], dict[str, float]]:
    """Tolerances of the outputs of the last of some steps, and of the variables after it: three times as far as rounding to TF32, and
    nothing else, moves them on these inputs. That is what our engine makes of them in IEEE float32 where products read rounded numbers,
    held against the same where they do not.

    Numbers are rounded to the nearest, and in other ways, for kernels round other sums than these. Where all rows are alike, an output
    is one number, which a single way may leave where it was: a two-tower of empty strings was moved by 0.009, and by 0.046 on a GPU."""
    wide = replace(_plain(job), precision=Precision.IEEE)
    ((exact, after),) = CUDA.try_steps(wide, fed, state, None)
    emulated = replace(wide, options=replace(wide.options, emulate=True))
    rounded = CUDA.try_steps(emulated, fed, state, None, *range(_RUNS))
    return (
        carried(compare(outputs, exact) for outputs, _ in rounded),
        carried(compare_state(learned, after, {}, state) for _, learned in rounded),
    )


def roughness(job: Job, fed: Sequence[Arrays], state: Arrays) -> Roughness:
    """Learns how far the roughness of functions carries in some steps from certain variables.

    Raises:
        EngineError: The engine can not run the model so.
    """
    plain = _plain(job)
    plain = replace(plain, precision=Precision.IEEE, options=replace(plain.options, simplify=False))
    exact, *rough = CUDA.try_steps(plain, fed, state, None, *range(_RUNS))
    return Roughness(state, exact, rough)


def _plain(job: Job) -> Job:
    """The job on one stream of one device, by libraries' kernels that nobody times."""
    options = replace(job.options, mode=KernelMode.PLAIN, measure=False, compile=False, capture=False, plan=None)
    options = replace(options, devices=(), split=(), torture=None)
    return replace(job, ids=np.zeros_like(job.ids), streams=1, options=options)


def errors_of(got: Sequence[Arrays], expected: Sequence[Arrays]) -> dict[str, float]:
    """Error of each output against the expected one, over all inputs; infinite where no tolerance would do, as for integers that differ."""
    found: dict[str, float] = {}
    for one, other in zip(got, expected, strict=True):
        for output in compare(one, other).outputs:
            away = output.distance if math.isfinite(output.needed) else math.inf
            found[output.name] = max(found.get(output.name, 0.0), away)
    return found


def choose(
    gains: Sequence[float], error: Callable[[frozenset[int]], float], most: float, evaluations: int = MOST
) -> frozenset[int]:
    """Units that may all be in half precision with an error of `most`, or none where that is too much already.

    Args:
        gains: What each unit gains from it, such as its time; units that are near each other in the model are near each other here.
        error: With these units in half precision and no others.
        evaluations: Most different sets that are asked about, up to two more.
    """
    everything = frozenset(range(len(gains)))
    if error(everything) <= most or error(frozenset()) > most:
        return everything if error(everything) <= most else frozenset()
    left = evaluations
    alone: dict[tuple[int, ...], float] = {tuple(sorted(everything)): math.inf}
    while left > evaluations // 2:
        split = max((units for units in alone if len(units) > 1), key=lambda units: alone[units], default=None)
        if split is None:
            break
        del alone[split]
        for half in (split[: len(split) // 2], split[len(split) // 2 :]):
            alone[half] = error(frozenset(half))
            left -= 1

    def harm(units: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return alone[units] ** 2 / sum(gains[unit] for unit in units), units  # what rounds apart adds up in squares

    chosen = frozenset[int]()
    waiting = [sorted(alone, key=harm)]
    while waiting and left > 0:
        tried = waiting.pop()
        wanted = chosen.union(*tried)
        left -= 1
        if error(wanted) <= most:
            chosen = wanted
        elif len(tried) > 1:
            waiting += [tried[len(tried) // 2 :], tried[: len(tried) // 2]]
        elif len(tried[0]) > 1:
            units = tried[0]
            waiting += [[units[len(units) // 2 :]], [units[: len(units) // 2]]]
    return chosen
