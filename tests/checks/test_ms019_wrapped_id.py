from tests.checks.harness import found, rules_of, skipped

GRAPH = "x:Placeholder; a:MatMul(x)[_stream_id=1]; b:MatMul(x)[_stream_id=5]; c:MatMul(x)[_stream_id=4]"


def test_finds_ids_that_become_others_and_whose_company_they_get():
    texts = [one.text for one in found(GRAPH, "MS019", fork_streams=4)]
    assert texts == [
        "node 'c' has stream id 4, which a fork with 4 streams takes as 0",
        "node 'b' has stream id 5, which a fork with 4 streams takes as 1, beside 1 of its own",
    ]


def test_finds_patterns_that_give_such_ids():
    (one,) = found(
        "a:MatMul", "MS019", fork_streams=4, rules=rules_of('regex: {patterns: {1: "a", 6: "a"}}', streams=8)
    )
    assert one.text == "pattern 'a' gives stream id 6, which a fork with 4 streams takes as 2"
    assert (one.file, one.line) == ("rules.yaml", 4)


def test_passes_enough_streams():
    assert found(GRAPH, "MS019", fork_streams=6) == []


def test_says_nothing_where_nobody_says_how_many_streams_the_fork_has():
    assert "fork_streams" in skipped(GRAPH, "MS019")
