"""Groups: the same results, nothing that waits for more than it did, and no cycle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import dtype_name
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import Readers
from msplit.engines.cuda.passes.pointwise_fusion.fuse import fuse, observe
from msplit.engines.cuda.passes.pointwise_fusion.outline import outline
from msplit.engines.cuda.passes.pointwise_fusion.partition import MOST_INPUTS, MOST_MEMBERS, find_groups
from msplit.engines.cuda.passes.tracing import trace
from msplit.opset.traits import VIEWS
from tests.campaign import examples
from tests.engines.cuda.alike_branches import alike_branches
from tests.engines.cuda.cases import CPU, bits, flat_of, job, run
from tests.engines.cuda.random_graphs import POINTWISE, random_graphs

FLOAT = "float32"


@settings(max_examples=examples(8, 60), deadline=None)
@given(st.one_of(random_graphs(most=30), random_graphs(most=40, steps=POINTWISE)), st.integers(1, 4), st.integers(0, 9))
def test_a_fused_graph_gives_the_same_bits_on_any_streams(case, streams, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    assert bits(run(flat, feeds, streams, seed=seed, fuse=True)) == bits(run(flat, feeds, streams, seed=seed))


@settings(max_examples=examples(25, 60), deadline=None)
@given(random_graphs(most=40, steps=POINTWISE))
def test_no_value_waits_for_more_than_it_did(case):
    graph_def, feeds, outputs = case
    graph = optimize(flat_of(graph_def, outputs=outputs), feeds, CPU).graph
    dtypes = {key: dtype_name(found[2]) for key, found in observe(graph, feeds, CPU, trace, nchw=False).items()}
    readers = Readers(graph)
    needs = ancestors(graph)
    taken: set[int] = set()
    groups = find_groups(graph, dtypes)
    kernels = {member: group for group in groups for member in group.members}

    def made_by(numbers):
        """Who waits for a value waits for the kernel that makes it, and for all others that this one makes."""
        return {kernels.get(number, number) for number in numbers}

    for group in groups:
        made = outline(graph, group, readers)
        assert not taken.intersection(group.members)
        taken.update(group.members)
        assert group.launching == sum(graph.ops[number].op not in VIEWS for number in group.members) > 1
        from_others = {key[0] for key in made.inputs} & graph.ops.keys()
        for key in made.outputs:
            if launched_readers(graph, readers.of, key) - set(group.members):
                assert made_by(from_others) <= made_by(needs[key[0]]), f"{graph.ops[key[0]].name} waits for more"


@settings(max_examples=examples(20, 40), deadline=None)
@given(st.one_of(alike_branches(), random_graphs(most=40)), st.booleans())
def test_how_every_value_that_a_group_reads_lies_in_memory_is_known(case, group):
    graph_def, feeds, outputs = case
    optimized = optimize(flat_of(graph_def, outputs=outputs), feeds, CPU, group=group)
    assert (
        fuse(optimized.graph, observe(optimized.graph, optimized.feeds, CPU, trace, nchw=False), CPU, seconds=0).groups
        == 0
    )  # to compile, that is, and nothing was compiled


def ancestors(graph: OpGraph) -> dict[int, set[int]]:
    needs: dict[int, set[int]] = {}
    for number, op in graph.ops.items():
        needs[number] = set().union(*({key[0]} | needs[key[0]] for key in op.inputs if key[0] in graph.ops))
    return needs


def launched_readers(graph: OpGraph, readers: dict[Key, list[int]], key: Key) -> set[int]:
    """Ops that wait for a value, on the device: what reads it, directly or through views.

    A fetch is none of them. All outputs go to the host together when the step is complete, so that a fetched value or view of one may wait.
    """
    found: set[int] = set()
    for reader in readers.get(key, ()):
        if graph.ops[reader].op in VIEWS:
            views = [other for other in readers if other[0] == reader]
            found.update(*(launched_readers(graph, readers, view) for view in views))
        else:
            found.add(reader)
    return found


class Graph:
    """A source by hand: every value is (2, 4) unless said otherwise."""

    def __init__(self) -> None:
        self.graph = OpGraph({}, {}, {}, {}, numbers=1000)
        self.count = 0

    def feed(self):
        self.count += 1
        key = (self.count, 0)
        self.graph.feeds[f"x{self.count}"] = key
        self.graph.shapes[key] = (2, 4)
        return key

    def op(self, name, *inputs, shape=(2, 4), **attrs):
        self.count += 1
        self.graph.ops[self.count] = Op(self.count, f"{name}_{self.count}", name, attrs, list(inputs), [self.count])
        self.graph.shapes[self.count, 0] = shape
        return (self.count, 0)

    def constant(self, value):
        return self.graph.constant(np.asarray(value))

    def groups(self, *fetches, dtypes=None, **options):
        self.graph.fetches = {f"y{number}": key for number, key in enumerate(fetches)}
        known = dict.fromkeys(self.graph.shapes, FLOAT) | (dtypes or {})
        return [set(group.members) for group in find_groups(self.graph, known, **options)]


def numbers(*keys):
    return {key[0] for key in keys}


def product(g, x):
    return g.op("MatMul", x, g.constant(np.ones((4, 4), np.float32)))


def test_a_chain_is_one_group_and_a_product_ends_it():
    g = Graph()
    a = g.op("Tanh", product(g, g.feed()))
    b = g.op("Mul", a, a)
    c = product(g, b)
    d = g.op("Exp", c)
    e = g.op("Neg", d)
    assert g.groups(e) == [numbers(a, b), numbers(d, e)]


def test_a_group_looks_at_a_constant_through_a_view_that_grouping_left():
    g = Graph()
    flat = g.constant(np.arange(8, dtype=np.float32))
    bias = g.op("Reshape", flat, g.constant(np.array([2, 4])))
    total = g.op("AddV2", product(g, g.feed()), bias)
    last = g.op("Neg", total)
    assert g.groups(last) == [numbers(total, last)]
    feeds = {name: np.ones((2, 4), np.float32) for name in g.graph.feeds}
    done = fuse(g.graph, observe(g.graph, feeds, CPU, trace, nchw=False), CPU, seconds=0)
    assert done.facts()["not_fused"] == {"compiling took more than 0 s": 1}


def test_what_another_branch_waits_for_does_not_wait_for_this_one():
    g = Graph()
    shared = g.op("Tanh", product(g, g.feed()))
    late = product(g, product(g, g.feed()))
    joined = g.op("Mul", shared, late)
    last = g.op("Neg", joined)
    other = product(g, shared)
    assert g.groups(last, other) == [numbers(joined, last)]


def test_what_only_the_group_reads_may_wait():
    g = Graph()
    early = g.op("Tanh", product(g, g.feed()))
    late = product(g, product(g, g.feed()))
    joined = g.op("Mul", early, late)
    assert g.groups(joined) == [numbers(early, joined)]


@pytest.mark.parametrize("view", [False, True])
def test_what_is_only_fetched_besides_may_wait_for_outputs_leave_together(view):
    g = Graph()
    early = g.op("Tanh", product(g, g.feed()))
    fetched = g.op("Transpose", early, g.constant(np.array([1, 0])), shape=(4, 2)) if view else early
    late = product(g, product(g, g.feed()))
    joined = g.op("Mul", early, late)
    assert g.groups(joined, fetched) == [numbers(early, joined) | numbers(fetched)]


@pytest.mark.parametrize("views", [1, 2])
def test_what_another_branch_reads_through_views_does_not_wait(views):
    g = Graph()
    early = g.op("Tanh", product(g, g.feed()))
    seen = early
    for _ in range(views):
        seen = g.op("Reshape", seen, g.constant(np.array([2, 4])))
    late = product(g, product(g, g.feed()))
    last = g.op("Neg", g.op("Mul", early, late))
    assert all(early[0] not in group for group in g.groups(last, product(g, seen)))


def test_a_residual_is_an_input_that_the_group_depends_on_already():
    g = Graph()
    x = product(g, g.feed())
    a = g.op("Tanh", product(g, x))
    b = g.op("AddV2", a, x)
    other = product(g, a)
    assert g.groups(b, other) == [numbers(a, b)]


def test_a_path_that_leaves_and_comes_back_is_no_part_of_the_group():
    g = Graph()
    a = g.op("Tanh", g.feed())
    around = product(g, a)
    b = g.op("Mul", a, around)
    c = g.op("Neg", b)
    assert g.groups(c) == [numbers(b, c)]


def test_independent_branches_stay_apart_until_they_meet():
    g = Graph()
    x = product(g, g.feed())
    left = g.op("Neg", g.op("Tanh", x))
    right = g.op("Neg", g.op("Exp", x))
    apart = g.groups(product(g, left), product(g, right))
    assert sorted(map(len, apart)) == [2, 2]
    assert apart[0].isdisjoint(apart[1])


def test_a_view_of_something_else_is_no_bond():
    g = Graph()
    x = product(g, g.feed())
    parts = g.op("Split", g.constant(np.int32(1)), x, shape=(2, 2), num_split=2)
    g.graph.shapes[parts[0], 1] = (2, 2)
    left = g.op("Neg", g.op("Tanh", parts, shape=(2, 2)), shape=(2, 2))
    right = g.op("Neg", g.op("Exp", (parts[0], 1), shape=(2, 2)), shape=(2, 2))
    found = g.groups(left, right)
    assert sorted(map(len, found)) == [2, 2]
    made = outline(g.graph, find_groups(g.graph, dict.fromkeys(g.graph.shapes, FLOAT))[0], Readers(g.graph))
    assert made.inputs == (x,), "it reads the product, not the part"


def test_a_reduction_does_not_wait_for_what_only_its_reader_needs():
    g = Graph()
    raised = g.op("Exp", product(g, g.feed()))
    total = g.op("Sum", raised, g.constant([1]), shape=(2, 1), keep_dims=True)
    late = product(g, product(g, g.feed()))
    assert g.groups(g.op("Mul", total, late)) == [numbers(raised, total)]


def test_rounding_in_front_of_a_jump_stays_where_it_is():
    g = Graph()
    quotient = g.op("RealDiv", g.feed(), g.feed())
    index = g.op("Floor", quotient)
    doubled = g.op("AddV2", index, index)
    assert g.groups(doubled) == [numbers(index, doubled)]
    exact = Graph()
    kept = exact.op("Maximum", exact.feed(), exact.feed())
    index = exact.op("Floor", kept)
    assert exact.groups(index) == [numbers(kept, index)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_shares_a_kernel_which_rounds_after_each_op(dtype):
    g = Graph()
    a = g.op("Tanh", g.feed())
    b = g.op("Mul", a, a)
    assert g.groups(b, dtypes=dict.fromkeys(g.graph.shapes, dtype)) == [numbers(a, b)]


@pytest.mark.parametrize("dtype", ["complex64", "uint32", "float8_e5m2"])
def test_dtypes_that_kernels_compute_in_another_width_are_left_alone(dtype):
    g = Graph()
    a = g.op("Tanh", g.feed())
    b = g.op("Mul", a, a)
    assert g.groups(b, dtypes=dict.fromkeys(g.graph.shapes, dtype)) == []


def test_integer_division_is_left_alone():
    g = Graph()
    a = g.op("AddV2", g.feed(), g.feed())
    b = g.op("Div", a, g.feed())
    c = g.op("Neg", b)
    assert g.groups(c, dtypes=dict.fromkeys(g.graph.shapes, "int32")) == []


def test_axes_that_only_the_run_knows_are_no_group():
    g = Graph()
    a = g.op("Tanh", g.feed())
    b = g.op("Sum", a, g.feed(), shape=(2,))
    assert g.groups(b) == []


def test_groups_have_a_largest_size():
    g = Graph()
    key = g.feed()
    for _ in range(3 * MOST_MEMBERS):
        key = g.op("Neg", key)
    found = g.groups(key)
    assert max(map(len, found)) <= MOST_MEMBERS
    assert sum(map(len, found)) >= 3 * MOST_MEMBERS - len(found)
    wide = Graph()
    key = wide.feed()
    for _ in range(3 * MOST_INPUTS):
        key = wide.op("Mul", key, wide.feed())
    assert len(wide.groups(key)) >= 3


def test_many_readers_of_many_values_take_little_time():
    g = Graph()
    x = [g.op("Tanh", product(g, g.feed())) for _ in range(1500)]
    hub = g.op("ConcatV2", *x, g.constant(np.int32(0)), shape=(3000, 4))
    y = [g.op("Mul", value, g.op("Sum", hub, g.constant([0]), shape=(4,))) for value in x]
    assert len(g.groups(*y, *x)) <= 3000


@settings(max_examples=10, deadline=None)
@given(random_graphs(most=15, steps=POINTWISE))
def test_weights_are_held_once(case):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    plain, fused = (ENGINE.compile(job(flat, feeds, fuse=fuse)).program for fuse in (False, True))
    for key, tensor in fused.constants.items():
        assert key not in plain.constants or tensor is plain.constants[key]
