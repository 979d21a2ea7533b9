import dataclasses

import pytest

from msplit.schedule.planfile import KernelGroup
from tests.checks.harness import found, plan_of, skipped
from tests.graphs import parse

GRAPH = (
    "x:Placeholder; a:MatMul(x)[_stream_id=1]; r:Relu(a)[_stream_id=1]; t:Tanh(r)[_stream_id=1]; b:MatMul(x); z:AddV2(t,b); "
    "s:StringJoin(x) host"
)
IDS = [0, 1, 1, 1, 0, 0, 0]


def with_groups(*groups, graph=GRAPH, ids=IDS):
    return dataclasses.replace(plan_of(graph, ids), groups=groups)


FUSED = KernelGroup("fused", ("r", "t"), 1)


def test_passes_where_all_nodes_of_a_group_are_on_its_stream():
    assert found(GRAPH, "MS021", plan=with_groups(FUSED, KernelGroup("grouped", ("b", "z", "s"), 0))) == []
    assert found(GRAPH, "MS021", plan=with_groups()) == []


@pytest.mark.parametrize("has", ["[_stream_id=0]", "[_stream_id=2]", ""])
def test_finds_a_node_whose_id_is_not_that_of_its_kernel(has):
    graph = GRAPH.replace("t:Tanh(r)[_stream_id=1]", f"t:Tanh(r){has}")
    stream = 2 if "2" in has else 0
    (one,) = found(graph, "MS021", plan=with_groups(FUSED))
    assert one.text == (
        f"node 't' is on stream {stream} on the graph, but the kernel that does the work of it (fused, of 2 nodes) runs on stream 1"
    )
    assert (one.nodes, one.count, one.file) == (("t",), 1, "plan.json")


def test_finds_a_whole_group_elsewhere_and_a_plan_that_contradicts_itself():
    (one,) = found(GRAPH.replace("=1]", "=2]"), "MS021", plan=with_groups(FUSED))
    assert one.text.startswith(
        "nodes 'r' and 't' are on stream 2 on the graph, but the kernel that does the work of them"
    )
    (one,) = found(GRAPH, "MS021", plan=with_groups(FUSED, ids=[0, 1, 1, 0, 0, 0, 0]))
    assert one.text.startswith("node 't' is on stream 0 in the order of the plan, but")


def test_a_graph_without_ids_is_held_against_the_plan_alone():
    bare = GRAPH.replace("[_stream_id=1]", "")
    assert found(bare, "MS021", plan=with_groups(FUSED, graph=bare)) == []
    assert len(found(bare, "MS021", plan=with_groups(FUSED, graph=bare, ids=[0, 1, 0, 1, 0, 0, 0]))) == 1


def test_host_nodes_have_no_stream_and_unknown_names_are_another_finding():
    host, unknown = KernelGroup("columns", ("s", "r", "t"), 1), KernelGroup("fused", ("r", "gone"), 1)
    plan = with_groups(host, unknown)
    assert parse(GRAPH)[0].host.any()
    assert found(GRAPH, "MS021", plan=plan) == []
    (one,) = found(GRAPH, "MS011", plan=plan)
    assert one.text == "the plan names node 'gone', which is not in the graph"


def test_says_what_it_needs():
    assert skipped(GRAPH, "MS021") == "no plan was given"
