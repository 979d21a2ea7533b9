import pytest

from msplit.core.graph import Assignment
from msplit.errors import AssignError
from msplit.rules.base import RuleContext
from msplit.rules.manual import Manual
from tests.graphs import by_name, parse


def apply(text, streams=4, wrap=False, attrs=None):
    flat, costs = parse(text, **({"attrs": attrs} if attrs else {}))
    assignment, remarks = Manual().apply(RuleContext(flat, costs, streams, wrap), Assignment.empty(len(flat)))
    return flat, assignment, remarks


def test_keeps_what_the_graph_says_and_tells_why():
    flat, assignment, remarks = apply(
        "a:MatMul[_stream_id=3]; b:MatMul; c:MatMul[_stream_id=0]; d:MatMul[_stream_id=3]"
    )
    assert by_name(flat, assignment.ids) == {"a": 3, "b": -1, "c": 0, "d": 3}
    assert assignment.why(0) == ("manual", "`_stream_id` is 3 on the graph")
    assert assignment.why(1) is None
    assert remarks == ()


def test_claims_of_earlier_rules_stand():
    flat, costs = parse("a:MatMul[_stream_id=3]")
    before = Assignment.empty(1).claim([0], 1, "regex", "x")
    after, _ = Manual().apply(RuleContext(flat, costs, 4), before)
    assert after.ids.tolist() == [1]


def test_an_id_out_of_range_names_the_node_and_the_way_out():
    with pytest.raises(AssignError, match=r"node 'b' has stream id 7, but ids are 0\.\.3") as error:
        apply("a:MatMul[_stream_id=1]; b:MatMul[_stream_id=7]")
    assert "--streams 8" in error.value.fix
    assert "--wrap" in error.value.fix


def test_several_nodes_out_of_range_are_counted():
    with pytest.raises(AssignError, match=r"node 'a' \(and 1 more\) has stream id 4, but ids are 0 only"):
        apply("a:MatMul[_stream_id=4]; b:MatMul[_stream_id=4]", streams=1)


def test_a_negative_id_is_out_of_range():
    with pytest.raises(AssignError, match="stream id -2") as error:
        apply("a:MatMul[_stream_id=-2]")
    assert "0 or more" in error.value.fix


def test_wrap_is_the_forks_modulo_and_is_remarked():
    flat, assignment, remarks = apply(
        "a:MatMul[_stream_id=7]; b:MatMul[_stream_id=4]; c:MatMul[_stream_id=4]", wrap=True
    )
    assert by_name(flat, assignment.ids) == {"a": 3, "b": 0, "c": 0}
    assert assignment.why(0) == ("manual", "`_stream_id` is 7 on the graph, which is 3 modulo 4")
    assert [(r.kind, r.text, r.where) for r in remarks] == [
        ("wrapped", "id 4 was taken as 0", "node 'b' (and 1 more)"),
        ("wrapped", "id 7 was taken as 3", "node 'a'"),
    ]


def test_host_nodes_keep_their_id_with_a_remark():
    flat, assignment, remarks = apply(
        "a:StringJoin[_stream_id=1] host; b:StringJoin[_stream_id=2] host; c:MatMul[_stream_id=1]"
    )
    assert by_name(flat, assignment.ids) == {"a": 1, "b": 2, "c": 1}
    (remark,) = remarks
    assert (remark.kind, remark.where) == ("host", "node 'a'")
    assert remark.text.startswith("2 host nodes have ids")


@pytest.mark.parametrize("value", ["1", 1.0, True, (1,)])
def test_an_id_that_is_no_integer_is_an_error(value):
    with pytest.raises(AssignError, match="not an integer") as error:
        apply("a:MatMul", attrs=[{"_stream_id": value}])
    assert error.value.where == "node 'a'"
