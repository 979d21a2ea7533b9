""""""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from msplit import rules
from msplit.core.graph import Assignment
from msplit.errors import AssignError, RulesError
from msplit.rules.auto import Propagate
from msplit.rules.manual import Manual
from tests.graphs import by_name, parse

HEAD = "version: 1\nstreams: 3\n"


def failure(text, **named):
    with pytest.raises(RulesError) as error:
        rules.parse(text, "r.yaml", **named)
    return error.value


def test_reads_everything():
    found = rules.parse("version: 1\nstreams: 3\nrules:\n  - manual\n  - propagate:\ndefault: 2\n", "r.yaml")
    assert found == rules.RuleSet(1, 3, (Manual(), Propagate()), 2, "r.yaml")


def test_shared_inputs_are_named_with_their_lines():
    found = rules.parse(HEAD + "shared:\n  - user_*\n  - age\nrules: []\n", "r.yaml")
    assert found.shared == (("user_*", "r.yaml:4"), ("age", "r.yaml:5"))
    assert rules.parse(HEAD + "rules: []\nshared: age\n", "r.yaml").shared == (("age", "r.yaml:4"),)


def test_shared_inputs_that_are_there_change_nothing_and_others_are_told():
    _, outcome = assign("shared: [x]", "[manual]")
    (remark,) = [one for one in outcome.remarks if one.rule == "shared"]
    assert (remark.kind, remark.where) == ("kept", "r.yaml:2")
    assert "TensorFlow gains nothing" in remark.text
    assert (outcome.ids == assign("", "[manual]")[1].ids).all()
    _, outcome = assign("shared: [x, 'user_*']", "[manual]")
    said = [(one.kind, one.text, one.where) for one in outcome.remarks if one.rule == "shared"]
    assert said == [("no-match", "no input is called 'user_*'", "r.yaml:2")]


def test_what_is_left_out_has_a_default():
    found = rules.parse("version: 1\nrules: []\n", "r.yaml")
    assert (found.streams, found.default, found.rules) == (4, 0, ())


def test_a_number_of_streams_from_outside_wins():
    assert rules.parse(HEAD + "rules: []\ndefault: 7\n", "r.yaml", streams=8).streams == 8
    assert "default is a whole number 2" in failure(HEAD + "rules: []\ndefault: 2\n", streams=2).what


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("rules: []\n", 1, "has no `version`"),
        ("version: 2\nrules: []\n", 1, "version 2 of rules files is not known"),
        ("version: '1'\nrules: []\n", 1, "version '1'"),
        ("version: true\nrules: []\n", 1, "version True"),
        ("version: 1\n\nstreams: 0\nrules: []\n", 3, "streams is a whole number 0"),
        ("version: 1\nstreams: many\nrules: []\n", 2, "streams is text 'many'"),
        ("version: 1\nstreams: true\nrules: []\n", 2, "streams is true/false"),
        ("version: 1\nstreams: 2000\nrules: []\n", 2, "streams is a whole number 2000"),
        (HEAD + "rules: []\ndefault: 3\n", 4, "default is a whole number 3"),
        (HEAD + "rules: []\nshared: 3\n", 4, "shared is a whole number 3"),
        (HEAD + "rules: []\nshared:\n  - user\n  - [age]\n", 6, "shared is a list"),
        (HEAD, 1, "`rules` must be a list"),
        (HEAD + "rules:\n  manual\n", 4, "`rules` must be a list"),
        (HEAD + "rules:\n  - manuel\n", 4, "unknown rule 'manuel'; did you mean 'manual'?"),
        (HEAD + "rules:\n  - manual: {keep: 1}\n", 4, "unknown key 'keep' in manual"),
        (HEAD + "rules:\n  - manual: 3\n", 4, "manual needs options in a mapping, not a whole number"),
        (HEAD + "rules:\n  - [manual]\n", 4, "a rule must be a name"),
        (HEAD + "rules:\n  - {manual: , propagate: }\n", 4, "a rule must be a name"),
        (HEAD + "rules:\n  - 3\n", 4, "a rule must be a name"),
        (HEAD + "rules: []\nsteams: 3\n", 4, "unknown key 'steams' in the rules file; did you mean 'streams'?"),
        (HEAD + "streams: 4\nrules: []\n", 3, "key 'streams' is there twice (first on line 2)"),
        (HEAD + "rules: [\n", 4, "not valid YAML"),
        (HEAD + "rules: ]\n", 3, "not valid YAML"),
        (HEAD + "rules: &a [manual]\ndefault: *a\n", 4, "aliases (*name) are not supported"),
        (HEAD + "rules: !!python/object/apply:os.system [ls]\n", 3, "unknown rule 'ls'"),
        (HEAD + "streams2: !!python/name:os.system\nrules: []\n", 3, "not valid YAML"),
        (HEAD + "? [a]\n: 1\n", 3, "a key must be a word or a number"),
        (HEAD + "rules: []\ndefault: 2024-01-01\n", 4, "is read as a date, which no option takes"),
        (HEAD + "rules: []\ndefault: " + "9" * 5000, 4, "can not be read"),
        (HEAD + "rules: []\ndefault: .nan\n", 4, "default is a number nan"),
        (HEAD + "rules: []\n---\nversion: 1\n", 4, "more than one document"),
        ("- manual\n", 1, "needs options in a mapping, not a list"),
        ("manual\n", 1, "needs options in a mapping, not text"),
        (HEAD + "rules: " + "[" * 40 + "]" * 40, 3, "nested deeper than 32"),
        (HEAD + "rules: " + "[" * 100_000, 3, "nested deeper than 32"),
    ],
)
def test_each_mistake_is_named_with_its_line(text, line, message):
    error = failure(text)
    assert error.where == f"r.yaml:{line}"
    assert message in error.what
    assert error.fix


