"""Which nodes are one to TensorFlow's optimizer, and that they get one id."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit import rules
from msplit.analysis.colocation import ColocationGroups
from msplit.analysis.isomorphic import _COMMUTATIVE, LITTLE, copies, with_copies
from msplit.core.graph import TensorValue
from msplit.errors import LoadError
from tests.graphs import by_name, parse


def same(text, fixed=None, **overrides):
    """The names of copies, by their first; kernels of other nodes take so long that copies are cheap."""
    flat, costs = parse(text, outputs=(), **overrides)
    of = copies(flat, costs.time_us, fixed)
    names = flat.graph.names
    found = {}
    for node in np.flatnonzero(of >= 0).tolist():
        found.setdefault(names[of[node]], []).append(names[node])
    return list(found.values())


BIG = "; big:MatMul(x,x)@10000us"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a:Relu(x); b:Relu(x)", [["a", "b"]]),
        ("a:Relu(x); b:Tanh(x)", []),
        ("a:Relu(x)[T=1]; b:Relu(x)[T=2]", []),
        ("a:Relu(x)[_stream_id=1]; b:Relu(x)[_stream_id=2]", [["a", "b"]]),
        ("a:Sub(x,y); b:Sub(y,x)", []),
        ("a:AddV2(x,y); b:AddV2(y,x)", [["a", "b"]]),
        ("a:Split(x); b:Relu(a:0); c:Relu(a:1)", []),
        ("a:Relu(x); b:Relu(x,^y)", []),
        ("a:Relu(x,^y,^x); b:Relu(x,^x,^y)", [["a", "b"]]),
        ("a:Relu(x); b:Relu(x); c:Tanh(a); d:Tanh(b)", [["a", "b"], ["c", "d"]]),
        ("a:Identity(x); b:Relu(a); c:Relu(x)", [["b", "c"]]),
        ("a:RandomUniform(x); b:RandomUniform(x)", []),
        ("a:ReadVariableOp(x); b:ReadVariableOp(x)", []),
        ("a:Enter(x); b:Enter(x)", []),
        ("a:Unheard(x); b:Unheard(x)", []),
        ("a:Placeholder; b:Placeholder", []),
    ],
)
def test_copies_are_what_the_optimizer_merges(nodes, expected):
    assert same(f"x:Placeholder; y:Placeholder; {nodes}{BIG}") == expected


def test_nodes_on_other_devices_are_no_copies():
    text = "x:Placeholder; a:Relu(x)@1us; b:Relu(x)@1us; c:MatMul(x,x)@1000us"
    flat, costs = parse(text, outputs=())
    assert copies(flat, costs.time_us).tolist() == [-1, 1, 1, -1]
    apart = replace(flat, graph=replace(flat.graph, devices=["", "/gpu:0", "/gpu:1", ""]))
    assert copies(apart, costs.time_us).tolist() == [-1] * 4


def test_what_is_fetched_is_no_copy():
    flat, costs = parse(f"x:Placeholder; a:Relu(x); b:Relu(x); c:Relu(x){BIG}", outputs=(2,))
    assert copies(flat, costs.time_us).tolist() == [-1, 1, -1, 1, -1]


def constants(*values):
    """A constant per value, and what its copies are."""

    def value(of):
        if callable(of):
            return TensorValue("float32", (1 << 40,), of)
        return TensorValue(of.dtype.name, of.shape, lambda: of)

    text = ";".join(f"c{number}:Const" for number in range(len(values)))
    return same(text, attrs=[{"dtype": "x", "value": value(one)} for one in values])


def test_constants_are_compared_by_value():
    long = np.arange(10_000, dtype=np.float32)
    other = long.copy()
    other[-1] = 0
    assert constants(long, other, long.copy(), long.reshape(100, 100)) == [["c0", "c2"]]
    assert constants(np.asarray(1, np.int32), np.asarray(1, np.int32), np.asarray(1.0, np.float32)) == [["c0", "c1"]]
    words = np.asarray([b"a", b"b"], object)
    assert constants(words, words.copy(), words[::-1].copy()) == [["c0", "c1"]]


def test_a_constant_that_can_not_be_read_is_like_no_other_and_a_huge_one_is_not_spread_out():
    def damaged():
        raise LoadError("damaged")

    def filled():
        return np.broadcast_to(np.float32(0), (1 << 40,))

    assert constants(damaged, damaged) == []
    assert constants(filled, filled, damaged) == [["c0", "c1"]]


def test_copies_with_long_kernels_are_not_tied():
    """Whoever gives streams to a model of equal towers wants them side by side."""
    towers = "x:Placeholder; a:MatMul(x,x)@10us; b:MatMul(x,x)@10us; c:Relu(x)@0.1us; d:Relu(x)@0.1us"
    assert same(towers) == [["c", "d"]]
    assert same(f"{towers}; big:Conv2D(x,x)@10000us") == [["a", "b"], ["c", "d"]]


@given(st.lists(st.floats(0, 100), max_size=12), st.randoms(use_true_random=False))
def test_what_is_tied_takes_little_and_the_order_of_the_file_does_not_matter(times, random):
    ops = ("Relu", "Tanh", "Exp")
    rows = [f"n{number}:{ops[number % 3]}(x)@{time:.6f}us" for number, time in enumerate(times)]

    def tied(rows):
        flat, costs = parse(";".join(["x:Placeholder", *rows]), outputs=())
        of = copies(flat, costs.time_us)
        kept = of >= 0
        more = sum(costs.time_us[of == one].sum() - costs.time_us[of == one].max() for one in set(of[kept].tolist()))
        assert more <= LITTLE * costs.time_us.sum() * (1 + 1e-9)
        return {name for name, one in zip(flat.graph.names, kept.tolist(), strict=True) if one}

    found = tied(rows)
    random.shuffle(rows)
    assert tied(rows) == found


def test_ids_set_by_hand_tell_copies_apart_and_are_never_tied_together():
    text = f"x:Placeholder; a:Relu(x)[_stream_id=1]; b:Relu(x)[_stream_id=2]; c:Relu(x)[_stream_id=2]{BIG}"
    flat, _ = parse(text)
    fixed = np.asarray([name in "abc" for name in flat.graph.names])
    assert same(text, fixed) == [["b", "c"]]
    flat, costs = parse(text, outputs=())
    asked = (None, fixed, None, fixed)  # of one graph, one after the other
    assert [np.count_nonzero(copies(flat, costs.time_us, kept) >= 0) for kept in asked] == [3, 2, 3, 2]
    # The copies p and q belong to two groups, each with an id of its own.
    text = "x:Placeholder; p:Relu(x); q:Relu(x); r:Tanh(p); s:Tanh(p); a:Exp(x)[_stream_id=1]; b:Log(x)[_stream_id=2]"
    flat, _ = parse(text)
    fixed = np.asarray([name in ("a", "b") for name in flat.graph.names])
    belong = ColocationGroups(np.asarray([-1, 0, 1, -1, -1, 0, 1], np.int32), 2)
    one = np.asarray([-1, 1, 1, 3, 3, -1, -1], np.int32)
    assert with_copies(flat, belong, one, fixed).of.tolist() == [-1, 0, 1, 2, 2, 0, 1]
    assert with_copies(flat, belong, one).of.tolist() == [-1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["auto", "default"])
def test_they_get_one_id_and_what_follows_them_does_not(name):
    """Two long branches begin with a copy each: the copies are tied, the branches are not."""
    text = (
        "x:Placeholder; w:Const; a:Relu(x)@1us; b:Relu(x)@1us; p:MatMul(a,w)@900us; q:Conv2D(b,w)@1000us; "
        "out:Sub(p,q)@1us"
    )
    flat, costs = parse(text)
    ids = by_name(flat, rules.assign(flat, costs, rules.load(name)).ids)
    assert ids["a"] == ids["b"]
    assert ids["p"] != ids["q"]


@pytest.mark.tf
def test_commutative_ops_are_those_of_tensorflow():
    from tensorflow.python.framework import op_def_registry

    known = {op for op in _COMMUTATIVE if op_def_registry.get(op).is_commutative}
    assert _COMMUTATIVE - known == {"Add"}  # the optimizer's own exception
