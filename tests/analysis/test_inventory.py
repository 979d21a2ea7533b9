""""""

from dataclasses import replace
from itertools import combinations

import networkx
import pytest
from hypothesis import given

from msplit.analysis import inventory
from msplit.analysis.branches import Blocks, KernelGraph, find
from msplit.analysis.colocation import groups
from msplit.analysis.embeddings import columns
from msplit.analysis.inventory import level_width, max_antichain
from msplit.core.graph import Argument, Function, Graph, TensorValue
from tests.analysis.test_branches import graphs
from tests.graphs import build, parse
from tests.model_shapes import inception, lstm, mmoe


def test_ops_are_counted_by_side_costliest_first():
    found = inventory.op_counts(
        *parse("a:MatMul@5us; b:MatMul@6us; c:Relu@20us; d:Const; e:Const; f:StringJoin@3us host; g:Identity")
    )
    assert [(c.op, c.gpu, c.host, c.kernels, c.time_us) for c in found] == [
        ("Relu", 1, 0, 1, 20.0),
        ("MatMul", 2, 0, 2, 11.0),
        ("Const", 2, 0, 0, 0.0),
        ("Identity", 1, 0, 0, 0.0),
        ("StringJoin", 0, 1, 0, 0.0),
    ]


def test_parameters_are_constants_with_a_shape_and_variables_largest_first():
    value = TensorValue("int8", (3, 4), lambda: None)
    attrs = [
        {"value": TensorValue("float32", (), lambda: None)},
        {"value": value},
        {"shape": (10, 4), "dtype": "float32_ref"},
        {"shape": (None, 4), "dtype": "half"},
        {"shape": (2, 2), "dtype": "resource"},
        {"shape": (100,), "dtype": "bfloat16"},
        {"dtype": "float64"},
    ]
    flat, _ = parse(
        "s:Const; c:Const; v:VariableV2; u:VarHandleOp; r:VarHandleOp; b:VarHandleOp; n:VarHandleOp; m:MatMul",
        attrs=[*attrs, {}],
    )
    found = inventory.parameters(flat.graph)
    assert [(p.name, p.kind, p.dtype, p.shape, p.bytes) for p in found] == [
        ("b", "VarHandleOp", "bfloat16", (100,), 200),
        ("v", "VariableV2", "float32", (10, 4), 160),
        ("c", "Const", "int8", (3, 4), 12),
        ("u", "VarHandleOp", "half", None, 0),
        ("r", "VarHandleOp", "resource", (2, 2), 0),
        ("n", "VarHandleOp", "float64", None, 0),
    ]


def test_functions_are_counted_without_their_parameters():
    flat, _ = parse("a:MatMul")
    body, _ = parse("x:Placeholder; y:Relu(x); z:Relu(y)")
    small = Function("small", body.graph, (Argument("x", "float32", 0),), ())
    large = Function("large", body.graph, (), ())
    graph = replace(flat.graph, functions={"small": small, "large": large})
    assert isinstance(graph, Graph)
    found = inventory.functions(replace(flat.model, graph=graph))
    assert [(f.name, f.nodes) for f in found] == [("large", 3), ("small", 2)]


def test_regions_have_their_nodes_and_time():
    found = inventory.regions(
        *parse("a:MatMul@4us region=u; b:MatMul; c:MatMul@6us region=v; d:Relu@1us region=u; e:Print@9us region=u host")
    )
    assert [(size.region.name, size.nodes.tolist(), size.time_us) for size in found] == [
        ("u", [0, 3, 4], 5.0),
        ("v", [2], 6.0),
    ]


def test_groups_are_measured_largest_first():
    flat, _ = parse("a:MatMul; b:Relu[_class=loc:@a]; c:Relu; d:Relu[_class=loc:@e]; e:Relu; f:Relu[_class=loc:@e]")
    found = groups(flat)
    assert inventory.group_sizes(found).tolist() == [3, 2]
    assert [members.tolist() for members in found.members()] == [[0, 1], [3, 4, 5]]
    alone, _ = parse("a:MatMul")
    assert inventory.group_sizes(groups(alone)).tolist() == []
    assert groups(alone).members() == []


def test_tables_say_how_often_they_are_used():
    text = "t:Const[value=9x4]; a:GatherV2(t)@2us; b:GatherV2(t)@3us; u:Const[value=90x4]; c:GatherV2(u)@2us; j:AddN(a,b,c)@30us"
    found = inventory.table_uses(columns(*parse(text)))
    assert [(use.table.name, use.lookups, use.time_us) for use in found] == [("u", 1, 2.0), ("t", 2, 5.0)]


def both(graph, **named):
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    kernels = KernelGraph.of(flat, costs)
    return flat, level_width(kernels), max_antichain(find(Blocks.from_kernels(kernels)), **named)


def test_the_two_widths_differ_where_branches_have_different_depths():
    flat, level, antichain = both(
        "a:MatMul; b:Relu(a); c:MatMul(b); d:MatMul(a); e:MatMul(c); f:MatMul(c); g:AddN(d,e,f)"
    )
    assert (level.width, level.level, level.levels) == (2, 1, 5)
    assert [flat.graph.names[node] for node in level.nodes] == ["b", "d"]
    assert antichain.size == 3
    assert [flat.graph.names[node] for node in antichain.nodes] == ["d", "e", "f"]


@pytest.mark.parametrize(
    ("graph", "size"), [(mmoe(16), 18), (inception(modules=3), 4), ("a:MatMul; b:Relu(a)", 1), ("a:Const", 0)]
)
def test_known_shapes(graph, size):
    assert both(graph)[2].size == size


def test_beyond_the_limit_it_says_that_it_was_skipped():
    _, level, antichain = both(lstm(layers=3, steps=5), limit=10)
    assert level.width >= 3
    assert antichain.size is None
    assert len(antichain.nodes) == 0
    assert "more than 10" in antichain.skipped


@given(graphs())
def test_agrees_with_brute_force(data):
    count, found, times = data
    _flat, level, antichain = both(build([f"n{i}" for i in range(count)], ["MatMul"] * count, found, times))
    graph = networkx.DiGraph([(s, d) for s, _, d, _ in found])
    graph.add_nodes_from(range(count))
    closure = networkx.transitive_closure_dag(graph)
    real = [node for node in range(count) if times[node] > 0]
    nodes = antichain.nodes.tolist()
    assert antichain.size == len(nodes)
    assert set(nodes) <= set(real)
    assert not any(closure.has_edge(u, v) or closure.has_edge(v, u) for u, v in combinations(nodes, 2))
    matching = networkx.bipartite.hopcroft_karp_matching(
        networkx.Graph([(("out", u), ("in", v)) for u, v in closure.edges if u in real and v in real]),
        [("out", u) for u in real if any(v in real for v in closure[u])],
    )
    assert antichain.size == len(real) - len(matching) // 2
    assert level.width <= antichain.size
    depth = {}
    for node in networkx.topological_sort(graph):
        depth[node] = max((depth[u] + (times[u] > 0) for u in graph.predecessors(node)), default=0)
    on_level = [depth[node] for node in real]
    assert level.width == max((on_level.count(d) for d in on_level), default=0)
    assert level.levels == len(set(on_level))
