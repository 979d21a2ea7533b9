"""The merged graph on its way, and one merge in it: its members side by side, their operands stacked where they are not shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Attrs, Key, Op, OpGraph, Shape, known
from msplit.engines.cuda.passes.horizontal_fusion.weights import StackedWeights
from msplit.engines.cuda.passes.pattern import value_key


@dataclass(frozen=True)
class StackSlot:
    """Place of a value in a stack: ``stack[index]`` is the value."""

    stack: Key
    index: int


@dataclass(frozen=True)
class StackRange:
    """Members of a stack to be: `count` positions of another from `start` on, or one value as it is (`start` -1)."""

    key: Key
    start: int
    count: int


class Builder:
    """The merged graph as far as it is made.

    Attributes:
        graph: What is merged. Its ops are not changed.
        types: Dtype name of every value.
        ops: The new ops, in topological order.
        places: Where the values of merged ops lie.
        weights: Constants that are stacked.
    """

    def __init__(self, graph: OpGraph, types: dict[Key, str]) -> None:
        self.graph, self.types = graph, types
        self.ops: dict[int, Op] = {}
        self.places: dict[Key, StackSlot] = {}
        self.weights = StackedWeights(graph)
        self._cache: dict[Any, Key] = {}

    def emit(
        self, like: Op, op: str, attrs: Attrs, inputs: list[Key], made: Sequence[tuple[Shape, str]], nodes: list[int]
    ) -> Op:
        """Adds an op that does the work of some nodes, given shape and type of each output."""
        number = self.graph.fresh()
        self.ops[number] = Op(number, like.name, op, attrs, inputs, nodes)
        for port, (shape, dtype) in enumerate(made):
            self.graph.shapes[number, port], self.types[number, port] = shape, dtype
        return self.ops[number]

    def constant(self, value: NDArray[Any]) -> Key:
        """A small constant, the same one for the same value."""
        key = value_key(value)
        if key not in self._cache:
            self._cache[key] = self.graph.constant(value)
            self.types[self._cache[key]] = value.dtype.name
        return self._cache[key]

    def helper(self, like: Op, op: str, inputs: list[Key], shape: Shape, **attrs: Any) -> Key:
        """The output, of its first input's type, of a new op that helps others, one for all that need the same. It does the work of no node
        but the first of the op that it helped first."""
        name = (op, *inputs, *attrs.items(), shape)
        if name not in self._cache:
            kind = self.types[inputs[0]]
            made = self.emit(like, op, {"T": kind, **attrs}, inputs, [(shape, kind)], like.source_nodes[:1])
            self._cache[name] = made.out
        return self._cache[name]

    def plain(self, key: Key, like: Op) -> Key:
        """A value for an op that is not merged: a view of the stack that it lies in, if it lies in one."""
        place = self.places.get(key)
        if place is None or self.graph.variable(key) is not None:
            return key
        at = [self.constant(np.asarray([value], np.int64)) for value in (place.index, place.index + 1, 1)]
        return self.helper(like, "StridedSlice", [place.stack, *at], self.graph.shapes[key], shrink_axis_mask=1)

    def range(self, part: StackRange, like: Op) -> Key:
        """Some positions of a stack: a view."""
        shape = self.graph.shapes[part.key]
        if part.start == 0 and part.count == shape[0]:
            return part.key
        begin = self.constant(np.asarray([part.start, *[0] * (len(shape) - 1)], np.int64))
        size = self.constant(np.asarray([part.count, *[-1] * (len(shape) - 1)], np.int64))
        return self.helper(like, "Slice", [part.key, begin, size], (part.count, *shape[1:]))

    def stack(self, keys: Sequence[Key], like: Op) -> Key:
        """Values side by side: a view where they lie so already, constants once and for all, otherwise a copy."""
        if all(key in self.graph.constants for key in keys):
            copied = self.weights.copy(keys)
            self.types[copied] = self.types[keys[0]]
            return copied
        self.side_by_side(keys)
        ranges = self.ranges(keys)
        if len(ranges) == 1 and ranges[0].start >= 0:
            return self.range(ranges[0], like)
        member = self.graph.shapes[keys[0]]
        if all(part.start < 0 for part in ranges):
            return self.helper(like, "Pack", list(keys), (len(keys), *member), axis=0)
        axis = self.constant(np.asarray(0, np.int32))
        inputs = [
            self.range(part, like) if part.start >= 0 else self.reshape(part.key, (1, *member), like) for part in ranges
        ]
        return self.helper(like, "ConcatV2", [*inputs, axis], (len(keys), *member))

    def side_by_side(self, keys: Sequence[Key]) -> StackSlot | None:
        """Place where variables of a shape are neighbours, from the first one on: memory is laid out for it. None where they can not be."""
        names = [name for key in keys if (name := self.graph.variable(key)) is not None]
        if len(names) != len(keys):
            return None
        first = self.places.get(keys[0])
        if first is not None:
            neighbours = [StackSlot(first.stack, first.index + place) for place in range(len(keys))]
            return first if [self.places.get(key) for key in keys] == neighbours else None
        if any(key in self.places for key in keys) or not self.graph.adjoin(names):
            return None
        stack = (self.graph.fresh(), 0)
        self.graph.stacks[stack] = tuple(names)
        self.graph.shapes[stack] = (len(keys), *self.graph.shapes[keys[0]])
        self.types[stack] = self.types[keys[0]]
        self.places |= {key: StackSlot(stack, place) for place, key in enumerate(keys)}
        return StackSlot(stack, 0)

    def reshape(self, key: Key, shape: Shape, like: Op) -> Key:
        """Gives the same elements another shape."""
        if self.graph.shapes[key] == shape:
            return key
        return self.helper(like, "Reshape", [key, self.constant(np.asarray(shape, np.int64))], shape)

    def ranges(self, keys: Sequence[Key]) -> list[StackRange]:
        """Values as runs of stacks, in order."""
        ranges: list[StackRange] = []
        for key in keys:
            place = self.places.get(key)
            one = StackRange(key, -1, 1) if place is None else StackRange(place.stack, place.index, 1)
            last = ranges[-1] if ranges else None
            if last is not None and last.start >= 0 and (last.key, last.start + last.count) == (one.key, one.start):
                ranges[-1] = StackRange(last.key, last.start, last.count + 1)
            else:
                ranges.append(one)
        return ranges

    def copies(self, keys: Sequence[Key]) -> bool:
        """Returns whether stacking these values takes a kernel."""
        if len(set(keys)) == 1 or all(key in self.graph.constants for key in keys):
            return False
        if len(set(keys)) == len(keys) and all(self.is_free(key) for key in keys):
            return False
        ranges = self.ranges(keys)
        return len(ranges) > 1 or ranges[0].start < 0

    def is_free(self, key: Key) -> bool:
        """Returns whether a value is a variable that may still come to lie anywhere."""
        return key not in self.places and self.graph.variable(key) is not None


class Batch:
    """The view that a batch rule has: the members' operands by slot, and functions that add ops."""

    def __init__(self, builder: Builder, members: Sequence[Op]) -> None:
        self._builder, self._members = builder, members
        self.op = members[0]
        self.count = len(members)
        self.slots = len(self.op.inputs)
        self._shapes = builder.graph.shapes

    def column(self, slot: int) -> list[Key]:
        """Every member's operand."""
        return [op.inputs[slot] for op in self._members]

    def key(self, slot: int) -> Key:
        """A shared operand."""
        return self._builder.plain(self.op.inputs[slot], self.op)

    def shared(self, slot: int) -> bool:
        """Returns whether all members read the same value."""
        return len(set(self.column(slot))) == 1

    def constants(self, slot: int) -> bool:
        """Returns whether every member's operand is a constant."""
        return all(key in self._builder.graph.constants for key in self.column(slot))

    def variables(self, slot: int) -> bool:
        """Returns whether every member's operand is a variable."""
        return all(self._builder.graph.variable(key) is not None for key in self.column(slot))

    def static(self, slot: int) -> NDArray[Any]:
        """A static operand, the same for all."""
        return np.asarray(self._builder.graph.constants[self.op.inputs[slot]])

    def shape(self, slot: int) -> Shape:
        """Shape of a member's operand."""
        return self._shapes[self.op.inputs[slot]]

    def out(self, port: int) -> Shape:
        """Shape of a member's output."""
        return self._shapes[self.op.node, port]

    def stacked_shape(self, port: int) -> Shape:
        """Shape of all members' outputs."""
        return (self.count, *self.out(port))

    def type_of(self, slot: int) -> str:
        """Dtype name of an operand."""
        return self._builder.types[self.op.inputs[slot]]

    def constant(self, value: NDArray[Any]) -> Key:
        """A small constant."""
        return self._builder.constant(value)

    def input(self, slot: int, rank: int) -> Key:
        """An operand that broadcasts: shared as it is, otherwise stacked, with axes of one so that members have `rank` axes."""
        if self.shared(slot):
            return self.key(slot)
        key = self._builder.stack(self.column(slot), self.op)
        shape = self.shape(slot)
        wanted = (self.count, *(1,) * (rank - len(shape)), *shape)
        if key in self._builder.graph.constants:
            return self._builder.weights.shaped(key, wanted)
        return self.reshape(key, wanted)

    def stacked(self, slot: int) -> Key:
        """An operand with the members' axis in front, repeated where it is shared."""
        if not self.shared(slot):
            return self._builder.stack(self.column(slot), self.op)
        shape = self.shape(slot)
        one = self.reshape(self.key(slot), (1, *shape))
        whole = (self.count, *shape)
        sizes = self.constant(np.asarray(whole, np.int64))
        return self.emit("BroadcastTo", {"T": self.type_of(slot)}, [one, sizes], whole)

    def layer(self, steps: tuple[str, ...]) -> tuple[dict[str, int], list[Key]]:
        """The members' weights and biases as `_GroupedMatMul` wants them, and the stacks, if that holds no weights twice."""
        stack, start = self._taken(1, wide=self.shared(0) and not self.op.attrs.get("transpose_b"))
        layer = self._builder.weights.layer(self.op, stack, start, self.count)
        if not steps:
            return layer, [stack]
        if self.shared(2):
            return {**layer, "bias": -1}, [stack, self.key(2)]
        biases, first = self._taken(2)
        return {**layer, "bias": first, "biases": self.count}, [stack, biases]

    def _taken(self, slot: int, *, wide: bool = False) -> tuple[Key, int]:
        """A stack in which the members' constants or variables are neighbours, and where the first one is; see `StackedWeights.take`."""
        if self.constants(slot):
            return self._builder.weights.take(self.column(slot), wide=wide)
        place = known(self._builder.side_by_side(self.column(slot)))
        return place.stack, place.index

    def tables(self, slot: int) -> tuple[Key, Key, Key]:
        """All tables below each other, the first row of each, and its number of rows, if that holds no tables twice."""
        key, starts, sizes = self._builder.weights.take_rows(self.column(slot))
        return key, self.constant(np.asarray(starts, np.int64)), self.constant(np.asarray(sizes, np.int64))

    def emit(self, op: str, attrs: Attrs, inputs: list[Key], *shapes: Shape) -> Key:
        """Adds the op that does the members' work; its first value."""
        nodes = [node for member in self._members for node in member.source_nodes]
        types = (self._builder.types[self.op.node, port] for port in range(len(shapes)))
        made = self._builder.emit(self.op, op, dict(attrs), inputs, list(zip(shapes, types, strict=True)), nodes)
        made.batch = self.count
        return made.out

    def reshape(self, key: Key, shape: Shape) -> Key:
        """Gives the same elements another shape."""
        return self._builder.reshape(key, shape, self.op)

    def outputs(self, op: str, attrs: Attrs, inputs: list[Key]) -> list[Key]:
        """Adds an op with as many outputs as a member has, each stacked; its values."""
        ports = range(self._builder.graph.ports(self.op.node))
        number, _ = self.emit(op, attrs, inputs, *(self.stacked_shape(port) for port in ports))
        return [(number, port) for port in ports]
