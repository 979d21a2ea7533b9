"""The critical path against brute force and against what scaling must do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.analysis.branches import critical_path, finish_times
from msplit.core.dag import longest
from msplit.core.graph import Edges, Graph
from tests.campaign import examples
from tests.strategies import graphs


@st.composite
def weighted(draw: st.DrawFn) -> tuple[Graph, np.ndarray]:
    graph = draw(graphs(max_nodes=9))
    weights = draw(st.lists(st.integers(0, 9), min_size=len(graph), max_size=len(graph)))
    return graph, np.array(weights, dtype=np.float64)


def _all_paths(graph: Graph) -> list[list[int]]:
    """Every path, by extending paths one edge at a time."""
    found = [[node] for node in range(len(graph))]
    longer = found
    while longer:
        longer = [[*path, int(following)] for path in longer for following in set(graph.successors(path[-1]).tolist())]
        found = found + longer
    return found


@given(weighted())
def test_no_path_is_heavier_and_the_path_given_is_one(case: tuple[Graph, np.ndarray]) -> None:
    graph, weights = case
    length, path = critical_path(graph, weights)
    assert length == max(weights[one].sum() for one in _all_paths(graph))
    assert weights[path].sum() == length
    for before, after in pairwise(path.tolist()):
        assert after in graph.successors(before)


@given(weighted(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_scaling_all_weights_scales_the_length(case: tuple[Graph, np.ndarray], factor: float) -> None:
    graph, weights = case
    length, path = critical_path(graph, weights)
    scaled, same = critical_path(graph, weights * factor)
    assert scaled == length * factor
    assert same.tolist() == path.tolist()


@given(weighted())
def test_heads_and_tails_meet_on_the_critical_path_and_nowhere_exceed_it(case: tuple[Graph, np.ndarray]) -> None:
    graph, weights = case
    tails = longest(weights, graph.topological[::-1], graph.in_start, graph.edges.src)
    through = finish_times(graph, weights) + tails - weights
    length, path = critical_path(graph, weights)
    assert through.max() == length
    assert (through[path] == length).all()


def test_empty_graph_has_an_empty_path() -> None:
    graph = Graph([], [], [], [], Edges.of([], [], [], []))
    length, path = critical_path(graph, np.zeros(0))
    assert length == 0.0
    assert len(path) == 0


def test_a_cycle_and_a_negative_weight_are_errors() -> None:
    cycle = Graph(["a", "b"], ["Op"] * 2, [""] * 2, [{}] * 2, Edges.of([0, 1], [0, 0], [1, 0], [0, 0]))
    with pytest.raises(ValueError, match="cycle"):
        critical_path(cycle, np.ones(2))
    chain = Graph(["a", "b"], ["Op"] * 2, [""] * 2, [{}] * 2, Edges.of([0], [0], [1], [0]))
    with pytest.raises(ValueError, match="negative"):
        critical_path(chain, np.array([1.0, -1.0]))


def test_long_chain_is_one_path() -> None:
    count = examples(40_000, 200_000)
    nodes = np.arange(count)
    edges = Edges.of(nodes[:-1], np.zeros(count - 1), nodes[1:], np.zeros(count - 1))
    graph = Graph([f"n{n}" for n in nodes], ["Op"] * count, [""] * count, [{}] * count, edges)
    length, path = critical_path(graph, np.ones(count))
    assert length == count
    assert path.tolist() == nodes.tolist()
