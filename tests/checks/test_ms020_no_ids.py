from tests.checks.harness import found, plan_of, read, report
from tests.flatten.graphdefs import function

BARE = "x:Placeholder; a:MatMul(x); b:MatMul(a)"


def test_finds_a_graph_without_ids_and_takes_it_lightly():
    result = report(BARE)
    assert [one.code for one in result.findings if one.code != "MS017"] == ["MS020"]
    assert not result.failed


def test_passes_a_graph_with_an_id_or_a_plan(tmp_path):
    assert found(BARE.replace("b:MatMul(a)", "b:MatMul(a)[_stream_id=0]"), "MS020") == []
    assert found(BARE, "MS020", plan=plan_of(BARE, [0, 0, 1])) == []
    body = function("f", "a:float32", "r:float32=m:activations:0", "m:Relu(a)[T=float32,_stream_id=1]")
    assert found(read(tmp_path, "x:Placeholder[dtype=float32]; y:f(x)", body, outputs=["y"]), "MS020") == []
