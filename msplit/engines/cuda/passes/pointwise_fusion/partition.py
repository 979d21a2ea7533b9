"""Groups of ops that become one kernel each: the largest that make nothing wait that did not wait before.

Ops are visited in topological order; each joins the groups of the values it reads, where that is safe. Let E be what a group reads from
outside. Every value that leaves a group depends on all of E anyway (in the graph as it was, directly or through others), so that one
kernel for the group starts when the first of its values was due to be complete at the latest. An op that joins keeps this up:

* a group that nobody else reads may take whatever the op reads besides: only the op waits for that;
* a group with other readers may only take an op whose further inputs the group depends on already.

From the same rule follows that contraction makes no cycle: a path that leaves a group and comes back would enter through an input that
the group's readers depend on, and that the group depends on itself. Whether one op depends on another is searched backwards for a bounded
number of steps ("no" where that is not enough), so all of it takes time linear in the graph.

Views (reshapes, slices, splits) launch nothing. A view of a member is a member; a view of anything else is no bond between those that
read it: each of them gets a copy of the view.

Roles that ops may play in a kernel that they share with others.

What is not in these tables runs as its library has it: products, convolutions, gathers, sorts, anything that Inductor has no code for.
Left out on purpose are integer divisions and remainders (what they give for a divisor of zero is the library's), and dtypes that
Triton computes in another width than PyTorch.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.interpret import device_inputs, static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes.pattern import FLOATS, Readers
from msplit.opset.traits import BATCH_NORMS, VIEWS, ops_with


class Role(enum.Enum):
    """Part that an op takes in a group."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    JOIN = "join"
    VIEW = "view"


_STEPS = ops_with("step") | ops_with("comparison")
_POINTWISE = (
    (ops_with("exact") - ops_with("reduction"))
    | _STEPS
    | ops_with("curve")
    | ops_with("arithmetic")
    | ops_with("rounds smoothly")
)
_JOINS = ops_with("parts")
_ONE_RESULT = ops_with("exact") | _STEPS | VIEWS | _JOINS
_REDUCTIONS = ops_with("row kernel")

_COMPUTED = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64", "bool"})
"""Dtypes that a kernel computes as PyTorch does, to the bit where there is one result: half precision in float32, rounded after each op."""

_CAST_FROM = _COMPUTED | {"uint8", "int8", "int16"}
_MOST_JOINED = 8  # Inductor writes larger ones in one kernel per part
_ADD_N_CHAIN = 4  # more addends are stacked, which is no pointwise op


def role(graph: OpGraph, op: Op, dtypes: dict[Key, str]) -> Role | None:
    """The role that an op may play in a group, or None: also where an input's dtype or what decides its shape is not known."""
    # All that decides shapes must be known.
    lowering = table().get(op.op)
    if lowering is None or lowering.dynamic or lowering.shape_only or not op.inputs:
        return None
    if any(op.inputs[slot] not in graph.constants for slot in static_slots(op)):
        return None
    if op.out not in graph.shapes or 0 in graph.shapes[op.out]:
        return None
    return _role_among(op, [dtypes.get(key) for key in device_inputs(op)])


def _role_among(op: Op, read: Sequence[str | None]) -> Role | None:
    """The role of an op that reads such types, and of which all is known that decides shapes."""
    # Casts and views take types that nothing is computed in.
    if op.op == "Cast":
        known = all(dtype in _CAST_FROM for dtype in read) and op.attrs.get("DstT") in _COMPUTED
        return Role.POINTWISE if known and not op.attrs.get("Truncate") else None
    if op.op in VIEWS:
        return Role.VIEW if len(read) == 1 and read[0] in _CAST_FROM else None
    if not all(dtype in _COMPUTED for dtype in read):
        return None
    # Of what is computed some ops only under conditions of their own.
    if op.op in _REDUCTIONS:
        return Role.REDUCTION
    if op.op in _JOINS:
        return Role.JOIN if len(read) <= _MOST_JOINED else None
    floats = all(dtype in FLOATS for dtype in read)
    if op.op in BATCH_NORMS:
        return Role.POINTWISE if floats and not op.attrs.get("is_training", True) else None
    if op.op == "AddN" and len(op.inputs) > _ADD_N_CHAIN:
        return None
    if op.op == "Div":  # of integers it rounds
        return Role.POINTWISE if floats else None
    return Role.POINTWISE if op.op in _POINTWISE else None


def is_exact(op: Op, dtypes: dict[Key, str]) -> bool:
    """Returns whether an op's result is the same in every correct implementation, given the same inputs."""
    return op.op in _ONE_RESULT or op.op == "Cast" or not any(dtypes.get(key) in FLOATS for key in op.inputs)


