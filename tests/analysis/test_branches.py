import itertools

import numpy as np
from hypothesis import given

from msplit.analysis.blocks import Blocks, Kernels
from msplit.analysis.branches import find
from msplit.analysis.inventory import branches_that_matter
from tests.analysis.test_blocks import graphs
from tests.graphs import build, parse
from tests.model_shapes import inception, lstm


def branches_of(graph):
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    return flat, find(Blocks.from_kernels(Kernels.of(flat, costs)))


def paths(flat, branches):
    """Node names of each branch."""
    return [[flat.graph.names[node] for node in branches.nodes(branch)] for branch in range(len(branches))]


def test_the_costliest_way_continues_the_path():
    flat, branches = branches_of("s:MatMul@5us; a:MatMul(s)@9us; b:MatMul(s)@4us; c:Relu(b)@20us; j:AddV2(a,c)@2us")
    assert paths(flat, branches) == [["s", "b", "c", "j"], ["a"]]
    assert branches.time_us.tolist() == [31.0, 9.0]
    blocks, node = branches.blocks, branches.blocks.kernels.node
    assert (branches.fork[0], branches.join[0]) == (-1, -1)
    assert flat.graph.names[node[blocks.last[branches.fork[1]]]] == "s"
    assert flat.graph.names[node[blocks.first[branches.join[1]]]] == "j"


def test_a_path_that_ends_may_go_on_with_a_less_urgent_consumer():
    flat, branches = branches_of("a:MatMul@9us; b:MatMul@8us; j:AddV2(a,b)@50us; k:Relu(b)@3us; l:Relu(a)@2us")
    assert sorted(map(tuple, paths(flat, branches))) == [("a", "j"), ("b", "k"), ("l",)]


def test_rows_of_a_lattice_stay_whole():
    flat, branches = branches_of(lstm(layers=3, steps=12))
    long = [path for path in paths(flat, branches) if len(path) > 50]
    assert len(long) == 3
    for path in long[1:]:
        assert len({name.split("/")[0] for name in path}) == 1


def test_modules_leave_one_trunk():
    flat, branches = branches_of(inception(modules=5))
    trunk = max(paths(flat, branches), key=len)
    assert {"stem", "head", *(f"m{module}/concat" for module in range(5))} <= set(trunk)
    assert len(branches) == 1 + 5 * 3


@given(graphs())
def test_branches_are_paths_that_cover_every_block_once(data):
    count, found, times = data
    flat, costs = build([f"n{i}" for i in range(count)], ["MatMul"] * count, found, times)
    _, branches = branches_of((flat, costs))
    blocks = branches.blocks
    edges = set(zip(blocks.dag.src.tolist(), blocks.dag.dst().tolist(), strict=True))
    seen = []
    for branch in range(len(branches)):
        members = branches.members(branch).tolist()
        assert all(pair in edges for pair in itertools.pairwise(members))
        assert members[0] == branches.first[branch]
        assert members[-1] == branches.last[branch]
        seen += members
    assert sorted(seen) == list(range(len(blocks)))
    assert np.isclose(branches.time_us.sum(), sum(times))


def test_branches_that_matter_come_largest_first():
    flat, branches = branches_of(
        "s:MatMul@5us; a:MatMul(s)@9us; b:MatMul(s)@30us; c:MatMul(s)@12us; d:MatMul(s)@1us; j:AddN(a,b,c,d)@2us"
    )
    found = branches_that_matter(branches, min_cost_us=5.0)
    name = flat.graph.names
    assert [[name[node] for node in branch.nodes] for branch in found] == [["s", "b", "j"], ["c"], ["a"]]
    assert [branch.time_us for branch in found] == [37.0, 12.0, 9.0]
    assert (name[found[1].fork], name[found[1].join]) == ("s", "j")
    assert (found[0].fork, found[0].join) == (None, None)
    assert len(branches_that_matter(branches, most=2)) == 2


def test_an_empty_graph_has_no_branches():
    _, branches = branches_of("a:Const")
    assert len(branches) == 0
    assert branches_that_matter(branches) == ()
