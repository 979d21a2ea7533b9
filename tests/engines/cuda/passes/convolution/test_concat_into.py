"""What a Concat joins is written where it belongs: equal to TensorFlow, in fewer kernels, and in an order that is looked at twice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.core.dag import Dag
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.program import BUFFER, INTO, JOINED
from msplit.engines.cuda.passes.convolution.concat_into import SIBLING_CONVOLUTIONS
from msplit.engines.cuda.passes.measured import deciding
from msplit.engines.cuda.passes.pattern import Dominators
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.runtime.executables import executable_of, plan_for, prove
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.engines.cuda.stored.program import StoredTables, Weights, pack, unpack
from msplit.errors import EngineError
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import (
    CPU,
    assert_equals_tensorflow,
    graph_of,
    job,
    kernels,
    program_of,
    run,
    scattered,
)
from tests.engines.cuda.passes.harness import image, normal, placeholder

pytestmark = pytest.mark.tf


def conv(tf, x, results, *, size=1, relu=True, strides=1):
    y = tf.nn.bias_add(tf.nn.conv2d(x, normal(size, size, int(x.shape[-1]), results), strides, "SAME"), normal(results))
    return tf.nn.relu(y) if relu else y


def dense_block(tf, x, layers):
    """DenseNet's: each layer reads all before it, through a norm that no convolution can take along."""
    for _ in range(layers):
        y = tf.nn.relu(x * normal(int(x.shape[-1])) + normal(int(x.shape[-1])))
        x = tf.concat([x, conv(tf, conv(tf, y, 8), 4, size=3, relu=False)], -1)
    return x


def dense(tf, v1, feeds, layers=4):
    x = tf.nn.max_pool2d(conv(tf, placeholder(tf, v1, feeds["x"]), 6), 2, 2, "SAME")
    x = dense_block(tf, x, layers)
    tf.identity(tf.reduce_mean(tf.nn.relu(x * normal(6 + 4 * layers)), [1, 2]), name="out")


def count(program, op):
    return sum(step.op.op == op for step in program.steps)


def test_a_chain_of_concats_is_one_buffer():
    feeds = image(size=7)
    flat = graph_of(lambda tf, v1: dense(tf, v1, feeds))
    program = program_of(flat, feeds)
    assert not {"ConcatV2", "_Copy"} & set(kernels(program))
    assert (count(program, BUFFER), count(program, JOINED)) == (1, 4)
    for options in ({}, {"fuse": True}, {"fuse": True, "group": True}):
        assert_equals_tensorflow(flat, feeds, tolerance=1e-4, streams=(1, 3, 8), **options)


def inception(tf, v1, feeds):
    x = conv(tf, placeholder(tf, v1, feeds["x"]), 8)
    pooled = tf.nn.avg_pool2d(x, 3, 1, "SAME")
    parts = [
        conv(tf, x, 4),
        conv(tf, conv(tf, x, 3), 5, size=3),
        conv(tf, pooled, 6),
        tf.nn.max_pool2d(x, 3, 1, "SAME"),
    ]
    tf.identity(conv(tf, tf.concat(parts, 3), 7), name="out")


def test_branches_write_one_buffer_and_do_not_wait_for_each_other():
    feeds = image(size=6)
    flat = graph_of(lambda tf, v1: inception(tf, v1, feeds), outputs=["out"])
    program = program_of(flat, feeds)
    assert "ConcatV2" not in kernels(program)
    (buffer,) = (number for number, step in enumerate(program.steps) if step.op.op == BUFFER)
    writers = [number for number, step in enumerate(program.steps) if step.op.attrs.get(INTO)]
    assert len(writers) == 4
    # The first convolution, which all branches need, is all that the buffer waits for.
    assert [program.steps[number].op.op for number in before(program.dag, buffer)] == ["_FusedConv2D"]
    assert all(not set(writers) & set(before(program.dag, number)) for number in writers)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, streams=(1, 4, 8))


def before(dag, number):
    """All steps that one needs."""
    found, stack = set(), [number]
    while stack:
        one = stack.pop()
        near = [] if one is None else dag.src[dag.start[one] : dag.start[one + 1]].tolist()
        stack += [other for other in near if other not in found]
        found.update(near)
    return sorted(found)


@pytest.fixture
def merged():
    with deciding({SIBLING_CONVOLUTIONS: lambda graph, members: (True, (32, 32, 64, 4, 3, 1))}):
        yield


