import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.graph import Assignment
from msplit.rules import parse as parse_rules
from msplit.rules.base import RuleContext
from msplit.rules.branch import Branch
from tests.campaign import examples
from tests.graphs import build, by_name, nodes, parse
from tests.model_shapes import inception, lstm, mmoe, towers


def apply(graph, streams=4, claims=(), rule=None, **named):
    flat, costs = parse(graph, **named) if isinstance(graph, str) else graph
    assignment = Assignment.empty(len(flat))
    for stream, *names in claims:
        assignment = assignment.claim(nodes(flat, *names), stream, "regex", "test")
    after, remarks = (rule or Branch()).apply(RuleContext(flat, costs, streams), assignment)
    return flat, after, remarks


def streams_of(flat, after, prefix):
    """The set of streams of the kernels whose names start so."""
    return {int(after.ids[node]) for node, name in enumerate(flat.graph.names) if name.startswith(prefix)} - {-1}


FORK = "x:Placeholder; s:Conv2D(x)@9us; a:Conv2D(s)@10us; b:Conv2D(s)@30us; c:Conv2D(s)@12us; j:ConcatV2(a,b,c)@2us; o:MatMul(j)@5us"


def test_the_costliest_branch_stays_on_its_parents_stream():
    flat, after, remarks = apply(FORK)
    ids = by_name(flat, after.ids)
    assert ids["x"] == -1
    assert ids["s"] == ids["b"] == ids["j"] == ids["o"] == 0
    assert {ids["a"], ids["c"]} == {1, 2}
    assert remarks == ()
    assert after.why(flat.graph.index["c"]) == ("branch", "branch of 1 kernel, 12.0 µs from 's' to 'j'")
    assert after.why(flat.graph.index["b"]) == ("branch", "branch of 4 kernels, 46.0 µs")


def test_with_two_streams_the_lighter_branches_share_the_second():
    flat, after, _ = apply(FORK, streams=2)
    assert by_name(flat, after.ids) == {"x": -1, "s": 0, "a": 1, "b": 0, "c": 1, "j": 0, "o": 0}


def test_a_branch_cheaper_than_its_waits_stays_with_its_join():
    _flat, after, remarks = apply("s:Conv2D@9us; a:Conv2D(s)@3us; b:Conv2D(s)@30us; j:ConcatV2(a,b)@2us")
    assert set(after.ids.tolist()) == {0}
    assert after.why(1)[1] == "branch too cheap for a stream of its own: 1 kernel, 3.0 µs from 's' to 'j'"
    assert [(r.kind, "spreads nothing" in r.text) for r in remarks] == [("no-gain", True)]


def test_how_cheap_is_an_option():
    graph = "s:Conv2D@9us; a:Conv2D(s)@3us; b:Conv2D(s)@30us; j:ConcatV2(a,b)@2us"
    flat, after, _ = apply(graph, rule=Branch(min_cost_us=2.0))
    assert by_name(flat, after.ids) == {"s": 0, "a": 1, "b": 0, "j": 0}
    assert parse_rules("version: 1\nrules: [branch: {min_cost_us: 2.5}]", "f").rules == (Branch(2.5),)


def test_many_cheap_branches_are_bundled():
    branches = "".join(f"b{i}:Relu(s)@2us;" for i in range(20))
    joined = ",".join(f"b{i}" for i in range(20))
    flat, after, _ = apply(f"s:Conv2D@9us; m:Conv2D(s)@20us; {branches} j:ConcatV2(m,{joined})@2us", streams=3)
    ids = by_name(flat, after.ids)
    assert ids["s"] == ids["m"] == ids["j"] == 0
    loads = [sum(ids[f"b{i}"] == stream for i in range(20)) for stream in range(3)]
    assert sum(loads) == 20
    assert loads[1] >= 6
    assert loads[2] >= 6


def test_without_a_least_cost_every_branch_counts():
    _flat, after, _ = apply(
        "s:Conv2D@1us; a:Relu(s)@1us; b:Relu(s)@1us; c:Relu(s)@1us; j:AddN(a,b,c)@1us", rule=Branch(0.0)
    )
    assert len(set(after.ids[1:4].tolist())) == 3


def test_kernels_that_fill_the_gpu_are_not_spread():
    _, after, remarks = apply(FORK, share=1.0)
    assert set(after.ids.tolist()) == {-1, 0}
    assert [r.kind for r in remarks] == ["no-gain"]


def test_a_chain_says_that_streams_can_not_help():
    _, after, remarks = apply("a:MatMul@9us; b:Relu(a)@9us; c:MatMul(b)@9us")
    assert after.ids.tolist() == [0, 0, 0]
    assert "one path" in remarks[0].text


def test_branches_that_never_run_beside_each_other_stay_on_one_stream():
    _flat, after, remarks = apply("a:MatMul@10us; b:MatMul(a)@10us; c:MatMul(b)@9us; d:MatMul(c,a)@1us")
    assert set(after.ids.tolist()) == {0}
    assert len(remarks) == 1


