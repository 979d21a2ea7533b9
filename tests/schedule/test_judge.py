"""Bounds, predictions and words never disagree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.cost.costs import Costs
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.schedule import judge as module
from msplit.schedule.judge import MOST_STREAMS, bounds, foresee, judge, predict
from msplit.schedule.machine import Machine
from tests import graphs
from tests.campaign import examples
from tests.graphs import parse
from tests.model_shapes import lstm, mmoe
from tests.schedule.test_bounds import priced
from tests.schedule.test_problem import LOOPS

BRANCHES = "x:Placeholder; " + "; ".join(f"a{i}:MatMul(x)@30us; b{i}:Relu(a{i})@9us" for i in range(4))


def judged(text: str, **named: object):
    flat, costs = graphs.parse(text, **named)
    return judge(bounds(flat, costs), *foresee(flat, costs))


def test_branches_help() -> None:
    found = judged(BRANCHES)
    assert (found.kind, found.streams, found.helps) == ("helps", 4, True)
    assert 2 < found.gain <= found.most
    assert f"{found.gain:.2f}x predicted on 4" in found.words


def test_a_chain_is_told_plainly() -> None:
    found = judged("a:MatMul@9us; b:Relu(a)@9us; c:Conv2D(b)@9us; d:Relu(a)@1us")
    assert (found.kind, found.helps) == ("never", False)
    assert found.words.startswith("Streams can not help this model: 96 % of the work is on one path")


def test_kernels_that_fill_the_gpu_are_told_plainly() -> None:
    found = judged("a:MatMul@9us; b:MatMul@9us; c:MatMul@9us", share=0.97)
    assert found.words == "Streams can not help this model: the kernels fill 97 % of the GPU already."


def test_what_the_bound_allows_and_no_plan_reaches_is_little_and_not_impossible() -> None:
    found = judged("x:Placeholder; a:MatMul(x)@9us; b:MatMul(a)@9us; c:MatMul(x)@2us; d:AddV2(b,c)@1us", share=0.6)
    assert found.kind == "little"
    assert found.gain < 1.05 <= found.most
    assert "next to nothing" in found.words
    assert "can not" not in found.words


def test_nothing_on_the_gpu_is_told_plainly() -> None:
    found = judged("a:Const; b:StringJoin@5us host")
    assert (found.kind, found.gain, "no node launches" in found.words) == ("nothing", 1.0, True)


def test_loops_are_kept_whole() -> None:
    flat, costs = graphs.parse(LOOPS)
    found = bounds(flat, costs)
    assert (found.whole_us, found.critical_path_us, found.serial_us) == (65, 30, 72)
    assert found.max_gain == pytest.approx(72 / 65)
    assert "stay whole" in found.limit
    gain, _ = foresee(flat, costs)
    assert gain <= found.max_gain


def test_a_guess_is_called_one() -> None:
    flat, costs = graphs.parse(BRANCHES)
    assert "That is a guess: the shapes of 50 %" in judge(bounds(flat, costs), 2.0, 4, guessed=0.5).words
    assert "guess" not in judge(bounds(flat, costs), 2.0, 4, guessed=0.2).words


@pytest.mark.parametrize("graph", [mmoe(8), lstm(layers=3, steps=6)])
def test_no_prediction_is_above_the_bound(graph: tuple[FlatGraph, Costs]) -> None:
    gain, streams = foresee(*graph)
    assert 1 < gain <= bounds(*graph).gain_at_most(streams)


@settings(max_examples=examples(50, 150))
@given(priced(), st.data())
def test_no_ids_are_predicted_to_gain_more_than_the_bound(case: tuple[FlatGraph, Costs], data: st.DataObject) -> None:
    flat, costs = case
    ids = np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=len(flat), max_size=len(flat))), np.int32)
    found = predict(flat, costs, ids)
    assert found.gain <= bounds(flat, costs).gain_at_most(max(len(found.lanes), 1)) + 1e-9


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
