import json
import re
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from msplit import cost, rules
from msplit.core.dag import Dag
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.formats.summary import graph_hash
from msplit.schedule import planfile
from msplit.schedule.plan import make_plan, record_order
from msplit.schedule.plan_check import check
from tests.graphs import parse

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "plan.json").read_text("utf-8"))
FORK = "x:Placeholder; a:MatMul(x)@9us; b:MatMul(x)@8us; c:MatMul(b)@7us; j:AddV2(a,c)@2us"


def plan_of(flat, costs, ids):
    dag = Dag.from_graph(flat.graph)
    return make_plan(dag, np.where(costs.time_us > 0, ids, -1).astype(np.int32), record_order(dag, costs.time_us))


def fork():
    flat, costs = parse(FORK)
    return flat, plan_of(flat, costs, np.asarray([0, 0, 1, 1, 0], np.int32))


def text(data):
    return json.dumps(data)


def test_a_plan_comes_back_as_it_was():
    flat, plan = fork()
    found = planfile.parse(text(planfile.dump(plan, flat, made_for={"gpu": "h200", "batch": 2})), "p.json")
    again, unknown = found.on(flat)
    assert unknown == ()
    assert found.made_for == {"gpu": "h200", "batch": 2}
    for name in ("stream", "order", "wait_node", "wait_on", "fork", "join"):
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name), err_msg=name)
    assert (again.streams, again.edges, again.merged_waits) == (plan.streams, plan.edges, plan.merged_waits)
    assert planfile.dump(again, flat, made_for=found.made_for) == planfile.dump(plan, flat, made_for=found.made_for)


def test_the_order_of_kernels_comes_back_as_it_was():
    flat, plan = fork()
    kernels = [(1, 0, 0), (2, 0, 1), (3, 1, 1), (3, 0, 1), (4, 0, 0)]
    found = planfile.parse(text(planfile.dump(plan, flat, kernels=kernels)), "p.json")
    index = flat.graph.index
    assert [(index[name], number, lane) for name, number, lane in found.kernels] == kernels
    assert planfile.parse(text(planfile.dump(plan, flat)), "p.json").kernels == ()


def test_groups_come_back_as_they_were_without_host_nodes():
    flat, costs = parse(FORK + "; s:StringJoin(x) host")
    plan = plan_of(flat, costs, np.asarray([0, 0, 1, 1, 0, 0], np.int32))
    host = flat.graph.index["s"]
    groups = [("fused", (2, 3), 1), ("grouped", (4, host, 1), 0), ("library", (4, host), 0)]
    data = planfile.dump(plan, flat, groups=groups)
    assert planfile.parse(text(data), "p.json").groups == (
        planfile.KernelGroup("fused", ("b", "c"), 1),
        planfile.KernelGroup("grouped", ("j", "a"), 0),
    )
    Draft202012Validator(SCHEMA).validate(data)
    assert "groups" not in planfile.dump(plan, flat)
    assert planfile.parse(text(planfile.dump(plan, flat)), "p.json").groups == ()


def test_the_schema_describes_what_is_written_and_no_more():
    flat, plan = fork()
    data = planfile.dump(plan, flat, kernels=[(1, 0, 0), (2, 0, 1)], made_for={"gpu": "h200", "batch": 2})
    validator = Draft202012Validator(SCHEMA)
    validator.validate(data)
    assert set(SCHEMA["properties"]) == {*data, "groups"}
    assert SCHEMA["properties"]["groups"]["items"]["properties"]["kind"]["enum"] == list(planfile.KINDS)
    for change in ({"schema_version": 2}, {"kind": "profile"}, {"groups": [{"kind": "fused"}]}, {"strems": 2}):
        assert not validator.is_valid({**data, **change})


def test_a_plan_of_another_version_says_which():
    flat, plan = fork()
    with pytest.raises(MsplitError, match="the plan is not one of version 1, but of 2"):
        planfile.parse(text({**planfile.dump(plan, flat), "schema_version": 2, "lanes": []}), "p.json")


def test_a_plan_of_a_sample_is_proven_after_a_round_trip_and_knows_its_graph():
    flat = flatten(read("sample_graphs/mmoe_small.pb"))
    costs = cost.estimate(flat, cost.infer(flat))
    made = plan_of(flat, costs, rules.assign(flat, costs, rules.load("default")).ids)
    found = planfile.parse(text(planfile.dump(made, flat)), "p.json")
    assert found.graph_hash == graph_hash(flat.model)
    plan, unknown = found.on(flat)
    assert unknown == ()
    assert plan.waits > 0
    assert check(plan, Dag.from_graph(flat.graph)) == []


