from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.report.html.data import KINDS, MOST_CHILDREN, Tree, contract
from tests.campaign import CAMPAIGN, examples


def dag_of(count: int, edges: list[tuple[int, int]]) -> Dag:
    unique = sorted(set(edges), key=lambda edge: (edge[1], edge[0]))
    return Dag.of(count, [src for src, _ in unique], [dst for _, dst in unique])


def children(tree: Tree) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for element, box in enumerate(tree.parent.tolist()):
        found.setdefault(box, []).append(element)
    return found


def contents(tree: Tree, element: int) -> list[int]:
    """The leaves in a box, without recursion."""
    below, leaves, waiting = children(tree), [], [element]
    while waiting:
        found = waiting.pop()
        if found < tree.leaves:
            leaves.append(found)
        else:
            waiting += below[found]
    return sorted(leaves)


def check(tree: Tree, shown: int) -> None:
    below = children(tree)
    assert contents_of_all(tree) == list(range(tree.leaves))
    assert len(below.get(-1, [])) <= shown
    for box in range(tree.leaves, len(tree.parent)):
        assert 2 <= len(below[box]) <= MOST_CHILDREN
    assert len(tree.kind) == len(tree.parent) - tree.leaves


def contents_of_all(tree: Tree) -> list[int]:
    return sorted(leaf for top in children(tree).get(-1, []) for leaf in contents(tree, top))


def kinds(tree: Tree) -> list[str]:
    return [KINDS[kind] for kind in tree.kind.tolist()]


def test_chains_of_one_stream_are_boxes_and_streams_end_them():
    tree = contract(dag_of(5, [(0, 1), (1, 2), (2, 3), (3, 4)]), np.asarray([0, 0, 1, 1, 0]))
    assert [contents(tree, top) for top in children(tree)[-1]] == [[4], [0, 1], [2, 3]]
    assert kinds(tree) == ["chain", "chain"]


def test_columns_that_are_alike_become_one_box_per_stream():
    columns = 400
    edges = [(i, columns) for i in range(columns)]
    tree = contract(dag_of(columns + 1, edges), np.asarray([i % 4 for i in range(columns)] + [0]))
    check(tree, 300)
    assert len(children(tree)[-1]) == 5


def test_a_lattice_is_cut_into_parts_of_one_stream():
    layers, steps = 10, 200
    at = lambda layer, step: step * layers + layer  # noqa: E731
    edges = [(at(i, t), at(i, t + 1)) for i in range(layers) for t in range(steps - 1)]
    edges += [(at(i, t), at(i + 1, t)) for i in range(layers - 1) for t in range(steps)]
    stream = np.asarray([i for _ in range(steps) for i in range(layers)])
    tree = contract(dag_of(layers * steps, edges), stream)
    check(tree, 300)
    for top in children(tree)[-1]:
        assert len(set(stream[contents(tree, top)])) == 1


def test_a_chain_of_a_hundred_thousand_opens_in_steps():
    count = 100_000
    tree = contract(dag_of(count, [(i, i + 1) for i in range(count - 1)]), np.zeros(count, int))
    check(tree, 300)
    assert len(children(tree)[-1]) == 1


def test_very_many_independent_nodes_on_many_streams_open_in_steps():
    count = 100_000 if CAMPAIGN else 15_000
    tree = contract(dag_of(count, []), np.arange(count) % 1000)
    check(tree, 300)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_and_one_node_are_shown_as_they_are(count: int):
    tree = contract(dag_of(count, []), np.zeros(count, int))
    assert tree.parent.tolist() == [-1] * count


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]], list[int]]:
    count = draw(st.integers(1, 60))
    ends = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda edge: edge[0] < edge[1])
    edges = draw(st.lists(ends, max_size=120)) if count > 1 else []
    return count, edges, draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count))


@given(dags(), st.integers(2, 20))
@settings(max_examples=examples(60, 200), deadline=None)
def test_every_leaf_is_in_the_tree_once_and_no_view_is_too_large(
    graph: tuple[int, list[tuple[int, int]], list[int]], shown: int
):
    count, edges, streams = graph
    tree = contract(dag_of(count, edges), np.asarray(streams), shown)
    check(tree, shown)
    for box in range(count, len(tree.parent)):
        if kinds(tree)[box - count] != "piece":
            assert len({streams[leaf] for leaf in contents(tree, box)}) == 1
