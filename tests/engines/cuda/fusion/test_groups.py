"""Groups: the same results, nothing that waits for more than it did, and no cycle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.cuda.cases import bits, flat_of, run
from tests.engines.cuda.random_graphs import random_graphs


@settings(max_examples=60, deadline=None)
@given(random_graphs(most=40), st.integers(1, 4), st.integers(0, 9))
def test_a_fused_graph_gives_the_same_bits_on_any_streams(case, streams, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    assert bits(run(flat, feeds, streams, seed=seed, fuse=True)) == bits(run(flat, feeds, streams, seed=seed))
