"""Rule `branch`: streams by the structure of the graph, and where each branch goes.

The rule `branch`: streams by the structure of the graph, weighted by cost.

Puts branches on streams: each where least runs at the time when it can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from msplit.analysis.branches import Branches, branches_of
from msplit.core.dag import distinct
from msplit.core.graph import UNASSIGNED, Assignment, Floats, Ints
from msplit.rules.base import Remark, RuleContext, RuleOptions

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


@dataclass(frozen=True)
class Branch:
    """Spreads independent branches over streams.

    The costliest way out of a fork stays on the fork's stream; other branches go where least runs beside them. Branches that cost less
    than two waits stay with the branch that they join; if a fork has many of them, they are bundled until a bundle is worth a stream.
    Kernels that fill the GPU count for nothing here: beside them nothing else can run.

    Nodes that launch no kernel are left to `propagate`.

    Attributes:
        min_cost_us: Time that a branch must be able to overlap with others to be worth a stream, µs: what leaving a stream and coming
            back costs.
    """

    key: ClassVar[str] = "branch"
    min_cost_us: float = 5.0

    @classmethod
    def from_options(cls, options: RuleOptions) -> Branch:
        """Read the options of the rule from YAML."""
        return cls(options.number("min_cost_us", cls.min_cost_us, 0.0))

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim every node that launches a kernel."""
        branches = branches_of(context.flat, context.costs, context.order_after(assignment))
        if len(branches) == 0:
            return assignment, (Remark(self.key, "no-gain", "no node launches a kernel"),)
        pinned = _pins(branches, assignment)
        units = _units(branches, pinned, self.min_cost_us, context.streams)
        streams = place(branches, units, context.streams, self.min_cost_us / 2)
        remarks: tuple[Remark, ...] = ()
        if context.streams > 1 and len(set(streams)) == 1:
            remarks = (Remark(self.key, "no-gain", _no_gain(branches, self.min_cost_us)),)
        claims = _claims(context, assignment, branches, units, streams)
        return assignment.claim_many(claims, self.key), remarks


