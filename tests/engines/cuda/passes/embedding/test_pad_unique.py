"""Distinct ids with a fixed number of places: equal to those that TensorFlow has, and left alone where anything looks at the padding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.interpret import run_step
from msplit.engines.cuda.passes.embedding.fixed_capacity import pad_unique
from msplit.engines.cuda.passes.pipeline import tidy
from msplit.engines.cuda.passes.specialize import specialize
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.passes.updates.merge_updates import sum_in_updates
from msplit.errors import EngineError
from tests.campaign import examples
from tests.engines.cuda.cases import CPU

ROWS = 7


class Ops:
    """Puts a graph of ops together: `ops.Mul(a, b, T="float32")` is a value. Arrays are constants, values of `feed` come from outside."""

    def __init__(self):
        self.graph = OpGraph({}, {}, {}, {})
        self.feeds = {}

    def feed(self, name, value):
        self.feeds[name] = value
        self.graph.feeds[name] = (self.graph.fresh(), 0)
        return self.graph.feeds[name]

    def __getattr__(self, op):
        def add(*inputs, **attrs):
            keys = [one if isinstance(one, tuple) else self.graph.constant(np.asarray(one)) for one in inputs]
            self.graph.shapes.clear()
            number = self.graph.fresh()
            self.graph.ops[number] = Op(number, f"{op}_{number}", op, attrs, keys, [0])
            return number, 0

        return add

    def fetch(self, **values):
        self.graph.fetches |= values
        return self

    def summed(self, ids, rows, unique="Unique"):
        """What TensorFlow's optimizers do first: (rows per distinct id, these ids)."""
        found = getattr(self, unique)(
            *([ids] if unique == "Unique" else [ids, np.zeros(1, np.int32)]), T="int64", out_idx="int32"
        )
        count = self.StridedSlice(
            self.Shape(found), *(np.array([one], np.int32) for one in (0, 1, 1)), shrink_axis_mask=1
        )
        return self.UnsortedSegmentSum(rows, (found[0], 1), count, T="float32"), found


def run(graph, feeds):
    program = trace(graph, feeds, CPU)
    values = {key: to_torch(feeds[name].copy()) for name, key in program.feeds.items()}
    for number in range(len(program.steps)):
        run_step(program, number, values)
    return {name: to_numpy(values[key]) for name, key in program.fetches.items()}, program


def check(ops, kinds, padded=True):
    """Padded or not, and then captured or not; equal to the graph as it was. `kinds` are ops that are there afterwards."""
    results = []
    for rewrite in (False, True):
        graph = ops.graph.copy()
        if rewrite:
            assert pad_unique(graph) is padded
            tidy(graph)
        specialize(graph, ops.feeds, CPU)
        found, program = run(graph, ops.feeds)
        results.append(found)
    assert bool(program.dynamic) is not padded
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, atol=1e-6)
    after = {op.op for op in graph.ops.values()}
    assert kinds <= after
    assert kinds or not after & {"Unique", "_UniquePadded"}


def start(ids=(3, 1, 3, 3, 6, 1), inner=(2,), slots=1):
    ops, rng = Ops(), np.random.default_rng(0)
    rows = ops.feed("rows", rng.standard_normal((len(ids), *inner)).astype(np.float32))
    variables = [
        ops.feed(f"variable{number}", rng.uniform(0.5, 1, (ROWS, *inner)).astype(np.float32))
        for number in range(slots + 1)
    ]
    return ops, ops.feed("ids", np.array(ids, np.int64)), rows, variables


LR, MOMENTUM = np.float32(0.1), np.float32(0.9)


@pytest.mark.parametrize("unique", ["Unique", "UniqueV2"])
@pytest.mark.parametrize("ids", [[3, 1, 3, 3, 6, 1], [0], [2, 2, 2], []], ids=str)
@pytest.mark.parametrize("inner", [(), (2,), (2, 3)])
def test_an_optimizer_of_rows(unique, ids, inner):
    ops, ids, rows, (variable, accum) = start(ids, inner)
    total, found = ops.summed(ids, rows, unique)
    new = ops.SparseApplyMomentum(variable, accum, LR, total, found, MOMENTUM, T="float32")
    check(ops.fetch(variable=new, accum=(new[0], 1)), {"_UniquePadded"})


def test_adam_squares_sums():
    ops, ids, rows, (m, v) = start()
    total, found = ops.summed(ids, rows)
    m = ops.ScatterAdd(m, found, ops.Mul(total, np.float32(0.1)))
    v = ops.ScatterAdd(v, found, ops.Mul(ops.Mul(total, total), np.float32(0.01)))
    check(ops.fetch(m=m, v=v), {"_UniquePadded", "ScatterAdd"})


@pytest.mark.parametrize("op", ["ScatterAdd", "ScatterSub"])
def test_what_is_only_added_is_not_summed_before(op):
    ops, ids, rows, (variable,) = start(slots=0)
    total, found = ops.summed(ids, rows)
    lr = ops.feed("lr", LR)
    check(ops.fetch(new=getattr(ops, op)(variable, found, ops.Neg(ops.Mul(total, lr)))), set())


