from tests.checks.harness import found, rules_of

GRAPH = "x:Placeholder; tower_a/m:MatMul(x); tower_b/m:MatMul(x)"


def test_finds_patterns_of_different_ids_that_match_one_node():
    (one,) = found(GRAPH, "MS005", rules=rules_of('regex: {patterns: {1: "tower.*", 2: "tower_b/.*"}}'))
    assert "'tower.*' (stream 1) and 'tower_b/.*' (stream 2) both match 1 node, such as 'tower_b/m'" in one.text
    assert (one.file, one.line) == ("rules.yaml", 4)


def test_passes_patterns_of_one_id_and_patterns_that_exclude_each_other():
    assert found(GRAPH, "MS005", rules=rules_of('regex: {patterns: {1: ["tower.*", "tower_b/.*"]}}')) == []
    assert found(GRAPH, "MS005", rules=rules_of('regex: {patterns: {1: "tower_a/.*", 2: "tower_b/.*"}}')) == []