def test_several_mistakes_are_named_together_in_the_order_of_their_lines():
    error = failure("version: 3\nstreams: -1\nrules:\n  - nothing\n  - colocation: {handles: 2, handels: true}\n")
    assert error.where == "r.yaml"
    assert error.what == "5 mistakes"
    assert [line.split(":")[0] for line in error.details] == ["line 1", "line 2", "line 4", "line 5", "line 5"]


def test_a_hundred_mistakes_are_counted():
    error = failure("version: 1\nrules:\n" + "  - nothing\n" * 100)
    assert "100 mistakes" in error.what
    assert error.details[-1] == "… and 80 more"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "\n\n"])
def test_an_empty_file_says_so(text):
    assert "empty" in failure(text).what


def test_a_file_beyond_all_reason_is_refused():
    assert "longer than" in failure("version: 1\n" + "# \n" * 2_000_000).what


def test_control_characters_are_refused():
    assert "not valid YAML" in failure("version: 1\x00\n").what


def test_billions_of_laughs_stay_one_error():
    text = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefghij", "bcdefghijk", strict=True)
    )
    assert "aliases" in failure(text).what


def test_reads_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "rules: [manual]\n")
    assert rules.load(path) == rules.RuleSet(1, 3, (Manual(),), 0, str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no rules file"), (b"version: \xff", "not UTF-8"), ("folder", "can not be read")],
)
def test_a_file_that_can_not_be_read_is_named(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(RulesError, match=message) as error:
        rules.load(path)
    assert str(path) in str(error.value)


GRAPH = """
x:Placeholder; w:Const; a:MatMul(x,w)@5us[_stream_id=2]; b:Relu(a); h:StringJoin host; hh:StringJoin[_stream_id=1] host
c:MatMul(x,w)@9us[_class=loc:@b]; d:AddV2(b,c); e:Const
"""


def assign(text, rule_list, *, graph=GRAPH, **named):
    flat, costs = parse(graph)
    return flat, rules.assign(flat, costs, rules.parse(f"version: 1\n{text}\nrules: {rule_list}\n", "r.yaml"), **named)


def test_rules_run_in_order_and_the_default_fills_the_rest():
    flat, outcome = assign(
        "streams: 3\ndefault: 1", '[manual, regex: {patterns: {0: ["b"], 2: ["a|x"]}}, propagate, colocation]'
    )
    assert by_name(flat, outcome.ids) == {"x": 2, "w": 2, "a": 2, "b": 0, "h": 0, "hh": 1, "c": 0, "d": 2, "e": 1}
    assert outcome.assignment.why(flat.graph.index["a"])[0] == "manual"
    assert outcome.assignment.why(flat.graph.index["e"]) is None
    assert outcome.streams == 3
    assert [remark.kind for remark in outcome.remarks] == ["host"]


def test_constraints_have_the_last_word():
    flat, outcome = assign("streams: 3", '[colocation, regex: {patterns: {1: ["b"], 2: ["c"]}}]')
    assert outcome.ids[flat.graph.index["b"]] == outcome.ids[flat.graph.index["c"]] == 1
    assert [remark.kind for remark in outcome.remarks] == ["moved"]


def test_streams_and_wrap_may_be_given_from_outside():
    flat, outcome = assign("streams: 3", "[manual]", streams=2, wrap=True)
    assert outcome.ids[flat.graph.index["a"]] == 0
    assert outcome.streams == 2
    with pytest.raises(AssignError, match="node 'a' has stream id 2"):
        assign("streams: 3", "[manual]", streams=2)


def test_a_default_that_does_not_exist_is_an_error():
    with pytest.raises(AssignError, match="default of the rule set has stream id 2"):
        assign("streams: 3\ndefault: 2", "[]", streams=2)


def test_assigning_what_was_assigned_changes_nothing():
    text, rule_list = "streams: 3", '[manual, regex: {patterns: {1: ["c"]}}, colocation, propagate]'
    flat, first = assign(text, rule_list)
    attrs = [{**attrs, "_stream_id": int(s)} for attrs, s in zip(flat.graph.attrs, first.ids, strict=True)]
    again, costs = parse(GRAPH, attrs=attrs)
    second = rules.assign(again, costs, rules.parse(f"version: 1\n{text}\nrules: {rule_list}\n", "r.yaml"))
    assert np.array_equal(first.ids, second.ids)


@dataclass(frozen=True)
class Bad:
    how: str
    key: ClassVar[str] = "bad"

    def apply(self, context: Any, assignment: Assignment) -> tuple[Assignment, tuple[()]]:
        ids, reason = assignment.ids.copy(), assignment.reason.copy()
        reasons = (*assignment.reasons, ("bad", "because"))
        index = context.flat.graph.index
        node = {"host": "h", "moved": "a"}.get(self.how, "e")
        ids[index[node]], reason[index[node]] = 1, len(reasons) - 1
        if self.how == "range":
            ids[index[node]] = 9
        elif self.how == "negative":
            ids[index[node]] = -2
        elif self.how == "no reason":
            reason[index[node]] = -1
        elif self.how == "lost reason":
            reasons = assignment.reasons
        elif self.how == "length":
            ids, reason = ids[:-1], reason[:-1]
        return Assignment(ids, reason, reasons), ()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("range", "out of range"),
        ("negative", "out of range"),
        ("no reason", "without a reason"),
        ("lost reason", "reason that is not there"),
        ("length", "8 ids for 9 nodes"),
        ("host", "host node"),
        ("moved", "moved a claimed node"),
    ],
)
def test_a_rule_that_breaks_its_promises_is_caught(how, message):
    flat, costs = parse(GRAPH)
    manual = rules.parse("version: 1\nrules: [manual]", "f").rules[0]
    ruleset = rules.RuleSet(1, 3, (manual, Bad(how)), 0, "test")
    with pytest.raises(AssignError, match=message) as error:
        rules.assign(flat, costs, ruleset)
    assert "rule 'bad'" in error.value.what