def is_step(op: Op, dtypes: dict[Key, str]) -> bool:
    """Returns whether an op must not be behind rounding that another kernel does in another way."""
    if op.op == "Cast":
        return dtypes.get(op.inputs[0]) in FLOATS and op.attrs.get("DstT") not in FLOATS
    return op.op in _STEPS and any(dtypes.get(key) in FLOATS for key in op.inputs)


MOST_MEMBERS = 64
"""Ops of a group that compute something: compile time grows with them, and registers run out."""

MOST_INPUTS = 24
"""Tensors that a group reads."""

SEARCH = 64
"""Ops and groups visited to learn whether one depends on another."""


@dataclass(frozen=True)
class FusionGroup:
    """Ops that are to be one kernel.

    Attributes:
        members: In topological order, views of members included.
        launching: How many of them compute something.
    """

    members: tuple[int, ...]
    launching: int


@dataclass(eq=False)
class _Unit:
    """A group on its way, or an op that is in none.

    Attributes:
        members: Op numbers; empty for an op that is in no group.
        launching: How many of them compute something.
        reads: Units that it reads, with how often.
        open: Reads of its values by others.
        first: Place of its first op in the order.
        last: Place of its last op.
        inputs: Values it reads from outside.
        size: Elements of its largest member.
        rounded: Members' values that another correct kernel may give in other bits.
        reduces: Whether there is a reduction in it.
    """

    members: list[int] = field(default_factory=list)
    launching: int = 0
    reads: Counter[int] = field(default_factory=Counter)
    open: int = 0
    first: int = 0
    last: int = 0
    inputs: set[Key] = field(default_factory=set)
    size: int = 0
    rounded: set[Key] = field(default_factory=set)
    reduces: bool = False


def find_groups(
    graph: OpGraph, dtypes: Mapping[Key, str], *, among: Container[int] | None = None, strict: bool = False
) -> list[FusionGroup]:
    """Groups of at least two ops that compute something, of some ops or, where `among` is None, of all.

    `dtypes` has a name for each value that an op reads. Strict: only ops that compute equally many elements share a group, no reductions
    and no joins.
    """
    return _Finder(graph, dict(dtypes), among, strict).run()


