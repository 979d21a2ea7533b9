"""Whether streams can help a model: one judgement, which every command tells in the same words."""

from __future__ import annotations

from dataclasses import dataclass

from msplit.analysis.colocation import groups
from msplit.analysis.copies import copies, with_copies
from msplit.analysis.order import canonical
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.schedule.algorithms import LIST, ONE
from msplit.schedule.bounds import Bounds
from msplit.schedule.machine import Machine
from msplit.schedule.problem import Problem
from msplit.schedule.search.choose import best, choose

WORTH = 1.05
"""A gain below this is none: what is predicted and what is measured differ by as much."""

MUCH = 0.25
"""A prediction in which more than this share of the kernels is guessed is called a guess."""

STREAMS = 16
"""Streams that the simulator may take; more gained nothing on any model measured."""

_ALL = 20_000
"""Blocks up to which all algorithms are tried to see what streams could gain, above it the one that is best most often."""


@dataclass(frozen=True)
class Judgement:
    """What streams are worth to a model.

    Attributes:
        kind: ``nothing`` (no node launches a kernel), ``never`` (no number of streams gains `WORTH`), ``little`` (these do not),
            ``helps``.
        gain: Simulated speed-up over one stream.
        streams: On how many.
        most: No number of streams gains more.
        guessed: Share of the kernels whose cost is a guess.
        words: All this, in one to three sentences.
    """

    kind: str
    gain: float
    streams: int
    most: float
    guessed: float
    words: str

    @property
    def helps(self) -> bool:
        """Whether the streams are worth having."""
        return self.kind == "helps"


def judge(of: Bounds, gain: float, streams: int, *, guessed: float = 0.0, worth: float = WORTH) -> Judgement:
    """Judges what streams gain.

    Args:
        gain: Simulated speed-up of some assignment over one stream.
        streams: Streams that its kernels use.
        guessed: Share of the kernels whose cost is a guess, since their shapes are not known.
        worth: Least gain that is one.
    """
    most = max(of.max_gain, gain)
    if not of.limit:
        kind, words = "nothing", "Streams can not help this model: no node launches a kernel."
    elif most < worth:
        kind, words = "never", f"Streams can not help this model: {of.limit}."
    elif gain < worth:
        kind = "little"
        got = (
            "one stream is as fast as any other number"
            if streams < 2
            else f"{gain:.2f}x predicted on {streams} streams"
        )
        words = f"Streams gain next to nothing here: {got}, and at most {most:.2f}x whatever their number: {of.limit}."
    else:
        kind = "helps"
        words = f"Streams help this model: {gain:.2f}x predicted on {streams}, and at most {most:.2f}x whatever their number."
    if guessed > MUCH and kind != "nothing":
        words += f" That is a guess: the shapes of {100 * guessed:.0f} % of the kernels are not known."
    return Judgement(kind, gain, streams, most, guessed, words)


def foresee(flat: FlatGraph, costs: Costs) -> tuple[float, int]:
    """What the rule `auto` should reach: simulated gain over one stream, and the streams that it takes.

    `auto` itself simulates longer, to refine what it finds here, so that it may gain a little more. Near-linear: all algorithms up to
    20,000 blocks, above it list scheduling.
    """
    problem = problem_of(flat, costs)
    if not len(problem):
        return 1.0, 1
    found = choose(problem, STREAMS, None if len(problem) <= _ALL else (LIST,), refining=0)
    winner = best(found)
    one = next(candidate for candidate in found if candidate.name == ONE)
    if not winner.makespan_us:
        return 1.0, 1
    return one.makespan_us / winner.makespan_us, max(winner.streams, 1)


def problem_of(flat: FlatGraph, costs: Costs) -> Problem:
    """The problem behind a model, where no rule says what else must share a stream."""
    order = canonical(flat, costs.time_us)
    same = copies(flat, costs.time_us)
    tie = with_copies(flat, groups(flat, handles=False, state=False), same).of
    return Problem.from_flat(flat, costs, tie=tie, same=same, order=order, machine=Machine.of_costs(costs))
