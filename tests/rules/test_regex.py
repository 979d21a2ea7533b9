import pytest

from msplit.core.graph import Assignment
from msplit.errors import AssignError, RulesError
from msplit.rules import parse as parse_rules
from msplit.rules.base import RuleContext
from msplit.rules.regex import Regex
from msplit.rules.streamfile import Entry
from tests.graphs import build, by_name, parse

GRAPH = """
x:Placeholder; tower_a/m:MatMul(x); tower_a/r:Relu(tower_a/m); tower_b/m:MatMul(x)
s:StringJoin host; out:AddV2(tower_a/r,tower_b/m)
"""


def rule(options, folder=None, **named):
    text = f"version: 1\nstreams: 4\nrules:\n  - regex: {options}\n"
    return parse_rules(text, "r.yaml", folder=folder, **named).rules[0]


def apply(regex, text=GRAPH, streams=4, wrap=False):
    flat, costs = parse(text)
    assignment, remarks = regex.apply(RuleContext(flat, costs, streams, wrap), Assignment.empty(len(flat)))
    return by_name(flat, assignment.ids), assignment, remarks


def test_the_first_pattern_that_matches_wins_and_says_where_it_stands():
    ids, assignment, remarks = apply(rule('{patterns: {2: ["tower_b/.*"], 1: ["tower_./m", "tower_a/r"]}}'))
    assert ids == {"x": -1, "tower_a/m": 1, "tower_a/r": 1, "tower_b/m": 2, "s": -1, "out": -1}
    assert assignment.why(1) == ("regex", "name matches 'tower_./m' (r.yaml:4)")
    (remark,) = remarks
    assert (remark.kind, remark.where) == ("overlap", "r.yaml:4")
    assert "'tower_b/.*' (stream 2) and 'tower_./m' (stream 1) both match 1 node, such as 'tower_b/m'" in remark.text


def test_patterns_of_one_id_may_overlap_without_a_remark():
    _, _, remarks = apply(rule('{patterns: {1: ["tower_a/.*", ".*/m"]}}'))
    assert remarks == ()


def test_search_matches_any_part():
    ids, _, _ = apply(rule('{patterns: {3: ["_a"]}, match: search}'))
    assert [name for name, stream in ids.items() if stream == 3] == ["tower_a/m", "tower_a/r"]


def test_a_pattern_that_matches_nothing_is_remarked():
    _, _, remarks = apply(rule('{patterns: {1: ["tower_a"]}}'))
    assert [(r.kind, r.text, r.where) for r in remarks] == [
        ("no-match", "pattern 'tower_a' matches no node", "r.yaml:4")
    ]


def test_host_nodes_get_no_id_and_a_pattern_for_them_alone_is_remarked():
    ids, _, remarks = apply(rule('{patterns: {1: ["s", "out|s"]}}'))
    assert (ids["s"], ids["out"]) == (-1, 1)
    assert [(r.kind, "host nodes" in r.text) for r in remarks] == [("no-match", True)]


def test_a_single_pattern_needs_no_list():
    ids, _, _ = apply(rule('{patterns: {1: "out"}}'))
    assert ids["out"] == 1


def test_reads_nvidias_file_beside_the_rules_file(tmp_path):
    (tmp_path / "streams.txt").write_text("# towers\n1:tower_a/.*\n2:tower_b/.*\n")
    ids, assignment, _ = apply(rule("{file: streams.txt}", folder=tmp_path))
    assert (ids["tower_a/m"], ids["tower_b/m"], ids["out"]) == (1, 2, -1)
    assert assignment.why(1)[1] == f"name matches 'tower_a/.*' ({tmp_path / 'streams.txt'}:2)"


def test_a_broken_stream_file_names_its_line(tmp_path):
    (tmp_path / "streams.txt").write_text("1:a\nb\n")
    with pytest.raises(RulesError) as error:
        rule("{file: streams.txt}", folder=tmp_path)
    assert error.value.where == f"{tmp_path / 'streams.txt'}:2"


