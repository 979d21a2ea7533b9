import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.checks.ms011_unordered_plan import loose_ends
from msplit.core.dag import Dag
from msplit.schedule import planfile
from msplit.schedule.plan import make_plan, record_order
from tests.campaign import examples
from tests.checks.harness import dumps, found, plan_of, skipped
from tests.graphs import build, parse

GRAPH = "x:Placeholder; a:MatMul(x)@9us; b:MatMul(x)@8us; c:MatMul(b)@7us; d:MatMul(x)@3us; j:AddV2(a,c)@2us"
IDS = [0, 0, 1, 1, 2, 0]


def changed(**changes):
    data = json.loads(dumps(*parse(GRAPH), IDS))
    return planfile.parse(
        json.dumps({key: changes[key](value) if key in changes else value for key, value in data.items()}), "plan.json"
    )


def texts(plan):
    return [one.text for one in found(GRAPH, "MS011", plan=plan)]


def test_finds_an_edge_without_a_wait():
    (one,) = found(GRAPH, "MS011", plan=changed(waits=lambda waits: []))
    assert one.text == "'j' may start before its input on stream 1 has ended: 'c'"
    assert (one.nodes, one.file) == (("c", "j"), "plan.json")


def test_finds_streams_that_are_not_the_ids_of_the_model():
    text = (
        "x:Placeholder; a:MatMul(x)@9us[_stream_id=0]; b:MatMul(x)@8us[_stream_id=1]; c:MatMul(b)@7us[_stream_id=1]; "
        "d:MatMul(x)@3us[_stream_id=0]; j:AddV2(a,c)@2us[_stream_id=0]"
    )
    (one,) = found(text, "MS011", plan=plan_of(GRAPH, IDS))
    assert one.text == "node 'd' is on another stream than its id says: 'd' is on stream 2, and its id is 0"
    assert one.file == "plan.json"
    assert found(text.replace("@3us[_stream_id=0]", "@3us[_stream_id=2]"), "MS011", plan=plan_of(GRAPH, IDS)) == []
    assert found(text.replace("@3us[_stream_id=0]", "@3us"), "MS011", plan=plan_of(GRAPH, IDS)) == []  # MS002 says so


def test_finds_an_order_against_the_edges():
    assert any("'c' may start" in text for text in texts(changed(order=lambda order: order[::-1])))


def test_finds_waits_in_a_circle():
    (one,) = texts(changed(waits=lambda waits: [*waits, ["b", "j"]]))
    assert one.endswith("streams wait for each other in a circle: the plan can never end")


def test_finds_nodes_that_the_plan_leaves_out_and_nodes_that_the_graph_lacks():
    left_out = texts(changed(order=lambda order: [entry for entry in order if entry[0] != "d"]))
    assert "node 'd' launches a kernel and is not in the plan" in left_out
    assert "the plan names node 'ghost', which is not in the graph" in texts(
        changed(order=lambda order: [*order, ["ghost", 1]])
    )


def test_finds_streams_outside_of_fork_and_join():
    assert texts(changed(fork=lambda fork: [name for name in fork if name != "b"])) == [
        "the first node of stream 1 waits for nothing, not even the start of the step: it is not in `fork`"
    ]
    assert texts(changed(join=lambda join: [])) == [
        "the end of the step does not wait for stream 2: its last node is not in `join`"
    ]


def test_passes_a_plan_as_it_was_made():
    assert found(GRAPH, "MS011", plan=plan_of(GRAPH, IDS)) == []
    assert found(GRAPH, "MS011", plan=plan_of(GRAPH, [0] * 6)) == []
    assert found(GRAPH, "MS011", plan=plan_of(GRAPH, [1] * 6)) == []


def test_says_nothing_without_a_plan():
    assert skipped(GRAPH, "MS011") == "no plan was given"


@settings(max_examples=examples(60, 200))
@given(st.data())
def test_plans_of_any_graph_have_no_loose_ends_until_fork_or_join_lose_a_node(data):
    count = data.draw(st.integers(1, 15))
    pairs = data.draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=30))
    edges = [(a, -1, b, -1) for a, b in sorted(pairs) if a < b]
    flat, costs = build([f"n{i}" for i in range(count)], ["Relu"] * count, edges, [1.0] * count)
    lanes = np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.int32)
    dag = Dag.from_graph(flat.graph)
    plan = make_plan(dag, lanes, record_order(dag, costs.time_us))
    assert list(loose_ends(plan)) == []
    import dataclasses

    for key, end in (("fork", "start"), ("join", "end")):
        ends = getattr(plan, key)
        for place in range(len(ends)):
            torn = dataclasses.replace(plan, **{key: np.delete(ends, place)})
            assert end in [what for _, what in loose_ends(torn)]


def test_finds_a_wait_that_is_recorded_before_its_event():
    moved = changed(
        order=lambda order: [
            ["j", 0] if name == "c" else ["c", 1] if name == "j" else [name, lane] for name, lane in order
        ]
    )
    assert texts(moved) == [
        "'j' waits for an event that is recorded after it, and so for nothing: 'c'",
        "'j' may start before its input on stream 1 has ended: 'c'",
    ]


def with_kernels(kernels):
    data = json.loads(dumps(*parse(GRAPH), IDS))
    return planfile.parse(json.dumps({**data, "kernels": kernels}), "plan.json")


def test_finds_kernels_on_another_stream_than_their_node_and_kernels_of_nodes_that_are_not_there():
    right = [[name, 0, stream] for name, stream in zip("abcdj", IDS[1:], strict=True)]
    assert texts(with_kernels(right)) == []
    assert texts(with_kernels([["a", 0, 2], *right[1:]])) == [
        "node 'a' is on another stream in `kernels` than in `order`"
    ]
    assert texts(with_kernels([*right, ["ghost", 0, 0]])) == ["the plan names node 'ghost', which is not in the graph"]
