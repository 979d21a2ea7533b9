import numpy as np
import pytest

from msplit.analysis import colocation
from msplit.core.graph import Assignment
from msplit.errors import AssignError
from msplit.rules import parse as parse_rules
from msplit.rules.base import RuleContext
from msplit.rules.colocation import Colocation
from tests.graphs import by_name, nodes, parse


def apply(text, claims, rule=None):
    """Claims are (rule, stream, names) in order of precedence."""
    flat, costs = parse(text)
    assignment = Assignment.empty(len(flat))
    for key, stream, *names in claims:
        assignment = assignment.claim(nodes(flat, *names), stream, key, "test")
    after, remarks = (rule or Colocation()).apply(RuleContext(flat, costs, 8), assignment)
    return flat, after, remarks


def test_a_class_follows_the_earliest_rule():
    text = "w:Const; a:MatMul(w)[_class=loc:@w]; b:MatMul(w)[_class=loc:@w]; c:MatMul(w)"
    flat, after, remarks = apply(text, [("regex", 2, "b"), ("branch", 3, "a"), ("branch", 4, "c")])
    assert by_name(flat, after.ids) == {"w": 2, "a": 2, "b": 2, "c": 4}
    assert after.why(1) == ("colocation", "must share a stream with 'b', which regex put on this one")
    assert after.why(2) == ("regex", "test")
    assert [(r.kind, r.where) for r in remarks] == [("moved", "node 'a'")]
    assert "1 node moved" in remarks[0].text
    assert "from stream 3 to 2" in remarks[0].text


def test_classes_are_closed_transitively():
    text = "a:MatMul; b:MatMul[_class=loc:@a]; c:MatMul[_class=loc:@b]; d:MatMul[_class=loc:@c|loc:@e]; e:MatMul"
    _, after, _ = apply(text, [("branch", 5, "e")])
    assert after.ids.tolist() == [5] * 5


def test_nodes_that_name_a_node_outside_the_graph_still_belong_together():
    flat, after, _ = apply("a:MatMul[_class=loc:@gone]; b:MatMul[_class=loc:@gone]; c:MatMul", [("branch", 2, "b")])
    assert by_name(flat, after.ids) == {"a": 2, "b": 2, "c": -1}


def test_within_a_rule_the_first_in_the_canonical_order_decides():
    text = "a:MatMul[_class=loc:@g]; b:MatMul[_class=loc:@g]; c:MatMul[_class=loc:@g]"
    _, after, _ = apply(text, [("branch", 6, "c"), ("branch", 5, "b")])
    assert after.ids.tolist() == [5, 5, 5]


def test_regions_stay_together():
    text = """
        a:Enter region=loop; b:MatMul(a) region=loop; c:Exit(b) region=loop
        d:MatMul(c); e:MatMul(d) region=other; f:Relu(e) region=other
    """
    flat, after, _ = apply(text, [("embedding", 1, "b"), ("branch", 2, "c"), ("branch", 3, "d")])
    assert by_name(flat, after.ids) == {"a": 1, "b": 1, "c": 1, "d": 3, "e": -1, "f": -1}


HANDLES = """
v:VarHandleOp; r:ReadVariableOp(v); m:MatMul(r); i:Identity(v)[T=resource]; g:ResourceGather(i,m); u:AssignVariableOp(v,m); late:NoOp(^v)
"""


def test_a_handle_stays_with_its_readers_and_writers_through_identities():
    flat, after, _ = apply(HANDLES, [("branch", 2, "g"), ("branch", 3, "m")])
    assert by_name(flat, after.ids) == {"v": 2, "r": 2, "m": 3, "i": 2, "g": 2, "u": 2, "late": -1}


def test_handles_may_be_left_alone():
    _, after, remarks = apply(HANDLES, [("branch", 2, "g"), ("branch", 3, "m")], Colocation(handles=False))
    assert sorted(after.ids.tolist()) == [-1, -1, -1, -1, -1, 2, 3]
    assert remarks == ()


def test_two_manual_ids_in_one_group_name_both_nodes():
    text = "a:MatMul; b:MatMul[_class=loc:@a]; c:MatMul[_class=loc:@a]"
    with pytest.raises(AssignError, match=r"'b' \(stream 1\) and 'c' \(stream 2\) must share a stream") as error:
        apply(text, [("manual", 1, "a", "b"), ("manual", 2, "c")])
    assert error.value.where == "node 'c'"
    assert error.value.fix


def test_equal_manual_ids_and_manual_ids_of_different_groups_are_fine():
    text = "a:MatMul[_class=loc:@x]; b:MatMul[_class=loc:@x]; c:MatMul[_class=loc:@y]; d:MatMul[_class=loc:@y]"
    _, after, remarks = apply(text, [("manual", 1, "a", "b"), ("manual", 2, "d"), ("regex", 3, "c")])
    assert after.ids.tolist() == [1, 1, 2, 2]
    assert len(remarks) == 1


