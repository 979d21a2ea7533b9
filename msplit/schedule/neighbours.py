"""Neighbours of a schedule in local search, and the alike pieces of a graph that change together.

Small changes of a schedule, for local search: a part to another stream, two streams into one, another record order.

Pieces of a graph that run one after the other, and which of them are alike: the modules of an inception network.

What helps in one module helps in its likes. A change of all of them together gains as many times as much, which can be measured where
the gain of one drowns in noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import Dag
from msplit.core.graph import Ints
from msplit.schedule.choose import constrain
from msplit.schedule.plan import Plan, make_plan, topological
from msplit.schedule.problem import Problem, between_cuts, components
from msplit.schedule.simulate import keep_lanes, node_order, timed_order

ROUNDS = 4
"""Rounds of telling blocks apart by their neighbours' neighbours."""


@dataclass(frozen=True, eq=False)
class Section:
    """Blocks between two that everything passes through.

    Attributes:
        blocks: Its blocks; the i-th corresponds to the i-th of any section of its kind.
        kind: Equal for sections whose blocks hang together in the same way and have as many kernels each.
    """

    blocks: Ints
    kind: int


def sections(problem: Problem) -> list[Section]:
    """The sections of more than one block, in order. O((blocks + edges) × rounds).

    Blocks are told apart by colour refinement (Weisfeiler and Leman 1968): by their kernels, then by the colours around them. Blocks
    that it can not tell apart correspond in the order of their numbers.
    """
    found = []
    kinds: dict[object, int] = {}
    for low, high in between_cuts(problem.dag):
        blocks, signature = _canonical(problem, low, high)
        found.append(Section(blocks, kinds.setdefault(signature, len(kinds))))
    return found


def _canonical(problem: Problem, low: int, high: int) -> tuple[Ints, object]:
    """The blocks of a range in an order that does not depend on their numbers but between equals, and what is equal for equal ranges."""
    count = high - low
    inputs: list[list[int]] = [[] for _ in range(count)]
    outputs: list[list[int]] = [[] for _ in range(count)]
    for node in range(low, high):
        for producer in problem.dag.src[problem.dag.start[node] : problem.dag.start[node + 1]].tolist():
            if producer >= low:
                inputs[node - low].append(producer - low)
                outputs[producer - low].append(node - low)
    colour = problem.kernels[low:high].tolist()
    seen: object = ()
    for _ in range(ROUNDS):
        shapes = [
            (
                colour[node],
                tuple(sorted(colour[i] for i in inputs[node])),
                tuple(sorted(colour[o] for o in outputs[node])),
            )
            for node in range(count)
        ]
        names = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
        seen = (seen, tuple(sorted(names)))
        colour = [names[shape] for shape in shapes]
    order = sorted(range(count), key=lambda node: (colour[node], node))
    blocks = np.asarray(order, np.int32) + low
    return blocks, (count, seen, tuple(sorted(colour)))


MOST_SECTIONED = 5_000
"""Blocks up to which sections are looked for, which takes milliseconds."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule: where each block runs, and in which order blocks are recorded.

    Attributes:
        stream: Per block its stream.
        order: Topological order of the blocks.
        keep: Whether the plan is then recorded so that streams keep their lanes of the CUDA graph (`plan.reorder`).
    """

    stream: Ints
    order: Ints
    keep: bool = True

    def key(self) -> bytes:
        """Equal for equal schedules."""
        return b"%d " % self.keep + self.stream.tobytes() + self.order.tobytes()

    def plan(self, problem: Problem, dag: Dag) -> Plan:
        """The plan over the nodes that the problem was made from: those of `dag`, in its own numbering."""
        lanes = problem.spread(self.stream)
        used = np.unique(lanes[lanes >= 0])
        dense = np.where(lanes >= 0, np.searchsorted(used, lanes), -1).astype(np.int32)
        plan = make_plan(dag, dense, node_order(problem, self.order, dag))
        return keep_lanes(plan) if self.keep else plan


def neighbours(
    problem: Problem, schedule: Schedule, streams: int, chance: random.Random, parents: Sequence[Schedule] = ()
) -> Iterator[tuple[str, Schedule]]:
    """Endless random small changes, each of the schedule that was given, with what was done in words.

    What does not change anything is left out; ties are kept and streams numbered without gaps.

    Args:
        streams: Most streams.
        chance: Draws all that is random.
        parents: Good schedules to take pieces from.
    """
    busy = np.flatnonzero(~problem.joints)
    if not len(busy):
        return
    part, parts = _parts(problem, schedule.stream)
    weights = np.bincount(part[busy], problem.work_us[busy], parts) + 1e-9
    pieces = sections(problem) if len(problem) <= MOST_SECTIONED else []
    view = _View(problem, schedule, streams, part, np.cumsum(weights), busy, chance, pieces, parents)
    kinds = _KINDS if streams > 1 else _ORDERS
    unlucky = 0
    while unlucky < 1000:  # where nothing can be changed, say so by ending
        name, change = chance.choice(kinds)
        changed = change(view)
        if changed is None:
            unlucky += 1
            continue
        found = replace(changed, stream=constrain(problem, changed.stream, streams))
        if found.key() == schedule.key():
            unlucky += 1
            continue
        unlucky = 0
        yield name, found


