""""""

import itertools

import networkx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit.analysis.branches import Blocks, KernelGraph, find
from msplit.analysis.inventory import branches_that_matter
from msplit.analysis.order import canonical
from tests.graphs import build, parse
from tests.model_shapes import inception, lstm


def contracted(text):
    kernels = KernelGraph.of(*parse(text))
    return kernels, Blocks.from_kernels(kernels)


def names(flat_text, numbers):
    flat, _ = parse(flat_text)
    return [flat.graph.names[node] for node in numbers]


def edges(dag, label):
    return {(label[u], label[v]) for u, v in zip(dag.src.tolist(), dag.dst().tolist(), strict=True)}


def test_nodes_that_launch_nothing_are_bypassed():
    text = "w:Const; r:Identity(w); x:Placeholder; a:MatMul(x,r); i:Reshape(a); b:Relu(i); h:StringJoin(b)@5us host; c:Relu(h)"
    kernels, _ = contracted(text)
    label = names(text, kernels.node)
    assert label == ["a", "b", "c"]
    assert edges(kernels.dag, label) == {("a", "b"), ("b", "c")}


def test_chains_become_one_block_with_the_sum_of_their_times():
    kernels, blocks = contracted(
        "a:MatMul@2us; b:Relu(a)@3us; c:MatMul(b)@4us; d:MatMul(b)@5us; e:Relu(d)@6us; f:AddV2(c,e)@7us"
    )
    assert blocks.time_us.tolist() == [5.0, 4.0, 11.0, 7.0]
    assert edges(blocks.dag, range(4)) == {(0, 1), (0, 2), (1, 3), (2, 3)}
    assert blocks.finish_us.tolist() == [5.0, 9.0, 16.0, 23.0]
    assert blocks.rank_us.tolist() == [23.0, 11.0, 18.0, 7.0]
    assert [kernels.node[k] for k in (*blocks.first, *blocks.last)] == [0, 2, 3, 5, 1, 2, 4, 5]


def test_groups_of_control_inputs_do_not_multiply_edges():
    sources = ";".join(f"s{i}:MatMul" for i in range(100))
    sinks = ";".join(f"t{i}:MatMul(^n)" for i in range(100))
    kernels, _ = contracted(f"{sources}; n:NoOp({','.join(f'^s{i}' for i in range(100))}); {sinks}")
    assert len(kernels) == 201
    assert len(kernels.dag.src) == 200
    assert kernels.time_us.sum() == 200


def test_useful_time_is_what_a_like_block_could_use():
    flat, costs = parse("a:MatMul@10us; b:MatMul@10us; c:MatMul@10us", share=[0.2, 0.75, 1.0])
    assert Blocks.from_kernels(KernelGraph.of(flat, costs)).useful_us.tolist() == [10.0, 5.0, 0.0]


def test_long_chains_need_no_recursion():
    count = 100_000
    flat, costs = build(
        [f"n{i}" for i in range(count)], ["Relu"] * count, [(i, 0, i + 1, 0) for i in range(count - 1)], [1.0] * count
    )
    blocks = Blocks.from_kernels(KernelGraph.of(flat, costs))
    assert len(blocks) == 1
    assert blocks.time_us.tolist() == [count]


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 16))
    found = []
    for node in range(1, count):
        for slot, source in enumerate(draw(st.lists(st.integers(0, node - 1), max_size=4, unique=True))):
            found.append((source, 0, node, slot))
    times = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0]), min_size=count, max_size=count))
    return count, found, times


@given(graphs())
def test_who_waits_for_whom_stays_the_same(data):
    count, found, times = data
    flat, costs = build([f"n{i}" for i in range(count)], ["MatMul"] * count, found, times)
    full = networkx.DiGraph([(s, d) for s, _, d, _ in found])
    full.add_nodes_from(range(count))
    kernels = KernelGraph.of(flat, costs)
    blocks = Blocks.from_kernels(kernels)
    real = [k for k in range(len(kernels)) if kernels.time_us[k] > 0]
    assert sorted(kernels.node[real].tolist()) == [node for node in range(count) if times[node] > 0]
    for dag, of in ((kernels.dag, np.arange(len(kernels))), (blocks.dag, blocks.of)):
        assert np.all(dag.src < dag.dst())
        small = networkx.DiGraph(zip(dag.src.tolist(), dag.dst().tolist(), strict=True))
        small.add_nodes_from(range(len(dag)))
        for one in real:
            for other in real:
                if of[one] != of[other]:
                    before = networkx.has_path(full, int(kernels.node[one]), int(kernels.node[other]))
                    assert networkx.has_path(small, int(of[one]), int(of[other])) == before
    ends = [0.0] * count
    for node in range(count):
        ends[node] = times[node] + max((ends[s] for s, _, d, _ in found if d == node), default=0.0)
    assert blocks.finish_us.max(initial=0.0) == max(ends)
    assert blocks.time_us.sum() == sum(times)
    assert blocks.finish_us.max(initial=0.0) == blocks.rank_us.max(initial=0.0)


@given(graphs(), st.randoms(use_true_random=False))
def test_the_canonical_order_is_topological_and_the_same_for_a_reordered_file(data, random):
    count, found, times = data
    outputs = [node for node in range(count) if not any(s == node for s, *_ in found)]

    def order(place):
        back = np.argsort(place)
        flat, _ = build(
            [f"n{node}" for node in back],
            ["MatMul"] * count,
            [(place[s], p, place[d], k) for s, p, d, k in found],
            times,
            outputs=[place[node] for node in outputs],
        )
        return back[canonical(flat)].tolist()

    shuffled = list(range(count))
    random.shuffle(shuffled)
    first = order(list(range(count)))
    assert sorted(first) == list(range(count))
    assert all(first.index(s) < first.index(d) for s, _, d, _ in found)
    assert order(shuffled) == first


def test_nodes_that_no_output_needs_come_last():
    flat, _ = parse("a:MatMul; b:Relu(a); c:MatMul; d:Relu(c)", outputs=[3], targets=(1,))
    assert [flat.graph.names[node] for node in canonical(flat)] == ["a", "b", "c", "d"]
    flat, _ = parse("a:MatMul; b:Relu(a); c:MatMul; d:Relu(c); e:Relu(d)", outputs=[1, 4])
    assert [flat.graph.names[node] for node in canonical(flat)] == ["c", "d", "e", "a", "b"]
    flat, _ = parse("a:MatMul; b:Relu(a); c:MatMul", outputs=[2])
    assert [flat.graph.names[node] for node in canonical(flat)] == ["c", "a", "b"]


def branches_of(graph):
    flat, costs = parse(graph) if isinstance(graph, str) else graph
    return flat, find(Blocks.from_kernels(KernelGraph.of(flat, costs)))


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
