import numpy as np
import pytest

from msplit.core.graph import Assignment
from msplit.errors import RulesError
from msplit.rules import parse as parse_rules
from msplit.rules.base import RuleContext
from msplit.rules.embedding import Embedding
from tests.graphs import by_name, nodes, parse


def column(name, lookup=2, dense=10, rows=1000):
    return f"""
    {name}/ids:Placeholder; {name}/table:Const[value={rows}x32]; {name}/read:Identity({name}/table)
    {name}/lookup:GatherV2({name}/read,{name}/ids)@{lookup}us; {name}/dense:MatMul({name}/lookup)@{dense}us
    """


def model(*columns):
    names = [line.split("/")[0].strip() for text in columns for line in text.split("\n")[1:2]]
    joined = ",".join(f"{name}/dense" for name in names)
    return "".join(columns) + f"join:ConcatV2({joined})@3us; top:MatMul(join)@9us"


def apply(text, streams=2, rule=None, claims=(), **named):
    flat, costs = parse(text, **named)
    assignment = Assignment.empty(len(flat))
    for stream, *names in claims:
        assignment = assignment.claim(nodes(flat, *names), stream, "regex", "test")
    after, remarks = (rule or Embedding()).apply(RuleContext(flat, costs, streams), assignment)
    return flat, after, by_name(flat, after.ids), remarks


def test_columns_are_packed_whole_longest_first():
    text = model(column("a", dense=10), column("b", dense=30), column("c", dense=12), column("d", dense=9))
    flat, after, ids, remarks = apply(text, rule=Embedding(balance="cost"))
    assert [ids[f"{name}/lookup"] for name in "abcd"] == [1, 0, 1, 1]
    for name in "abcd":
        assert len({ids[f"{name}/{part}"] for part in ("ids", "table", "read", "lookup", "dense")}) == 1
    assert ids["join"] == ids["top"] == -1
    assert remarks == ()
    assert after.why(flat.graph.index["a/dense"]) == ("embedding", "lookup of table 'a/table' (128.0 kB)")


def test_balance_may_be_bytes_cost_or_count():
    text = model(column("a", lookup=2, dense=25), column("b", lookup=3, dense=6), column("c", lookup=4, dense=6))
    moved = [0.0] * 17
    moved[3], moved[8], moved[13] = 1e3, 9e6, 2e3
    by_bytes = apply(text, bytes_=moved)[2]
    assert by_bytes["b/lookup"] != by_bytes["a/lookup"] == by_bytes["c/lookup"]
    by_cost = apply(text, rule=Embedding(balance="cost"), bytes_=moved)[2]
    assert by_cost["a/lookup"] != by_cost["b/lookup"] == by_cost["c/lookup"]
    by_count = apply(text, rule=Embedding(balance="count"), bytes_=moved)[2]
    assert [by_count[f"{name}/lookup"] for name in "abc"] == [0, 1, 0]


def test_stream_zero_may_be_left_out_and_the_number_of_streams_limited():
    text = model(*(column(name) for name in "abcd"))

    def used(**options):
        return {stream for stream in apply(text, streams=4, rule=Embedding(**options))[2].values() if stream >= 0}

    assert used() == {0, 1, 2, 3}
    assert used(include_zero=False) == {1, 2, 3}
    assert used(streams=2) == {0, 1}
    assert used(streams=2, include_zero=False) == {1, 2}


def test_no_more_streams_are_used_than_the_columns_are_worth():
    text = model(*(column(name, lookup=2, dense=1) for name in "abcd"))
    assert {s for s in apply(text, streams=4)[2].values() if s >= 0} == {0, 1}
    assert {s for s in apply(text, streams=4, rule=Embedding(min_cost_us=0))[2].values() if s >= 0} == {0, 1, 2, 3}
    _, after, _, remarks = apply(text, streams=4, rule=Embedding(min_cost_us=20))
    assert set(after.ids.tolist()) == {-1}
    assert [(r.kind, "less time than a wait" in r.text) for r in remarks] == [("no-gain", True)]


def test_one_stream_leaves_nothing_to_spread():
    for rule in (Embedding(), Embedding(include_zero=False)):
        _, after, _, remarks = apply(model(column("a"), column("b")), streams=1, rule=rule)
        assert set(after.ids.tolist()) == {-1}
        assert "only one stream" in remarks[0].text


def test_a_graph_without_lookups_says_so():
    _, after, _, remarks = apply("a:MatMul; b:Relu(a)")
    assert set(after.ids.tolist()) == {-1}
    assert [r.kind for r in remarks] == ["no-match"]


