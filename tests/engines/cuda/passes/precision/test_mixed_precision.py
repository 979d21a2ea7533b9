"""Half precision: which ops, which casts, and how far the outputs are from float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from msplit import api
from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.dtypes import dtype_name
from msplit.engines.cuda.ir.graph import RESULT
from msplit.engines.cuda.ir.interpret import walk
from msplit.engines.cuda.ir.windows import CAST_FROM
from msplit.engines.cuda.ops.linalg import product
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.inputs.make import make_inputs
from msplit.opset.traits import BATCH_MATMULS, HALF, MATMULS, Half
from msplit.verify.compare import compare
from tests.campaign import examples, sampled
from tests.engines.cuda.cases import CPU, SAMPLES, bits, flat_of, graph_of, options_of, scattered
from tests.engines.cuda.random_graphs import random_graphs
from tests.training_graphs import BATCH
from tests.training_graphs import kept as training_graph

IEEE, BF16, FP16 = Precision.IEEE, Precision.BF16, Precision.FP16
DISTANCE = {BF16: 2e-2, FP16: 2.5e-3}
"""Of a few layers from float32: a unit in the last place is 2**-8 and 2**-11 of a number."""

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def job(flat, feeds, precision, streams=1, **options):
    ids = scattered(flat, streams, streams)
    return Job(flat, ids, streams, feeds, precision=precision, options=options_of(**options))


def outputs_of(flat, feeds, precision, streams=1, **options):
    executable = CudaEngine().build(job(flat, feeds, precision, streams, **options))
    try:
        return executable.step(feeds)
    finally:
        executable.close()


def program_of(flat, feeds, precision=BF16, **options):
    return CudaEngine().compile(job(flat, feeds, precision, **options)).program


def steps(program):
    """The ops that launch something, each with the type of its first result, or products with that of what they multiply."""
    found = {}
    for step, _, call in walk(program, {name: np.zeros(*shape) for name, shape in program.fed.items()}, CPU):
        if step.launches:
            product = HALF.get(step.op.op) is Half.GAINS
            found.setdefault(step.op.op, []).append(step.op.attrs["T"] if product else dtype_name(call()[0].dtype))
    return found


def check(build, feeds, precision=BF16, *, wide=(), casts=1, within=None):
    """Near float32 in every kernel mode, with so many casts, and these ops in float32 beside casts; all others are in half precision."""
    flat = graph_of(build, outputs=["out"])
    expected = outputs_of(flat, feeds, IEEE)
    for options in ({}, {"fuse": True, "group": True}):
        got = outputs_of(flat, feeds, precision, **options)
        assert {name: value.dtype for name, value in got.items()} == {
            name: value.dtype for name, value in expected.items()
        }
        found = compare(got, expected, precision=BF16, tolerance=within or DISTANCE[precision])
        assert found.passed, found.describe()
    made = steps(program_of(flat, feeds, precision))
    assert len(made.pop("Cast", [])) == casts
    assert {op for op, types in made.items() if precision.half not in types} == set(wide)
    return flat


def test_products_with_what_lies_between_them_are_in_half_precision():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        hidden = tf.nn.relu(tf.tanh(x @ normal(8, 16)) + normal(4, 16))
        tf.identity(hidden @ normal(16, 4), name="out")

    check(build, {"x": normal(4, 8)}, casts=1)  # the last product gives float32 itself


def test_what_overflows_stays_in_float32_with_what_reads_it_up_to_the_next_product():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        hidden = tf.exp(x @ normal(8, 16)) * 0.1 + 1.0
        tf.identity(hidden @ normal(16, 4), name="out")

    check(build, {"x": normal(4, 8) / 4}, wide={"Exp", "Mul", "AddV2"}, casts=3)


@pytest.mark.parametrize(
    ("rows", "reader", "converted"),
    [
        ((0, 1, 2, 3), "exp", [(4, 8, 32)]),
        ((0, 2), "exp", [(8, 32), (8, 32)]),
        ((0, 1, 2, 3), "softmax", []),
    ],
)
def test_a_product_that_is_cut_into_parts_is_converted_once(rows, reader, converted):
    """But not if the parts are less than all of it, or if who reads them converts them itself."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8, 16], name="x")
        made = x @ normal(4, 16, 32)
        tf.identity(
            tf.stack([getattr(tf.nn if reader == "softmax" else tf, reader)(made[row]) for row in rows]), name="out"
        )

    feeds = {"x": normal(4, 8, 16) / 8}
    flat = graph_of(build, outputs=["out"])
    found = compare(
        outputs_of(flat, feeds, BF16), outputs_of(flat, feeds, IEEE), precision=BF16, tolerance=DISTANCE[BF16]
    )
    assert found.passed, found.describe()
    casts = [
        tuple(call()[0].shape)
        for step, _, call in walk(program_of(flat, feeds), feeds, CPU)
        if step.op.op == "Cast" and step.op.attrs["DstT"] == "float32"
    ]
    assert casts == converted