def test_host_nodes_link_a_group_but_get_and_give_no_id():
    text = "h:StringJoin[_class=loc:@x] host; a:MatMul[_class=loc:@h]; b:MatMul[_class=loc:@x]"
    flat, after, _ = apply(text, [("manual", 7, "h"), ("manual", 1, "a")])
    assert by_name(flat, after.ids) == {"h": 7, "a": 1, "b": 1}


def test_a_group_that_nobody_claims_stays_free():
    _, after, remarks = apply("a:MatMul[_class=loc:@b]; b:MatMul; c:MatMul", [("branch", 1, "c")])
    assert after.ids.tolist() == [-1, -1, 1]
    assert remarks == ()
    _, after, _ = apply("a:MatMul[_class=loc:@b]; b:MatMul", [])
    assert after.ids.tolist() == [-1, -1]


def test_what_only_followed_its_neighbours_moves_without_a_remark():
    _, after, remarks = apply("a:MatMul[_class=loc:@b]; b:MatMul", [("branch", 1, "a"), ("propagate", 2, "b")])
    assert after.ids.tolist() == [1, 1]
    assert remarks == ()


def test_applying_it_twice_changes_nothing():
    text = "w:Const; a:MatMul(w)[_class=loc:@w]; b:MatMul(w)[_class=loc:@w]; " + HANDLES
    flat, once, _ = apply(text, [("branch", 3, "b"), ("branch", 1, "u"), ("branch", 2, "r")])
    twice, remarks = Colocation().apply(RuleContext(flat, parse(text)[1], 8), once)
    assert np.array_equal(once.ids, twice.ids)
    assert remarks == ()


def test_options_in_yaml():
    rules = parse_rules("version: 1\nrules: [colocation, colocation: {handles: false}]", "f").rules
    assert rules == (Colocation(True), Colocation(False))


RACING = {
    "an array": "t:TensorArrayV3[dtype=float32]; one:VendorPush(t); two:VendorPush(t); flow:Relu(t:1)",
    "two handles of one variable": """
        v:VarHandleOp[dtype=float32,shared_name=v]; w:VarHandleOp[dtype=float32,shared_name=v]
        one:AssignVariableOp(v,x)[dtype=float32]; two:ReadVariableOp(w)[dtype=float32]; x:MatMul; flow:Relu(x)
    """,
}
ORDERED = {
    "by a control edge": "t:TensorArrayV3[dtype=float32]; one:VendorPush(t); two:VendorPush(t,^one)",
    "by what one gives the other": "t:TensorArrayV3[dtype=float32]; one:VendorPush(t); two:VendorPush(t,one)",
    "by a path": "t:TensorArrayV3[dtype=float32]; one:VendorPush(t); mid:Relu(one); two:VendorPush(t,^mid)",
    "readers": """
        v:VarHandleOp[dtype=float32,shared_name=v]; w:VarHandleOp[dtype=float32,shared_name=v]
        one:ReadVariableOp(v)[dtype=float32]; two:ReadVariableOp(w)[dtype=float32]
    """,
}


@pytest.mark.parametrize("graph", RACING.values(), ids=RACING)
def test_what_writes_state_shares_a_stream_with_users_that_nothing_orders(graph):
    """Found by random graphs: a fresh assignment put them on several streams, which `check` calls a race (MS010)."""
    flat, after, _ = apply(graph, [("branch", 2, "one"), ("branch", 3, "two"), ("branch", 4, "flow")])
    ids = by_name(flat, after.ids)
    assert (ids["one"], ids["two"]) == (2, 2)
    assert ids["flow"] == 4, "it uses a number that the array gives, not the array"


@pytest.mark.parametrize("graph", ORDERED.values(), ids=ORDERED)
def test_users_of_one_state_stay_apart_where_nothing_can_race(graph):
    flat, after, _ = apply(graph, [("branch", 2, "one"), ("branch", 3, "two")])
    assert by_name(flat, after.ids)["two"] == 3


def test_users_that_edges_chain_are_not_searched_for_paths(monkeypatch):
    """A model has thousands of TensorArrays, whose flow orders their users."""
    monkeypatch.setattr(colocation, "unordered", lambda *arguments: pytest.fail("they were searched"))
    chain = "t:TensorArrayV3[dtype=float32]; one:VendorPush(t); two:VendorPush(t,one); three:VendorPush(t,^two)"
    flat, after, _ = apply(chain, [("branch", 2, "one"), ("branch", 3, "two"), ("branch", 4, "three")])
    ids = by_name(flat, after.ids)
    assert [ids[name] for name in ("one", "two", "three")] == [2, 3, 4]
