"""A model on its way to the GPU: ops with their constants, which the frontend makes and every pass changes in place."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int]
"""A value: (op, output port)."""

STEPS = "(steps before this one)"
"""The input, an int64 scalar, that random ops with a state draw by; no input of the model has such a name."""


def final(names: Mapping[Key, Key], key: Key) -> Key:
    """What a value is called in the end, over several names."""
    while key in names:
        key = names[key]
    return key


def attrs_key(attrs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Equal for attributes that mean the same. Those that begin with ``_`` mean nothing to a lowering."""
    return tuple(sorted((name, repr(value)) for name, value in attrs.items() if not name.startswith("_")))


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

    def signature(self) -> str:
        """A hash of what its time depends on: ops with their attributes, what they read, and shapes; not names, and no values."""
        rows = ((op.op, attrs_key(op.attrs), op.inputs, op.batch) for op in self.ops.values())
        shapes = sorted(self.shapes.items())
        return hashlib.sha256(repr((list(rows), shapes)).encode()).hexdigest()

    def copy(self) -> OpGraph:
        """A graph that can be changed without changing this one. Constants are shared."""
        ops = {
            number: replace(op, attrs=dict(op.attrs), inputs=list(op.inputs), source_nodes=list(op.source_nodes))
            for number, op in self.ops.items()
        }
        tables: dict[str, Any] = {
            name: dict(getattr(self, name)) for name in ("constants", "feeds", "fetches", "shapes", "dtypes", "facts")
        }
        return replace(self, ops=ops, merges=list(self.merges), **tables)

    def fresh(self) -> int:
        """A number that nothing has."""
        self.numbers += 1
        return self.numbers - 1

    def constant(self, value: NDArray[Any]) -> Key:
        """A new constant."""
        key = (self.fresh(), 0)
        self.constants[key] = value
        self.shapes[key] = value.shape
        return key

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Shape of a value, also of a constant; None where it differs from run to run."""
        return self.constants[key].shape if key in self.constants else self.shapes.get(key)

    def ports(self, number: int) -> int:
        """How many outputs of an op have a known shape, from the first one on."""
        return next(port for port in itertools.count() if (number, port) not in self.shapes)

    def sizes(self, shape: tuple[int, ...]) -> Key:
        """A shape as a new constant, for a Reshape."""
        return self.constant(np.asarray(shape, np.int64))

    def add(self, op: str, like: Op, attrs: dict[str, Any], inputs: list[Key], shape: tuple[int, ...]) -> Op:
        """A new op with one output of a known shape, that does a part of another's work. `sort` afterwards."""
        number = self.fresh()
        self.ops[number] = Op(number, like.name, op, attrs, inputs, [like.source_nodes[0]])
        self.shapes[number, 0] = shape
        return self.ops[number]

    def consumers(self) -> dict[Key, list[int]]:
        """Ops that read each value, one entry per read, in op order."""
        readers: dict[Key, list[int]] = {}
        for number, op in self.ops.items():
            for key in op.inputs:
                readers.setdefault(key, []).append(number)
        return readers

    def read(self) -> set[Key]:
        """Values that an op reads or that are fetched."""
        return {key for op in self.ops.values() for key in op.inputs} | set(self.fetches.values())

    def rename(self, names: Mapping[Key, Key]) -> None:
        """Lets everything that reads a value read another in its place, over several steps where the other is renamed too."""
        if not names:
            return
        for op in self.ops.values():
            op.inputs = [final(names, key) for key in op.inputs]
        self.fetches = {name: final(names, key) for name, key in self.fetches.items()}

    def prune(self) -> None:
        """Drops ops that no fetch needs, and inputs that nothing reads."""
        needed: set[int] = set()
        stack = [key[0] for key in self.fetches.values()]
        while stack:
            number = stack.pop()
            if number not in needed and number in self.ops:
                needed.add(number)
                stack.extend(key[0] for key in self.ops[number].inputs if key not in self.constants)
        self.ops = {number: op for number, op in self.ops.items() if number in needed}
        read = self.read()
        self.feeds = {name: key for name, key in self.feeds.items() if key in read}

    def forget_constants(self) -> None:
        """Lets go of constants that nothing reads any more: what was made of them would otherwise be held beside them."""
        read = self.read()
        self.constants = {key: value for key, value in self.constants.items() if key in read}

    def sort(self) -> None:
        """Puts the ops in topological order again, as near to their present order as that allows (Kahn's algorithm)."""
        place = {number: position for position, number in enumerate(self.ops)}
        readers: dict[int, list[int]] = {}
        waiting = dict.fromkeys(self.ops, 0)
        for number, op in self.ops.items():
            for producer, _ in op.inputs:
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
        if len(ordered) != len(self.ops):
            raise ValueError("internal error: a pass made a cycle")
        self.ops = ordered
