"""A model on its way to the GPU: ops with their constants, which the frontend makes and every pass changes in place.

The GPU of each op of a split graph follows from the graph (`gpus_of`): inputs of the model are on the first one, a copy says where it goes,
and everything else runs where what it reads, or what reads it, is. So no pass has to keep it, as long as none puts together what lies
apart.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import DisjointSets, reached
from msplit.opset.traits import CALLS, CONDS, LOOPS, VIEWS, ops_with, traits, written

Key = tuple[int, int]
"""A value: (op, output port)."""

Shape = tuple[int, ...]
"""Sizes of a value's axes."""

Attrs = dict[str, Any]
"""Attributes of an op: plain values, or descriptions of the engine's own."""

_Item = TypeVar("_Item", bound=Hashable)
_Found = TypeVar("_Found")

_ALIASES = (
    ops_with("view")
    | ops_with("hands on data")
    | ops_with("identity")
    | ops_with("unchanged by shape")
    | ops_with("reduction")  # over no axes
    | {"AddN"}
)
"""Ops whose results may lie in the memory of the values that they are given."""

_MAY_ALIAS = _ALIASES | LOOPS | CONDS | CALLS
"""These, and ops that give what is in them."""


def mutated(op: Op) -> tuple[int, ...]:
    """Input slots that an op writes in place: its first outputs are these, afterwards."""
    own: tuple[int, ...] | None = op.attrs.get("_mutates")
    return written(op.op) if own is None else own


def _handed_on(op: Op, port: int) -> Sequence[Key]:
    """Values that an output may be, or lie in the memory of. A loop gives what it is given where its turns leave it, a cond whatever its
    branches are given; lists of theirs are no memory."""
    if op.op in LOOPS:
        return op.inputs[port : port + 1]
    if op.op in CONDS | CALLS:
        types = op.attrs.get("Tout", ())
        return () if port < len(types) and types[port] == "variant" else op.inputs
    slot = traits(op.op).values_in
    return op.inputs[slot : slot + 1] if op.op in _ALIASES else ()


def _place_of(names: Sequence[str], within: Sequence[str]) -> int | None:
    """Index of the first of some names within others, where they stand there in one piece; None where they do not."""
    if names[0] not in within:
        return None
    start = within.index(names[0])
    return start if tuple(within[start : start + len(names)]) == tuple(names) else None


class Unproved(Exception):
    """Something is not known, or does not hold, that a rule needs."""


def known(found: _Found | None) -> _Found:
    """Gives what a rule can not do without.

    Raises:
        Unproved: It is None.
    """
    if found is None:
        raise Unproved
    return found


def require(holds: Any) -> None:
    """Ends a rule where a condition of it does not hold.

    Raises:
        Unproved: It does not.
    """
    if not holds:
        raise Unproved


def proved(rule: Callable[..., _Found], *given: Any) -> _Found | None:
    """The result of a rule for what it is given; None where something does not hold that it needs."""
    try:
        return rule(*given)
    except Unproved:
        return None


def final(names: Mapping[Key, Key], key: Key) -> Key:
    """The last name of a value that was renamed several times."""
    while key in names:
        key = names[key]
    return key


RESULT = "_result"
"""Attribute that the engine gives an op which can read half precision and compute in float32, or the other way round: what it gives."""


