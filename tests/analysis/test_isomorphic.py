"""Alike and nearly alike branches, found on graphs whose shapes are known."""

import time

import networkx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.analysis.branches import Blocks, KernelGraph
from msplit.analysis.isomorphic import KERNEL_US, find
from msplit.api import price
from tests.engines.cuda.alike_branches import ROWS, Branches, alike_branches
from tests.engines.cuda.random_graphs import FLOAT, INT32


def flat_of(graph_def, outputs=None):
    import tempfile
    from pathlib import Path

    from msplit.flatten.build import flatten
    from msplit.formats import read

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pb"
        path.write_bytes(graph_def.SerializeToString())
        return flatten(read(path, outputs=outputs))


def analyzed(graph_def, outputs=None):
    flat = flat_of(graph_def, outputs)
    shapes, costs = price(flat)
    return flat, find(flat, shapes, Blocks.from_kernels(KernelGraph.of(flat, costs)))


def branches(*variants):
    """One branch per variant, each a list of (kind, width of what it makes), on one input, joined at the end."""
    g = Branches(lambda strategy: 0)
    g.placeholder("x", (ROWS, 4))
    ends = []
    for steps in variants:
        value, width = "x", 4
        for kind, units in steps:
            value, width = g.step(kind, value, width, {"width": units})
        ends.append(value)
    g.node("ConcatV2", [*ends, g.constant(np.int32(1))], T=FLOAT, Tidx=INT32)
    g.graph_def.node[-1].attr["N"].i = len(ends)
    return analyzed(g.graph_def)


PLAIN = [("dense", 4), ("Tanh", 4), ("dense", 2)]


def test_attributes_without_a_name_take_part_in_the_form():
    """A damaged file may have one."""
    g = Branches(lambda strategy: 0)
    g.placeholder("x", (ROWS, 4))
    ends = []
    for mark in (0, 0, 1):
        value = "x"
        for kind, units in PLAIN:
            value, _ = g.step(kind, value, 4, {"width": units})
        next(node for node in reversed(g.graph_def.node) if node.op == "MatMul").attr[""].i = mark
        ends.append(value)
    g.node("ConcatV2", [*ends, g.constant(np.int32(1))], T=FLOAT, Tidx=INT32)
    g.graph_def.node[-1].attr["N"].i = len(ends)
    _, found = analyzed(g.graph_def)
    (one,) = found.isomorphic
    assert len(one.branches) == 2


def test_alike_branches_are_one_kind():
    flat, found = branches(PLAIN, PLAIN, PLAIN)
    (one,) = found.isomorphic
    assert len(one.branches) == 3
    # Bias and ReLU ride on their product.
    assert [flat.graph.ops[node] for node in one.branches[0]] == ["MatMul", "Tanh", "MatMul"]
    assert one.groups == 1
    assert one.saved_us == 2 * 3 * KERNEL_US
    assert not found.nearly


def test_branches_with_convolutions_are_left_out():
    """The engine does not do them at once."""
    g = Branches(lambda strategy: 0)
    g.placeholder("x", (1, 8, 8, 4))
    ends = []
    for _ in range(3):
        node = g.node("Conv2D", ["x", g.normal(3, 3, 4, 4)], T=FLOAT)
        made = g.graph_def.node[-1]
        made.attr["strides"].list.i.extend([1, 1, 1, 1])
        made.attr["padding"].s = b"SAME"
        ends.append(g.node("Exp", [g.node("Tanh", [node], T=FLOAT)], T=FLOAT))
    g.node("ConcatV2", [*ends, g.constant(np.int32(3))], T=FLOAT, Tidx=INT32)
    g.graph_def.node[-1].attr["N"].i = len(ends)
    _, found = analyzed(g.graph_def)
    assert not found.isomorphic
    assert not found.nearly


def test_one_op_more_is_nearly_alike():
    more = [*PLAIN[:1], ("Abs", 4), *PLAIN[1:]]
    flat, found = branches(PLAIN, more, PLAIN)
    (one,) = found.nearly
    assert flat.graph.ops[one.branches[0][one.extra]] == "Abs"
    assert one.like == found.isomorphic[0].branches[0]
    assert one.cost_us == 2 * KERNEL_US


def test_the_few_differ_from_the_many():
    more = [*PLAIN, ("Abs", 4)]
    flat, found = branches(PLAIN, more, more, more)
    (one,) = found.nearly
    assert flat.graph.ops[one.like[one.lacks]] == "Abs"
    assert len(one.branches) == 1
    assert len(found.isomorphic[0].branches) == 3


def test_other_sizes_are_nearly_alike():
    wide = [("dense", 4), ("Tanh", 4), ("dense", 3)]
    flat, found = branches(PLAIN, PLAIN, wide)
    (one,) = found.nearly
    assert flat.graph.ops[one.branches[0][one.differs]] == "MatMul"
    assert one.differs == 2
    assert one.cost_us == 3 * KERNEL_US


def test_two_ops_more_and_other_ops_are_not_alike_at_all():
    _, found = branches(PLAIN, [*PLAIN, ("Abs", 4), ("Neg", 4)], [("Tanh", 4), ("Softmax", 4), ("Neg", 4)])
    assert not found.isomorphic
    assert not found.nearly


def test_branches_that_follow_each_other_are_not_alike():
    g = Branches(lambda strategy: 0)
    g.placeholder("x", (ROWS, 4))
    value = "x"
    for _ in range(3):
        start = value
        value, _ = g.step("dense", value, 4, {"width": 4})
        value = g.node("AddV2", [value, start], T=FLOAT)
    _, found = analyzed(g.graph_def)
    assert not found.isomorphic


@given(alike_branches(most=6))
@settings(max_examples=25)
def test_what_is_alike_is_independent_and_does_the_same(case):
    graph_def, _, outputs = case
    flat, found = analyzed(graph_def, outputs)
    reach = networkx.transitive_closure_dag(networkx.DiGraph(flat.graph.to_networkx()))
    index = dict(enumerate(flat.graph.names))
    for one in found.isomorphic:
        assert len({tuple(flat.graph.ops[node] for node in nodes) for nodes in one.branches}) == 1
        if one.groups == 1:
            for first in one.branches:
                for second in one.branches:
                    for a in first:
                        for b in second:
                            assert first is second or not reach.has_edge(index[a], index[b])
        assert one.saved_us == (len(one.branches) - one.groups) * len(one.branches[0]) * KERNEL_US
    for one in found.nearly:
        assert (one.extra >= 0) + (one.lacks >= 0) + (one.differs >= 0) == 1


@given(st.integers(0, 3))
@settings(max_examples=1)
def test_time_grows_with_the_graph(seed):
    def seconds(count):
        g = Branches(lambda strategy: seed)
        g.placeholder("x", (ROWS, 4))
        ends = [g.step("Tanh", *g.step("dense", "x", 4, {"width": 4}), {})[0] for _ in range(count)]
        g.node("AddN", ends, T=FLOAT)
        g.graph_def.node[-1].attr["N"].i = count
        flat = flat_of(g.graph_def)
        shapes, costs = price(flat)
        blocks = Blocks.from_kernels(KernelGraph.of(flat, costs))
        start = time.process_time()
        found = find(flat, shapes, blocks)
        assert len(found.isomorphic[0].branches) == count
        return time.process_time() - start

    assert seconds(4000) < 20 * max(seconds(500), 0.005)
