"""Puts branches on streams: each where least runs at the time when it can run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.analysis.branches import Branches
from msplit.core.assignment import UNASSIGNED
from msplit.core.dag import distinct
from msplit.core.graph import Floats, Ints

_BINS = 4096
"""Most intervals into which time is cut. With fewer different times than that, loads are exact."""


@dataclass(frozen=True)
class Unit:
    """Branches that go on one stream.

    Attributes:
        roots: Branches that decide when the unit runs.
        guests: Cheap branches that go with them.
        pin: The stream that earlier rules chose, or UNASSIGNED.
    """

    roots: tuple[int, ...]
    guests: tuple[int, ...]
    pin: int


def place(branches: Branches, units: list[Unit], streams: int, wait_us: float) -> list[int]:
    """Chooses a stream for each unit, by list scheduling: the most urgent first, each on the stream with the least load at its time.

    A unit's time reaches from when it can start to when what it feeds could start at the earliest (to the end, where it feeds
    nothing), if streams were free. A stream's load is the work of the units placed on it so far within that time; being away from
    the fork's stream or the join's costs a wait each. Each branch is in one unit.
    """
    loads = _Loads(branches, streams)
    rank = branches.blocks.rank_us[branches.first]
    urgency = [
        (units[number].pin == UNASSIGNED, -float(rank[list(units[number].roots)].max()), number)
        for number in range(len(units))
    ]
    stream_of = np.full(len(branches), UNASSIGNED, np.int32)
    chosen = [UNASSIGNED] * len(units)
    for _, _, number in sorted(urgency):
        unit = units[number]
        chosen[number] = unit.pin if unit.pin != UNASSIGNED else _choose(branches, unit, loads, stream_of, wait_us)
        for branch in (*unit.roots, *unit.guests):
            stream_of[branch] = chosen[number]
            loads.add(branch, chosen[number])
    return chosen


def _choose(branches: Branches, unit: Unit, loads: _Loads, stream_of: Ints, wait_us: float) -> int:
    cost = loads.within(*_window(branches, unit))
    for ends in (branches.fork, branches.join):
        blocks = {int(ends[branch]) for branch in unit.roots} - {-1}
        near = {int(stream_of[branches.of[block]]) for block in blocks} - {UNASSIGNED}
        if len(near) == 1:
            away = np.ones(len(cost), bool)
            away[near.pop()] = False
            cost = cost + wait_us * away
    # Sums of the same times in another order must count as equal; of equals, the lowest stream.
    return int(np.flatnonzero(cost <= cost.min() + 1e-9 * max(1.0, loads.end))[0])


def _window(branches: Branches, unit: Unit) -> tuple[float, float]:
    blocks = branches.blocks
    roots = list(unit.roots)
    first, last, join = branches.first[roots], branches.last[roots], branches.join[roots]
    begin = float((blocks.finish_us[first] - blocks.time_us[first]).min())
    if (join < 0).any():
        return begin, float(blocks.finish_us.max())
    end = max(float(blocks.finish_us[last].max()), float((blocks.finish_us[join] - blocks.time_us[join]).max()))
    return begin, end


class _Loads:
    """Work on each stream over time, as if every block ran as early as its producers allow."""

    def __init__(self, branches: Branches, streams: int) -> None:
        blocks = branches.blocks
        self._branches = branches
        self._begin = blocks.finish_us - blocks.time_us
        times = distinct(np.concatenate([self._begin, blocks.finish_us]))
        if len(times) > _BINS:
            times = np.unique(np.quantile(times, np.linspace(0, 1, _BINS + 1)))
        self._times = times
        self._load = np.zeros((streams, max(len(times) - 1, 1)))
        self.end = float(times[-1])

    def within(self, begin: float, end: float) -> Floats:
        """Per stream its work between two times."""
        first, last = self._bins(begin, end)
        return np.asarray(self._load[:, first:last].sum(axis=1))

    def add(self, branch: int, stream: int) -> None:
        """Put a branch on a stream."""
        blocks = self._branches.members(branch)
        begin, finish = self._begin[blocks], self._branches.blocks.finish_us[blocks]
        first, last = self._bins(float(begin[0]), float(finish[-1]))
        edges = self._times[first : last + 1]
        done = np.cumsum(finish - begin)
        # Work done by each time: constant between blocks, rising at rate one within them.
        corners = np.stack([begin, finish], axis=1).ravel()
        heights = np.stack([done - (finish - begin), done], axis=1).ravel()
        self._load[stream, first:last] += np.diff(np.interp(edges, corners, heights))

    def _bins(self, begin: float, end: float) -> tuple[int, int]:
        first = int(np.searchsorted(self._times, begin, side="right")) - 1
        last = int(np.searchsorted(self._times, end, side="left"))
        return max(first, 0), max(last, first + 1)
