"""Groups as ops: what they read and give, and the function that computes them.

From a group of ops to one op: what it reads, what it gives, what it computes.

Bodies of groups: the lowerings of their ops, one after the other, as one function of the values they read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import FUSED, Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.interpret import as_tuple, device_inputs, static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.windows import ROUNDS, TO_TF32
from msplit.engines.cuda.kernels.codec import decode, encode
from msplit.engines.cuda.passes.pattern import Readers, value_key
from msplit.engines.cuda.passes.pointwise_fusion.partition import FusionGroup
from msplit.opset.traits import VIEWS

Reference = tuple[int, int]
"""A value inside a body: (call, output port), or (-1, number) for a value that the group reads."""


@dataclass(frozen=True, eq=False)
class Call:
    """One op of a group.

    Attributes:
        op: TensorFlow op.
        attrs: Its attributes.
        arguments: By slot: a value, or the array of a static input.
    """

    op: str
    attrs: Mapping[str, Any]
    arguments: tuple[Reference | NDArray[Any], ...]

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that do the same, whatever their nodes are called."""
        arguments = tuple(value_key(value) if isinstance(value, np.ndarray) else value for value in self.arguments)
        return self.op, attrs_key(self.attrs), arguments


@dataclass(frozen=True, eq=False)
class Body:
    """A group without its place in a graph. Two groups with equal keys share a kernel.

    Attributes:
        calls: In an order in which every value is made before it is read.
        inputs: How many values it reads.
        outputs: The values that are wanted outside.
        key: What it computes.
    """

    calls: tuple[Call, ...]
    inputs: int
    outputs: tuple[Reference, ...]
    key: tuple[Any, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (tuple(call.key() for call in self.calls), self.inputs, self.outputs))

    def __repr__(self) -> str:
        """Short, and the same for bodies that compute the same."""
        return f"Body({hashlib.sha256(repr(self.key).encode()).hexdigest()[:16]})"

    def __call__(self, *tensors: Any) -> list[Any]:
        """Runs it op by op: what a kernel of the group must give."""
        made: list[Sequence[Any]] = []
        lowerings = table()

        def value(reference: Reference | NDArray[Any]) -> Any:
            if isinstance(reference, np.ndarray):
                return reference
            call, port = reference
            return tensors[port] if call < 0 else made[call][port]

        for call in self.calls:
            arguments = [value(argument) for argument in call.arguments]
            made.append(as_tuple(lowerings[call.op].function(Node(call.op, call.op, call.attrs), *arguments)))
        return [made[call][port] for call, port in self.outputs]

    def packed(self) -> Any:
        """All of it as plain data for JSON.

        Raises:
            TypeError: Something in it has no such form.
        """
        calls = [[call.op, encode(dict(call.attrs)), encode(call.arguments)] for call in self.calls]
        return [calls, self.inputs, encode(self.outputs)]

    @staticmethod
    def unpacked(data: Any) -> Body:
        """Restores a body from `packed` data: it has the same key."""
        calls, inputs, outputs = data
        made = (Call(op, decode(attrs), decode(arguments)) for op, attrs, arguments in calls)
        return Body(tuple(made), inputs, decode(outputs))


@dataclass(frozen=True, eq=False)
class Outline:
    """A group as one op that is not in the graph yet.

    Attributes:
        group: The ops.
        body: What they compute.
        inputs: The values that the body reads.
        outputs: The values that it makes and that something else wants.
        kept: Views among the members that something else reads: they stay in the graph, as views of an output.
        rounds: Numbers of the outputs that are rounded to TF32.
    """

    group: FusionGroup
    body: Body
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    kept: frozenset[int]
    rounds: tuple[int, ...] = ()


def outline(graph: OpGraph, group: FusionGroup, readers: Readers, for_products: Set[Key] = frozenset()) -> Outline:
    """Works out what a group is as one op, which rounds to TF32 what it makes `for_products` alone."""
    inside = set(group.members)
    wanted: dict[int, list[int]] = {}  # member -> ports that are wanted outside
    kept: set[int] = set()
    for number in reversed(group.members):
        own = inside - kept  # a view that stays reads its source as anything outside does
        keys = ((number, port) for port in readers.ports.get(number, ()))
        out = [key[1] for key in keys if key in readers.fetched or not own.issuperset(readers.of.get(key, ()))]
        if out and graph.ops[number].op in VIEWS:
            kept.add(number)
        elif out:
            wanted[number] = out
    outputs = tuple((number, port) for number in group.members for port in wanted.get(number, ()))
    maker = _Maker(graph, inside)
    made = [maker.reference(key) for key in outputs]
    rounds = tuple(port for port, key in enumerate(outputs) if key in for_products)
    for port in rounds:
        maker.calls.append(Call(TO_TF32, {}, (made[port],)))
        made[port] = len(maker.calls) - 1, 0
    body = Body(tuple(maker.calls), len(maker.inputs), tuple(made))
    return Outline(group, body, tuple(maker.inputs), outputs, frozenset(kept), rounds)


