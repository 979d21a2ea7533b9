"""Signatures of ops that are alike: the same op, attributes, shapes and types. Names and the values of weights do not count."""

from __future__ import annotations

from typing import Any

from msplit.engines.cuda.ir.gpus import gpus_of
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.interpret import static_slots
from msplit.engines.cuda.passes.horizontal_fusion.batch_rules import BATCH_RULES, weight_slot
from msplit.engines.cuda.passes.pattern import Readers, heights, value_key
from msplit.opset import schema
from msplit.opset.traits import JOINS, VIEWS, ops_with

FORWARD = 3
"""Ops ahead that must read two ops alike for a merge that costs something."""
_CHAIN = 12
"""Ops ahead whose kernels are counted for what a merge saves."""


class Signatures:
    """Numbers for ops: equal for alike ops.

    Attributes:
        own: Op -> its signature; ops that can not be merged have none.
        forward: Op -> signature of itself and of what reads it, `FORWARD` ops deep.
        height: Op -> kernels on the longest path from it to an output, itself included.
        chain: Op -> what of that path, `_CHAIN` ops deep, a merge of it may take along, in kernels.
    """

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._gpus = gpus_of(graph)
        self.dtypes = value_types(graph)
        self._numbers: dict[Any, int] = {}
        self.own: dict[int, int] = {}
        for number, op in graph.ops.items():
            found = self._own(op)
            if found is not None:
                self.own[number] = self._number(found)
        self._readers: dict[int, list[tuple[int, int, int]]] = {}  # op -> (port, slot, reader)
        for number, op in graph.ops.items():
            for slot, (producer, port) in enumerate(op.inputs):
                self._readers.setdefault(producer, []).append((port, slot, number))
        self.forward = self._forward()
        self.height = heights(graph, Readers(graph), lambda op: op.op not in VIEWS)
        self.chain = self._chain()

    def _number(self, what: Any) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _own(self, op: Op) -> tuple[Any, ...] | None:
        rule = BATCH_RULES.get(op.op)
        if rule is None or (op.node, 0) not in self._graph.shapes:
            return None
        shapes, types = self._graph.shapes, self.dtypes
        static = static_slots(op)
        weights = weight_slot(self._graph, op)
        slots: list[Any] = []
        for slot, key in enumerate(op.inputs):
            if slot in static:
                value = self._graph.constants.get(key)
                if value is None:
                    return None
                slots.append(value_key(value))
            elif key not in shapes or types.get(key) is None:
                return None
            elif slot == weights and rule.lookup:
                slots.append((shapes[key][1:], types[key], "table"))  # tables may differ in their rows
            else:
                slots.append((shapes[key], types[key], slot == weights))
        made = [(op.node, port) for port in range(self._graph.ports(op.node))]
        if any(key not in shapes for key in made):
            return None
        outputs = tuple(shapes[key] for key in made)
        return op.op, attrs_key(op.attrs), tuple(slots), outputs, self._gpus.get(op.node, 0)

    def _forward(self) -> dict[int, int]:
        ops, current = self._graph.ops, {number: self.own.get(number, -1) for number in self._graph.ops}
        for _ in range(FORWARD):
            following = {}
            for number in self._graph.ops:
                read = self._readers.get(number, ())
                # Where a branch enters a join differs from branch to branch.
                after = {
                    (port, -1, ops[by].op) if ops[by].op in JOINS else (port, slot, current[by])
                    for port, slot, by in read
                }
                following[number] = self._number((current[number], tuple(sorted(after, key=repr))))
            current = following
        return current

    def _chain(self) -> dict[int, float]:
        ops, current = self._graph.ops, dict.fromkeys(self._graph.ops, 0.0)
        own = {number: BATCH_RULES[ops[number].op].kernels for number in self.own if ops[number].op not in JOINS}
        for _ in range(_CHAIN):
            ahead = ((number, [current[by] for _, _, by in self._readers.get(number, ())]) for number in own)
            current = current | {number: own[number] + max(behind, default=0.0) for number, behind in ahead}
        return current


def value_types(graph: OpGraph) -> dict[Key, str]:
    """The dtype name of every value that it is known of: as it ran once, else by the attributes of what makes or reads it."""
    types = graph.dtypes | {key: value.dtype.name for key, value in graph.constants.items()}
    for number, op in graph.ops.items():
        if any(key not in types for key in op.inputs):
            for key, found in zip(op.inputs, schema.input_dtypes(op.op, op.attrs) or (), strict=False):
                if found is not None:
                    types.setdefault(key, found)
        ports = graph.ports(number)
        if all((number, port) in types for port in range(ports)):
            continue
        made = schema.output_dtypes(op.op, op.attrs, ports) or ()
        first = types.get(op.inputs[0]) if op.inputs and op.op in _ONE_TYPE else None
        for port in range(ports):
            # Ops that passes added lack attributes; those that do not say hand on the type of their first input.
            found = (made[port] if port < len(made) else None) or first
            if found is not None:
                types.setdefault((number, port), found)
    return types


_ONE_TYPE = VIEWS | ops_with("one type")