class _Finder:
    def __init__(self, graph: OpGraph, dtypes: dict[Key, str], among: Container[int] | None, strict: bool) -> None:
        self.graph, self.dtypes, self.among, self.strict = graph, dtypes, among, strict
        self.readers = Readers(graph)
        self.units: list[_Unit] = []
        self.parent: list[int] = []
        self.made_in: dict[Key, int] = {}  # value -> unit
        self.views: dict[Key, Key] = {}  # value of a view in no group -> what it is a view of
        self.hazards = graph.hazards()

    def run(self) -> list[FusionGroup]:
        place = {number: position for position, number in enumerate(self.graph.ops)}
        for op in self.graph.ops.values():
            self._visit(op, place[op.node])
        roots = (unit for index, unit in enumerate(self.units) if self.parent[index] == index and unit.launching > 1)
        groups = [FusionGroup(tuple(sorted(unit.members, key=place.__getitem__)), unit.launching) for unit in roots]
        return sorted(groups, key=lambda group: place[group.members[0]])

    def _visit(self, op: Op, place: int) -> None:
        kind = role(self.graph, op, self.dtypes) if self.among is None or op.node in self.among else None
        if self.strict and kind in (Role.REDUCTION, Role.JOIN):
            kind = None
        keys = [self._base(key) for key in (device_inputs(op) if kind else op.inputs)]
        if kind is not Role.VIEW:
            self._create(op, kind, keys, self._joinable(op, keys) if kind else [], place)
        elif (unit := self._unit_of(keys[0])) is not None and self.units[unit].members:
            self._add_view(op, unit, place)
        else:
            self.views |= dict.fromkeys(self._values(op), keys[0])

    def _base(self, key: Key) -> Key:
        while key in self.views:
            key = self.views[key]
        return key

    def _root(self, index: int) -> int:
        while self.parent[index] != index:
            self.parent[index] = self.parent[self.parent[index]]
            index = self.parent[index]
        return index

    def _unit_of(self, key: Key) -> int | None:
        index = self.made_in.get(key)
        return None if index is None else self._root(index)

    def _reads(self, index: int) -> Counter[int]:
        """Values that a unit reads, by what those units are part of today."""
        unit = self.units[index]
        if any(self.parent[other] != other for other in unit.reads):
            now: Counter[int] = Counter()
            for other, times in unit.reads.items():
                now[self._root(other)] += times
            unit.reads = now
        return unit.reads

    def _readers(self, op: Op) -> int:
        """Number of reads of an op's values."""
        return sum(len(self.readers.of.get(key, ())) for key in self._values(op))

    def _values(self, op: Op) -> list[Key]:
        """Those of an op's values that anything wants."""
        return [(op.node, port) for port in self.readers.ports.get(op.node, ())]

    def _add_view(self, op: Op, index: int, place: int) -> None:
        unit = self.units[index]
        unit.members.append(op.node)
        unit.last = place
        unit.open += self._readers(op) - 1
        self.made_in |= dict.fromkeys(self._values(op), index)
        if not unit.rounded.isdisjoint(op.inputs):
            unit.rounded.update(self._values(op))

    def _joinable(self, op: Op, keys: list[Key]) -> list[int]:
        """The groups that an op joins."""
        near = {index for key in keys if (index := self._unit_of(key)) is not None}
        groups = [index for index in sorted(near) if self.units[index].members]
        # A comparison must not be behind rounding that another kernel does in another way.
        if is_step(op, self.dtypes):
            rounded = {self._unit_of(key) for key in keys if self._is_rounded(key)}
            groups = [index for index in groups if index not in rounded]
        if self.strict:
            size = self._size(op)
            groups = [index for index in groups if self.units[index].size == size]
        # Without the groups that would have to wait for more than they do, until all others can be joined.
        while groups:
            if sum(self.units[index].launching for index in groups) >= MOST_MEMBERS:
                return []
            inputs = {key for key in keys if self._unit_of(key) not in groups}
            if len(inputs.union(*(self.units[index].inputs for index in groups))) > MOST_INPUTS:
                return []
            refused = self._refused(groups, keys)
            if not refused:
                return groups
            groups = [index for index in groups if index not in refused]
        return []

    def _is_rounded(self, key: Key) -> bool:
        index = self._unit_of(key)
        return index is not None and key in self.units[index].rounded

    def _refused(self, groups: list[int], keys: list[Key]) -> set[int]:
        """Groups with other readers that would have to wait for more than they do."""
        mine = Counter(index for key in keys if (index := self._unit_of(key)) is not None)
        outside = set(mine).union(*(self._reads(index) for index in groups)) - set(groups)
        refused = set()
        for index in groups:
            inside = mine[index] + sum(self._reads(other)[index] for other in groups if other != index)
            # A reduction takes longer than what follows it, so that it must not wait for that one's other inputs either.
            waits = self.units[index].reduces or self.units[index].open > inside
            if waits and not all(self._depends(index, other) for other in outside):
                refused.add(index)
        return refused

    def _depends(self, index: int, on: int) -> bool:
        """Returns whether a unit depends on another, as far as a bounded search tells."""
        earliest = self.units[on].first
        seen = {index}
        waiting = deque([index])
        while waiting:
            for older in self.units[waiting.popleft()].reads:
                other = self._root(older)
                if other == on:
                    return True
                if other not in seen and self.units[other].last > earliest:
                    if len(seen) == SEARCH:
                        return False
                    seen.add(other)
                    waiting.append(other)
        return False

    def _size(self, op: Op) -> int:
        return math.prod(self.graph.shapes[op.node, 0])

    def _create(self, op: Op, kind: Role | None, keys: list[Key], joined: list[int], place: int) -> None:
        index = len(self.units)
        self.parent.append(index)
        unit = _Unit(first=place, last=place, open=self._readers(op))
        self.units.append(unit)
        for reader in self.hazards.get(op.node, ()):
            if (before := self._unit_of((reader, 0))) is not None:
                unit.reads[before] += 1
        for key in keys:
            made = self._unit_of(key)
            if made in joined:
                self.units[made].open -= 1
            elif made is not None:
                unit.reads[made] += 1
        if kind is not None:
            self._fill(unit, op, kind, keys, joined)
        self.made_in |= dict.fromkeys(self._values(op), index)
        for other in joined:
            self._absorb(index, other, joined)
        for other in joined:
            self.parent[other] = index
        unit.reads = Counter({other: times for other, times in unit.reads.items() if self._root(other) != index})

    def _fill(self, unit: _Unit, op: Op, kind: Role, keys: list[Key], joined: list[int]) -> None:
        unit.members = [op.node]
        unit.launching = 1
        unit.size = self._size(op)
        unit.reduces = kind is Role.REDUCTION
        unit.inputs = {key for key in keys if self._unit_of(key) not in joined}
        if not is_exact(op, self.dtypes) or any(self._is_rounded(key) for key in keys if self._unit_of(key) in joined):
            unit.rounded = set(self._values(op))

    def _absorb(self, index: int, other: int, joined: list[int]) -> None:
        unit, old = self.units[index], self.units[other]
        unit.open += old.open - sum(self._reads(reader)[other] for reader in joined)
        unit.members += old.members
        unit.launching += old.launching
        unit.size = max(unit.size, old.size)
        unit.reduces = unit.reduces or old.reduces
        unit.first = min(unit.first, old.first)
        unit.rounded |= old.rounded
        unit.inputs |= {key for key in old.inputs if self._unit_of(key) not in joined}
        unit.reads.update({read: times for read, times in self._reads(other).items() if read not in joined})
