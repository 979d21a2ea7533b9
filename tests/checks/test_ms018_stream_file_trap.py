import pytest

from msplit.rules import streamfile
from tests.checks.harness import found, rules_of

GRAPH = "x:Placeholder; a/m:MatMul(x)[_stream_id=1]; b/m:MatMul(x)[_stream_id=2]; c:MatMul(x); s:StringJoin(x)[_stream_id=1] host"


def check(tmp_path, text):
    (tmp_path / "s.txt").write_text(text)
    return found(GRAPH, "MS018", rules=rules_of("regex: {file: s.txt}"), folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("# towers\n1:a/m\n2:b/m\n", 1, "comment"),
        ("1:a/m\n\n2:b/m\n", 2, "blank"),
        ("1:a/m\n1:b/m\n", 2, "forgets"),
        ("1:a/(?:m)\n2:b/m\n", 1, "cuts the line"),
        ("1:a/m{1,2}\n2:b/m\n", 1, "cuts the pattern"),
        ("1:a/m\r\n2:b/m\n", 1, "space"),
        ("1:(?i)A/M\n2:b/m\n", 1, "no ECMAScript"),
        ("1:a/m\\z\n2:b/m\n", 1, "no ECMAScript"),
    ],
)
def test_finds_lines_that_are_taken_differently(tmp_path, text, line, why):
    (tmp_path / "s.txt").write_bytes(text.encode())
    findings = found(GRAPH, "MS018", rules=rules_of("regex: {file: s.txt}"), folder=tmp_path)
    assert [(one.line, why in one.text) for one in findings] == [(line, True)]


def test_finds_ids_on_the_graph_that_the_file_would_undo(tmp_path):
    (one,) = check(tmp_path, "1:a/m\n3:c\n")
    assert one.text.startswith(
        "node 'b/m' has a stream id and matches no pattern: its newer readers then put it on stream 0"
    )
    assert one.file == str(tmp_path / "s.txt")


def test_passes_what_msplit_writes_and_patterns_that_stand_in_the_rules(tmp_path):
    assert check(tmp_path, streamfile.emit(["a/m", "b/m"], [1, 2])) == []
    assert check(tmp_path, "1:a/\\w\n2:[bc].*\n") == []
    assert found(GRAPH, "MS018", rules=rules_of('regex: {patterns: {1: "(?i)A.*"}}')) == []
