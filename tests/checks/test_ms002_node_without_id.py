from tests.checks.harness import found, rules_of, skipped

GRAPH = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:MatMul(x); c:MatMul(b); s:StringJoin(x) host"
RULES = rules_of('regex: {patterns: {1: "a", 2: ["b", "c", "s"]}}')


def test_finds_nodes_that_the_rules_put_on_a_stream():
    (one,) = found(GRAPH, "MS002", rules=RULES)
    assert one.text == "nodes 'b' and 'c' have no stream id, but the rules say stream 2"
    assert one.nodes == ("b", "c")


def test_passes_where_all_have_one_and_where_the_rules_say_0():
    assert (
        found(
            GRAPH.replace("b:MatMul(x)", "b:MatMul(x)[_stream_id=2]"),
            "MS002",
            rules=rules_of('regex: {patterns: {1: "a", 2: "b"}}'),
        )
        == []
    )
    assert found(GRAPH, "MS002", rules=rules_of('regex: {patterns: {0: ["b", "c"]}}')) == []


def test_says_nothing_without_rules():
    assert skipped(GRAPH, "MS002") == "no rules were given"