@pytest.mark.parametrize(
    "updates", [lambda ops, total: np.float32(1), lambda ops, total: ops.Sqrt(ops.Square(total))], ids=["one", "root"]
)
def test_what_is_not_a_sum_is(updates):
    ops, ids, rows, (variable,) = start(slots=0)
    total, found = ops.summed(ids, rows)
    check(ops.fetch(new=ops.ScatterAdd(variable, found, updates(ops, total))), {"_UniquePadded"})


def test_a_lookup_of_distinct_ids_and_its_gradient():
    """`embedding_lookup_sparse` under an optimizer: ids are made distinct twice."""
    ops, ids, _, (variable, accum) = start()
    first = ops.Unique(ids, T="int64", out_idx="int32")
    table = ops.GatherV2(variable, first, np.int32(0), Tindices="int64")
    segments = np.array([0, 0, 1, 1, 1, 2], np.int32)
    out = ops.SparseSegmentMeanWithNumSegments(table, (first[0], 1), segments, np.int32(3))
    size = ops.StridedSlice(ops.Shape(table), *(np.array([one], np.int32) for one in (0, 1, 1)), shrink_axis_mask=1)
    grad = ops.SparseSegmentMeanGrad(ops.Square(out), (first[0], 1), segments, size)
    number = ops.ExpandDims(ops.Size(first), np.int32(0))
    grad = ops.Reshape(grad, ops.ConcatV2(number, np.array([2], np.int32), np.int32(0)))
    total, found = ops.summed(ops.Reshape(first, number), grad)
    norm = ops.L2Loss(grad)
    new = ops.SparseApplyAdagrad(variable, accum, LR, total, found)
    check(ops.fetch(out=out, norm=norm, variable=new, accum=(new[0], 1)), {"_UniquePadded", "Maximum"})


def test_a_gradient_of_rows_at_places():
    """There are as many places as ids went in, however many of those are distinct."""
    ops, ids, rows, (variable, accum) = start()
    first = ops.Unique(ids, T="int64", out_idx="int32")
    table = ops.GatherV2(variable, first, np.int32(0), Tindices="int64")
    out = ops.Mul(ops.GatherV2(table, (first[0], 1), np.int32(0)), rows)
    size = ops.StridedSlice(ops.Shape(table), *(np.array([one], np.int32) for one in (0, 1, 1)), shrink_axis_mask=1)
    number = ops.ExpandDims(ops.Size((first[0], 1)), np.int32(0))
    grad = ops.UnsortedSegmentSum(rows, ops.Reshape((first[0], 1), number), size)
    total, found = ops.summed(first, grad)
    new = ops.SparseApplyAdagrad(variable, accum, LR, total, found)
    check(ops.fetch(out=out, variable=new, accum=(new[0], 1)), {"_UniquePadded"})


def test_two_lookups_in_one_table():
    ops, ids, rows, (variable, accum) = start()
    total, found = ops.summed(ids, rows)
    both = ops.ConcatV2(found, ids, np.int32(0)), ops.ConcatV2(total, rows, np.int32(0))
    again, distinct = ops.summed(*both)
    new = ops.SparseApplyAdagrad(variable, accum, LR, again, distinct)
    check(ops.fetch(variable=new, accum=(new[0], 1)), {"_UniquePadded"})


def test_rows_of_all_ids_of_a_variable():
    """What makes a dense gradient of a sparse one."""
    ops, ids, rows, _ = start()
    total, found = ops.summed(ids, rows)
    check(ops.fetch(dense=ops.UnsortedSegmentSum(total, found, np.int32(ROWS))), {"_UniquePadded"})


def test_rows_of_another_shape():
    ops, ids, rows, (variable, accum) = start(inner=(2, 3))
    total, found = ops.summed(ids, rows)
    total = ops.Reshape(ops.Reshape(total, np.array([-1, 6], np.int32)), np.array([-1, 2, 3], np.int32))
    new = ops.SparseApplyAdagrad(variable, accum, LR, total, found)
    check(ops.fetch(variable=new, accum=(new[0], 1)), {"_UniquePadded"})


def test_a_shape_that_makes_more_rows_is_refused():
    """Those without an id would come to lie between others."""
    ops, ids, rows, (variable, accum) = start(inner=(2, 3))
    total, found = ops.summed(ids, rows)
    more = ops.Reshape(total, np.array([-1, 3], np.int32))
    ops.fetch(variable=ops.SparseApplyAdagrad(variable, accum, LR, more, found))
    assert pad_unique(ops.graph)
    tidy(ops.graph)
    with pytest.raises(EngineError, match="Reshape"):
        specialize(ops.graph, ops.feeds, CPU)


def _fetched(ops, total, found):
    return total


def _mean(ops, total, found):
    return ops.Mean(total, np.array([0], np.int32), keep_dims=False)


def _sum_of_more(ops, total, found):
    """Rows without an id are no zeros any more."""
    return ops.Sum(ops.AddV2(total, np.float32(1)), np.array([0], np.int32))


def _count(ops, total, found):
    return ops.Size(found)


def _ids(ops, total, found):
    return ops.AddV2(found, np.int64(1))


