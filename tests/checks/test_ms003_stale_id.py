import dataclasses

import pytest

from tests.checks.harness import found, plan_of, read, rules_of, skipped
from tests.flatten.graphdefs import function

GRAPH = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:MatMul(a)[_stream_id=2]; s:StringJoin(x)[_stream_id=2] host"
RULES = rules_of("manual", 'regex: {patterns: {1: "a|b|s"}}')


def test_finds_ids_that_the_rules_would_not_give_now():
    (one,) = found(GRAPH, "MS003", rules=RULES)
    assert one.text.startswith("node 'b' is on stream 2, but the rules say stream 1 (regex: name matches 'a|b|s'")
    assert one.nodes == ("b",)


def test_finds_ids_that_no_rule_gives():
    (one,) = found(GRAPH, "MS003", rules=rules_of('regex: {patterns: {1: "a"}}'))
    assert "'b' is on stream 2, but the rules say stream 0 (default: no rule claims it)" in one.text


def test_passes_what_the_rules_give_and_what_is_set_by_hand():
    assert found(GRAPH, "MS003", rules=rules_of('regex: {patterns: {1: "a", 2: "b"}}')) == []
    assert found(GRAPH, "MS003", rules=RULES, hand_set=("b",)) == []
    assert len(found(GRAPH, "MS003", rules=RULES, hand_set=("a",))) == 1


def test_one_id_per_node_of_a_function_whatever_its_callers_want(tmp_path):
    body = function("f", "a:float32", "r:float32=m:activations:0", "m:Relu(a)[T=float32,_stream_id=1]")
    graph = "x:Placeholder[dtype=float32]; p:f(x); q:f(x); r:f(x); z:AddN(p,q,r)[T=float32,N=3,_stream_id=0]"
    model = read(tmp_path, graph, body, outputs=["z"])
    assert [name for name in model[0].graph.names if name.endswith("/m")] == ["p/m", "q/m", "r/m"]
    assert found(model, "MS003", rules=rules_of('regex: {patterns: {1: "[pq]/m", 2: "r/m"}}')) == []
    (one,) = found(model, "MS003", rules=rules_of('regex: {patterns: {1: "p/m", 2: "[qr]/m"}}'))
    assert (one.count, one.nodes) == (3, ("p/m", "q/m", "r/m"))


def test_finds_rules_that_can_not_be_applied():
    graph = "x:Placeholder; a:MatMul(x)[_stream_id=1,_class=loc:@g]; b:MatMul(x)[_stream_id=2,_class=loc:@g]"
    (one,) = found(graph, "MS003", rules=rules_of("manual", "colocation"), hand_set=("a|b",))
    assert one.text.startswith("the rules can not be applied to this graph: nodes 'a' (stream 1) and 'b' (stream 2)")
    for code in ("MS002", "MS004", "MS005"):
        assert "MS003" in skipped(graph, code, rules=rules_of("manual", "colocation"), hand_set=("a|b",))


OLD = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:Relu(a)[_stream_id=1]; c:Relu(b)[_stream_id=2]"


@pytest.mark.parametrize(
    ("new", "texts", "nodes"),
    [
        (OLD, [], []),
        (OLD.replace("b:Relu", "b:Tanh"), ["'b' changed since test.pb (op or inputs) and kept the stream id"], ["b"]),
        (OLD.replace("c:Relu(b)", "c:Relu(a)"), ["'c' changed since"], ["c"]),
        (OLD.replace("c:Relu(b)", "c:Relu(b,^x)"), ["'c' changed since"], ["c"]),
        (OLD.replace("c:Relu(b)[_stream_id=2]", "c:Relu(a)[_stream_id=3]"), [], []),
        (
            OLD.replace("c:Relu(b)[_stream_id=2]", "c:Relu(b)"),
            ["'c' had a stream id in test.pb and has none now"],
            ["c"],
        ),
        (OLD + "; d:Relu(c)", ["'d' came since test.pb, beside nodes with stream ids, and got none"], ["d"]),
        (OLD + "; d:Relu(x)", [], []),
        (OLD + "; d:Relu(c)[_stream_id=2]", [], []),
        (OLD.replace("; c:Relu(b)[_stream_id=2]", ""), ["'c' had a stream id in test.pb and is gone"], ["c"]),
    ],
)
def test_against_the_model_that_the_ids_were_made_for(new, texts, nodes):
    findings = found(new, "MS003", against=OLD)
    assert [text in one.text for text, one in zip(texts, findings, strict=True)] == [True] * len(texts)
    assert [name for one in findings for name in one.nodes] == nodes


def test_passes_against_a_model_without_ids():
    assert found(OLD, "MS003", against="x:Placeholder; a:Tanh(x)") == []


def test_finds_a_plan_for_another_graph(tmp_path):
    graph = "x:Placeholder[dtype=float32]; a:Relu(x)[T=float32]; b:Tanh(a)[T=float32]"
    model = read(tmp_path, graph)
    plan = plan_of(model, [0, 1, 1])
    assert found(model, "MS003", plan=plan) == []
    (tmp_path / "other").mkdir()
    other = read(tmp_path / "other", graph.replace("Tanh", "Sigmoid"))
    (one,) = found(other, "MS003", plan=plan)
    assert (one.text, one.file) == ("the plan was made for another graph: its graph hash differs", "plan.json")


def test_finds_nodes_on_other_streams_than_the_plan_says():
    graph = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:MatMul(a)[_stream_id=2]"
    assert found(graph, "MS003", plan=plan_of(graph, [0, 1, 2])) == []
    (one,) = found(graph, "MS003", plan=plan_of(graph, [0, 1, 0]))
    assert one.text == "node 'b' is on another stream in the plan (0) than on the graph (2)"


def test_says_what_it_needs():
    assert skipped(GRAPH, "MS003") == "it needs --rules, --plan or --against"


def test_rules_of_a_graph_that_is_only_priced_differently_still_agree():
    # The ids came from patterns: costs have no say in them.
    from tests.graphs import parse

    flat, costs = parse(GRAPH)
    slower = dataclasses.replace(costs, time_us=costs.time_us * 3)
    assert found((flat, slower), "MS003", rules=rules_of('regex: {patterns: {1: "a", 2: "b"}}')) == []


def test_finds_kernels_of_a_plan_on_other_streams_than_the_graph_says():
    graph = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:MatMul(a)[_stream_id=2]"
    plan = dataclasses.replace(plan_of(graph, [0, 1, 2]), kernels=(("a", 0, 1), ("b", 0, 2), ("b", 1, 2)))
    assert found(graph, "MS003", plan=plan) == []
    (one,) = found(graph, "MS003", plan=dataclasses.replace(plan, kernels=(("a", 0, 1), ("b", 0, 2), ("b", 1, 0))))
    assert one.text == "node 'b' is on another stream in the plan (0) than on the graph (2)"
