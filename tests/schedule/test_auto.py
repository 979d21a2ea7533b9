"""The rule `auto` on flat graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.core.graph import UNASSIGNED, Assignment
from msplit.errors import RulesError
from msplit.flatten.flat import FlatGraph
from msplit.rules import ruleset
from msplit.rules.auto import Auto
from msplit.rules.base import Remark, RuleContext
from msplit.rules.ruleset import assign, verify
from msplit.schedule.choose import choose
from msplit.schedule.judge import predict
from msplit.schedule.plan import make_plan
from msplit.schedule.plan_check import check
from msplit.schedule.simulate import evaluate, node_order
from tests.campaign import CAMPAIGN
from tests.graphs import by_name, parse
from tests.schedule.large import seconds

THREE = "x:Placeholder; a:MatMul(x)@30us; b:MatMul(x)@30us; c:MatMul(x)@30us; j:AddN(a,b,c)@2us; y:Identity(j)"


def run(
    text: str, rule: Auto | None = None, streams: int = 4, start: Assignment | None = None
) -> tuple[FlatGraph, Assignment, tuple[Remark, ...]]:
    flat, costs = parse(text)
    rule = rule or Auto()
    context = RuleContext(flat, costs, streams)
    before = start or Assignment.empty(len(flat))
    after, remarks = rule.apply(context, before)
    verify(before, after, rule, context)
    return flat, after, remarks


def test_independent_branches_get_a_stream_each():
    flat, found, remarks = run(THREE)
    ids = by_name(flat, found.ids)
    assert sorted([ids["a"], ids["b"], ids["c"]]) == [0, 1, 2]
    assert remarks == ()
    rule, why = found.why(flat.graph.index["a"]) or ("", "")
    assert rule == "auto"
    assert "µs on 3 streams with 2 waits, 98 µs on one" in why


def test_what_is_left_over_stays_where_nothing_is_gained():
    text = "x:Placeholder; a:MatMul(x)@30us; b:MatMul(a)@10us; c:MatMul(b)@10us"
    flat, _ = parse(text)
    start = Assignment.empty(len(flat)).claim(np.asarray([flat.graph.index["a"]], np.int32), 1, "regex", "a")
    flat, found, remarks = run(text, start=start)
    assert by_name(flat, found.ids)["a"] == 1
    (remark,) = remarks
    assert (remark.kind, "what earlier rules left over stays on stream 0" in remark.text) == ("no-gain", True)


def test_every_node_has_an_id_but_host_nodes():
    flat, found, _ = run(THREE + "; s:LookupTableFindV2 host; w:Const; k:MatMul(s,w)@3us; r:Reshape(k); n:NoOp")
    for name, stream in by_name(flat, found.ids).items():
        assert (stream == UNASSIGNED) == (name == "s")


def test_nodes_that_launch_nothing_follow_their_inputs_or_consumers():
    flat, found, _ = run(
        "x:Placeholder; w:Const; a:MatMul(x,w)@30us; v:Const; b:MatMul(x,v)@30us; r:Reshape(b); s:Identity(r)"
    )
    ids = by_name(flat, found.ids)
    assert ids["w"] == ids["a"] != ids["b"] == ids["v"] == ids["r"] == ids["s"]


def test_one_stream_is_kept_where_nothing_is_gained():
    flat, found, remarks = run("x:Placeholder; a:Relu(x)@10us; b:Relu(a)@10us; c:Relu(b)@10us")
    assert set(found.ids.tolist()) == {0}
    assert [remark.kind for remark in remarks] == ["no-gain"]
    assert "30 µs" in remarks[0].text
    assert found.why(flat.graph.index["a"]) == ("auto", "no assignment to more streams is faster in the simulator")


def test_a_graph_without_kernels_is_left_alone():
    _, found, remarks = run("x:Placeholder; y:Identity(x)")
    assert (found.ids == UNASSIGNED).all()
    assert remarks[0].text == "no node launches a kernel"


def test_what_earlier_rules_claimed_stays_and_counts():
    flat, _ = parse(THREE)
    index = flat.graph.index
    start = Assignment.empty(len(flat)).claim(np.asarray([index["a"], index["b"]]), 2, "manual", "on the graph")
    _, found, _ = run(THREE, start=start)
    ids = by_name(flat, found.ids)
    assert ids["a"] == ids["b"] == 2
    assert ids["c"] != 2
    assert found.why(index["a"]) == ("manual", "on the graph")


def test_regions_and_colocation_classes_stay_together():
    text = (
        "x:Placeholder; a:MatMul(x)@30us region=loop; b:MatMul(x)@30us region=loop; "
        "c:MatMul(x)@30us; d:MatMul(x)@30us[_class=loc:@c]; e:MatMul(x)@30us"
    )
    flat, found, _ = run(text, streams=8)
    ids = by_name(flat, found.ids)
    assert ids["a"] == ids["b"]
    assert ids["c"] == ids["d"]
    assert len({ids["a"], ids["c"], ids["e"]}) == 3


LSTMS = "; ".join(
    f"h{n}:VarHandleOp; r{n}:ReadVariableOp(h{n}); v{n}:ReverseV2(x)@2us; w{n}:While(v{n},h{n})@1000us"
    for n in range(6)
)


def test_a_loop_stays_where_it_was_put_though_its_variable_comes_before_everything():
    """The handle of a variable launches nothing and has no inputs: what is tied to it does not follow it to stream 0."""
    flat, costs = parse(f"x:Placeholder; {LSTMS}; y:ConcatV2({','.join(f'w{n}' for n in range(6))})@2us")
    outcome = assign(flat, costs, ruleset.load("auto"), streams=16)
    ids = by_name(flat, outcome.ids)
    assert len({ids[f"w{n}"] for n in range(6)}) == 6
    assert all(ids[f"w{n}"] == ids[f"h{n}"] == ids[f"r{n}"] for n in range(6))
    assert predict(flat, costs, outcome.ids).gain > 4
    assert [remark.kind for remark in outcome.remarks if remark.rule == "colocation"] == []


@st.composite
def tied_graphs(draw):
    """Graphs as text, with colocation classes, loops, variables and their readers, host nodes, kernels of any time, and ids from hand."""
    lines, made = ["x:Placeholder"], ["x"]
    variables = [f"var{number}" for number in range(draw(st.integers(0, 2)))]
    lines += [f"{name}:VarHandleOp" for name in variables]
    for number in range(draw(st.integers(1, 14))):
        op, time = draw(st.sampled_from((("MatMul", 30), ("Relu", 2), ("Identity", 0), ("While", 200), ("NoOp", 0))))
        inputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
        if variables and draw(st.integers(0, 2)) == 0:
            inputs.append(draw(st.sampled_from(variables)))
        kind = draw(st.integers(0, 8))
        attrs = {
            0: f"[_class=loc:@{draw(st.sampled_from([*made, 'gone']))}]",
            1: "[_stream_id=1]",
            2: " region=loop",
            3: " host",
        }
        lines.append(f"n{number}:{op}({','.join(inputs)})@{time}us{attrs.get(kind, '')}")
        made.append(f"n{number}")
    return "; ".join(lines)


@given(
    text=tied_graphs(),
    streams=st.integers(1, 5),
    first=st.sampled_from(
        ("", "manual, ", "manual, branch: {min_cost_us: 50}, ", 'regex: {patterns: {1: "n[135]"}}, ')
    ),
    handles=st.booleans(),
    late=st.sampled_from(("", ", branch", ", embedding")),
)
def test_what_comes_later_leaves_its_ids_alone(text, streams, first, handles, late):
    flat, costs = parse(text)
    decided = {}

    class Watched(Auto):
        def apply(self, context, assignment):
            after, remarks = super().apply(context, assignment)
            decided["ids"] = after.ids
            return after, remarks

    kept = f"colocation: {{handles: {str(handles).lower()}}}"
    rules = ruleset.parse(f"version: 1\nstreams: 5\nrules: [{first}auto{late}, {kept}, propagate]\n", "r.yaml")
    rules = replace(rules, rules=tuple(Watched() if isinstance(rule, Auto) else rule for rule in rules.rules))
    outcome = assign(flat, costs, rules, streams=max(streams, 2))
    claimed = decided["ids"] != UNASSIGNED
    assert np.array_equal(outcome.ids[claimed], decided["ids"][claimed])
    if ((costs.time_us > 0) & ~flat.host).any():
        assert (claimed | flat.host).all()


def test_options_limit_streams_and_algorithms():
    branches = "; ".join(f"b{number}:MatMul(x)@30us" for number in range(8))
    _, found, _ = run(f"x:Placeholder; {branches}", Auto(streams=2), streams=8)
    assert set(found.ids.tolist()) == {0, 1}
    _, found, _ = run(THREE, Auto(candidates=("opara",)))
    assert "opara" in found.reasons[0][1]


def test_dear_waits_keep_short_branches_together():
    text = "x:Placeholder; p:Relu(x)@2us; a:Relu(p)@4us; b:Relu(p)@4us; j:AddV2(a,b)@2us"
    assert len(set(run(text, Auto(wait_us=0.1))[1].ids.tolist())) == 2
    assert len(set(run(text, Auto(wait_us=5.0))[1].ids.tolist())) == 1


RULES = "version: 1\nstreams: 8\nrules:\n  - auto: {options}\n"


def test_rules_files_name_it():
    rules = ruleset.parse(RULES.replace("{options}", "{streams: 3, candidates: [opara, ios], wait_us: 2.5}"), "r.yaml")
    assert rules.rules == (Auto(3, ("opara", "ios"), 2.5),)
    flat, costs = parse(THREE)
    ids = by_name(flat, assign(flat, costs, ruleset.parse(RULES.replace("{options}", "{}"), "r.yaml")).ids)
    assert len({ids["a"], ids["b"], ids["c"]}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{candidates: [opra]}", "did you mean 'opara'"),
        ("{wait_us: -1}", "wait_us"),
        ("{streams: many}", "streams"),
        ("{stream: 3}", "did you mean 'streams'"),
    ],
)
def test_mistakes_in_options_are_named_with_their_line(options, message):
    with pytest.raises(RulesError, match=message) as caught:
        ruleset.parse(RULES.replace("{options}", options), "r.yaml")
    assert "r.yaml:4" in str(caught.value)


def test_the_order_of_the_file_does_not_matter():
    results = []
    for parts in (THREE.split("; "), THREE.split("; ")[::-1]):
        flat, found, _ = run("; ".join(parts))
        results.append(by_name(flat, found.ids))
    assert results[0] == results[1]


def test_the_plan_of_the_chosen_streams_is_proved_on_the_whole_graph():
    flat, costs = parse(THREE + "; w:Const; k:MatMul(y,w)@4us; l:MatMul(x,w)@9us; m:AddV2(k,l)@1us")
    rule, context = Auto(), RuleContext(flat, costs, 4)
    problem = rule.problem(context, Assignment.empty(len(flat)))
    dag = Dag.from_graph(flat.graph)
    for candidate in choose(problem, 4):
        if candidate.skipped is None:
            order = node_order(problem, evaluate(problem, candidate.stream).order, dag)
            plan = make_plan(dag, problem.spread(candidate.stream), order)
            assert check(plan, dag) == []
            assert plan.waits == candidate.waits


@pytest.mark.slow
def test_very_many_nodes_take_seconds_and_time_grows_with_their_number():
    nodes = 100_000 if CAMPAIGN else 12_000
    some, many = seconds(nodes // 4, nodes)
    # 100,000 take 11 s of processor time beside other work, 8 on a quiet core.
    assert many < 45 * nodes / 100_000
    assert many < 8 * some