def test_names_that_the_graph_lacks_are_left_out_and_told():
    flat, plan = fork()
    found = planfile.parse(text(planfile.dump(plan, flat)), "p.json")
    other, _ = parse(FORK.replace("b:MatMul", "bb:MatMul").replace("(b)", "(bb)"))
    again, unknown = found.on(other)
    assert unknown == ("b",)
    assert again.stream[other.graph.index["bb"]] == -1
    assert "b" not in [other.graph.names[node] for node in (*again.order, *again.wait_node, *again.fork)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"order": [["a", 2]]}, "stream 2, but `streams` is 2"),
        ({"order": [["a", 0], ["a", 1]]}, "there twice"),
        ({"order": [["a", True]]}, "`order[0][1]` is not a whole number of 0 or more"),
        ({"order": {"a": 0}}, "not a list"),
        ({"waits": [["a"]]}, "`waits[0]` is not a list of 2"),
        ({"fork": [1]}, "`fork[0]` is not text"),
        ({"streams": -1}, "0 or more"),
        ({"streams": 10**9}, "at most"),
        ({"kind": "recipe"}, "not one of version 1"),
        ({"schema_version": 7}, "not one of version 1"),
        ({"strems": 2}, "no key 'strems'"),
        ({"made_for": 3}, "`made_for` is not an object"),
        ({"kernels": [["a", 0]]}, "`kernels[0]` is not a list of 3"),
        ({"kernels": [["a", 0, True]]}, "`kernels[0][2]` is not a whole number"),
        ({"kernels": [["a", 0, 2]]}, "`kernels[0]` is on stream 2, but `streams` is 2"),
        ({"kernels": [["a", -1, 0]]}, "`kernels[0][1]` is not a whole number of 0 or more"),
        ({"kernels": [["a", 0, 0], ["a", 0, 1]]}, "there twice"),
        ({"groups": {"fused": ["a", "b"]}}, "`groups` is not a list"),
        ({"groups": [["a", "b"]]}, "`groups[0]` is not an object"),
        ({"groups": [{"kind": "fused", "nodes": ["a"], "stream": 0}]}, "`groups[0].nodes` are not two or more"),
        ({"groups": [{"kind": "fused", "nodes": ["a", "b"]}]}, "`groups[0]` lacks the key 'stream'"),
        ({"groups": [{"kind": "fused", "nodes": ["a", "b", 3], "stream": 0}]}, "`groups[0].nodes[2]` is not text"),
        (
            {"groups": [{"kind": "fused", "nodes": ["a", "b"], "stream": True}]},
            "`groups[0].stream` is not a whole number",
        ),
        ({"groups": [{"kind": "fused", "nodes": ["a", "b"], "stream": 0, "size": 2}]}, "has no key 'size'"),
        (
            {"groups": [{"kind": "joined", "nodes": ["a", "b"], "stream": 0}]},
            "`groups[0].kind` is 'joined', not one of fused, grouped",
        ),
        ({"groups": [{"kind": "fused", "nodes": ["a", "b"], "stream": 2}]}, "on stream 2, but `streams` is 2"),
        ({"groups": [{"kind": "fused", "nodes": ["a", "b", "a"], "stream": 0}]}, "not two or more different nodes"),
    ],
)
def test_mistakes_are_named(change, why):
    flat, plan = fork()
    with pytest.raises(MsplitError, match=re.escape(why)) as error:
        planfile.parse(text({**planfile.dump(plan, flat), **change}), "p.json")
    assert error.value.where == "p.json"
    assert error.value.fix


@pytest.mark.parametrize("junk", ["", "{", "[]", "nul", "[" * 100_000, '{"streams": 1e999}'])
def test_junk_gives_one_clear_error(junk):
    with pytest.raises(MsplitError):
        planfile.parse(junk, "p.json")


def test_files_that_are_not_there_or_not_text_are_errors(tmp_path):
    with pytest.raises(MsplitError, match="can not be read"):
        planfile.load(tmp_path / "no.json")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(MsplitError, match="UTF-8"):
        planfile.load(tmp_path / "b.json")
