"""What is computed once, before the first step, and so costs a step nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, Graph
from msplit.opset.traits import CONSTANTS, VARIABLES, ops_with
from msplit.shapes.infer import Shapes

_READS, _REF_READS = ops_with("reads by handle"), ops_with("reads by reference")


def prepared(
    graph: Graph,
    shapes: Shapes,
    stateful: NDArray[np.bool_],
    given: Iterable[int] = (),
    back: Iterable[tuple[int, int]] = (),
) -> NDArray[np.bool_]:
    """Which nodes depend on constants, on variables that nothing assigns and on static shapes only.

    They are evaluated once, before the first step: such as the batch normalization of a Keras model, which is scales and offsets
    that are made of four variables each time.

    Args:
        graph: A DAG.
        shapes: Its shapes.
        stateful: Which nodes read or write state, or are random.
        given: Parameters of a function for which it is called with what is known before the first step.
        back: What a loop's next turn takes from the last one, as (from, to). What a loop only counts is known before the first step,
            since it is unrolled there; what it makes of other things is not, even where it starts with a constant.
    """
    count = len(graph)
    edges = graph.edges
    data_inputs = np.bincount(edges.dst[edges.port != CONTROL], minlength=count)
    constant = np.fromiter((op in CONSTANTS for op in graph.ops), np.bool_, count)
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


def _fixed(graph: Graph) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
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
