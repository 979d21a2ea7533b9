from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from msplit.errors import MsplitError
from msplit.schedule import predict as module
from msplit.schedule.machine import Machine
from msplit.schedule.predict import MOST_STREAMS, predict
from tests.graphs import parse

FORK = "x:Placeholder; a:MatMul(x)@10us; b:MatMul(a)@20us; c:MatMul(a)@18us; c2:Relu(c)@4us; d:AddV2(b,c2)@6us"


def ids(*lanes: int) -> np.ndarray:
    return np.asarray(lanes, np.int32)


def test_ids_with_gaps_mean_the_same_as_ids_without():
    flat, costs = parse(FORK)
    dense, sparse = (predict(flat, costs, ids(0, 0, 0, lane, lane, 0)) for lane in (1, 2_000_000_000))
    assert dense.makespan_us == sparse.makespan_us
    assert sparse.lanes.tolist() == [0, 2_000_000_000]
    assert sparse.load_us() == {0: 36.0, 2_000_000_000: 22.0}
    assert dense.one_us == pytest.approx(58.0 + Machine().step_us)
    assert dense.gain == dense.one_us / dense.makespan_us > 1.1


def test_blocks_list_their_kernels_in_running_order():
    flat, costs = parse(FORK)
    found = predict(flat, costs, ids(0, 0, 0, 1, 1, 0))
    blocks = [
        [flat.graph.names[node] for node in found.node[found.start[b] : found.start[b + 1]]]
        for b in range(len(found.problem))
    ]
    assert sorted(blocks) == [["a"], ["b"], ["c", "c2"], ["d"]]
    assert [found.stream_of(b) for b in range(len(blocks)) if blocks[b] == ["c", "c2"]] == [1]


def test_on_one_stream_the_gain_is_one():
    flat, costs = parse(FORK)
    assert predict(flat, costs, ids(*[7] * 6)).gain == 1.0


def test_a_graph_without_kernels_takes_no_time():
    flat, costs = parse("x:Placeholder; y:Identity(x)")
    found = predict(flat, costs, ids(0, 5))
    assert (found.makespan_us, found.gain, found.load_us()) == (0.0, 1.0, {})


def test_more_ids_than_can_be_simulated_are_an_error():
    flat, costs = parse(";".join(f"n{i}:Relu@1us" for i in range(MOST_STREAMS + 1)))
    with pytest.raises(MsplitError, match="different stream ids"):
        predict(flat, costs, np.arange(MOST_STREAMS + 1, dtype=np.int32))


def test_equal_ids_are_simulated_once(monkeypatch):
    """A report shows a model's ids, and the checks that it runs ask again: a third of its time on large graphs."""
    played = []
    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *asked: played.append(asked) or evaluate(*asked))
    flat, costs = parse(FORK)
    first = predict(flat, costs, ids(0, 0, 0, 1, 1, 0))
    assert len(played) == 2  # with one stream to compare with
    again = predict(flat, costs, ids(0, 0, 0, 7, 7, 0))  # the same, by other numbers
    assert len(played) == 2
    assert (again.makespan_us, again.one_us, again.lanes.tolist()) == (first.makespan_us, first.one_us, [0, 7])
    assert predict(flat, costs, ids(0, 0, 1, 0, 0, 0)).ids.tolist() == [0, 0, 1, 0, 0, 0]
    assert len(played) == 4
    dearer = replace(costs, time_us=costs.time_us * 2)
    assert predict(flat, dearer, ids(0, 0, 0, 1, 1, 0)).makespan_us > first.makespan_us
