"""Nodes that the replicas of a model share, and nodes that can not be copied."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph, TensorValue
from msplit.errors import LoadError, MsplitError
from msplit.flatten.control_flow import is_stateful
from msplit.formats.model import Model
from msplit.opset import schema
from msplit.opset.traits import CONSTANTS, DRAWS, PLACEHOLDERS, VARIABLES, ops_with, traits

_STAYS_WHOLE = frozenset().union(
    *(ops_with(word) for word in ("enter", "exit", "next", "switch", "switch n", "merge", "functional")), DRAWS
)
"""Ops that are never shared: control flow stays with what it controls, functions may hold weights, and each replica draws for itself."""

_CUSTOM_HANDLES = ops_with("handle") - VARIABLES
FLOATING = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""Types of weights, and of what can be averaged."""


def refuse(model: Model, graph: Graph, needed: NDArray[np.bool_]) -> None:
    """Refuses a model that replicas can not be made of.

    Raises:
        MsplitError: It changes variables, has variables of custom ops, or no output.
    """
    where = str(model.path)
    for node in np.flatnonzero(needed).tolist():
        op, name = graph.ops[node], graph.names[node]
        if traits(op).writes:
            raise MsplitError(
                f"the outputs need {name!r} ({op}), which changes variables; replicas are for inference",
                where=where,
                fix="name what the model predicts with --part outputs=",
            )
        if op in _CUSTOM_HANDLES:
            raise MsplitError(
                f"{name!r} is a variable of a custom op ({op}), whose values only its own library can copy",
                where=where,
                fix="freeze the model, or name other outputs with --part outputs=",
            )
    if not model.outputs:
        raise MsplitError("the model has no output", where=where, fix="name the tensors with --part outputs=")
    infos = (
        model.meta.signature_def[model.signature].outputs if model.signature and model.choice.outputs is None else {}
    )
    parts = [name for name in sorted(infos) if infos[name].WhichOneof("encoding") != "name"]
    if parts:
        raise MsplitError(
            f"output {parts[0]!r} is of several tensors, sparse or ragged, which differ in size from replica to replica",
            where=where,
            fix="name dense outputs with --part outputs=",
        )


def initializers(model: Model, graph: Graph, needed: NDArray[np.bool_]) -> list[int]:
    """Nodes that fill the tables that are needed: initializers, groups of them taken apart, without those of weights."""
    lasting = _lasting(graph)
    waiting = [graph.index[name] for name in model.init_ops]
    found: dict[int, None] = {}
    seen = set(waiting)
    while waiting:
        node = waiting.pop(0)
        if graph.ops[node] == "NoOp":
            further = [int(one) for one in graph.predecessors(node) if int(one) not in seen]
            seen.update(further)
            waiting += further
            continue
        before = np.flatnonzero(graph.ancestors([node])).tolist()
        if any(needed[one] and graph.ops[one] in VARIABLES for one in before):
            continue  # the value comes from a checkpoint
        if any(needed[one] and one in lasting for one in before):
            found[node] = None
    return list(found)


def _lasting(graph: Graph) -> set[int]:
    """Tables, queues and iterators, which last from step to step under their own names. Variables do, too, and are not meant."""
    return {node for node in graph.nodes_with("shared_name") if graph.ops[node] not in VARIABLES}


def shared_nodes(model: Model, graph: Graph, graph_defs: Sequence[Any], init: Sequence[int]) -> NDArray[np.bool_]:
    """Mask of the nodes that all replicas share."""
    others = list({id(one): one for one in graph_defs if one is not model.graph_def}.values())
    theirs = [{node.name: node for node in one.node} for one in others]
    own = {node.name: node for node in model.graph_def.node} if others else {}

    def equal(node: int) -> bool:
        name = graph.names[node]
        return all(nodes[name].attr["value"] == own[name].attr["value"] for nodes in theirs)

    # What variables, inputs and initializers depend on is shared, so its constants must be equal in all models.
    lasting = _lasting(graph)
    fed = [node for node, op in enumerate(graph.ops) if op in PLACEHOLDERS]
    shared = graph.ancestors([*lasting, *fed, *init])
    different = [node for node in np.flatnonzero(shared).tolist() if graph.ops[node] in CONSTANTS and not equal(node)]
    if different:
        raise LoadError(
            f"the weights are of a model with other values in {graph.names[different[0]]!r}, which all replicas share",
            where=str(model.path),
            fix="give models with the same vocabularies and the same preprocessing",
        )
    # From there on in topological order: a node all of whose inputs are shared may be shared too.
    waiting = np.bincount(graph.edges.dst, minlength=len(graph))
    ready = [node for node in range(len(graph)) if not waiting[node] or shared[node]]
    done = np.zeros(len(graph), np.bool_)
    while ready:
        node = ready.pop()
        if done[node]:
            continue
        done[node] = True
        if not shared[node] and not _same_for_all(graph, node, lasting, equal):
            continue
        shared[node] = True
        for consumer in graph.successors(node).tolist():
            waiting[consumer] -= 1
            if not waiting[consumer]:
                ready.append(consumer)
    return shared


def _same_for_all(graph: Graph, node: int, lasting: Container[int], equal: Callable[[int], bool]) -> bool:
    """True if a node of which all inputs are shared is shared, too."""
    op = graph.ops[node]
    if op in CONSTANTS:
        value = graph.attrs[node].get("value")
        if not isinstance(value, TensorValue) or (value.dtype in FLOATING and value.shape):
            return False  # weights: though they may be equal, each replica has its own
        return equal(node)
    if op in _STAYS_WHOLE or op in VARIABLES or schema.lookup(op) is None:
        return False
    return not is_stateful(op) or any(int(before) in lasting for before in graph.predecessors(node))
