"""What loops, conds and calls run, known before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.control.bodies import CONDS, FUNCTIONAL, LOOPS, Bodies, functions_of, taken
from msplit.engines.cuda.control.lists import LISTS
from msplit.engines.cuda.program import Key
from msplit.engines.cuda.registry import table
from msplit.flatten.flat import FlatGraph
from msplit.graph import TensorValue


@dataclass(frozen=True)
class Within:
    """The inside of one node.

    Attributes:
        ops: Every op that it may run, those included that only effects need.
        missing: Op -> names, for ops that the engine can not run.
        names: Op -> names of all nodes.
    """

    ops: frozenset[str] = frozenset()
    missing: Mapping[str, list[str]] = field(default_factory=dict)
    names: Mapping[str, list[str]] = field(default_factory=dict)

    def named(self, pattern: re.Pattern[str]) -> list[str]:
        """Nodes whose op has a name of this form."""
        return [name for op, names in self.names.items() if pattern.fullmatch(op) for name in names]


NOTHING = Within()


class Inside:
    """What is inside of the nodes of a graph.

    Args:
        flat: The graph.
    """

    def __init__(self, flat: FlatGraph) -> None:
        self._flat = flat
        self._bodies = Bodies(flat.model)
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
        if op in CONDS and (predicate := self._predicate(node)) is not None and wanted:
            wanted = [wanted[taken(op, predicate, len(wanted))]]
        missing: dict[str, list[str]] = {}
        names: dict[str, list[str]] = {}
        if not wanted or (op in LOOPS and len(wanted) != 2):
            missing[op] = [where]
        seen: set[str] = set()
        pending = [ref.name for ref in wanted]
        while pending:
            function = pending.pop()
            if function in seen:
                continue
            seen.add(function)
            body = self._bodies.of(function)
            if body is None:
                missing.setdefault(op, []).append(where)
                continue
            for inner, name in body.every_op:
                names.setdefault(inner, []).append(f"{where}/{name}")
            for piece in body.ops:
                if piece.op in FUNCTIONAL:
                    pending += [ref.name for ref in functions_of(piece.op, piece.attrs)]
                elif piece.op not in LISTS and piece.op != "ReadVariableOp" and piece.op not in table():
                    missing.setdefault(piece.op, []).append(f"{where}/{piece.name}")
        return Within(frozenset(names), missing, names)

    def _predicate(self, node: int) -> NDArray[Any] | None:
        """The number of the branch or the truth value, where that is a constant or the default of an input that is not fed."""
        graph = self._flat.graph
        key: Key = graph.inputs(node)[0]
        negated = False
        while key not in self._fed:
            op, inputs = graph.ops[key[0]], graph.inputs(key[0])
            if op == "Const":
                value = graph.attrs[key[0]].get("value")
                if not isinstance(value, TensorValue) or value.dtype == "string":
                    return None
                found = value.load()
                return np.logical_not(found) if negated else found
            if op not in ("Identity", "PlaceholderWithDefault", "LogicalNot") or not inputs:
                return None
            negated ^= op == "LogicalNot"
            key = inputs[0]
        return None