class _Maker:
    """Collects the calls that some values need."""

    def __init__(self, graph: OpGraph, inside: set[int]) -> None:
        self.graph, self.inside = graph, inside
        self.calls: list[Call] = []
        self.place: dict[int, int] = {}  # op -> call
        self.inputs: dict[Key, int] = {}

    def reference(self, key: Key) -> Reference:
        """The value inside the body, everything it needs made before (without recursion: groups may be deep)."""
        stack = [key]
        while stack:
            op = self._missing(stack[-1])
            if op is None:
                stack.pop()
                continue
            before = [other for other in reversed(device_inputs(op)) if self._missing(other) is not None]
            if not before:
                self._emit(op)
            stack += before
        return self._known(key)

    def _missing(self, key: Key) -> Op | None:
        """The op that makes a value, if it belongs here and is not here yet: members do, and copies of the views in front of them."""
        op = self.graph.ops.get(key[0])
        if op is None or op.node in self.place:
            return None
        copied = op.op in VIEWS and all(op.inputs[slot] in self.graph.constants for slot in static_slots(op))
        return op if copied or op.node in self.inside else None

    def _known(self, key: Key) -> Reference:
        if key[0] in self.place:
            return self.place[key[0]], key[1]
        return -1, self.inputs.setdefault(key, len(self.inputs))

    def _emit(self, op: Op) -> None:
        static = static_slots(op)
        arguments = list[Reference | NDArray[np.generic]]()
        for slot, key in enumerate(op.inputs):
            arguments.append(np.asarray(self.graph.constants[key]) if slot in static else self._known(key))
        self.place[op.node] = len(self.calls)
        self.calls.append(Call(op.op, op.attrs, tuple(arguments)))


def _doers(graph: OpGraph) -> dict[int, int]:
    """Per flat node the op that does its work, of those that have it among their `source_nodes`.

    Others only help: copies and views that passes add have the one node for whose op they were added.
    """
    best: dict[int, tuple[tuple[bool, bool, int], int]] = {}
    for number, op in graph.ops.items():
        for node in op.source_nodes:
            rank = (op.op in VIEWS, op.node != node, -len(op.source_nodes))
            if node not in best or rank < best[node][0]:
                best[node] = rank, number
    return {node: number for node, (_, number) in best.items()}


def contract(graph: OpGraph, outlines: Sequence[tuple[Outline, object]]) -> dict[Key, Key]:
    """Puts one op in the place of each group, which comes with its kernel or with None to run it op by op.

    Returns:
        Old name -> new name of the values that groups make.
    """
    names: dict[Key, Key] = {}
    fused: dict[int, Op] = {}  # last member -> op
    gone: set[int] = set()
    doer = _doers(graph)
    for made, kernel in outlines:
        ops = [graph.ops[number] for number in made.group.members]
        computing = [op for op in ops if op.op not in VIEWS]
        last = computing[-1]
        # It runs where its last op was to run: that is where its result is wanted. A copy or a view that was added for an op
        # elsewhere goes by the name of that op's node, whose work is not done here.
        inside = set(made.group.members)
        own = [node for op in [*computing[::-1], *ops] for node in op.source_nodes if doer[node] in inside]
        first = [node for op in computing[::-1] for node in op.source_nodes if doer[node] in inside][:1]
        source_nodes = list(dict.fromkeys([*first, *own])) or [last.source_nodes[0]]
        # Of a loop's node every op is a kernel, whichever of them counts as its doer.
        looped = [node for op in computing for node in op.source_nodes if node in graph.unrolled]
        replaces = [*(node for node in source_nodes if node not in graph.unrolled), *looped] if looped else []
        number = graph.fresh()
        attrs = {"body": made.body, "kernel": kernel} | ({ROUNDS: made.rounds} if made.rounds else {})
        batch = max(op.batch for op in computing)
        # It stands where its last member stood, and gives the values that others want.
        fused[last.node] = Op(number, last.name, FUSED, attrs, list(made.inputs), source_nodes, batch, replaces)
        for port, key in enumerate(made.outputs):
            names[key] = (number, port)
            graph.shapes[number, port] = graph.shapes[key]
        gone |= set(made.group.members) - made.kept
    # Views that something outside reads stay: they are views of an output from now on.
    left = (fused.get(number, op) for number, op in graph.ops.items() if number in fused or number not in gone)
    graph.ops = {op.node: op for op in left}
    graph.rename(names)
    graph.prune()
    graph.sort()
    return names