def attrs_key(attrs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Equal for attributes that mean the same. Those that begin with ``_`` say how, not what: but for the type that an op gives."""
    meant = ((name, repr(value)) for name, value in attrs.items() if name == RESULT or not name.startswith("_"))
    return tuple(sorted(meant))


@dataclass(frozen=True)
class StandIn:
    """A value of which only this is looked at.

    Attributes:
        shape: None where it is not known.
        dtype: As in ``"float32"``.
    """

    shape: tuple[int, ...] | None
    dtype: str


@dataclass
class Op:
    """One node on its way to the GPU. Passes change ops in place and drop those that are absorbed.

    Attributes:
        node: The op's number in `OpGraph.ops`: the flat node, or a fresh number for an op that a pass adds.
        name: For messages.
        op: TensorFlow op whose lowering runs it.
        inputs: Data inputs by slot.
        source_nodes: Every flat node that this op does the work of, the one whose stream it runs on first.
        batch: How many alike ops it does side by side.
        replaces: The flat nodes whose kernels it is in place of, one per kernel, where that is not each of `source_nodes` once: the fused
            op of a loop replaces many kernels of the loop's node.
    """

    node: int
    name: str
    op: str
    attrs: dict[str, Any]
    inputs: list[Key]
    source_nodes: list[int] = field(default_factory=list)
    batch: int = 1
    replaces: list[int] = field(default_factory=list)

    def copy(self) -> Op:
        """An op that can be changed without changing this one."""
        return replace(self, attrs=dict(self.attrs), inputs=[*self.inputs], source_nodes=[*self.source_nodes])

    @property
    def out(self) -> Key:
        """The op's first output."""
        return self.node, 0


@dataclass(frozen=True)
class Merge:
    """Alike ops that became one.

    Attributes:
        op: TensorFlow op of each.
        copies: Kernels that put operands side by side.
        launches: Whether a member would launch a kernel.
    """

    op: str
    members: int
    copies: int
    launches: bool


@dataclass
class OpGraph:
    """The part of a flat graph that the engine runs, constants evaluated.

    Attributes:
        ops: By number, in topological order.
        constants: Values known before anything runs.
        feeds: Input name -> the value that is fed.
        fetches: Output name -> value.
        shapes: Shape of every value whose shape is the same in every run; empty before `specialize`.
        dtypes: Type of every value that ran then, as TensorFlow names it.
        numbers: How many numbers are taken: by flat nodes, by inputs, and by what passes added.
        unrolled: Flat nodes that became many ops, or will: loops, conds and calls. Each with further flat nodes that these ops do the work
            of, and that no op covers: those of a TensorFlow 1 loop's frame.
        streamless: Flat nodes that have no stream: TensorFlow computes with integers on the host, and the engine on the device.
        merges: What horizontal fusion did, in the order in which it runs.
        facts: What pointwise fusion did, for the report of a run.
        state: Variable -> its value when a step begins, in memory of its own that outlives the step; empty but in a training graph.
        final: Variable -> its value when the step is over, for those that are written. Ops that write them do so in place: see `hazards`.
        initial: Variable -> its value before the first step, for those of `state`.
        stacks: Values that are several variables side by side, as they are when a step begins: with one more axis in front.
        contiguous: Variables that are to lie one behind the other in memory.
        table_memory: Bytes of the device for tables of which rows are looked up and nothing else is read, and how rows of others are
            packed, if they are; None: as many as they take.
        hosted: Variables that lie in the host's memory: rows of them are looked up and changed, and nothing else.
    """

    ops: dict[int, Op]
    constants: dict[Key, NDArray[Any]]
    feeds: dict[str, Key]
    fetches: dict[str, Key]
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)
    numbers: int = 0
    unrolled: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    streamless: frozenset[int] = frozenset()
    merges: list[Merge] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Key] = field(default_factory=dict)
    final: dict[str, Key] = field(default_factory=dict)
    initial: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    stacks: dict[Key, tuple[str, ...]] = field(default_factory=dict)
    contiguous: list[tuple[str, ...]] = field(default_factory=list)
    table_memory: tuple[int, str] | None = None
    hosted: frozenset[str] = frozenset()
    _variables: dict[Key, str] = field(default_factory=dict, repr=False)

    def signature(self) -> str:
        """A hash of what its time depends on: ops with their attributes, what they read, and shapes; not names, and no values."""
        rows = ((op.op, attrs_key(op.attrs), op.inputs, op.batch) for op in self.ops.values())
        shapes = sorted(self.shapes.items())
        return hashlib.sha256(repr((list(rows), shapes)).encode()).hexdigest()

    def copy(self) -> OpGraph:
        """A graph that can be changed without changing this one. Constants are shared."""
        ops = {number: op.copy() for number, op in self.ops.items()}
        tables: Attrs = {name: value.copy() for name, value in vars(self).items() if isinstance(value, dict | list)}
        return replace(self, **{**tables, "ops": ops})

    def fresh(self) -> int:
        """A number that nothing has."""
        self.numbers += 1
        return self.numbers - 1

    def constant(self, value: NDArray[Any]) -> Key:
        """A new constant."""
        key = self.fresh(), 0
        self.constants[key], self.shapes[key] = value, value.shape
        return key

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Shape of a value, also of a constant; None where it differs from run to run."""
        return self.constants[key].shape if key in self.constants else self.shapes.get(key)

    def dtype(self, key: Key) -> str | None:
        """Name of a value's type, also of a constant's; None where it is not known."""
        return self.constants[key].dtype.name if key in self.constants else self.dtypes.get(key)

    def ports(self, number: int) -> int:
        """Count the outputs of an op that have a known shape, or a known type where the shape depends on values, from the first one on."""
        known = ((number, port) in self.shapes or (number, port) in self.dtypes for port in itertools.count())
        return next(port for port, is_known in enumerate(known) if not is_known)

    def sizes(self, shape: tuple[int, ...]) -> Key:
        """A shape as a new constant, for a Reshape."""
        return self.constant(np.asarray(shape, np.int64))

    def add(
        self, op: str, like: Op, attrs: Attrs, inputs: list[Key], shape: Shape | None = None, dtype: str | None = None
    ) -> Op:
        """A new op with one output, of a shape and a type where these are known, that does a part of another's work. `sort` afterwards."""
        made = Op(self.fresh(), like.name, op, attrs, inputs, like.source_nodes[:1])
        self.ops[made.node] = made
        self.describe(made.out, shape, dtype)
        return made

    def describe(self, key: Key, shape: Shape | None, dtype: str | None) -> None:
        """Notes the shape and the type of a value, as far as they are known."""
        if shape is not None:
            self.shapes[key] = shape
        if dtype is not None:
            self.dtypes[key] = dtype

    def drop(self, ops: Iterable[Op]) -> None:
        """Takes ops out whose work others do now."""
        for op in ops:
            del self.ops[op.node]

    def is_chain(self) -> bool:
        """Checks that each op waits for the one in front, views left out: no two could run side by side. For a graph in topological order.

        Ops that do not wait for each other stand on one level, they or one of them and what the other waits for.
        """
        levels: dict[int, int] = {}
        found: set[int] = set()
        for op in self.ops.values():
            level = max((levels.get(node, 0) for node, _ in op.inputs), default=0)
            if op.op not in VIEWS:
                level += 1
                if level in found:
                    return False
                found.add(level)
            levels[op.node] = level
        return True

    def consumers(self) -> dict[Key, list[int]]:
        """Ops that read each value, one entry per read, in op order."""
        readers: dict[Key, list[int]] = {}
        for number, op in self.ops.items():
            for key in op.inputs:
                readers.setdefault(key, []).append(number)
        return readers

    def read(self) -> set[Key]:
        """Values that an op reads, or that are wanted when the step is over."""
        return {key for op in self.ops.values() for key in op.inputs} | self.kept()

    def kept(self) -> set[Key]:
        """Values that are wanted when the step is over: what is fetched, and what variables become."""
        return {*self.fetches.values(), *self.final.values()}

    def rename(self, names: Mapping[Key, Key]) -> None:
        """Lets everything that reads a value read another in its place, over several steps where the other is renamed too."""
        if not names:
            return
        for op in self.ops.values():
            op.inputs = [final(names, key) for key in op.inputs]
        self.fetches = {name: final(names, key) for name, key in self.fetches.items()}
        self.final = {name: final(names, key) for name, key in self.final.items()}

    def prune(self) -> None:
        """Drops ops that nothing needs in the end, and inputs and variables that nothing reads."""

        def before(number: int) -> list[int]:
            read = self.ops[number].inputs
            return [key[0] for key in read if key[0] in self.ops and key not in self.constants]

        needed = reached(self.ops.keys() & {key[0] for key in self.kept()}, before)
        self.ops = {number: op for number, op in self.ops.items() if number in needed}
        read = self.read()
        self.feeds = {name: key for name, key in self.feeds.items() if key in read}
        self.stacks = {key: names for key, names in self.stacks.items() if key in read}
        held = {name for names in self.stacks.values() for name in names}
        self.state = {name: key for name, key in self.state.items() if key in read or name in held}

    def forget_constants(self) -> None:
        """Lets go of constants that nothing reads any more: what was made of them would otherwise be held beside them."""
        read = self.read()
        self.constants = {key: value for key, value in self.constants.items() if key in read}

    def variable(self, key: Key) -> str | None:
        """The variable whose value as the step begins this is; None for any other value."""
        if len(self._variables) != len(self.state):
            self._variables = {value: name for name, value in self.state.items()}
        return self._variables.get(key)

    def aliases(self) -> Callable[[Key], tuple[Key, ...]]:
        """Tells in the memory of which variables' values a value lies: itself, where it is one, and what views and stacks are made of."""
        state = set(self.state.values())

        def lies_in(key: Key) -> tuple[Key, ...]:
            op = self.ops.get(key[0])
            if op is not None and op.op not in _MAY_ALIAS and key not in state and key not in self.stacks:
                return (key,) if key[1] < len(mutated(op)) else ()
            found, waiting, seen = list[Key](), [key], {key}
            while waiting:
                key = waiting.pop()
                op = self.ops.get(key[0])
                if key in self.stacks:
                    found += [self.state[name] for name in self.stacks[key]]
                elif key in state or (op is not None and key[1] < len(mutated(op))):
                    found.append(key)
                elif op is not None:
                    new = [one for one in _handed_on(op, key[1]) if one not in seen]
                    seen.update(new)
                    waiting += new
            return tuple(dict.fromkeys(found))

        return lies_in

    def hazards(self) -> dict[int, list[int]]:
        """Per op that writes variables in place the ops that must have run before: those that read what it overwrites, views included."""
        if not self.state:
            return {}
        lies_in = self.aliases()
        readers: dict[Key, dict[int, None]] = {}
        overwritten: list[tuple[int, Key]] = []
        for number, op in self.ops.items():
            slots = mutated(op)
            for slot, key in enumerate(op.inputs):
                for value in lies_in(key):
                    readers.setdefault(value, {})[number] = None
                    if slot in slots:
                        overwritten.append((number, value))
        found: dict[int, list[int]] = {}
        for number, value in overwritten:
            if others := [reader for reader in readers[value] if reader != number]:
                found.setdefault(number, []).extend(others)
        return found

    def adjoin(self, names: Sequence[str]) -> bool:
        """Lets variables lie one behind the other in memory, in this order. False, and nothing changes, where that can not be: they are of
        several types, or one lies between others already, or in the host's memory."""
        names = tuple(names)
        if (
            len(set(names)) != len(names)
            or not self.hosted.isdisjoint(names)
            or len({self.initial[name].dtype for name in names}) != 1
        ):
            return False
        mine = set(names)
        parts = [run for run in self.contiguous if not mine.isdisjoint(run)]
        for run in parts:
            if _place_of(names, run) is not None:
                return True
            if _place_of(run, names) is None:
                return False
        self.contiguous = [run for run in self.contiguous if run not in parts] + [names]
        return True

    def _circle(self) -> tuple[int, int] | None:
        """An op that reads what another overwrites, and that needs what that one, or one behind it, makes; None where there are none."""
        hazards = self.hazards()
        left = self.ops.keys() - self._ordered(hazards).keys()
        read = ((number, (key[0] for key in self.ops[number].inputs)) for number in left)
        before = {number: {*makers, *hazards.get(number, ())} & left for number, makers in read}

        def is_circle(pair: tuple[int, int]) -> bool:
            return pair[1] in reached(pair[:1], lambda number: before.get(number, ()))

        return next(
            filter(is_circle, ((reader, writer) for writer in left for reader in hazards.get(writer, ()))), None
        )

    def sort(self) -> None:
        """Puts the ops in topological order again, as near to their present order as that allows.

        Whatever reads a variable's value comes before what overwrites it. What can not, since it needs what that makes, gets a copy.
        """
        while len(ordered := self._ordered(self.hazards())) != len(self.ops):
            found = self._circle()
            if found is None:
                raise ValueError("internal error: a pass made a cycle")
            reader, writer = (self.ops[number] for number in found)
            lies_in = self.aliases()
            overwritten = {value for slot in mutated(writer) for value in lies_in(writer.inputs[slot])}
            key = next(key for key in reader.inputs if not overwritten.isdisjoint(lies_in(key)))
            copy = self.set_aside(key, writer)
            reader.inputs = [copy if one == key else one for one in reader.inputs]
        self.ops = ordered

    def set_aside(self, key: Key, writer: Op) -> Key:
        """A copy of a variable's value, for what wants it after an op has overwritten it. `sort` afterwards."""
        return self.add("_Copy", writer, {}, [key], self.shapes.get(key), self.dtypes.get(key)).out

    def _ordered(self, before: Mapping[int, list[int]]) -> dict[int, Op]:
        """Ops in order, as many as can be (Kahn's algorithm), some of which have further ones to come before them."""
        place = {number: position for position, number in enumerate(self.ops)}
        readers: dict[int, list[int]] = {}
        waiting = dict.fromkeys(self.ops, 0)
        for number, op in self.ops.items():
            for producer in (*(key[0] for key in op.inputs), *before.get(number, ())):
                if producer in self.ops:
                    readers.setdefault(producer, []).append(number)
                    waiting[number] += 1
        heap = [(place[number], number) for number, count in waiting.items() if not count]
        ordered: dict[int, Op] = {}
        while heap:
            _, number = heapq.heappop(heap)
            ordered[number] = self.ops[number]
            for reader in readers.get(number, ()):
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(heap, (place[reader], reader))
        return ordered


