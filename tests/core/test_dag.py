""""""

import networkx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit.core.dag import DisjointSets, mixed


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_sets_are_what_the_pairs_connect_and_their_smallest_leads(pairs):
    sets = DisjointSets(31)
    graph = networkx.empty_graph(31)
    for one, other in pairs:
        sets.join(one, other)
        graph.add_edge(one, other)
    for members in networkx.connected_components(graph):
        assert {sets.find(number) for number in members} == {min(members)}


def test_a_chain_of_a_hundred_thousand_is_no_problem():
    sets = DisjointSets(100_000)
    for number in reversed(range(1, 100_000)):
        sets.join(number - 1, number)
    assert sets.find(99_999) == 0


def test_hashes_are_those_of_splitmix64() -> None:
    """What its authors' generator gives for the seed 0: each state is the one before and 0x9E3779B97F4A7C15."""
    step = 0x9E3779B97F4A7C15
    states = np.asarray([0, step, 2 * step % 2**64], np.uint64)
    assert mixed(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