def test_one_stream_needs_no_remark():
    _, after, remarks = apply(FORK, streams=1)
    assert set(after.ids.tolist()) == {-1, 0}
    assert remarks == ()


def test_a_graph_without_kernels_is_left_alone():
    _, after, remarks = apply("a:Const; b:Identity(a); h:StringJoin host")
    assert after.ids.tolist() == [-1, -1, -1]
    assert [r.kind for r in remarks] == ["no-gain"]


def test_host_nodes_and_what_launches_nothing_get_no_id():
    flat, after, _ = apply(
        "h:ParseExampleV2@9us host; a:MatMul(h)@9us; r:Reshape(a); b:MatMul(r)@9us; c:MatMul(h)@20us"
    )
    ids = by_name(flat, after.ids)
    assert (ids["h"], ids["r"]) == (-1, -1)
    assert ids["a"] == ids["b"] != ids["c"]


def test_claims_of_earlier_rules_stand_and_their_branches_follow():
    flat, after, _ = apply(FORK + "; o2:Relu(o)@3us", claims=[(3, "a"), (2, "s"), (1, "j")])
    ids = by_name(flat, after.ids)
    assert (ids["a"], ids["s"], ids["j"]) == (3, 2, 1)
    assert (ids["b"], ids["o"], ids["o2"]) == (2, 1, 1)
    assert after.why(flat.graph.index["o"])[1].endswith("follows its claimed part")


def test_what_stands_before_a_claimed_node_follows_it_too():
    flat, after, _ = apply("a:MatMul@9us; b:Relu(a)@9us; c:Relu(b)@9us; d:MatMul@5us", claims=[(3, "b")])
    assert by_name(flat, after.ids) == {"a": 3, "b": 3, "c": 3, "d": 0}


def test_claimed_work_counts_as_load():
    graph = "a:MatMul@50us; b:MatMul@20us; c:MatMul@20us; j:AddN(a,b,c)@1us"
    flat, after, _ = apply(graph, streams=2, claims=[(0, "a")])
    assert by_name(flat, after.ids) == {"a": 0, "b": 1, "c": 1, "j": 0}


def test_cheap_branches_that_only_have_each_other_stay_together():
    _, after, _ = apply("a:MatMul@1us; b:MatMul@1us; c:AddV2(a,b)@1us; d:Relu(a)@1us; e:Relu(b)@1us")
    assert set(after.ids.tolist()) == {0}


def test_joints_do_not_multiply_edges():
    sources = ";".join(f"s{i}:MatMul@9us" for i in range(40))
    sinks = ";".join(f"t{i}:MatMul(^n)@9us" for i in range(40))
    flat, after, _ = apply(f"{sources}; n:NoOp({','.join(f'^s{i}' for i in range(40))}); {sinks}", streams=4)
    for prefix in "st":
        loads = np.bincount(after.ids[[n for n, name in enumerate(flat.graph.names) if name.startswith(prefix)]])
        assert loads.tolist() == [10, 10, 10, 10]
    assert after.ids[flat.graph.index["n"]] == -1


def test_a_joint_may_be_a_branch_of_its_own():
    count = range(6)
    text = "; ".join(
        f"p{i}:MatMul@9us; x{i}:MatMul(p{i})@90us; z{i}:MatMul@30us; y{i}:AddV2(z{i},^n)@5us" for i in count
    )
    flat, after, _ = apply(f"{text}; n:NoOp({','.join(f'^p{i}' for i in count)})")
    ids = by_name(flat, after.ids)
    assert ids["n"] == -1
    assert all(ids[f"z{i}"] == ids[f"y{i}"] for i in count)


def test_a_graph_that_earlier_rules_put_on_one_stream_says_so():
    _, after, remarks = apply("a:MatMul@20us; b:MatMul@20us; c:Relu(a)@3us", claims=[(1, "a", "b")])
    assert after.ids.tolist() == [1, 1, 1]
    assert "earlier rules" in remarks[0].text


def test_loads_are_balanced_over_thousands_of_different_times():
    count = 6000
    names = [f"n{i}" for i in range(count)]
    times = [10 + i * 0.001 for i in range(count)]
    flat, costs = build(
        [*names, "j"], ["MatMul"] * (count + 1), [(i, 0, count, i) for i in range(count)], [*times, 1.0]
    )
    _, after, _ = apply((flat, costs), streams=4)
    loads = np.bincount(after.ids, costs.time_us)
    assert loads.max() - loads.min() < 30


def test_experts_spread_evenly():
    flat, after, _ = apply(mmoe(16), streams=4)
    used = [streams_of(flat, after, f"e{expert}/") for expert in range(16)]
    assert all(len(streams) == 1 for streams in used)
    assert sorted(stream for (stream,) in used) == sorted([0, 1, 2, 3] * 4)


