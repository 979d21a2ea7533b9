from tests.checks.harness import found, plan_of
from tests.model_shapes import mmoe


def test_finds_a_chain_on_two_streams():
    (one,) = found("x:Placeholder; a:MatMul(x)@20us; b:MatMul(a)@20us[_stream_id=1]", "MS015")
    assert "0.98x (46 µs to 46 µs), below 1.05x" in one.text


def test_finds_a_gain_below_the_projects_threshold():
    graph = "x:Placeholder; a:MatMul(x)@20us; b:MatMul(x)@20us[_stream_id=1]"
    assert found(graph, "MS015") == []
    assert len(found(graph, "MS015", min_gain=2.5)) == 1


def test_passes_experts_on_four_streams_also_where_only_a_plan_says_so():
    flat, costs = mmoe(8)
    ids = [int(name[1]) % 4 if name[0] == "e" and name[1].isdigit() else 0 for name in flat.graph.names]
    assert found((flat, costs), "MS015", plan=plan_of((flat, costs), ids)) == []
