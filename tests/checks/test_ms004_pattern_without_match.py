from dataclasses import replace

from msplit.checks import examine
from msplit.checks.subject import CheckSettings, Subject
from msplit.rules import load
from tests.checks.harness import found, rules_of
from tests.graphs import parse

GRAPH = "x:Placeholder; tower/a:MatMul(x)@9us; tower/b:MatMul(x)@9us; join:AddV2(tower/a,tower/b); s:StringJoin(x) host"


def test_finds_patterns_that_match_nothing_with_their_lines():
    (one,) = found(GRAPH, "MS004", rules=rules_of('regex: {patterns: {1: "twoer/.*", 2: "tower/.*"}}'))
    assert one.text == "pattern 'twoer/.*' matches no node"
    assert (one.file, one.line) == ("rules.yaml", 4)


def test_finds_patterns_of_a_stream_file(tmp_path):
    (tmp_path / "s.txt").write_text("1:tower/a\n2:gone/.*\n3:s\n")
    findings = found(GRAPH, "MS004", rules=rules_of("regex: {file: s.txt}"), folder=tmp_path)
    assert [(one.file, one.line) for one in findings] == [(str(tmp_path / "s.txt"), 2), (str(tmp_path / "s.txt"), 3)]
    assert "matches only host nodes" in findings[1].text


def test_finds_rules_of_the_users_own_file_that_claim_nothing():
    (one,) = found(
        GRAPH, "MS004", rules=rules_of("embedding", 'regex: {patterns: {1: "tower/.*"}}', "colocation", "propagate")
    )
    assert (one.text, one.file) == ("the rule 'embedding' claims no node of this graph", "rules.yaml")


def test_finds_inputs_that_are_not_there():
    text = "version: 1\nshared: [x, 'user_*']\nrules: [manual]\n"
    (one,) = found(GRAPH, "MS004", rules=text)
    assert (one.text, one.file, one.line) == ("no input is called 'user_*'", "rules.yaml", 2)


def test_passes_where_everything_matches():
    assert found(GRAPH, "MS004", rules=rules_of('regex: {patterns: {1: "tower/.*"}}')) == []
    assert found(GRAPH, "MS004", rules=rules_of("branch: {min_cost_us: 1}")) == []


def test_passes_idle_rules_of_shipped_rule_sets():
    flat, costs = parse(GRAPH)
    subject = Subject(flat, costs, CheckSettings(select=("MS004",)), load("default"))
    assert examine(subject).findings == ()
    own = Subject(flat, costs, CheckSettings(select=("MS004",)), replace(load("default"), source="mine.yaml"))
    assert [one.finding.text for one in examine(own).findings] == ["the rule 'embedding' claims no node of this graph"]