def test_towers_spread_evenly():
    flat, after, _ = apply(towers(40), streams=8)
    used = [streams_of(flat, after, f"t{tower}/") for tower in range(40)]
    assert all(len(streams) == 1 for streams in used)
    assert sorted(stream for (stream,) in used) == sorted(list(range(8)) * 5)


def test_every_inception_module_uses_all_streams():
    flat, after, _ = apply(inception(modules=6), streams=4)
    for module in range(6):
        branches = [streams_of(flat, after, f"m{module}/b{branch}/") for branch in range(4)]
        assert set().union(*branches) == {0, 1, 2, 3}
        assert streams_of(flat, after, f"m{module}/concat") == {0}


def test_an_unrolled_lstm_gets_a_stream_per_layer():
    flat, after, _ = apply(lstm(layers=5, steps=20), streams=5)
    homes = []
    for layer in range(5):
        kernels = [
            n for n, name in enumerate(flat.graph.names) if name.startswith(f"layer_{layer}/") and after.ids[n] >= 0
        ]
        counts = np.bincount(after.ids[kernels])
        homes.append(int(counts.argmax()))
        # The last step of all layers is the end of the longest path, which is one branch.
        assert counts.max() >= len(kernels) * 19 / 20
    assert sorted(homes) == [0, 1, 2, 3, 4]


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 30))
    edges = []
    for node in range(1, count):
        for slot, source in enumerate(draw(st.lists(st.integers(max(0, node - 8), node - 1), max_size=3))):
            edges.append((source, 0, node, slot))
    times = draw(st.lists(st.sampled_from([0.0, 1.0, 3.0, 7.0, 20.0]), min_size=count, max_size=count))
    share = draw(st.lists(st.sampled_from([0.05, 0.6, 1.0]), min_size=count, max_size=count))
    host = draw(st.lists(st.sampled_from([False, False, False, True]), min_size=count, max_size=count))
    return count, edges, times, share, host


def _graph(data, place):
    count, edges, times, share, host = data
    back = np.argsort(place)
    return build(
        [f"n{node}" for node in back],
        ["MatMul"] * count,
        [(place[s], p, place[d], k) for s, p, d, k in edges],
        [times[node] for node in back],
        host=[host[node] for node in back],
        share=[share[node] for node in back],
        # A reordered file keeps the order of a signature's outputs.
        outputs=[place[node] for node in range(count) if not any(s == node for s, *_ in edges)],
    )


@given(graphs(), st.integers(1, 5))
def test_every_kernel_and_nothing_else_is_claimed(data, streams):
    flat, costs = _graph(data, list(range(data[0])))
    after, _ = Branch().apply(RuleContext(flat, costs, streams), Assignment.empty(len(flat)))
    launches = (costs.time_us > 0) & ~flat.host
    assert np.array_equal(after.ids >= 0, launches)
    assert after.ids.max(initial=0) < streams


@given(graphs(), st.randoms(use_true_random=False))
@settings(max_examples=examples(30, 60))
def test_neither_names_nor_the_order_of_the_file_matter(data, random):
    place = list(range(data[0]))
    random.shuffle(place)
    first = Branch().apply(RuleContext(*_graph(data, list(range(data[0]))), 3), Assignment.empty(data[0]))[0]
    second = Branch().apply(RuleContext(*_graph(data, place), 3), Assignment.empty(data[0]))[0]
    assert first.ids.tolist() == second.ids[place].tolist()


@pytest.mark.parametrize("graph", [mmoe(8), towers(12), inception(modules=3), lstm(layers=4, steps=12)])
def test_it_pays_by_a_simple_model(graph):
    flat, after, _ = apply(graph, streams=4)
    _, costs = graph
    alone = simulate(flat, costs, np.zeros(len(flat), np.int32))
    assert alone == pytest.approx(costs.time_us.sum())
    assert simulate(flat, costs, after.ids) < 0.6 * alone


def simulate(flat, costs, ids, wait_us=1.0):
    """Makespan if each stream runs its kernels in topological order by the longest way to the end."""
    graph, count = flat.graph, len(flat)
    rank = np.zeros(count)
    for node in graph.topological[::-1]:
        behind = rank[graph.successors(node)]
        rank[node] = costs.time_us[node] + (behind.max() if len(behind) else 0.0)
    end, free, stream = np.zeros(count), {}, ids.copy()
    for node in sorted(range(count), key=lambda node: (-rank[node], graph.level[node])):
        ready = 0.0
        for source in graph.predecessors(node):
            crosses = costs.time_us[node] > 0 and costs.time_us[source] > 0 and stream[source] != stream[node]
            ready = max(ready, end[source] + wait_us * crosses)
        if costs.time_us[node] > 0:
            ready = max(ready, free.get(int(stream[node]), 0.0))
            free[int(stream[node])] = ready + costs.time_us[node]
        end[node] = ready + costs.time_us[node]
    return end.max()