def test_sums_and_softmax_read_half_precision_and_compute_in_float32():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [17, 8, 8, 3], name="x")  # too many rows for one kernel
        pooled = tf.reduce_mean(tf.nn.conv2d(x, normal(3, 3, 3, 16), 1, "SAME"), [1, 2])
        tf.nn.softmax(pooled @ normal(16, 5), name="out")

    # The mean gives half precision: a product alone wants it. The convolution converts what it is fed.
    flat = check(build, {"x": normal(17, 8, 8, 3)}, wide={"Softmax"}, casts=0)
    large = {"x": np.full((17, 8, 8, 3), 600, np.float32)}
    assert np.isfinite(outputs_of(flat, large, FP16)["out"]).all()  # 64 of some thousands are more than float16 has


def test_a_norm_keeps_its_parameters_in_float32():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [2, 6, 6, 3], name="x")
        first = tf.nn.conv2d(x, normal(3, 3, 3, 8), 1, "SAME")
        joined = tf.concat([first, tf.nn.relu(first)], 3)  # two read it, so it is not folded
        y, *_ = v1.nn.fused_batch_norm(
            joined, normal(16), normal(16), normal(16), np.abs(normal(16)) + 1e-6, is_training=False
        )
        tf.identity(tf.nn.conv2d(tf.nn.relu(y), normal(1, 1, 16, 4), 1, "SAME"), name="out")

    flat = check(build, {"x": normal(2, 6, 6, 3)}, within=5e-2)
    program = program_of(flat, {"x": normal(2, 6, 6, 3)})
    (norm,) = (step for step in program.steps if step.op.op == "_PrologueConv2D")
    assert [dtype_name(program.constants[key].dtype) for key in norm.inputs[1:]] == ["bfloat16", "float32", "float32"]


def test_an_image_of_bytes_is_converted_at_once():
    def build(tf, v1):
        x = v1.placeholder(tf.uint8, [2, 8, 8, 3], name="x")
        tf.identity(tf.nn.conv2d(tf.cast(x, tf.float32), normal(3, 3, 3, 4), 2, "VALID"), name="out")

    feeds = {"x": rng.integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)}
    flat = check(build, feeds)
    first = program_of(flat, feeds).steps[0]
    assert (first.op.op, first.op.attrs[CAST_FROM]) == ("_CastConv2D", "uint8")


@pytest.mark.tf
@pytest.mark.parametrize("precision", [BF16, FP16])
def test_outputs_whose_shape_depends_on_values_are_float32_again(precision):
    def model(tf, v1):
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        rows = tf.gather(x, tf.reshape(tf.where(x[:, 0] > 0), [-1]))
        hidden = tf.nn.relu(tf.matmul(rows, normal(8, 8)))
        tf.nn.relu6(tf.matmul(hidden, normal(8, 4)), name="y")
        tf.identity(hidden + 1.0, name="z")

    flat = graph_of(model, outputs=["y", "z"])
    feeds = {"x": normal(6, 8)}
    exact = outputs_of(flat, feeds, IEEE, capture=False)
    found = outputs_of(flat, feeds, precision, capture=False)
    passed = compare(found, exact, precision=precision, tolerance=5 * DISTANCE[precision])
    assert passed.passed, passed.describe()
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    assert bits(found) != bits(exact)