@pytest.mark.parametrize("other", [_fetched, _mean, _sum_of_more, _count, _ids])
def test_what_looks_at_the_padding_leaves_it_alone(other):
    ops, ids, rows, (variable, accum) = start()
    total, found = ops.summed(ids, rows)
    new = ops.SparseApplyMomentum(variable, accum, LR, total, found, MOMENTUM)
    check(ops.fetch(variable=new, other=other(ops, total, found)), {"Unique"}, padded=False)


def test_rows_of_other_ids_leave_it_alone():
    ops, ids, rows, (variable, accum) = start([3, 1, 2])
    others = ops.feed("others", np.array([5, 2, 4]))
    (total, _), (_, found) = ops.summed(ids, rows), ops.summed(others, rows)
    new = ops.SparseApplyMomentum(variable, accum, LR, total, found, MOMENTUM)
    check(ops.fetch(variable=new), {"Unique"}, padded=False)


def test_one_that_stays_does_not_keep_the_others():
    ops, ids, rows, (variable, accum) = start()
    total, found = ops.summed(ids, rows)
    new = ops.SparseApplyMomentum(variable, accum, LR, total, found, MOMENTUM)
    other = ops.Unique(ops.feed("others", np.array([5, 2, 5])), T="int64", out_idx="int32")
    ops.fetch(variable=new, other=other)
    graph = ops.graph.copy()
    assert pad_unique(graph)
    assert sorted(op.op for op in graph.ops.values() if "Unique" in op.op) == ["Unique", "_UniquePadded"]


def _scaled(ops, rows, ids, original):
    return ops.Mul(rows, np.float32(0.5), T="float32"), ids


def _squared(ops, rows, ids, original):
    return ops.Square(rows, T="float32"), ids


def _moved(ops, rows, ids, original):
    return ops.Sub(rows, np.float32(0.25), T="float32"), ids


def _with_each_other(ops, rows, ids, original):
    return ops.AddV2(rows, ops.Mul(rows, rows, T="float32"), T="float32"), ids


def _made_distinct(ops, rows, ids, original):
    return ops.summed(ids, rows)


def _next_to_more(ops, rows, ids, original):
    axis = np.int32(0)
    return ops.ConcatV2(rows, original[0], axis, T="float32"), ops.ConcatV2(ids, original[1], axis, T="int64")


def _looked_up(ops, rows, ids, original):
    found = ops.GatherV2(original[2], ids, np.int32(0), Tindices="int64")
    return ops.AddV2(rows, found, T="float32"), ids


STEPS = [_scaled, _squared, _moved, _with_each_other, _made_distinct, _next_to_more, _looked_up]
ENDS = {
    "norm": lambda ops, rows: ops.L2Loss(rows, T="float32"),
    "sum": lambda ops, rows: ops.Sum(rows, np.array([0, 1], np.int32), T="float32"),
    "mean": lambda ops, rows: ops.Mean(rows, np.array([0, 1], np.int32), T="float32"),
    "none": None,
}


@given(
    st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=7),
    st.lists(st.sampled_from(STEPS), max_size=5),
    st.sampled_from(sorted(ENDS)),
    st.sampled_from(["SparseApplyAdagrad", "ScatterAdd", "ScatterMax"]),
)
@settings(max_examples=examples(40, 3000), deadline=None)
def test_whatever_is_padded_gives_the_same(ids, steps, end, update):
    """And whatever is not, too: the pass says of each graph whether padding shows."""
    ops, ids, rows, (variable, accum) = start(ids)
    original = rows, ids, ops.feed("lookup", np.random.default_rng(1).uniform(1, 2, (ROWS, 2)).astype(np.float32))
    rows, ids = ops.summed(ids, rows)
    for step in steps:
        rows, ids = step(ops, rows, ids, original)
    if end != "none":
        ops.fetch(end=ENDS[end](ops, rows))
    rows, ids = ops.summed(ids, rows)
    if update == "SparseApplyAdagrad":
        ops.fetch(new=ops.SparseApplyAdagrad(variable, accum, LR, rows, ids))
    else:
        ops.fetch(new=getattr(ops, update)(variable, ids, rows))
    found = []
    for rewrite in (False, True):
        graph = ops.graph.copy()
        if rewrite and pad_unique(graph):
            tidy(graph)
        specialize(graph, ops.feeds, CPU)
        if rewrite and sum_in_updates(graph):
            tidy(graph)
        found.append(run(graph, ops.feeds)[0])
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=2e-4, atol=1e-5)


@given(st.lists(st.integers(-1, 5), max_size=12))
def test_each_distinct_element_stands_where_it_comes_first(numbers):
    x = np.array(numbers, np.int64)
    distinct, places = (one.numpy() for one in run_lowering_padded(x))
    firsts = [numbers.index(number) for number in numbers]
    assert places.tolist() == firsts
    assert distinct.tolist() == [
        number if first == place else -1 for place, (number, first) in enumerate(zip(numbers, firsts, strict=True))
    ]


def run_lowering_padded(x):
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node

    return table()["_UniquePadded"].function(Node("node", "_UniquePadded", {"out_idx": "int32"}), to_torch(x))