def test_siblings_write_one_of_their_results_there(merged):
    feeds = image(size=6)

    def build(tf, v1):
        x = conv(tf, placeholder(tf, v1, feeds["x"]), 8)
        a, b, c = (conv(tf, x, results) for results in (4, 3, 6))
        tf.identity(tf.concat([a, conv(tf, b, 5, size=3), conv(tf, c, 4)], 3), name="out")

    flat = graph_of(build, outputs=["out"])
    program = CudaEngine().compile(job(flat, feeds, group=True)).program
    (siblings,) = (step.op for step in program.steps if step.op.op == "_SiblingConv2D")
    assert len(siblings.attrs[INTO]) == 1
    assert "ConcatV2" not in kernels(program)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, streams=(1, 4), group=True)


@pytest.mark.parametrize("what", ["constant", "input", "repeated", "fetched", "other"])
def test_what_is_not_made_there_is_copied_where_that_saves_kernels(what):
    feeds = image(size=4, channels=4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        a, b = conv(tf, x, 4), conv(tf, x, 4, size=3)
        other = {
            "constant": tf.constant(normal(2, 4, 4, 2)),
            "input": x,
            "repeated": a,
            "fetched": tf.identity(b, name="part"),
            "other": tf.nn.softmax(x),
        }[what]
        inner = tf.concat([other, a], -1)
        tf.identity(tf.concat([inner, b], 3), name="out")

    flat = graph_of(build, outputs=["out", "part"] if what == "fetched" else ["out"])
    program = program_of(flat, feeds)
    copied = {"repeated": 2, "fetched": 2}.get(what, 1)
    if copied < 2:
        assert (count(program, "ConcatV2"), count(program, "_Copy")) == (0, copied)
    else:
        assert count(program, BUFFER) == 0 or count(program, "_Copy") < count(program, JOINED)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, streams=(1, 4))


def test_what_reads_a_part_in_one_piece_keeps_the_concat():
    feeds = image(size=4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        a, b = conv(tf, x, 4), conv(tf, x, 4, size=3)
        tf.identity(conv(tf, a, 3), name="other")  # a convolution of a library would copy it
        tf.identity(tf.concat([a, b], 3), name="out")

    flat = graph_of(build, outputs=["out", "other"])
    assert count(program_of(flat, feeds), "ConcatV2") == 1


@st.composite
def graphs(draw):
    """Convolutions, pools, elementwise ops and Concats of them along any axis, some of them outputs."""
    dtype = draw(st.sampled_from(["float32", "float32", "float16", "bfloat16"]))
    steps = draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.lists(st.integers(0, 30), min_size=3, max_size=3)), min_size=2, max_size=12
        )
    )
    fetched = draw(st.lists(st.integers(0, 30), min_size=1, max_size=3))
    axes = draw(st.lists(st.sampled_from([3, -1, 3, 1, 0]), min_size=12, max_size=12))
    old = draw(st.booleans())

    def build(tf, v1, feeds):
        def filter(*shape):
            return tf.constant(normal(*shape) / 4, dtype)

        x = placeholder(tf, v1, feeds["x"])
        x = tf.cast(x, dtype)
        x = tf.ensure_shape(x, feeds["x"].shape)
        values = [tf.nn.conv2d(x, filter(1, 1, 3, 4), 1, "SAME"), tf.constant(normal(2, 4, 4, 4), dtype)]
        for (kind, picks), axis in zip(steps, axes, strict=False):
            one, two, three = (values[pick % len(values)] for pick in picks)
            if kind <= 1:
                values.append(tf.nn.conv2d(one, filter(kind * 2 + 1, 1, int(one.shape[-1]), 4), 1, "SAME"))
            elif kind == 2:
                values.append(tf.nn.max_pool2d(one, 3, 1, "SAME"))
            elif kind == 3:
                values.append(tf.nn.relu(one * filter(int(one.shape[-1]))))
            else:
                parts = [one, two] if kind == 4 else [one, two, three]
                sizes = [[size for place, size in enumerate(part.shape) if place != axis % 4] for part in parts]
                same = [part for part, size in zip(parts, sizes, strict=True) if size == sizes[0]]
                if len(same) > 1 and sum(int(np.prod(part.shape)) for part in same) < 20_000:
                    joined = tf.raw_ops.Concat(concat_dim=axis, values=same) if old else tf.concat(same, axis)
                    values.append(joined)
        for place, pick in enumerate(dict.fromkeys(pick % len(values) for pick in (-1, *fetched))):
            tf.cast(values[pick], tf.float32, name=f"out_{place}")

    feeds = {"x": normal(2, 4, 4, 3)}
    return graph_of(lambda tf, v1: build(tf, v1, feeds)), feeds, dtype


@settings(max_examples=examples(8, 200), deadline=None)
@given(graphs(), st.sampled_from([{}, {"fuse": True}, {"group": True}]))
def test_random_graphs(case, options):
    flat, feeds, dtype = case
    tolerance = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}[dtype]
    assert_equals_tensorflow(flat, feeds, streams=(1, 4), tolerance=tolerance, **options)