@pytest.mark.parametrize("half", [BF16, FP16])
def test_a_mask_beyond_float16_masks(half):
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [2, 4, 8], name="x")
        kept = v1.placeholder(tf.int32, [2, 4], name="kept")
        mask = (1.0 - tf.cast(kept, tf.float32)) * -1e9
        scores = tf.nn.softmax(tf.matmul(x, x, transpose_b=True) / 8.0 + mask[:, None, :])
        tf.identity(tf.matmul(scores, x), name="out")

    feeds = {"x": normal(2, 4, 8), "kept": np.array([[1, 1, 0, 0], [0, 0, 0, 0]], np.int32)}
    flat = graph_of(build, outputs=["out"])
    got = outputs_of(flat, feeds, half)
    assert compare(got, outputs_of(flat, feeds, IEEE), precision=BF16, tolerance=2 * DISTANCE[half]).passed


def test_a_factor_beyond_float16_stays_in_float32():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        y = tf.tanh(tf.minimum((x @ normal(8, 8)) * 1e6, 1e9) * 1e-6)
        tf.identity(y @ normal(8, 2), name="out")

    # The factor is folded into the first product's weights, which then are as large.
    check(build, {"x": normal(4, 8)}, FP16, wide={"Mul", "Minimum", "Tanh"}, casts=1, within=1e-2)


def test_what_is_summed_in_float32_is_joined_before_it_is_converted():
    def build(tf, v1):
        ids = v1.placeholder(tf.int32, [4, 3], name="ids")
        columns = [tf.reduce_sum(tf.gather(normal(9, 4), ids), 1) for _ in range(5)]
        tf.identity(tf.concat(columns, 1) @ normal(20, 3), name="out")

    check(build, {"ids": rng.integers(0, 9, (4, 3)).astype(np.int32)}, wide={"GatherV2", "Sum", "ConcatV2"})


def test_tables_that_a_product_reads_are_converted_once():
    def build(tf, v1):
        ids = v1.placeholder(tf.int32, [4], name="ids")
        columns = [tf.gather(normal(9, 4), ids) for _ in range(5)]
        tf.identity(tf.concat(columns, 1) @ normal(20, 3), name="out")

    feeds = {"ids": rng.integers(0, 9, 4).astype(np.int32)}
    flat = check(build, feeds, casts=0)
    assert {dtype_name(one.dtype) for one in program_of(flat, feeds).constants.values()} == {"bfloat16"}
    # One kernel for all lookups reads float32 and rounds.
    assert sorted(steps(program_of(flat, feeds, group=True))) == ["MatMul", "_Columns"]