PEER_COPY = "_PeerCopy"
"""Op that copies a value from one GPU to another."""

FUSED = "_FusedPointwise"
"""Op of a group of pointwise ops that is one kernel."""


def gpus_of(graph: OpGraph) -> dict[int, int]:
    """Per op its GPU; nothing for a graph that is not split.

    Ops between which values go without a copy are on one GPU: the first, where one of them reads an input of the model, or that of a copy
    whose result one of them reads. Ops that read constants alone and are read by copies alone may be anywhere: they are on the first.
    """
    copies = {number: int(op.attrs["gpu"]) for number, op in graph.ops.items() if op.op == PEER_COPY}
    if not copies:
        return {}
    fed, row = set(graph.feeds.values()), {number: index for index, number in enumerate(graph.ops)}
    together, known = DisjointSets(len(row)), list(copies.items())
    for number, op in graph.ops.items():
        for key in op.inputs if number not in copies else ():
            if key in fed:
                known.append((number, 0))
            elif key[0] in row:
                together.join(row[number], row[key[0]])
    found: dict[int, int] = {}
    for number, gpu in known:
        found.setdefault(together.find(row[number]), gpu)
    return {number: copies.get(number, found.get(together.find(index), 0)) for number, index in row.items()}


def apart(graph: OpGraph, gpus: Mapping[int, int]) -> str | None:
    """An op that reads a value of another GPU, in words; None where none does."""
    fed = set(graph.feeds.values())
    for number, op in graph.ops.items() if gpus else ():
        for key in op.inputs:
            if op.op == PEER_COPY or key in graph.constants:
                continue
            where = 0 if key in fed else gpus.get(key[0], gpus[number])
            if where != gpus[number]:
                return f"{op.name} ({op.op}) on GPU {gpus[number]} reads {key}, which is on GPU {where}"
    return None
