from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from msplit import rules
from msplit.core.assignment import Assignment
from msplit.errors import AssignError
from tests.graphs import by_name, parse

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