def test_an_id_out_of_range_in_a_stream_file_names_its_line(tmp_path):
    (tmp_path / "streams.txt").write_text("1:a\n\n4:b\n")
    with pytest.raises(RulesError, match="stream id 4 is out of range") as error:
        rule("{file: streams.txt}", folder=tmp_path)
    assert error.value.where == f"{tmp_path / 'streams.txt'}:3"
    wrapped = rule("{file: streams.txt}", folder=tmp_path, wrap=True)
    _, assignment, remarks = apply(wrapped, "b:MatMul; a:MatMul", wrap=True)
    assert assignment.ids.tolist() == [0, 1]
    assert [(r.kind, r.text) for r in remarks] == [("wrapped", "stream ids 4 of patterns were taken modulo 4")]


@pytest.mark.parametrize("content", [None, b"\xff\xfe1:a"])
def test_a_file_that_can_not_be_read_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "s.txt").write_bytes(content)
    with pytest.raises(RulesError, match=r"s.txt can not be read") as error:
        rule("{file: s.txt}", folder=tmp_path)
    assert error.value.where == "r.yaml:4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{}", "needs either `patterns` or `file`"),
        ('{patterns: {1: ["a"]}, file: x}', "needs either `patterns` or `file`"),
        ('{patterns: {1: ["(a"]}}', r"bad pattern '\(a': missing \)"),
        ('{patterns: {1: ["a", ""]}}', "bad pattern '': it is empty"),
        ('{patterns: {one: ["a"]}}', "stream id 'one' is not a whole number"),
        ('{patterns: {-1: ["a"]}}', "stream id -1 is not a whole number of 0 or more"),
        ('{patterns: {true: ["a"]}}', "stream id True"),
        ('{patterns: {9: ["a"]}}', "stream id 9 is out of range: with 4 streams, ids are 0..3"),
        ("{patterns: {1: [3]}}", "regex.patterns.1 is a whole number 3"),
        ("{file: 3}", "regex.file is a whole number 3"),
        ("{patterns: {1: }}", "regex.patterns.1 is nothing"),
        ("{patterns: [a]}", "regex.patterns is a list"),
        ('{patterns: {1: ["a"]}, match: whole}', "regex.match is text 'whole'"),
        ('{patterns: {1: ["a"]}, mach: full}', "unknown key 'mach' in regex; did you mean 'match'"),
    ],
)
def test_mistakes_in_yaml_have_a_line(options, message):
    with pytest.raises(RulesError, match=message) as error:
        rule(options)
    assert "r.yaml" in error.value.where
    assert "4" in str(error.value)


def test_fewer_streams_than_the_patterns_need_is_an_error_at_assign_time():
    with pytest.raises(AssignError, match=r"pattern 'out' has stream id 3, but ids are 0\.\.1") as error:
        apply(rule('{patterns: {3: ["out"]}}'), streams=2)
    assert error.value.where == "r.yaml:4"


def test_many_exact_names_are_grouped_by_line():
    names = [f"n{i}" for i in range(3000)]
    flat, costs = build(names, ["MatMul"] * 3000, [], [1.0] * 3000)
    regex = Regex(tuple(Entry(i % 3, name, f"s.txt:{i % 3 + 1}") for i, name in enumerate(names)))
    assignment, remarks = regex.apply(RuleContext(flat, costs, 3), Assignment.empty(3000))
    assert assignment.ids.tolist() == [i % 3 for i in range(3000)]
    assert assignment.why(4) == ("regex", "name is listed at s.txt:2")
    assert remarks == ()


def test_overlaps_beyond_twenty_pairs_are_counted():
    regex = Regex(tuple(Entry(i % 2, pattern, f"f:{i}") for i, pattern in enumerate(["a+", "a*", *["a"] * 50])))
    _, _, remarks = apply(regex, "a:MatMul")
    found = [r.text for r in remarks if r.kind == "overlap"]
    assert len(found) == 21
    assert found[-1] == "6 more pairs of patterns overlap"


def test_patterns_that_are_too_large_together_are_refused(tmp_path):
    (tmp_path / "streams.txt").write_text("".join(f"1:a{{0,900}}{number}\n" for number in range(600)))
    with pytest.raises(RulesError, match="together make more than 1,000,000 instructions"):
        parse_rules("version: 1\nrules:\n  - regex: {file: streams.txt}\n", "rules.yaml", folder=tmp_path)
