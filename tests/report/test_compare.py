from __future__ import annotations

import numpy as np
import pytest

from msplit import rules
from msplit.assignment.analysis import ModelChanges, Side, compare
from msplit.errors import AssignError
from msplit.report import difference
from msplit.report.document import plain
from msplit.report.render import to_markdown
from msplit.schedule.machine import Machine
from tests.graphs import parse

OLD = "x:Placeholder; a:MatMul(x)@10us; b:MatMul(a)@20us; c:MatMul(a)@18us; d:AddV2(b,c)@6us"
NEW = "x:Placeholder; a:MatMul(x)@10us; b:MatMul(a)@20us; c:MatMul(a)@18us[_stream_id=1]; d:AddV2(b,c)@6us"
TOWERS = "version: 1\nstreams: 2\nrules: [manual, regex: {patterns: {1: ['c']}}]\n"


def sides(old: str, new: str) -> tuple[Side, Side]:
    return Side.of(*parse(old)), Side.of(*parse(new))


def compared(old: str, new: str, text: str = "") -> ModelChanges:
    return compare(*sides(old, new), rules.parse(text, "test") if text else None)


def test_a_node_on_another_stream_is_a_move_and_the_prediction_tells_what_it_is_worth():
    found = compared(OLD, NEW)
    assert [(move.name, move.old, move.new, move.time_us) for move in found.moved] == [("c", 0, 1, 18.0)]
    assert (found.added, found.removed, found.replaced) == ((), (), ())
    assert found.old.prediction.plan.edges == 0
    assert found.new.prediction.plan.edges == 2
    step = Machine().step_us
    assert found.old.prediction.makespan_us == pytest.approx(54 + step)
    assert found.new.prediction.makespan_us < 40 + step
    assert found.new.prediction.load_us() == {0: 36.0, 1: 18.0}


def test_rules_explain_the_moves_that_they_make():
    (move,) = compared(OLD, NEW, TOWERS).moved
    assert move.rule == "regex"
    assert "c" in move.why


def test_an_id_that_the_rules_do_not_give_is_the_graphs_own():
    (move,) = compared(OLD, NEW, TOWERS.replace("'c'", "'b'")).moved
    assert (move.rule, move.why) == ("graph", "the id is on the graph; the rules alone give 0")


def test_a_move_to_the_default_stream_is_explained_too():
    (move,) = compared(NEW, OLD, TOWERS.replace("'c'", "'b'")).moved
    assert (move.old, move.new, move.rule) == (1, 0, "default")


def test_nodes_that_come_go_and_change_their_op_are_listed_by_cost():
    found = compared(
        OLD, "x:Placeholder; a:MatMul(x)@10us; b:Relu(a)@20us; e:MatMul(a)@1us; f:MatMul(e)@7us; d:AddV2(b,f)@6us"
    )
    assert [node.name for node in found.added] == ["f", "e"]
    assert [node.name for node in found.removed] == ["c"]
    assert [(node.name, node.was, node.op) for node in found.replaced] == [("b", "MatMul", "Relu")]
    assert not found.same


def test_moves_are_grouped_by_streams_and_reason_costliest_first():
    new = (
        OLD.replace("@10us", "@10us[_stream_id=2]")
        .replace("@20us", "@20us[_stream_id=1]")
        .replace("@6us", "@6us[_stream_id=1]")
    )
    found = compared(OLD, new)
    assert [(key[:2], [move.name for move in moves]) for key, moves in found.groups.items()] == [
        ((0, 1), ["b", "d"]),
        ((0, 2), ["a"]),
    ]


def test_the_same_model_twice_says_so():
    found = compared(NEW, NEW)
    assert found.same
    assert "Nothing changed" in to_markdown(difference.document(found))


def test_models_without_a_common_name_warn():
    assert difference.document(compared("a:MatMul@1us", "b:MatMul@1us")).warnings


@pytest.mark.parametrize("value", ["text", "-1", "true", str(2**31)])
def test_an_id_that_is_none_names_its_node(value: str):
    with pytest.raises(AssignError, match=r"node 'a': its `_stream_id` is no stream id"):
        Side.of(*parse(f"a:MatMul@1us[_stream_id={value}]"))


def test_tables_end_at_the_limit_and_tell_how_many_are_left():
    nodes = [f"n{i}:MatMul@{i + 1}us" for i in range(40)]
    found = compared("; ".join(nodes), "; ".join(f"{node}[_stream_id=1]" for node in nodes))
    text = to_markdown(difference.document(found, 30))
    assert "| n39 |" in text
    assert "| n9 |" not in text
    assert "and 10 more nodes (--all)" in text
    assert "| n9 |" in to_markdown(difference.document(found, None))


def test_markdown_of_a_change_reads_like_this():
    lines = to_markdown(difference.document(compared(OLD, NEW, TOWERS))).splitlines()
    assert "| edges cut | 0 | 2 | +2 |" in lines
    assert "| streams in use | 1 | 2 | +1 |" in lines
    assert "| 1 | 0 µs | 18.0 µs | +18.0 µs |" in lines
    assert "| c | MatMul | 0 → 1 | 18.0 µs | regex |" in lines
    assert "faster" in lines[-1]


def test_json_holds_every_move_and_both_predictions():
    found = plain(difference.payload(compared(OLD, NEW)))
    assert found["moved"] == [{"name": "c", "op": "MatMul", "old": 0, "new": 1, "time_us": 18.0, "rule": "", "why": ""}]
    assert found["new"]["load_us"] == {"0": 36.0, "1": 18.0}
    assert found["new"]["predicted_us"] < found["old"]["predicted_us"]


def test_the_order_of_the_file_does_not_matter():
    count = 2_000
    nodes = [f"n{i}:MatMul@1us" for i in range(count)]
    found = compared("; ".join(nodes), "; ".join(reversed(nodes)))
    assert found.same
    assert np.array_equal(found.old.prediction.ids, found.new.prediction.ids)
