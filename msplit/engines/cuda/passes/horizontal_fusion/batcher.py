"""Merging of alike ops of several branches, and of where the branches join.

Choice of ops that are merged: agenda-based batching.

Ops are visited in an order in which each comes after what it reads, the ones with the most kernels behind them first. Among those that are
ready at the same time, alike ones are candidates for a merge (Neubig, Goldberg, Dyer: On-the-fly Operation Batching in Dynamic
Computation Graphs, 2017, who take the signature of the least average depth; the height makes branches that begin or end differently
meet where they are alike, and the cells of an unrolled network on its wavefronts). Whatever is merged is ready at the same time, so that
members never depend on each other and the order of visits proves that merging makes no cycle.

Members whose operands lie in the same stacks are merged for nothing. Others are merged where the kernels that it saves, there and
behind, are worth more than the copies that put their operands side by side.

Joins of branches: the members of a stack side by side are the stack itself, seen along another axis.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, known, proved, require
from msplit.engines.cuda.ir.interpret import static_slots
from msplit.engines.cuda.passes.horizontal_fusion.batch_rules import BATCH_RULES, Signatures, large, weight_slot
from msplit.engines.cuda.passes.horizontal_fusion.builder import Batch, Builder, StackSlot
from msplit.opset.traits import JOINS, VIEWS

_CHAIN_OF_ADDITIONS = 4


def join(builder: Builder, op: Op) -> bool:
    """Makes an op that reads several members of a stack read the stack, if it can. Whether it did."""
    if op.op == "Unpack":
        return _unpack(builder, op)
    data = op.inputs[:-1] if op.op == "ConcatV2" else op.inputs
    require(op.op in JOINS and len(data) >= 2 and op.out in builder.graph.shapes)
    ranges = builder.ranges(data)
    require(len(ranges) == 1 and ranges[0].start >= 0)
    rank = len(builder.graph.shapes[data[0]])
    stack = builder.range(ranges[0], op)
    if op.op == "AddN":
        require(len(data) > _CHAIN_OF_ADDITIONS)  # or it is a chain of additions, which rounds in another order
        _place(builder, op, "Sum", [stack, builder.constant(np.asarray([0], np.int32))])
        return True
    if op.op == "Pack":
        axis = int(op.attrs.get("axis", 0)) % (rank + 1)
        how = _front_to(builder, axis, rank) if axis else _shape(builder, op)
        _place(builder, op, "Transpose" if axis else "Reshape", [stack, how])
        return True
    require(rank)
    axis = int(known(builder.graph.constants.get(op.inputs[-1]))) % rank
    if axis:
        shape = builder.graph.shapes[data[0]]
        moved = (*shape[:axis], len(data), *shape[axis:])
        stack = builder.helper(op, "Transpose", [stack, _front_to(builder, axis, rank)], moved)
    _place(builder, op, "Reshape", [stack, _shape(builder, op)])
    return True


def _unpack(builder: Builder, op: Op) -> bool:
    """The parts of a value along an axis are a stack already: the value with that axis in front."""
    key = op.inputs[0]
    shape = known(builder.graph.shapes.get(key))
    require(shape and builder.types.get(key) is not None)
    axis = int(op.attrs.get("axis", 0)) % len(shape)
    stack = builder.plain(key, op)
    if axis:
        order = [axis, *(other for other in range(len(shape)) if other != axis)]
        inputs = [stack, builder.constant(np.asarray(order, np.int64))]
        stack = builder.helper(op, "Transpose", inputs, tuple(shape[place] for place in order))
    for port in range(shape[axis]):
        builder.places[op.node, port] = StackSlot(stack, port)
    return True


def _front_to(builder: Builder, axis: int, rank: int) -> Key:
    """The permutation that brings the first of `rank` + 1 axes to a position."""
    return builder.constant(np.asarray([*range(1, axis + 1), 0, *range(axis + 1, rank + 1)], np.int64))


def _shape(builder: Builder, op: Op) -> Key:
    return builder.constant(np.asarray(builder.graph.shapes[op.node, 0], np.int64))


def _place(builder: Builder, op: Op, name: str, inputs: list[Key]) -> None:
    """The op itself, as another one."""
    builder.ops[op.node] = Op(op.node, op.name, name, {"T": builder.types.get(inputs[0])}, inputs, op.source_nodes)


KERNEL_US = 1.3
"""Time that one kernel less saves inside a CUDA graph."""

COPY_US = 2.0
"""Time of a kernel that puts operands side by side, beside its bytes."""

BYTES_PER_US = 2e6
"""Read and written by such a copy."""

LEAST_GAIN_US = 1.0
"""A merge that needs a copy must gain at least this."""

_MOST_WAITING = 64
"""Ops of one signature that may wait for their height: what lies beyond is merged at once, so that time stays near-linear."""

Token = tuple[object, ...]


class Batcher:
    """Visits every op of a graph once; `builder` holds the result."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.signatures = Signatures(graph)
        self.builder = Builder(graph, self.signatures.dtypes)
        self.merges: list[Merge] = []
        self._rank: dict[int, int] = {}
        self._ready: dict[int, dict[int, Op]] = {}  # signature -> ops that wait, in order of readiness
        self._static = {number: static_slots(op) for number, op in graph.ops.items()}

    def run(self) -> None:
        """Visits all."""
        readers: dict[int, list[int]] = {}
        waiting: dict[int, int] = {}
        hazards = self.graph.hazards()
        for number, op in self.graph.ops.items():
            producers = {key[0] for key in op.inputs if key[0] in self.graph.ops} | {*hazards.get(number, ())}
            waiting[number] = len(producers)
            for producer in producers:
                readers.setdefault(producer, []).append(number)
        place = {number: position for position, number in enumerate(self.graph.ops)}
        heap: list[tuple[int, int, int, int]] = []

        def announce(numbers: Iterable[int]) -> None:
            for number in numbers:
                op = self.graph.ops[number]
                heapq.heappush(heap, (-self.signatures.height[number], op.op not in VIEWS, place[number], number))
                signature = self.signatures.own.get(number)
                if signature is not None:
                    self._ready.setdefault(signature, {})[number] = op

        announce([number for number, count in waiting.items() if not count])
        visited: set[int] = set()
        while heap:
            *_, number = heapq.heappop(heap)
            if number in visited:
                continue
            done = self._visit(number)
            visited.update(done)
            for finished in done:
                for reader in readers.get(finished, ()):
                    waiting[reader] -= 1
                    if not waiting[reader]:
                        announce([reader])

    def _visit(self, number: int) -> list[int]:
        """Merges an op with what can be merged with it, or keeps it as it is. The ops that are done with."""
        signature = self.signatures.own.get(number)
        waiting = self._ready.get(signature, {}) if signature is not None else {}
        op = self.graph.ops[number]
        if len(waiting) < 2 or large(self.graph, op):
            waiting.pop(number, None)
            self._keep(op)
            return [number]
        height = self.signatures.height[number]
        done: list[int] = []
        for sets in self._divide(list(waiting.values())):
            due = any(self.signatures.height[member.node] >= height for members in sets for member in members)
            if not due and len(waiting) <= _MOST_WAITING:
                continue
            self._merge_sets(sets)
            done += [member.node for members in sets for member in members]
        for member in done:
            del waiting[member]
        return done

    def _merge_sets(self, sets: list[list[Op]]) -> None:
        """Merges all of some sets or, where that can not be done, each that gains something by itself."""
        together = [op for members in sets for op in members]
        if len(sets) > 1 and self._merge(together):
            return
        for members in sets:
            if not (self._worth(members) and self._merge(members)):
                for member in members:
                    self._keep(member)

    def _keep(self, op: Op) -> None:
        """An op on its own."""
        self._rank[op.node] = self._rank_of(op)
        if proved(join, self.builder, op):
            return
        inputs = [self.builder.plain(key, op) for key in op.inputs]
        self.builder.ops[op.node] = Op(op.node, op.name, op.op, op.attrs, inputs, op.source_nodes)

    def _rank_of(self, op: Op) -> int:
        """Place of members in an order that branches keep: by their weights where they have some, else by what they read."""
        slot = weight_slot(self.graph, op)
        if slot is not None:
            return op.inputs[slot][0]
        static = self._static[op.node]
        read = (key for slot, key in enumerate(op.inputs) if slot not in static and key not in self.graph.constants)
        return max((self._rank.get(key[0], key[0]) for key in read), default=op.node)

    def _divide(self, ops: list[Op]) -> list[list[list[Op]]]:
        """Ready ops of one signature, divided into what to merge: each part is one set, or several to put together."""
        classes: dict[tuple[Token, ...], list[Op]] = {}
        repeated = self._repeated_constants(ops)
        for op in ops:
            classes.setdefault(self._tokens(op, repeated), []).append(op)
        alike: dict[int, list[list[Op]]] = {}
        for members in classes.values():
            forward = Counter(self.signatures.forward[op.node] for op in members)
            alike.setdefault(forward.most_common(1)[0][0], []).append(members)
        result: list[list[list[Op]]] = []
        for sets in alike.values():
            together = [op for members in sets for op in members]
            if len(sets) > 1 and self._worth(together, [self._worth(members) for members in sets]):
                result.append(sets)
            else:
                result += [[members] for members in sets]
        return result

    def _repeated_constants(self, ops: list[Op]) -> set[Key]:
        """Constants that several of some products or lookups read: those that share their weights are merged with each other."""
        if BATCH_RULES[ops[0].op].weights is None:
            return set()
        read = (key for op in ops for slot, key in enumerate(op.inputs) if slot not in self._static[op.node])
        held = self.graph.constants
        return {key for key, times in Counter(read).items() if times > 1 and (key in held or self.graph.variable(key))}

    def _tokens(self, op: Op, repeated: set[Key]) -> tuple[Token, ...]:
        """Tokens that must be equal for operands to be stacked without a copy."""
        tokens: list[Token] = []
        for slot, key in enumerate(op.inputs):
            place = self.builder.places.get(key)
            if key in repeated:
                tokens.append(("weights", key))
            elif slot in self._static[op.node] or key in self.graph.constants or self.builder.is_free(key):
                tokens.append(())
            else:
                tokens.append(("stack", place.stack) if place is not None else ("value", key))
        return tuple(tokens)

    def _worth(self, members: list[Op], apart: Sequence[list[Op]] | None = None) -> list[Op]:
        """The members if merging them gains something, else nothing. `apart` are the sets that would be merged otherwise."""
        if len(members) < 2:
            return []
        ordered = self._ordered(members)
        if all(len({op.inputs[slot] for op in ordered}) == 1 for slot in range(len(members[0].inputs))):
            return []  # one result for all, and nothing to stack
        copies, volume = self._copies(ordered)
        if not copies:
            return members
        chain = self.signatures.chain[members[0].node]
        # Apart, each set that is not empty becomes one op, and each member that is in none stays one.
        saved = len(members) + sum(1 - len(group) for group in apart or () if group) - 1
        gain = saved * chain * KERNEL_US - copies * COPY_US - 2 * volume / BYTES_PER_US
        return members if gain >= LEAST_GAIN_US else []

    def _copies(self, ordered: Sequence[Op]) -> tuple[int, int]:
        """Kernels that stack the members' operands, and the bytes of those."""
        copies, volume = 0, 0
        weights = weight_slot(self.graph, ordered[0])
        for slot in range(len(ordered[0].inputs)):
            if slot in self._static[ordered[0].node] or slot == weights:
                continue
            keys = [op.inputs[slot] for op in ordered]
            if self.builder.copies(keys):
                copies += 1
                volume += 4 * len(keys) * math.prod(self.graph.shapes[keys[0]])
        return copies, volume

    def _ordered(self, members: list[Op]) -> list[Op]:
        """The members in the order that needs the fewest copies."""
        orders = [sorted(members, key=lambda op: (self._rank_of(op), op.node))]
        if not self._copies(orders[0])[0]:
            return orders[0]
        for slot in range(len(members[0].inputs)):
            places = [place for op in members if (place := self.builder.places.get(op.inputs[slot])) is not None]
            if len(places) == len(members) and len({place.stack for place in places}) == 1:
                pairs = sorted(zip(places, members, strict=True), key=lambda pair: pair[0].index)
                orders.append([op for _, op in pairs])
        return min(orders, key=lambda order: self._copies(order)[0])

    def _merge(self, members: list[Op]) -> bool:
        """Makes the merged op. False where it can not be done."""
        ordered = self._ordered(members)
        copies, _ = self._copies(ordered)
        first = ordered[0]
        stacked = proved(BATCH_RULES[first.op].build, Batch(self.builder, ordered))
        if stacked is None:
            return False
        for port, key in enumerate(stacked):
            self.builder.types[key] = self.signatures.dtypes[first.node, port]
            for index, member in enumerate(ordered):
                self.builder.places[member.node, port] = StackSlot(key, index)
        for member in ordered:
            self._rank[member.node] = self._rank_of(member)
        self.merges.append(Merge(first.op, len(ordered), copies, first.op not in VIEWS))
        return True