@dataclass(frozen=True, eq=False)
class _View:
    """A schedule with what the changes look at."""

    problem: Problem
    schedule: Schedule
    streams: int
    part: Ints
    weights: NDArray[np.float64]
    busy: NDArray[np.intp]
    chance: random.Random
    sections: Sequence[Section]
    parents: Sequence[Schedule]

    def isomorphic(self, least: int = 2) -> list[Section]:
        """All sections of one kind: mostly of one that there are several of. None where there are fewer than so many."""
        if not self.sections:
            return []
        kind = self.chance.choice(self.sections).kind
        found = [section for section in self.sections if section.kind == kind]
        return found if len(found) >= least else []

    def lane(self, but: int) -> int:
        """Another stream, a new one included where there may be more."""
        used = int(self.schedule.stream.max()) + 1
        choices = [lane for lane in range(min(used + 1, self.streams)) if lane != but]
        return self.chance.choice(choices)

    def random_part(self) -> NDArray[np.bool_]:
        """A part: by its work, so that large ones are tried more often, or any."""
        if self.chance.random() < 0.5:
            number = int(np.searchsorted(self.weights, self.chance.random() * self.weights[-1], "right"))
        else:
            number = int(self.part[self.chance.choice(self.busy)])
        return np.asarray(self.part == number)

    def mask(self, blocks: Ints | list[int]) -> NDArray[np.bool_]:
        """Mask of the blocks that are in a list."""
        found = np.zeros(len(self.problem), np.bool_)
        found[blocks] = True
        return found

    def moved(self, blocks: NDArray[np.bool_], lane: int) -> Schedule:
        """Some blocks on another stream. Half of the time the record order is worked out anew for it."""
        return self.ordered(np.where(blocks, lane, self.schedule.stream).astype(np.int32))

    def ordered(self, stream: Ints) -> Schedule:
        """Other streams, in the order that there was or in one worked out for them."""
        if self.chance.random() < 0.5:
            return replace(self.schedule, stream=stream)
        return replace(self.schedule, stream=stream, order=timed_order(self.problem, stream))

    def reordered(self, blocks: NDArray[np.bool_], places: Sequence[int]) -> Schedule:
        """Some blocks recorded earlier or later by one of some numbers of places, as far as what they depend on allows."""
        by = self.chance.choice((-1, 1)) * self.chance.choice(places)
        position = np.empty(len(self.problem))
        position[self.schedule.order] = np.arange(len(self.schedule.order))
        # By half a place more, so that it lands behind what it jumps over and not in a tie with it.
        position[blocks] += by + (0.5 if by > 0 else -0.5)
        return replace(self.schedule, order=topological(self.problem.dag, -position))


def _parts(problem: Problem, stream: Ints) -> tuple[Ints, int]:
    """Connected pieces of the graph on one stream: per block its part, and how many there are."""
    src, dst = problem.dag.src, problem.dag.dst()
    same = stream[src] == stream[dst]
    first = components(len(problem), src[same], dst[same])
    names, part = np.unique(first, return_inverse=True)
    return part.reshape(-1).astype(np.int32), len(names)


def _move_part(view: _View) -> Schedule | None:
    blocks = view.random_part()
    return view.moved(blocks, view.lane(int(view.schedule.stream[blocks][0])))


def _move_block(view: _View) -> Schedule | None:
    block = view.chance.choice(view.busy)
    return view.moved(view.mask([block]), view.lane(int(view.schedule.stream[block])))


def _split_part(view: _View) -> Schedule | None:
    """The end of a part, in record order, goes to another stream."""
    blocks = view.random_part()
    inside = view.schedule.order[blocks[view.schedule.order]]
    if len(inside) < 2:
        return None
    later = view.mask(inside[view.chance.randrange(1, len(inside)) :])
    return view.moved(later, view.lane(int(view.schedule.stream[inside[0]])))