def test_a_model_of_half_precision_is_left_as_it_is():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        inner = tf.cast(x, tf.float16) @ tf.constant(normal(8, 8), tf.float16)
        tf.cast(tf.exp(inner), tf.float32, name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = {"x": normal(4, 8) / 4}
    assert bits(outputs_of(flat, feeds, FP16)) == bits(outputs_of(flat, feeds, IEEE))


def test_a_graph_without_products_stays_in_float32():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        tf.tanh(x * 2.0, name="out")

    feeds = {"x": normal(4, 8)}
    flat = graph_of(build, outputs=["out"])
    assert bits(outputs_of(flat, feeds, BF16)) == bits(outputs_of(flat, feeds, IEEE))


@sampled(
    5,
    name=["mmoe_small.pb", "keras_inception", "lstm_small.pb", "towers_small.pb", "gru_while"],
    precision=[BF16, FP16],
)
def test_emulated_it_is_as_far_from_float32_and_computes_in_it(name, precision):
    flat = api.load(SAMPLES / name)
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    exact = outputs_of(flat, feeds, IEEE)
    emulated = compare(outputs_of(flat, feeds, precision, emulate=True), exact, precision=BF16).outputs
    real = compare(outputs_of(flat, feeds, precision, fuse=True, group=True), exact, precision=BF16).outputs
    for one, other in zip(emulated, real, strict=True):
        assert 0.6 * one.distance < other.distance < 1.6 * one.distance
    made = steps(program_of(flat, feeds, precision, emulate=True))
    assert {kind for op in made if HALF.get(op) is Half.GAINS for kind in made[op]} == {"float32"}


def test_nodes_that_are_to_stay_in_float32_do():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [4, 8], name="x")
        hidden = tf.tanh(tf.matmul(x, normal(8, 16), name="first"))
        tf.matmul(tf.tanh(tf.matmul(hidden, normal(16, 16), name="second")), normal(16, 4), name="out")

    flat, feeds = graph_of(build, outputs=["out"]), {"x": normal(4, 8)}
    wide = frozenset([flat.graph.index["second"]])
    wanted = replace(job(flat, feeds, BF16), wide=wide)
    made = steps(CudaEngine().compile(wanted).program)
    assert sorted(made["MatMul"]) == ["bfloat16", "bfloat16", "float32"]
    assert made["Tanh"] == ["float32", "float32"]  # none is between two products in half precision any more
    every = replace(wanted, wide=frozenset(range(len(flat))))
    assert bits(CudaEngine().build(every).step(feeds)) == bits(outputs_of(flat, feeds, IEEE))


@pytest.mark.no_cover
@settings(max_examples=examples(8, 1000), deadline=None)
@given(random_graphs())
def test_random_graphs_have_the_types_that_passes_say_and_no_races(made):
    graph_def, feeds, outputs = made
    flat = flat_of(graph_def, outputs=outputs)
    engine = CudaEngine()
    expected = outputs_of(flat, feeds, IEEE)
    for half in (BF16, FP16):
        compiled = engine.compile(job(flat, feeds, half, group=True))
        types = compiled.optimized.graph.dtypes
        for step, _, call in walk(compiled.program, feeds, CPU):
            for port, result in enumerate(call()):
                assert types.get((step.op.node, port), dtype_name(result.dtype)) == dtype_name(result.dtype)
        outputs_of(flat, feeds, half, emulate=True)
        one = outputs_of(flat, feeds, half)
        assert bits(outputs_of(flat, feeds, half, 4)) == bits(one)
        assert {name: (value.dtype, value.shape) for name, value in one.items()} == {
            name: (value.dtype, value.shape) for name, value in expected.items()
        }


@pytest.mark.tf
@pytest.mark.parametrize("name", ["mmoe_small.pb", "keras_inception", "lstm_small.pb", "towers_small.pb"])
def test_outputs_are_about_as_near_to_float32_as_those_of_tensorflows_own_mixed_precision(name):
    flat = api.load(SAMPLES / name)
    feeds = make_inputs(flat, {}, batch=64, seed=0)
    theirs = {}
    for half in (IEEE, BF16):
        executable = TENSORFLOW.build(Job(flat, np.zeros(len(flat), np.int32), 1, feeds, precision=half))
        theirs[half] = executable.step(feeds)
        executable.close()

    def away(got):
        return {one.name: one.distance for one in compare(got, theirs[IEEE], precision=BF16).outputs}

    ours, stock = away(outputs_of(flat, feeds, BF16, fuse=True, group=True)), away(theirs[BF16])
    assert all(0 < ours[output] <= 3 * stock[output] for output in stock), (ours, stock)


