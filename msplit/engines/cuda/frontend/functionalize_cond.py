"""Conds of TensorFlow 1, and those that freezing a TensorFlow 2 model makes of them, as an `If` per Merge.

A Switch hands its data on, to both branches; a Merge chooses between what they give. Where the predicate is a constant, such as
an `is_training` that nobody feeds, the Merge is what the branch that is taken gives, and nothing of the other one is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.engines.cuda.frontend.rewire import Changes, rewired
from msplit.engines.cuda.ir.functions import Body
from msplit.engines.cuda.ir.graph import Key
from msplit.errors import LoadError
from msplit.flatten.flat import FlatGraph
from msplit.formats.endpoints import behind
from msplit.opset.traits import DRAWN_ON_DEVICE, ops_with, written

_BEFORE_SWITCHES = ops_with("hands on a condition")
IN_A_BRANCH = " in a branch"
"""Behind the name of an op that runs in those steps only that take the branch."""

_SWITCHES = ops_with("switch")
_NO, _YES = "Merge/no", "Merge/yes"
_CHOICE = {
    _NO: Body([(0, 0), (1, 0)], (), {}, [(0, 0)], ()),
    _YES: Body([(0, 0), (1, 0)], (), {}, [(1, 0)], ()),
}
"""Functions of two values that give one of them."""

_Branch = tuple[Key, int]
"""A predicate, and 1 for the branch that is taken where it is true."""

_NOWHERE: Set[_Branch] = frozenset()


def raise_conds(flat: FlatGraph) -> tuple[FlatGraph, Mapping[str, Body]]:
    """The graph with an `If` for each Merge of a cond, and the functions of those.

    A Merge of which it is not plain what it joins stays as it is.
    """
    if "Merge" not in flat.graph.ops:
        return flat, {}
    graph, changes = flat.graph, Changes()
    fed = {(tensor.node, tensor.port) for tensor in flat.inputs}
    fetched = {(tensor.node, tensor.port) for tensor in flat.outputs}
    inside: dict[int, Set[_Branch]] = {}  # per node the branches that it is in
    for node in graph.topological.tolist():
        op = graph.ops[node]
        around = [_around(graph, inside, edge) for edge in graph.in_edges(node)]
        found: Set[_Branch] = frozenset().union(*around)
        inputs = graph.inputs(node)
        # A Switch hands its data on to both branches; a Merge of two sides of one predicate chooses.
        if _condition(graph, node) is not None:
            changes.stands_for |= {(node, 0): inputs[0], (node, 1): inputs[0]}
        elif op == "Merge" and len(inputs) == 2:
            sides = [_around(graph, inside, edge) for edge in list(graph.in_edges(node))[:2]]
            apart = [branch for branch in sides[0] if (branch[0], 1 - branch[1]) in sides[1]]
            if len(apart) == 1 and (node, 1) not in fetched and not _reads_which(graph, node):
                ((predicate, first),) = apart
                no, yes = (inputs[1], inputs[0]) if first else (inputs[0], inputs[1])
                _choose(changes, node, predicate, no, yes, known(graph, predicate, fed))
                found = sides[0] & sides[1]
        # What draws or writes in a branch does so in those steps only that take it.
        if found:
            inside[node] = found
            if op in DRAWN_ON_DEVICE or written(op):
                taken = [_taken(graph, branch, fed) for branch in found]
                if False in taken and written(op):  # what needs it by control edges goes on without it
                    changes.ops[node], changes.inputs[node], changes.stateful[node] = "NoOp", [], False
                elif None in taken:
                    # Only the run knows which steps these are: no op is known by this name.
                    changes.ops[node] = op + IN_A_BRANCH
                    changes.stateful[node] = True
    return rewired(flat, changes), _CHOICE


def _taken(graph: Graph, branch: _Branch, fed: Set[Key]) -> bool | None:
    """True if a branch is taken; None where only the run knows."""
    predicate, side = branch
    value = known(graph, predicate, fed)
    return None if value is None else bool(value) == bool(side)


def _choose(changes: Changes, merge: int, predicate: Key, no: Key, yes: Key, value: NDArray[np.generic] | None) -> None:
    if value is not None:
        changes.stands_for[merge, 0] = yes if bool(value) else no
        return
    changes.ops[merge] = "If"
    changes.attrs[merge] = {"then_branch": FunctionRef(_YES), "else_branch": FunctionRef(_NO)}
    changes.inputs[merge] = [predicate, no, yes]


def _around(graph: Graph, inside: Mapping[int, Set[_Branch]], edge: int) -> Set[_Branch]:
    """The branches that what comes through an edge is in."""
    source, port = int(graph.edges.src[edge]), int(graph.edges.port[edge])
    found, condition = inside.get(source, _NOWHERE), _condition(graph, source) if port != CONTROL else None
    return found if condition is None else found | {(condition, port)}


def _condition(graph: Graph, node: int) -> Key | None:
    """The predicate of a cond's Switch; None for a loop's, and for all else."""
    inputs = graph.inputs(node) if graph.ops[node] in _SWITCHES else []
    if len(inputs) == 2 and graph.ops[inputs[1][0]] != "LoopCond":
        return behind(graph, inputs[1], ("Identity",))
    return None


def _reads_which(graph: Graph, merge: int) -> bool:
    """Checks if something asks which side a Merge took."""
    return any(int(graph.edges.port[edge]) == 1 for edge in graph.out_edges(merge))


def known(graph: Graph, key: Key, fed: Set[Key]) -> NDArray[np.generic] | None:
    """A value that is a constant, or the default of an input that is not fed."""
    negated = False
    while key not in fed:
        op, inputs = graph.ops[key[0]], graph.inputs(key[0])
        if op == "Const":
            value = graph.attrs[key[0]].get("value")
            if not isinstance(value, TensorValue) or value.dtype == "string":
                return None
            try:
                found = value.load()
            except LoadError:  # whoever runs it is told
                return None
            return np.logical_not(found) if negated else found
        if op not in _BEFORE_SWITCHES or not inputs:
            return None
        negated ^= op == "LogicalNot"
        key = inputs[0]
    return None
