from itertools import combinations

import networkx
import pytest
from hypothesis import given

from msplit.analysis.blocks import Blocks, Kernels
from msplit.analysis.branches import find
from msplit.analysis.width import level_width, max_antichain
from tests.analysis.test_blocks import graphs
from tests.graphs import build, parse
from tests.model_shapes import inception, lstm, mmoe


def both(graph, **named):
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    kernels = Kernels.of(flat, costs)
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