def _pins(branches: Branches, assignment: Assignment) -> Ints:
    """Per branch the stream on which earlier rules put most of its time, or UNASSIGNED."""
    kernels = branches.blocks.kernels
    ids = assignment.ids[kernels.node]
    claimed = (ids != UNASSIGNED) & (kernels.time_us > 0)
    pins = np.full(len(branches), UNASSIGNED, np.int32)
    if not claimed.any():
        return pins
    branch = branches.of[branches.blocks.of[claimed]]
    width = int(ids.max()) + 1
    keys, of = np.unique(branch.astype(np.int64) * width + ids[claimed], return_inverse=True)
    times = np.bincount(of, kernels.time_us[claimed])
    # Ascending by time, and among equals the lowest stream last, so that what is written last stays.
    for key in keys[np.lexsort((-(keys % width), times))].tolist():
        pins[key // width] = key % width
    return pins


def _units(branches: Branches, pinned: Ints, min_cost_us: float, streams: int) -> list[Unit]:
    """Units that are placed as one: a branch with the cheap ones that stay with it, or a bundle of cheap ones."""
    cheap = (branches.useful_us < min_cost_us) & (pinned == UNASSIGNED)
    bundles: dict[tuple[int, int], list[int]] = {}
    for branch in np.flatnonzero(cheap).tolist():
        bundles.setdefault((int(branches.fork[branch]), int(branches.join[branch])), []).append(branch)
    home = {}
    roots = [[branch] for branch in np.flatnonzero(~cheap).tolist()]
    for (fork, join), members in bundles.items():
        useful = branches.useful_us[members]
        parts = min(streams, int(useful.sum() // min_cost_us))
        if parts and len(members) > 1:
            # Neighbours stay together, and each bundle gets an equal share of the time.
            cut = np.minimum((np.cumsum(useful) - useful / 2) * parts / useful.sum(), parts - 1).astype(int)
            roots += [[m for m, at in zip(members, cut.tolist(), strict=True) if at == part] for part in range(parts)]
        else:
            for branch in members:
                at = join if join >= 0 else fork
                home[branch] = int(branches.of[at]) if at >= 0 else -1
    return _with_guests([root for root in roots if root], home, pinned)


def _with_guests(roots: list[list[int]], home: dict[int, int], pinned: Ints) -> list[Unit]:
    """Add to each unit the cheap branches that stay with it, directly or through others; those that stay with nobody form one unit."""
    unit_of = {branch: number for number, root in enumerate(roots) for branch in root}
    guests: list[list[int]] = [[] for _ in roots]
    strays: list[int] = []
    for branch in sorted(home):
        path = [branch]
        while path[-1] in home and path[-1] not in unit_of and home[path[-1]] not in path:
            path.append(home[path[-1]])
        number = unit_of.get(path[-1], -1)
        for stop in path:
            if stop in home and stop not in unit_of:
                unit_of[stop] = number
                (guests[number] if number >= 0 else strays).append(stop)
    units = [Unit(tuple(root), tuple(guests[number]), int(pinned[root[0]])) for number, root in enumerate(roots)]
    return units + ([Unit(tuple(strays), (), UNASSIGNED)] if strays else [])


def _claims(
    context: RuleContext, assignment: Assignment, branches: Branches, units: list[Unit], streams: list[int]
) -> list[tuple[Ints, int, str]]:
    kernels, blocks = branches.blocks.kernels, branches.blocks
    names = context.flat.graph.names
    stream = np.full(len(branches), UNASSIGNED, np.int32)
    for unit, chosen in zip(units, streams, strict=True):
        stream[list(unit.roots + unit.guests)] = chosen
    # Kernels grouped by branch, each branch from first to last: blocks are numbered topologically, and so are kernels.
    launching = np.flatnonzero(kernels.time_us > 0)
    branch = branches.of[blocks.of[launching]]
    order = launching[np.argsort(branch, kind="stable")]
    start = np.searchsorted(np.sort(branch), np.arange(len(branches) + 1))
    guest = {number for unit in units for number in unit.guests}
    ids = assignment.ids[kernels.node]
    claims = []
    for number in range(len(branches)):
        members = order[start[number] : start[number + 1]]
        if len(members) == 0:
            continue
        why = _why(branches, number, len(members), names, number in guest)
        own = ids[members]
        if (own == UNASSIGNED).all():
            claims.append((kernels.node[members], int(stream[number]), why))
        else:
            claims += _beside_claimed(kernels.node[members], own, why)
    return claims


def _beside_claimed(nodes: Ints, ids: Ints, why: str) -> list[tuple[Ints, int, str]]:
    """Along a branch that is claimed in part, the rest follows the claimed node before it, or else the first one behind it."""
    place = np.where(ids != UNASSIGNED, np.arange(len(ids)), -1)
    last = np.maximum.accumulate(place)
    last[last < 0] = place[place >= 0][0]
    filled = ids[last]
    rest = ids == UNASSIGNED
    return [
        (nodes[rest & (filled == stream)], int(stream), f"{why}; follows its claimed part")
        for stream in np.unique(filled[rest])
    ]


def _why(branches: Branches, number: int, kernels: int, names: Sequence[str], guest: bool) -> str:
    blocks, node = branches.blocks, branches.blocks.kernels.node
    fork, join = int(branches.fork[number]), int(branches.join[number])
    ends = f" from '{names[node[blocks.last[fork]]]}'" if fork >= 0 else ""
    if join >= 0:
        ends += f" to '{names[node[blocks.first[join]]]}'"
    kind = "branch too cheap for a stream of its own:" if guest else "branch of"
    return f"{kind} {kernels} kernel{'s' * (kernels != 1)}, {branches.time_us[number]:.1f} µs{ends}"


def _no_gain(branches: Branches, min_cost_us: float) -> str:
    if len(branches) == 1:
        return "all kernels depend on each other in one path: this rule spreads nothing"
    worth = int((branches.useful_us >= min_cost_us).sum())
    if worth <= 1:
        return f"no second branch can overlap {min_cost_us:g} µs or more with others: this rule spreads nothing"
    return "all branches end on one stream, by earlier rules or because none runs beside another"
