import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.run.tensorflow_rows import fold_ids


@given(
    st.lists(st.tuples(st.integers(0, 12), st.floats(0, 100)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_folding_keeps_together_what_was_together_and_packs_within_the_known_bound(nodes, streams):
    ids = np.array([i for i, _ in nodes], np.int32)
    cost = np.array([c for _, c in nodes])
    folded = fold_ids(ids, cost, streams)
    assert folded.streams <= streams
    assert int(folded.ids.max()) < folded.streams
    for old in np.unique(ids):
        assert len(np.unique(folded.ids[ids == old])) == 1
    if 0 in ids:
        assert (folded.ids[ids == 0] == 0).all()
    loads = np.bincount(folded.ids, weights=cost, minlength=streams)
    each = np.bincount(ids, weights=cost)
    best = max(each.max(), cost.sum() / streams)
    if folded.note:
        assert loads.max() <= (4 / 3) * max(best, _two_must_share(each, streams)) + 1e-6


def _two_must_share(each, streams):
    """With more ids than streams, the loads of rank `streams` and next share a stream at best."""
    order = np.sort(each[each > 0])[::-1]
    return order[streams - 1] + order[streams] if len(order) > streams else 0.0


def test_few_enough_ids_stay():
    ids = np.array([0, 1, 1, 2], np.int32)
    folded = fold_ids(ids, np.ones(4), 3)
    assert folded.ids is ids
    assert (folded.streams, folded.note) == (3, "")


def test_the_longest_goes_first():
    ids = np.array([0, 1, 2, 3], np.int32)
    folded = fold_ids(ids, np.array([5.0, 1.0, 2.0, 3.0]), 2)
    assert folded.ids.tolist() == [0, 0, 1, 1]
    assert folded.note == "the graph uses 4 stream ids up to 3; they are folded onto 2 by load"


def test_gaps_in_the_ids_are_closed():
    folded = fold_ids(np.array([0, 7, 7], np.int32), np.ones(3), 4)
    assert sorted(set(folded.ids.tolist())) == [0, 1]
    assert folded.streams == 2


def test_nodes_without_cost_still_spread():
    folded = fold_ids(np.arange(8, dtype=np.int32), np.zeros(8), 4)
    assert np.bincount(folded.ids).tolist() == [2, 2, 2, 2]


def test_no_stream_is_an_error():
    with pytest.raises(ValueError, match="at least 1"):
        fold_ids(np.zeros(1, np.int32), np.zeros(1), 0)