@pytest.mark.parametrize("precision", [BF16, FP16])
@pytest.mark.parametrize("name", ["mmoe", "deepfm"])
def test_variables_are_converted_together_and_their_gradients_by_the_products(name, precision):
    """A launch for each weight, and for each gradient, was more than half precision gained."""
    flat, training = training_graph(name, "Adam", "resource")
    feeds = training.feeds(BATCH, 0)
    own = job(flat, feeds, precision, fuse=True, group=True)
    made = CudaEngine().compile(replace(own, state=training.state())).optimized.graph
    together = [op for op in made.ops.values() if op.op == "_CastAll"]
    assert [set(op.inputs) <= {*made.state.values(), *made.stacks} for op in together] == [True]
    assert len(together[0].inputs) >= 8
    products = {number for number, op in made.ops.items() if op.op in MATMULS | BATCH_MATMULS}
    gradients = [number for number in products if made.ops[number].attrs.get(RESULT) == "float32"]
    assert len(gradients) >= 4
    assert all(made.dtypes[number, 0] == "float32" for number in gradients)
    casts = [op for op in made.ops.values() if op.op == "Cast" and op.inputs[0][0] in products]
    updates = {"_ApplyFlat", "_Unscale", "ApplyAdam"}
    for op in casts:
        assert updates.isdisjoint(made.ops[reader].op for reader in made.consumers().get((op.node, 0), ()))


def test_a_product_gives_float32_of_half_precision_as_numpy_does():
    """On a GPU it does not round in between: `tests/gpu/test_half.py`."""
    a, b = (torch.tensor(normal(*shape)).bfloat16() for shape in ((4, 8), (3, 8, 5)))
    found = product(a, b, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, a.float() @ b.float(), rtol=1e-2, atol=1e-2)
    assert product(a, b, torch.bfloat16).equal(product(a, b))


@pytest.mark.parametrize("precision", [IEEE, BF16])
@pytest.mark.parametrize("op", ["MatMul", "BatchMatMulV2"])
def test_a_model_says_nothing_by_attributes_that_an_op_does_not_have(op, precision):
    """A node may have any. The engine called the type that a product gives by a name that other ops have."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 8), "x")
        y = x @ np.ones((8, 3), np.float32) if op == "MatMul" else tf.matmul(x[None], np.ones((1, 8, 3), np.float32))
        tf.identity(y, name="out")
    made = graph.as_graph_def()
    (node,) = (node for node in made.node if node.op == op)
    node.attr["Tout"].type = tf.float64.as_datatype_enum
    feeds = {"x": normal(4, 8)}
    (found,) = outputs_of(flat_of(made, outputs=["out"]), feeds, precision).values()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.reshape(4, 3), feeds["x"] @ np.ones((8, 3)), atol=0.05)


@pytest.mark.parametrize("precision", [BF16, FP16])
def test_an_output_of_attention_keeps_its_type(precision):
    """Of matrices, the last product of which gives float32 itself: joined with the softmax it gave half precision."""

    def build(tf, v1):
        q, k, v = (v1.placeholder(tf.float32, (16, 8), name) @ normal(8, 8) for name in "qkv")
        tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 3.0), v, name="out")

    feeds = {name: normal(16, 8) / 4 for name in "qkv"}
    flat = graph_of(build, outputs=["out"])
    expected, got = (outputs_of(flat, feeds, one, fuse=True, group=True)["out"] for one in (IEEE, precision))
    assert got.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=0.1)


def test_a_kernel_is_for_the_type_that_it_gives():
    """A sum in float32 gives a product half precision itself. Its fused kernel was taken for one that gives float32, in whatever was built
    next in the process.
    """
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 6, 8), "x")
        tf.matmul(tf.reduce_sum(tf.exp(x * 0.3), 1), normal(8, 8), name="out")
    flat, feeds = flat_of(graph.as_graph_def(), outputs=["out"]), {"x": normal(4, 6, 8)}
    (wanted,) = outputs_of(flat, feeds, IEEE).values()
    for precision in (BF16, IEEE, FP16, Precision.TF32):
        program = program_of(flat, feeds, precision, fuse=True, compile=True)
        assert sorted(steps(program)) == ["MatMul", "_FusedPointwise"]
        (found,) = outputs_of(flat, feeds, precision, fuse=True, compile=True).values()
        within = DISTANCE.get(precision, 1e-5)
        np.testing.assert_allclose(found, wanted, rtol=within, atol=within * np.abs(wanted).max())
