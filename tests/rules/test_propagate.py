import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit.core.graph import Assignment
from msplit.rules.auto import Propagate
from msplit.rules.base import RuleContext
from tests.graphs import build, by_name, nodes, parse


def apply(text, claims):
    flat, costs = parse(text)
    assignment = Assignment.empty(len(flat))
    for stream, *names in claims:
        assignment = assignment.claim(nodes(flat, *names), stream, "regex", "test")
    after, remarks = Propagate().apply(RuleContext(flat, costs, 8), assignment)
    assert remarks == ()
    return by_name(flat, after.ids), after


def test_a_node_follows_the_input_that_finishes_last():
    ids, after = apply("a:MatMul@5us; b:MatMul@9us; c:Relu(b); d:AddV2(a,b); e:Relu(d)", [(1, "a"), (2, "b")])
    assert ids == {"a": 1, "b": 2, "c": 2, "d": 2, "e": 2}
    assert after.why(3) == ("propagate", "follows the input that finishes last")
    assert after.why(0) == ("regex", "test")


def test_finishing_counts_everything_before():
    ids, _ = apply("x:MatMul@8us; a:Relu(x)@1us; b:MatMul@5us; d:AddV2(b,a)", [(1, "a"), (2, "b")])
    assert ids["d"] == 1


def test_weights_take_the_stream_of_their_consumers():
    ids, after = apply("w:Const; r:Identity(w); m:MatMul(r); n:MatMul(r)", [(3, "m", "n")])
    assert ids == {"w": 3, "r": 3, "m": 3, "n": 3}
    assert after.why(0) == ("propagate", "all its consumers are on this stream")


def test_a_node_shared_by_two_streams_stays_free():
    ids, _ = apply("w:Const; m:MatMul(w); n:MatMul(w)", [(1, "m"), (2, "n")])
    assert ids["w"] == -1


def test_inputs_come_before_consumers():
    ids, _ = apply("a:MatMul; r:Reshape(a); b:MatMul(r)", [(1, "a"), (2, "b")])
    assert ids["r"] == 1


def test_what_consumers_give_is_passed_on():
    ids, _ = apply("w:Const; r:Identity(w); m:MatMul(r); side:Relu(r); deep:Relu(side)", [(4, "m")])
    assert ids == {"w": -1, "r": -1, "m": 4, "side": -1, "deep": -1}
    ids, _ = apply("w:Const; r:Identity(w); m:MatMul(r); s:Relu(m)", [(4, "m")])
    assert ids == {"w": 4, "r": 4, "m": 4, "s": 4}


def test_of_inputs_that_finish_together_the_first_slot_decides():
    ids, _ = apply("a:MatMul@5us; b:MatMul@5us; c:AddV2(b,a); d:AddV2(a,b)", [(1, "a"), (2, "b")])
    assert (ids["c"], ids["d"]) == (2, 1)


def test_data_inputs_come_before_control_inputs_and_low_streams_before_high():
    ids, _ = apply("a:MatMul@5us; b:MatMul@5us; c:AddV2(^a,b); d:NoOp(^b,^a); e:NoOp(^a,^b)", [(1, "a"), (2, "b")])
    assert (ids["c"], ids["d"], ids["e"]) == (2, 1, 1)
    ids, _ = apply("a:MatMul@5us; b:MatMul@7us; c:AddV2(a,^b)", [(1, "a"), (2, "b")])
    assert ids["c"] == 2


def test_host_nodes_take_no_part():
    ids, _ = apply(
        "a:MatMul; h:StringJoin(a) host; b:MatMul(h); c:Const; d:StringJoin(c) host; e:MatMul(c)", [(1, "a"), (2, "e")]
    )
    assert (ids["h"], ids["b"], ids["c"], ids["d"]) == (-1, -1, 2, -1)


def test_nothing_claimed_means_nothing_to_follow():
    ids, _ = apply("a:MatMul; b:Relu(a)", [])
    assert ids == {"a": -1, "b": -1}


def test_streams_reach_through_zigzags():
    ids, _ = apply("p:Const; q:MatMul(p); s:MatMul(p,t); t:Const; z:Relu(s)", [(3, "q"), (3, "s")])
    assert ids == {"p": 3, "q": 3, "s": 3, "t": 3, "z": 3}


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 25))
    edges = []
    for node in range(1, count):
        for slot, source in enumerate(draw(st.lists(st.integers(0, node - 1), max_size=3))):
            edges.append((source, 0, node, slot))
    times = draw(st.lists(st.sampled_from([0.0, 1.0, 5.0]), min_size=count, max_size=count))
    host = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    ids = draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count))
    return count, edges, times, host, ids


@given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_the_file_does_not_matter(graph, random):
    count, edges, times, host, ids = graph

    def run(place):
        back = np.argsort(place)
        flat, costs = build(
            [f"n{node}" for node in back],
            ["MatMul"] * count,
            [(place[s], p, place[d], k) for s, p, d, k in edges],
            [times[node] for node in back],
            host=[host[node] for node in back],
        )
        start = Assignment.empty(count)
        for node in range(count):
            if ids[node] >= 0 and not host[node]:
                start = start.claim([place[node]], ids[node], "regex", "")
        after, _ = Propagate().apply(RuleContext(flat, costs, 4), start)
        assert np.all(after.ids[flat.host] == -1)
        return after.ids[place].tolist()

    shuffled = list(range(count))
    random.shuffle(shuffled)
    assert run(list(range(count))) == run(shuffled)
