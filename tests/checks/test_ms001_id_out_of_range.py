from tests.checks.harness import found, plan_of, read, rules_of
from tests.flatten.graphdefs import function

GRAPH = "x:Placeholder; a:MatMul(x)[_stream_id=3]; b:MatMul(x)[_stream_id=4]; c:MatMul(x)[_stream_id=4]"


def test_finds_ids_that_the_rules_do_not_have():
    (one,) = found(GRAPH, "MS001", rules=rules_of("manual", streams=4))
    assert one.text == "nodes 'b' and 'c' have stream id 4, but ids are 0..3"
    assert (one.nodes, one.count) == (("b", "c"), 2)


def test_finds_negative_ids_and_huge_ones_whoever_says_nothing():
    texts = [
        one.text
        for one in found("a:MatMul[_stream_id=-1]; b:MatMul[_stream_id=1024]; c:MatMul[_stream_id=1023]", "MS001")
    ]
    assert texts == [
        "node 'a' has stream id -1, but ids are 0..1023",
        "node 'b' has stream id 1024, but ids are 0..1023",
    ]


def test_finds_ids_that_are_no_integers():
    (one,) = found("a:MatMul[_stream_id=true]; b:MatMul[_stream_id=1]", "MS001")
    assert "'a' has a `_stream_id` that is not an integer" in one.text


def test_finds_ids_in_functions_and_on_nodes_that_no_output_needs(tmp_path):
    body = function("f", "a:float32", "r:float32=m:activations:0", "m:Relu(a)[T=float32,_stream_id=7]")
    graph = """
        x:Placeholder[dtype=float32]
        y:f(x)
        z:Identity(y)[T=float32]
        unused:Relu(x)[T=float32,_stream_id=9]
    """
    texts = [one.text for one in found(read(tmp_path, graph, body, outputs=["z"]), "MS001", streams=2)]
    assert texts == [
        "node 'f/m' has stream id 7, but ids are 0..1",
        "node 'unused' has stream id 9, but ids are 0..1",
    ]


def test_passes_ids_in_range():
    assert found(GRAPH, "MS001", streams=5) == []
    assert found(GRAPH, "MS001") == []


def test_a_plan_says_how_many_streams_there_are_where_nobody_else_does():
    assert len(found(GRAPH, "MS001", plan=plan_of(GRAPH, [0, 0, 1, 1]))) == 2
