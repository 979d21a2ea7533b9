"""Ops that loops, conds and calls run, known before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msplit.engines.cuda.frontend.functionalize_cond import known
from msplit.engines.cuda.frontend.tensor_lists import LISTS
from msplit.engines.cuda.ir.functions import FUNCTIONAL, Bodies, functions_of, names_all, taken
from msplit.engines.cuda.ir.lowering import listed
from msplit.flatten.control_flow import has_effect
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import CONDS, DRAWS, FREE_OF_EFFECTS, written


@dataclass(frozen=True)
class Within:
    """The inside of one node.

    Attributes:
        missing: Op -> names, for ops that the engine can not run.
        names: Op -> names of all nodes that it may run, those included that only effects need.
    """

    missing: Mapping[str, list[str]] = field(default_factory=dict)
    names: Mapping[str, list[str]] = field(default_factory=dict)

    def writes(self) -> list[str]:
        """Nodes that write variables."""
        return [name for op, names in self.names.items() if written(op) for name in names]

    def acts(self) -> bool:
        """Returns whether it may do anything beside giving values. What only looks and fails does not."""
        free = FREE_OF_EFFECTS | DRAWS | FUNCTIONAL
        return not self.names or any(written(op) or (has_effect(op) and op not in free) for op in self.names)


NOTHING = Within()


class Inside:
    """Insides of the nodes of a graph, given its functions."""

    def __init__(self, flat: FlatGraph, bodies: Bodies) -> None:
        self._flat = flat
        self._bodies = bodies
        self._fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
        self._known: dict[int, Within] = {}

    def of(self, node: int) -> Within:
        """The inside of a node; nothing for one that is no loop, cond or call."""
        op = self._flat.graph.ops[node]
        if op not in FUNCTIONAL:
            return NOTHING
        if node not in self._known:
            self._known[node] = self._look(node, op)
        return self._known[node]

    def _look(self, node: int, op: str) -> Within:
        attrs, where = self._flat.graph.attrs[node], self._flat.graph.names[node]
        wanted = functions_of(op, attrs)
        # Functions that it needs; of a cond whose predicate is known the branch that is taken.
        missing: dict[str, list[str]] = {}
        names: dict[str, list[str]] = {}
        if not names_all(op, wanted):
            missing[op] = [where]
        elif op in CONDS and (inputs := self._flat.graph.inputs(node)):
            predicate = known(self._flat.graph, inputs[0], self._fed)
            if predicate is not None:
                wanted = [wanted[taken(op, predicate, len(wanted))]]
        # Those first that its results need; ops of others, which run for their effects only, may be missing.
        runs = LISTS.keys() | listed().keys() | {"ReadVariableOp"}
        seen: set[str] = set()
        aside: list[str] = []
        pending = [ref.name for ref in wanted]
        while pending or aside:
            needed = bool(pending)
            function = pending.pop() if needed else aside.pop()
            if function in seen:
                continue
            seen.add(function)
            body = self._bodies.of(function)
            if body is None:
                if needed:
                    missing.setdefault(op, []).append(where)
                continue
            for inner, name in body.every_op:
                names.setdefault(inner, []).append(f"{where}/{name}")
            aside += body.aside
            for piece in body.ops if needed else ():
                inside = functions_of(piece.op, piece.attrs) if piece.op in FUNCTIONAL else []
                pending += [ref.name for ref in inside]
                if not (names_all(piece.op, inside) if piece.op in FUNCTIONAL else piece.op in runs):
                    missing.setdefault(piece.op, []).append(f"{where}/{piece.name}")
        return Within(missing, names)
