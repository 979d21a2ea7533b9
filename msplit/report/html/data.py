"""What the page's script works on: the graph, its tree of boxes and the simulated run, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import CONTROL, Assignment, Ints
from msplit.cost.costs import Costs
from msplit.escape import visible
from msplit.flatten.flat import FlatGraph
from msplit.report.html.tree import KINDS, contract
from msplit.report.text import dimensions
from msplit.schedule.judge import Prediction
from msplit.shapes import Shapes


@dataclass(frozen=True, eq=False)
class Leaves:
    """What the graph is drawn of: kernels in the order of their blocks, and joints.

    Attributes:
        node: Per leaf its node in the flat graph, -1 for a joint.
        stream: Its stream id, -1 for a joint.
        start_us: When it begins in the simulated step, 0 for a joint.
        time_us: How long it takes there.
        dag: Dependencies.
        first: Per block its first leaf.
        last: Per block its last leaf.
    """

    node: Ints
    stream: Ints
    start_us: np.ndarray
    time_us: np.ndarray
    dag: Dag
    first: Ints
    last: Ints

    @staticmethod
    def of(prediction: Prediction) -> Leaves:
        """Takes a prediction apart."""
        problem, simulation = prediction.problem, prediction.simulation
        kernels = np.diff(prediction.start)
        size = np.maximum(kernels, 1)
        end = np.cumsum(size)
        first = (end - size).astype(np.int32)
        block = np.repeat(np.arange(len(problem)), size)
        node = np.full(int(end[-1]) if len(end) else 0, -1, np.int32)
        node[kernels[block] > 0] = prediction.node
        work = np.where(node >= 0, prediction.kernel_us[node], 0.0)
        before = np.cumsum(work) - work
        # While a block shares the GPU, all its kernels take longer by one factor.
        whole = np.maximum(problem.time_us, 1e-12)
        factor = np.where(kernels > 0, (simulation.end_us - simulation.start_us) / whole, 0.0)
        begin = np.where(kernels > 0, simulation.start_us, 0.0)
        inner = before - before[first][block] if len(node) else before
        lane = prediction.plan.stream
        named = np.where(lane >= 0, np.append(prediction.lanes, -1)[lane], -1)
        last = (end - 1).astype(np.int32)
        inside = np.flatnonzero(block[1:] == block[:-1]) if len(block) else np.empty(0, np.int64)
        src = np.concatenate([inside, last[problem.dag.src]])
        dst = np.concatenate([inside + 1, first[problem.dag.dst()]])
        return Leaves(
            node=node,
            stream=named[block].astype(np.int32),
            start_us=begin[block] + inner * factor[block],
            time_us=work * factor[block],
            dag=Dag.of(len(node), src, dst),
            first=first,
            last=last,
        )


def home(flat: FlatGraph, leaves: Leaves) -> Ints:
    """Per node the leaf that it belongs to: its own, else that of its first consumer, else of its last producer; -1 for none."""
    graph = flat.graph
    found = np.full(len(flat), -1, np.int32)
    kernels = np.flatnonzero(leaves.node >= 0)
    found[leaves.node[kernels]] = kernels
    order = graph.topological
    result = found.tolist()
    for nodes, starts, others in (
        (order[::-1], graph.out_start.tolist(), graph.out_dst.tolist()),
        (order, graph.in_start.tolist(), graph.edges.src.tolist()),
    ):
        for node in nodes.tolist():
            if result[node] < 0:
                result[node] = next((result[o] for o in others[starts[node] : starts[node + 1]] if result[o] >= 0), -1)
    return np.asarray(result, np.int32)


def columns(
    flat: FlatGraph,
    costs: Costs,
    prediction: Prediction,
    assignment: Assignment | None,
    shapes: Shapes | None = None,
    critical: Ints | None = None,
) -> dict[str, Any]:
    """The graph for the page. Numbers are rounded to what it shows."""
    leaves = Leaves.of(prediction)
    tree = contract(leaves.dag, leaves.stream)
    graph = flat.graph
    ops: dict[str, int] = {}
    edges = graph.edges
    return {
        "nodes": {
            "name": list(map(visible, graph.names)),
            "op": [ops.setdefault(op, len(ops)) for op in graph.ops],
            "ops": list(map(visible, ops)),
            "stream": prediction.ids.tolist(),
            "time": rounded(prediction.kernel_us),
            "flops": _whole(costs.flops),
            "bytes": _whole(costs.bytes),
            "share": rounded(costs.share),
            "known": costs.known.astype(int).tolist(),
            "host": flat.host.astype(int).tolist(),
            "reason": assignment.reason.tolist() if assignment is not None else [],
            "home": home(flat, leaves).tolist(),
            **_results(flat, shapes),
        },
        "critical": [] if critical is None else critical[prediction.kernel_us[critical] > 0].tolist(),
        "reasons": [list(map(visible, reason)) for reason in assignment.reasons] if assignment is not None else [],
        "edges": {
            "src": edges.src.tolist(),
            "dst": edges.dst.tolist(),
            "control": np.flatnonzero(edges.port == CONTROL).tolist(),
        },
        "leaves": {
            "node": leaves.node.tolist(),
            "stream": leaves.stream.tolist(),
            "start": rounded(leaves.start_us),
            "time": rounded(leaves.time_us),
        },
        "links": {"src": leaves.dag.src.tolist(), "dst": leaves.dag.dst().tolist()},
        "waits": {
            "on": leaves.last[prediction.plan.wait_on].tolist(),
            "by": leaves.first[prediction.plan.wait_node].tolist(),
        },
        "tree": {"parent": tree.parent.tolist(), "kind": tree.kind.tolist(), "kinds": list(KINDS)},
        "makespan": round(prediction.makespan_us, 3),
        "lanes": prediction.lanes.tolist(),
    }


_MOST_RESULTS = 8
"""Outputs of a node whose types and shapes the page tells."""


def _results(flat: FlatGraph, shapes: Shapes | None) -> dict[str, Any]:
    """Types and shapes of what each node gives, as numbers in a list of all that there are."""
    if shapes is None:
        return {"result": [], "results": []}
    texts: dict[str, int] = {}
    numbers = []
    for node in range(len(flat)):
        outputs = shapes.outputs[node]
        lines = [
            f"{shapes.dtype(node, port)} {dimensions(shape)}".strip()
            for port, shape in enumerate(outputs[:_MOST_RESULTS])
        ]
        if len(outputs) > _MOST_RESULTS:
            lines.append(f"and {len(outputs) - _MOST_RESULTS} more")
        numbers.append(texts.setdefault("; ".join(lines), len(texts)))
    return {"result": numbers, "results": list(map(visible, texts))}


def rounded(values: np.ndarray) -> Sequence[float]:
    """To what the page shows; whole numbers as integers, which take less room."""
    return [int(value) if value.is_integer() else value for value in np.round(values, 3).tolist()]


def _whole(values: np.ndarray) -> Sequence[int]:
    return [int(value) for value in np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).tolist()]
