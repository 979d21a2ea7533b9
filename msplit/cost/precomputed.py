"""What is computed once: before the first step, and so costs a step nothing; or for all nodes that compute the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Graph, Ints
from msplit.core.hashing import Hashes, mixed
from msplit.cost.costs import Mask
from msplit.opset.traits import CONSTANTS, VARIABLES, ops_with
from msplit.shapes.infer import Shapes

_READS, _REF_READS = ops_with("reads by handle"), ops_with("reads by reference")


def prepared(
    graph: Graph,
    shapes: Shapes,
    stateful: Mask,
    given: Iterable[int] = (),
    back: Iterable[tuple[int, int]] = (),
) -> Mask:
    """Which nodes depend on constants, on variables that nothing assigns and on static shapes only.

    They are evaluated once, before the first step: such as the batch normalization of a Keras model, which is scales and offsets
    that are made of four variables each time.

    Args:
        graph: A DAG.
        shapes: Its shapes.
        stateful: Which nodes read or write state, or are random.
        given: Parameters of a function for which it is called with what is known before the first step.
        back: What a loop's next iteration takes from the last one, as (from, to). What a loop only counts is known before the first step,
            since it is unrolled there; what it makes of other things is not, even where it starts with a constant.
    """
    count = len(graph)
    edges = graph.edges
    data_inputs = np.bincount(edges.dst[edges.port != CONTROL], minlength=count)
    constant = graph.with_ops(CONSTANTS)
    fixed, reads = _fixed(graph)
    constant |= fixed
    constant[list(given)] = True
    varies = ((stateful & ~fixed & ~reads) | ((data_inputs == 0) & ~constant)).tolist()
    folded = shapes.folded.tolist()
    starts, targets = graph.out_start.tolist(), graph.out_dst.tolist()
    ports = edges.port[graph.out_order].tolist()
    following: dict[int, list[int]] = {}
    for source, target in back:
        following.setdefault(source, []).append(target)
    waiting = [node for node in range(count) if varies[node]]
    while waiting:
        node = waiting.pop()
        for target in following.get(node, ()):
            if not varies[target]:
                varies[target] = True
                waiting.append(target)
        for edge in range(starts[node], starts[node + 1]):
            target = targets[edge]
            if not varies[target] and ports[edge] != CONTROL and not folded[target]:
                varies[target] = True
                waiting.append(target)
    return ~np.array(varies, dtype=np.bool_)


def _fixed(graph: Graph) -> tuple[Mask, Mask]:
    """Which nodes are variables that nothing in the graph can change, and which only read such a variable.

    A variable is one by its shared name, whatever nodes stand for it. What takes it and is not known to read only may change it.
    """
    fixed, reads = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    readers: dict[tuple[str, str], list[int]] = {}
    nodes: dict[tuple[str, str], list[int]] = {}
    changed: set[tuple[str, str]] = set()
    for node, op in enumerate(graph.ops):
        if op not in VARIABLES:
            continue
        attrs = graph.attrs[node]
        key = (str(attrs.get("container", "")), str(attrs.get("shared_name", "") or graph.names[node]))
        nodes.setdefault(key, []).append(node)
        waiting = [node]
        while waiting:
            for edge in graph.out_edges(waiting.pop()).tolist():
                target = int(graph.edges.dst[edge])
                if graph.edges.port[edge] == CONTROL:
                    continue
                kind = graph.ops[target]
                if kind == "Identity":
                    if op == "VarHandleOp":  # the handle again; of a reference it is the value
                        waiting.append(target)
                elif kind in (_READS if op == "VarHandleOp" else _REF_READS):
                    readers.setdefault(key, []).append(target)
                else:
                    changed.add(key)
    for key, found in nodes.items():
        if key not in changed:
            fixed[found] = True
            reads[readers.get(key, [])] = True
    return fixed, reads


def duplicates(graph: Graph, able: Mask) -> Ints:
    """Per node the first of the nodes that have the same op, attributes and inputs: itself, if there is none before it.

    TensorFlow's optimizer and msplit's engine run one of them for all. Only nodes that read the very same tensors are found, not those
    that read duplicates of each other.

    Args:
        graph: A DAG.
        able: Which nodes may be merged: those that launch kernels and have no state.
    """
    count = len(graph)
    same = np.arange(count, dtype=np.int32)
    edges = graph.edges
    data = edges.port != CONTROL
    reads = np.bincount(edges.dst[data], minlength=count) > 0
    candidates = np.flatnonzero(able & reads)
    if len(candidates) < 2:
        return same
    numbers: dict[str, int] = {}
    ops = np.fromiter((numbers.setdefault(op, len(numbers)) for op in graph.ops), np.int64, count)
    signature = _inputs(graph, data) + mixed(ops.astype(np.uint64))
    _, group, size = np.unique(signature[candidates], return_inverse=True, return_counts=True)
    first: dict[tuple[Any, ...], int] = {}
    for node in candidates[size[group.reshape(-1)] > 1].tolist():
        attrs = sorted((name, repr(value)) for name, value in graph.attrs[node].items() if not name.startswith("_"))
        key = (graph.ops[node], tuple(graph.inputs(node)), tuple(attrs))
        same[node] = first.setdefault(key, node)
    return same


def _inputs(graph: Graph, data: Mask) -> Hashes:
    """A number per node that is the same for the same data inputs, and rarely for others."""
    edges = graph.edges
    tensor = mixed(mixed(edges.src.astype(np.uint64)) + (edges.port + 1).astype(np.uint64))
    own = np.where(data, mixed(tensor + edges.slot.astype(np.uint64)), np.uint64(0))
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(own, dtype=np.uint64)))
    result: Hashes = total[graph.in_start[1:]] - total[graph.in_start[:-1]]
    return result