def _swap_parts(view: _View) -> Schedule | None:
    """Two parts change streams."""
    one, other = view.random_part(), view.random_part()
    first, second = (int(view.schedule.stream[blocks][0]) for blocks in (one, other))
    if first == second:
        return None
    swapped = view.moved(one, second)
    return replace(swapped, stream=np.where(other, first, swapped.stream).astype(np.int32))


def _merge_streams(view: _View) -> Schedule | None:
    used = np.unique(view.schedule.stream[view.busy]).tolist()
    if len(used) < 3:
        return None  # one stream is what everything is measured against anyway
    one, other = view.chance.sample(used, 2)
    return view.moved(view.schedule.stream == one, other)


def _split_stream(view: _View) -> Schedule | None:
    """A random half of the parts of a stream goes to a new one."""
    used = int(view.schedule.stream.max()) + 1
    if used >= view.streams:
        return None
    lane = view.chance.randrange(used)
    parts = np.unique(view.part[view.schedule.stream == lane]).tolist()
    if len(parts) < 2:
        return None
    chosen = view.chance.sample(parts, len(parts) // 2)
    return view.moved(np.isin(view.part, chosen), used)


def _shift_block(view: _View) -> Schedule | None:
    return view.reordered(view.mask([view.chance.choice(view.busy)]), (1, 2, 4, 8))


def _shift_part(view: _View) -> Schedule | None:
    return view.reordered(view.random_part(), (2, 5, 10, len(view.problem)))


def _move_isomorphic(view: _View) -> Schedule | None:
    """Move one block of all alike sections to the same stream, or all that the section has on one stream."""
    isomorphic = view.isomorphic()
    if not isomorphic:
        return None
    first = isomorphic[0].blocks
    place = view.chance.randrange(len(first))
    lane = view.lane(int(view.schedule.stream[first[place]]))
    if view.chance.random() < 0.5:
        same = np.array([place])
    else:
        same = np.flatnonzero(view.part[first] == view.part[first[place]])
    return view.moved(view.mask(np.concatenate([section.blocks[same] for section in isomorphic])), lane)


def _shift_isomorphic(view: _View) -> Schedule | None:
    """Record one block of all alike sections earlier or later."""
    isomorphic = view.isomorphic()
    if not isomorphic:
        return None
    place = view.chance.randrange(len(isomorphic[0].blocks))
    return view.reordered(view.mask([int(section.blocks[place]) for section in isomorphic]), (1, 2, 4, 8))


def _copy_isomorphic(view: _View) -> Schedule | None:
    """One section's streams for all that are alike."""
    isomorphic = view.isomorphic()
    if not isomorphic:
        return None
    model = view.chance.choice(isomorphic)
    stream = view.schedule.stream.copy()
    for section in isomorphic:
        stream[section.blocks] = view.schedule.stream[model.blocks]
    return view.ordered(stream)


def _borrow(view: _View) -> Schedule | None:
    """One section, or all that are alike, with the streams of another schedule."""
    isomorphic = view.isomorphic(least=1)
    if not isomorphic or not view.parents:
        return None
    other = view.chance.choice(view.parents)
    chosen = isomorphic if view.chance.random() < 0.5 else [view.chance.choice(isomorphic)]
    stream = view.schedule.stream.copy()
    for section in chosen:
        stream[section.blocks] = np.minimum(other.stream[section.blocks], view.streams - 1)
    return view.ordered(stream)


def _order_anew(view: _View) -> Schedule | None:
    if view.chance.random() < 0.5:
        return replace(view.schedule, order=topological(view.problem.dag, view.problem.rank))
    return replace(view.schedule, order=timed_order(view.problem, view.schedule.stream))


def _other_lanes(view: _View) -> Schedule | None:
    return replace(view.schedule, keep=not view.schedule.keep)


_Change = Callable[[_View], "Schedule | None"]
_ORDERS: list[tuple[str, _Change]] = [
    ("a block earlier or later", _shift_block),
    ("a block earlier or later in all alike sections", _shift_isomorphic),
    ("a branch earlier or later", _shift_part),
    ("another record order", _order_anew),
    ("another record order", _other_lanes),
]
_KINDS: list[tuple[str, _Change]] = [
    *_ORDERS,
    *[("a branch to another stream", _move_part)] * 3,
    *[("a block to another stream", _move_block)] * 2,
    *[("the end of a branch to another stream", _split_part)] * 2,
    ("two branches swapped", _swap_parts),
    *[("a block or branch to another stream in all alike sections", _move_isomorphic)] * 2,
    ("one section's streams for all alike", _copy_isomorphic),
    *[("sections of another candidate", _borrow)] * 2,
    ("two streams merged", _merge_streams),
    ("a stream split", _split_stream),
]