def test_a_single_column_is_left_to_other_rules():
    _, after, _, remarks = apply("t:Const[value=9x4]; g:GatherV2(t)@2us; x:MatMul@50us; j:AddV2(g,x)@50us")
    assert set(after.ids.tolist()) == {-1}
    assert "only one embedding column" in remarks[-1].text


def test_a_column_that_is_most_of_the_model_keeps_only_its_lookup():
    _flat, _after, ids, remarks = apply(model(column("a", dense=900), column("b", dense=20)))
    assert ids["a/lookup"] >= 0
    assert ids["a/dense"] == -1
    assert ids["b/dense"] == ids["b/lookup"] >= 0
    assert [(r.kind, r.where) for r in remarks] == [("dominant", "table 'a/table'")]


def test_a_lookup_that_was_claimed_keeps_its_column_together():
    text = model(column("a"), column("b"), column("c"))
    flat, after, ids, _ = apply(text, claims=[(1, "a/lookup")])
    assert ids["a/dense"] == ids["a/ids"] == 1
    assert ids["b/lookup"] == ids["c/lookup"] == 0
    assert after.why(flat.graph.index["a/lookup"])[0] == "regex"


def test_host_nodes_of_a_column_get_no_id():
    text = model(column("a"), column("b")).replace("a/ids:Placeholder", "a/ids:LookupTableFindV2 host")
    assert apply(text)[2]["a/ids"] == -1


def test_several_tables_of_one_column_are_counted():
    text = """
    t1:VarHandleOp[shape=900000x10,dtype=float32]; a:ResourceGather(t1)@9us; b:ResourceGather(t1)@9us; am:MatMul(a)@9us
    t2:VarHandleOp[shape=10x10,dtype=float32]; c:ResourceGather(t2)@9us; j:AddN(am,b,c)@99us
    """
    flat, after, ids, _ = apply(text)
    assert ids["a"] == ids["b"] == ids["t1"] == ids["am"] != ids["c"]
    assert after.why(flat.graph.index["a"]) == ("embedding", "lookup of table 't1' (36.0 MB)")
    text = text.replace("c:ResourceGather(t2)", "t3:Identity(t1); p:ConcatV2(t1,t2,t1); c:ResourceGather(p)")
    assert "2 tables" in apply(text + "; z:Const[value=2x2]; y:GatherV2(z)@9us; jj:AddV2(j,y)")[1].why(1)[1]


def test_equal_columns_are_dealt_in_the_order_of_what_joins_them():
    columns = [column(name) for name in "abcd"]
    first = apply(model(*columns))[2]
    # The same graph, written in another order and joined in the same.
    body = "".join(reversed(columns))
    second = apply(body + "join:ConcatV2(a/dense,b/dense,c/dense,d/dense)@3us; top:MatMul(join)@9us")[2]
    assert {name: first[name] for name in second} == second
    assert np.bincount([first[f"{name}/lookup"] for name in "abcd"]).tolist() == [2, 2]


def test_users_can_add_ops():
    rule = parse_rules(
        "version: 1\nrules: [embedding: {ops: {MyGather: 1}, balance: count, streams: 2, include_zero: false}]", "f"
    ).rules[0]
    assert rule == Embedding(balance="count", streams=2, include_zero=False, ops={"MyGather": 1})
    text = (
        "".join(f"{n}t:Const[value=9x9]; {n}i:Placeholder; {n}:MyGather({n}i,{n}t)@9us;" for n in "ab")
        + "j:AddV2(a,b)@3us"
    )
    _, _, ids, _ = apply(text, streams=3, rule=rule)
    assert {ids["a"], ids["b"]} == {1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{balance: size}", "embedding.balance is text 'size'"),
        ("{streams: -1}", "embedding.streams"),
        ("{include_zero: maybe}", "embedding.include_zero"),
        ("{min_cost_us: -1}", "embedding.min_cost_us"),
        ("{min_cost_us: cheap}", "embedding.min_cost_us"),
        ("{ops: [MyGather]}", "embedding.ops is a list"),
        ("{ops: {MyGather: first}}", "embedding.ops.MyGather"),
        ("{balanc: bytes}", "did you mean 'balance'"),
    ],
)
def test_mistakes_in_options_are_named(options, message):
    with pytest.raises(RulesError, match=message):
        parse_rules(f"version: 1\nrules: [embedding: {options}]", "f")