def test_the_second_checker_sees_an_edge_that_was_dropped():
    """A mutant: the steps that read what is joined do not wait for one that writes a part of it."""
    feeds = image(size=6)
    flat = graph_of(lambda tf, v1: inception(tf, v1, feeds), outputs=["out"])
    program = program_of(flat, feeds)
    ids = np.arange(len(flat), dtype=np.int32)
    prove(plan_for(program, ids, None), program)
    edges = [
        (int(first), number)
        for number in range(len(program.steps))
        for first in program.dag.src[program.dag.start[number] : program.dag.start[number + 1]]
    ]
    of_joined = [(a, b) for a, b in edges if program.steps[b].op.op == JOINED and program.steps[a].op.attrs.get(INTO)]
    assert len(of_joined) == 4
    for dropped in of_joined:
        left = [edge for edge in edges if edge != dropped]
        mutant = replace(program, dag=Dag.of(len(program.steps), [a for a, _ in left], [b for _, b in left]))
        with pytest.raises(EngineError, match="does not hold"):
            plan_for(mutant, ids, None)


def test_a_concat_that_forgets_a_part_is_refused():
    feeds = image(size=6)
    flat = graph_of(lambda tf, v1: inception(tf, v1, feeds), outputs=["out"])
    compiled = CudaEngine().compile(job(flat, feeds))
    graph = compiled.optimized.graph.copy()
    joined = next(op for op in graph.ops.values() if op.op == JOINED)
    joined.inputs = joined.inputs[:-1]
    # What is left out now stands behind it.
    writer = next(number for number, op in graph.ops.items() if op.attrs.get(INTO) and (number, 0) not in joined.inputs)
    graph.ops[writer] = graph.ops.pop(writer)
    with pytest.raises(EngineError, match="not written yet"):
        trace(graph, feeds, CPU)


def test_memory_of_a_buffer_is_given_back():
    """Two blocks one after the other need no more than one and what lies between."""
    feeds = image(size=16)

    def build(tf, v1, blocks):
        x = conv(tf, placeholder(tf, v1, feeds["x"]), 16)
        for _ in range(blocks):
            x = conv(tf, tf.concat([conv(tf, x, 32), conv(tf, x, 32, size=3)], 3), 16)
        tf.reduce_mean(x, [1, 2], name="out")

    peaks = []
    for blocks in (2, 6):
        flat = graph_of(lambda tf, v1, blocks=blocks: build(tf, v1, blocks), outputs=["out"])
        program = program_of(flat, feeds)
        assert count(program, BUFFER) == blocks
        peaks.append(arrange(program, plan_for(program, np.zeros(len(flat), np.int32), None)).peak_bytes)
    assert peaks[0] == peaks[1]
    assert peaks[0] >= 2 * 16 * 16 * (64 + 16) * 4


def ops_of(*rows):
    """A graph of ops by what each reads."""
    ops = {
        number: Op(number, f"n{number}", "AddN", {}, [(one, 0) for one in reads], [number]) for number, reads in rows
    }
    return OpGraph(ops, {}, {}, {})


def test_dominators():
    graph = ops_of((1, [0]), (2, [1]), (3, [1]), (4, [2, 3]), (5, [4]), (6, [0, 5]))
    found = Dominators(graph)
    assert [found.of(number) for number in range(1, 7)] == [None, 1, 1, 1, 4, None]
    assert found.of(5, 2) == 1
    assert found.of(5, 6) is None


@settings(max_examples=examples(50, 500))
@given(st.data())
def test_dominators_are_what_every_way_goes_through(data):
    count = data.draw(st.integers(2, 14))
    rows = [(n, data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3))) for n in range(1, count)]
    found, reads = Dominators(ops_of(*rows)), dict(rows)

    def ways(number):
        if number == 0:
            return {()}
        return {(*way, one) for one in reads[number] for way in ways(one)}

    for number in reads:
        common = set.intersection(*map(set, ways(number))) - {0}
        assert found.of(number) == max(common, default=None)


def test_it_is_stored_and_runs_again():
    feeds = image(size=6)
    flat = graph_of(lambda tf, v1: inception(tf, v1, feeds), outputs=["out"])
    asked = job(flat, feeds, scattered(flat, 4), streams=4)
    compiled = CudaEngine().compile(asked)
    plan, weights = compiled.plan(asked), Weights()
    data = pack(compiled, plan, weights)
    restored = unpack(
        data,
        torch.from_numpy(weights.memory()),
        StoredTables(np.zeros(0, np.uint8), torch.device("cpu")),
        feeds,
        fits=True,
    )
    found = executable_of(restored.compiled, restored.plan, asked.options, ieee=True).step(feeds)
    assert compare(found, run(flat, feeds)).passed
