from __future__ import annotations

import json

import numpy as np
import pytest

from msplit.report.html.data import Leaves, columns, home
from msplit.schedule.judge import Prediction, predict
from tests.graphs import parse

FORK = "x:Placeholder; w:Const; a:MatMul(x,w)@10us; b:MatMul(a)@20us; c:MatMul(a)@18us; c2:Relu(c)@4us; d:AddV2(b,c2)@6us; y:Identity(d)"
LANES = np.asarray([0, 0, 0, 0, 3, 3, 0, 0], np.int32)


def predicted(text: str, lanes: np.ndarray) -> tuple:
    flat, costs = parse(text)
    return flat, costs, predict(flat, costs, lanes)


def leaf_names(flat, leaves: Leaves) -> list[str]:
    return [flat.graph.names[node] for node in leaves.node.tolist()]


def test_leaves_are_the_kernels_with_their_streams_and_dependencies():
    flat, _, prediction = predicted(FORK, LANES)
    leaves = Leaves.of(prediction)
    names = leaf_names(flat, leaves)
    assert sorted(names) == ["a", "b", "c", "c2", "d"]
    assert dict(zip(names, leaves.stream.tolist(), strict=True)) == {"a": 0, "b": 0, "c": 3, "c2": 3, "d": 0}
    links = {(names[s], names[d]) for s, d in zip(leaves.dag.src.tolist(), leaves.dag.dst().tolist(), strict=True)}
    assert links == {("a", "b"), ("a", "c"), ("c", "c2"), ("b", "d"), ("c2", "d")}


def test_leaves_fill_the_time_of_their_blocks():
    _, _, prediction = predicted(FORK, LANES)
    leaves = Leaves.of(prediction)
    for block in range(len(prediction.problem)):
        first, last = int(leaves.first[block]), int(leaves.last[block])
        assert leaves.start_us[first] == pytest.approx(prediction.simulation.start_us[block])
        assert leaves.start_us[last] + leaves.time_us[last] == pytest.approx(prediction.simulation.end_us[block])
    assert (np.diff(leaves.first) > 0).all()


def test_nodes_without_a_kernel_live_with_their_consumer_or_else_their_producer():
    flat, _, prediction = predicted(FORK, LANES)
    leaves = Leaves.of(prediction)
    names = leaf_names(flat, leaves)
    at = dict(zip(flat.graph.names, [names[leaf] for leaf in home(flat, leaves).tolist()], strict=True))
    assert at == {"x": "a", "w": "a", "a": "a", "b": "b", "c": "c", "c2": "c2", "d": "d", "y": "d"}


def test_a_graph_without_kernels_has_no_leaves_and_no_homes():
    flat, costs, prediction = predicted("x:Placeholder; y:Identity(x)", np.zeros(2, np.int32))
    assert len(Leaves.of(prediction).node) == 0
    assert columns(flat, costs, prediction, None)["nodes"]["home"] == [-1, -1]


def test_joints_are_leaves_without_a_node():
    sources = "; ".join(f"s{i}:MatMul@5us" for i in range(20))
    sinks = "; ".join(f"t{i}:MatMul(^j)@5us" for i in range(20))
    text = f"{sources}; j:NoOp({','.join(f'^s{i}' for i in range(20))}); {sinks}"
    flat, costs, prediction = predicted(text, np.asarray([i % 2 for i in range(41)], np.int32))
    leaves = Leaves.of(prediction)
    assert (leaves.node < 0).sum() == 1
    assert len(leaves.dag.src) == 40
    assert isinstance(prediction, Prediction)
    json.dumps(columns(flat, costs, prediction, None), allow_nan=False)
