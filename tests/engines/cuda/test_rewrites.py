"""Rewrites: the same result as TensorFlow, in the kernels that are expected, and nothing where nothing may be rewritten."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.engine import plan_for
from msplit.engines.cuda.lanes import arrange
from msplit.engines.cuda.lower import lower
from msplit.engines.cuda.program import Op, Source
from msplit.engines.cuda.rewrites import rewrite
from msplit.engines.cuda.rewrites.pattern import per_channel, trailing
from msplit.engines.cuda.simulated import SimulatedExecutable
from msplit.engines.cuda.trace import infer, trace
from msplit.measure.verify import compare
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, kernels, program_of

pytestmark = pytest.mark.tf

RNG = np.random.default_rng(0)
VIEWS = {"Reshape", "ExpandDims", "Squeeze"}


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def image(channels=3, size=8):
    return {"x": normal(2, size, size, channels)}


def check(build, feeds, expected, *, outputs=None, tolerance=None):
    """Equal to TensorFlow on 1 and 4 streams, in exactly these kernels."""
    flat = graph_of(build, outputs=outputs)
    assert_equals_tensorflow(flat, feeds, tolerance=tolerance)
    program = program_of(flat, feeds)
    assert kernels(program) == sorted(expected)
    assert {step.op.op for step in program.steps if not step.launches} <= VIEWS
    return program


def assert_equals_itself(flat, feeds):
    """With and without rewrites the same."""
    plain, rewritten = (lower(flat, feeds, CPU, rewrites=flag).source for flag in (False, True))
    assert compare(run_source(rewritten, feeds)[0], run_source(plain, feeds)[0]).passed


def placeholder(tf, v1, array, name="x"):
    return v1.placeholder(tf.as_dtype(array.dtype), [None, *array.shape[1:]], name=name)


# Batch norm and scales


def normalized(tf, y, channels):
    gamma, beta, mean = normal(channels), normal(channels), normal(channels)
    variance = np.abs(normal(channels)) + 0.1
    return tf.compat.v1.nn.fused_batch_norm(y, gamma, beta, mean, variance, epsilon=0.01, is_training=False)


# Not Tanh: TensorFlow 2.21's own optimizer fuses it with batch norm, and then has no kernel for that.
@pytest.mark.parametrize("act", [None, "Relu", "Relu6", "Elu", "LeakyRelu", "Sigmoid"])
def test_batch_norm_folds_into_a_convolution_and_takes_the_activation_along(act):
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 2, "SAME")
        y, _, _ = normalized(tf, y, 4)
        if act is not None:
            y = getattr(tf.raw_ops, act)(**{"x" if act == "Sigmoid" else "features": y})
        tf.identity(y, name="out")

    program = check(build, feeds, ["_FusedConv2D"], outputs=["out"])
    fused = program.steps[0].op.attrs["fused_ops"]
    assert fused == (("BiasAdd",) if act is None else ("BiasAdd", act))


def test_batch_norm_folds_into_a_depthwise_convolution():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.depthwise_conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 2), [1, 1, 1, 1], "SAME")
        y, _, _ = normalized(tf, y, 6)
        tf.nn.relu6(y, name="out")

    check(build, feeds, ["_FusedDepthwiseConv2dNative"], outputs=["out"])


@pytest.mark.parametrize("shape", [(4,), (1, 1, 1, 4), (1, 4)])
@pytest.mark.parametrize("last", ["add", "sub", "rsub"])
def test_batch_norm_taken_apart_folds_too(shape, last):
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "VALID")
        y = tf.nn.bias_add(y, normal(4)) * tf.constant(normal(*shape))
        offset = tf.constant(normal(*shape))
        y = {"add": tf.add, "sub": tf.subtract, "rsub": lambda a, b: tf.subtract(b, a)}[last](y, offset)
        tf.nn.relu(y, name="out")

    check(build, feeds, ["_FusedConv2D"], outputs=["out"])


def test_scales_offsets_and_divisions_behind_a_dense_layer_fold_into_it():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(4, 6), transpose_b=True) + normal(4)
        y = (y - normal(4)) / (np.abs(normal(4)) + 0.5) * 0.25
        tf.nn.relu(y + normal(1, 4), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_a_scale_alone_needs_no_bias():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)), 0.125, name="out")

    check(build, feeds, ["MatMul"], outputs=["out"])


def test_folded_weights_of_a_shared_filter_leave_the_other_reader_its_own():
    feeds = image()

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        filters = tf.constant(normal(3, 3, 3, 4))
        a = tf.nn.relu(tf.nn.conv2d(x, filters, 1, "SAME") * normal(4) + normal(4))
        tf.add(a, tf.nn.conv2d(x, filters, 1, "SAME"), name="out")

    check(build, feeds, ["AddV2", "Conv2D", "_FusedConv2D"], outputs=["out"])


# Products


@pytest.mark.parametrize("act", [None, "Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid"])
@pytest.mark.parametrize("add", ["BiasAdd", "AddV2", "AddV2 the other way"])
def test_bias_and_activation_ride_on_a_product(act, add):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4))
        bias = tf.constant(normal(4))
        y = {"BiasAdd": tf.nn.bias_add, "AddV2": tf.add}.get(add, lambda a, b: tf.add(b, a))(y, bias)
        if act == "LeakyRelu":
            y = tf.nn.leaky_relu(y, 0.3)
        elif act is not None:
            y = getattr(tf, act.lower())(y) if act in ("Tanh", "Sigmoid") else getattr(tf.nn, act.lower())(y)
        tf.identity(y, name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


EXACT = [
    lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2)))),
    lambda tf, x: x * (0.5 * (1.0 + tf.math.erf(x * np.float32(np.sqrt(0.5))))),
    lambda tf, x: (x * 0.5) * (tf.math.erf(0.70710678 * x) + 1.0),
    lambda tf, x: 0.5 * x * tf.math.erfc(-x * np.float32(np.sqrt(0.5))),
    lambda tf, x: tf.nn.gelu(x, approximate=False),
]
APPROXIMATE = [
    lambda tf, x: tf.nn.gelu(x, approximate=True),
    lambda tf, x: x * 0.5 * (1.0 + tf.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    lambda tf, x: x * (0.5 * (1.0 + tf.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * tf.pow(x, 3.0))))),
    lambda tf, x: x * tf.sigmoid(1.5957691216 * (x + 0.044715 * tf.square(x) * x)),
]


@pytest.mark.parametrize(
    ("form", "name"), [(form, "GeluExact") for form in EXACT] + [(form, "GeluApproximate") for form in APPROXIMATE]
)
def test_gelu_rides_on_a_product_however_it_is_written(form, name):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)
        tf.identity(form(tf, y), name="out")

    program = check(build, feeds, ["_FusedMatMul"], outputs=["out"])
    assert program.steps[0].op.attrs["fused_ops"] == ("BiasAdd", name)


@pytest.mark.parametrize(
    "form",
    [
        lambda tf, x: 0.5 * x * (1.0 + tf.math.erf(x * 0.72)),
        lambda tf, x: 0.51 * x * (1.0 + tf.math.erf(x * 0.70710678)),
        lambda tf, x: x * tf.sigmoid(1.702 * x),
        lambda tf, x: x * 0.5 * (1.0 + tf.tanh(0.7978845608 * (x + 0.05 * x * x * x))),
    ],
)
def test_what_is_only_near_gelu_stays(form):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        tf.identity(form(tf, tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)), name="out")

    # Not against TensorFlow: its own optimizer takes the last one of them for GELU.
    flat = graph_of(build, outputs=["out"])
    assert_equals_itself(flat, feeds)
    assert [op for op in kernels(program_of(flat, feeds)) if op == "Mul"]


def test_gelu_whose_parts_are_wanted_elsewhere_stays():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)) + normal(4)
        tf.add(tf.nn.gelu(y, approximate=True), y, name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    assert "Tanh" in kernels(program_of(flat, feeds))


def test_a_sum_rides_on_a_convolution_that_a_relu_follows():
    feeds = image(4)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y, _, _ = normalized(tf, tf.nn.conv2d(x, normal(3, 3, 4, 4), 1, "SAME"), 4)
        y = tf.nn.relu(y)
        y, _, _ = normalized(tf, tf.nn.conv2d(y, normal(3, 3, 4, 4), 1, "SAME"), 4)
        tf.nn.relu(x + y, name="out")

    program = check(build, feeds, ["_FusedConv2D", "_FusedConv2D"], outputs=["out"])
    assert program.steps[1].op.attrs["fused_ops"] == ("BiasAdd", "Add", "Relu")


def test_a_sum_that_broadcasts_does_not_ride_along():
    feeds = {"x": normal(2, 8, 8, 4), "z": normal(2, 1, 1, 4)}

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 4, 4), 1, "SAME")
        tf.nn.relu(tf.nn.bias_add(y, normal(4)) + placeholder(tf, v1, feeds["z"], "z"), name="out")

    check(build, feeds, ["AddV2", "Relu", "_FusedConv2D"], outputs=["out"])


@pytest.mark.parametrize(
    ("equation", "weights", "bias"),
    [
        ("abc,cd->abd", (6, 4), (4,)),
        ("abc,cde->abde", (6, 2, 3), (2, 3)),
        ("abc,cde->abde", (6, 2, 3), (1, 1, 2, 3)),
        ("acd,cde->ae", (3, 6, 5), (5,)),
    ],
)
def test_an_einsum_with_constant_weights_is_one_product(equation, weights, bias):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.einsum(equation, placeholder(tf, v1, feeds["x"]), tf.constant(normal(*weights)))
        tf.nn.relu(y + normal(*bias), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_an_einsum_that_is_no_plain_product_stays():
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        tf.einsum("abc,cd->adb", placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), name="out")

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert "Einsum" in kernels(program_of(flat, feeds))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_batched_product_with_one_matrix_is_a_product_of_matrices(transposed):
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        weights = tf.constant(normal(4, 6) if transposed else normal(6, 4))
        y = tf.raw_ops.BatchMatMulV2(x=placeholder(tf, v1, feeds["x"]), y=weights, adj_y=transposed)
        tf.nn.gelu(y + normal(4), name="out", approximate=True)

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds)
    assert kernels(program_of(flat, feeds)) == ["_FusedMatMul"]


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_a_dense_layer_on_a_sequence_is_one_product(act):
    """Keras' Dense takes a tensor of rank three through Tensordot: reshapes around the product, the bias behind them."""
    feeds = {"x": normal(2, 3, 6)}

    def build(tf, v1):
        y = tf.tensordot(placeholder(tf, v1, feeds["x"]), tf.constant(normal(6, 4)), [[2], [0]])
        tf.identity(getattr(tf.nn, act)(tf.nn.bias_add(y, normal(4))), name="out")

    check(build, feeds, ["_FusedMatMul"], outputs=["out"])


def test_a_bias_behind_two_products_rides_on_one_of_them():
    feeds = {"x": normal(2, 6), "h": normal(2, 3)}

    def build(tf, v1):
        x, h = placeholder(tf, v1, feeds["x"]), placeholder(tf, v1, feeds["h"], "h")
        y = tf.nn.bias_add(tf.matmul(x, normal(6, 4)) + tf.matmul(tf.tanh(h), normal(3, 4)), normal(4))
        tf.tanh(y, name="out")

    program = check(build, feeds, ["AddV2", "MatMul", "Tanh", "Tanh", "_FusedMatMul"], outputs=["out"])
    (fused,) = [step for step in program.steps if step.op.op == "_FusedMatMul"]
    assert fused.inputs[0] in program.feeds.values(), "the product that is ready first takes the bias"


# Padding and identities


@pytest.mark.parametrize("kind", ["Conv2D", "DepthwiseConv2dNative"])
def test_zeros_around_an_image_become_padding(kind):
    feeds = image()

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), [[0, 0], [1, 2], [0, 1], [0, 0]])
        y = (
            tf.nn.conv2d(x, normal(3, 3, 3, 4), 2, "VALID")
            if kind == "Conv2D"
            else tf.nn.depthwise_conv2d(x, normal(3, 3, 3, 2), [1, 2, 2, 1], "VALID")
        )
        tf.identity(y, name="out")

    check(build, feeds, [kind], outputs=["out"])


@pytest.mark.parametrize(
    ("paddings", "value", "mode"),
    [
        ([[0, 0], [1, 1], [1, 1], [0, 1]], 0.0, "VALID"),
        ([[0, 0], [1, 1], [1, 1], [0, 0]], 1.0, "VALID"),
        ([[0, 0], [1, 1], [1, 1], [0, 0]], 0.0, "SAME"),
    ],
)
def test_other_padding_stays(paddings, value, mode):
    feeds = image()

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), paddings, constant_values=value)
        tf.nn.conv2d(x, normal(3, 3, 3 + paddings[3][1], 4), 2, mode, name="out")

    # Not against TensorFlow: its own optimizer folds padding of the channels too, and fails.
    flat = graph_of(build)
    assert_equals_itself(flat, feeds)
    assert len(kernels(program_of(flat, feeds))) == 2


def test_what_changes_nothing_is_no_step():
    feeds = {"x": normal(2, 4)}

    def build(tf, v1):
        x = tf.stop_gradient(tf.identity(placeholder(tf, v1, feeds["x"])))
        x = tf.identity_n([x, x])[1]
        x = tf.cast(x, tf.float32)
        x = tf.reshape(x, [-1, 4]) * 1.0 / 1.0 - 0.0
        x = tf.debugging.check_numerics(tf.transpose(x, [0, 1]), "nan")
        x = tf.tile(tf.pad(x, [[0, 0], [0, 0]]), [1, 1])[:, :]
        tf.tanh(tf.slice(tf.concat([x], 0), [0, 0], [-1, -1]), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    assert [step.op.op for step in program_of(flat, feeds).steps if step.launches] == ["Tanh"]


def test_arithmetic_that_changes_the_shape_is_no_identity():
    feeds = {"x": normal(2, 1)}

    def build(tf, v1):
        tf.multiply(placeholder(tf, v1, feeds["x"]), np.ones((2, 3), np.float32), name="out")

    check(build, feeds, ["Mul"], outputs=["out"])


# Tables in parts


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("rows", [(4, 4, 3), (5, 5, 5), (7,)])
def test_a_lookup_in_a_table_of_parts_is_a_lookup_in_the_whole(strategy, rows):
    feeds = {"ids": RNG.integers(0, sum(rows), (4, 3)).astype(np.int64)}

    def build(tf, v1):
        ids = v1.placeholder(tf.int64, [None, 3], name="ids")
        tables = [tf.constant(normal(count, 2)) for count in rows]
        tf.identity(v1.nn.embedding_lookup(tables, ids, partition_strategy=strategy), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds)
    program = program_of(flat, feeds)
    assert not program.dynamic
    found = kernels(program)
    assert not {"DynamicPartition", "ParallelDynamicStitch"} & set(found)
    assert found.count("GatherV2") == (2 if len(rows) > 1 else 1)


def test_parts_in_another_order_stay():
    """A stitch that does not put the rows back where their ids were."""
    feeds = {"ids": np.array([0, 1, 2, 3], np.int32)}

    def build(tf, v1):
        ids = v1.placeholder(tf.int32, [4], name="ids")
        to = tf.math.floormod(ids, 2)
        places = tf.dynamic_partition(tf.constant([3, 2, 1, 0]), to, 2)
        parts = tf.dynamic_partition(ids // 2, to, 2)
        rows = [tf.gather(tf.constant(normal(2, 3)), part) for part in parts]
        tf.identity(tf.dynamic_stitch(places, rows), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds, capture=False)
    assert program_of(flat, feeds).dynamic


# What must stay


def dense(tf, v1, feeds):
    return tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4), name="product")


@pytest.mark.parametrize("fetched", ["product", "biased", "scaled"])
def test_nothing_is_folded_across_a_fetched_value(fetched):
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.add(dense(tf, v1, feeds), normal(4), name="biased")
        tf.nn.relu(tf.multiply(y, normal(4), name="scaled"), name="out")

    flat = graph_of(build, outputs=[fetched, "out"])
    assert_equals_tensorflow(flat, feeds)
    assert len(kernels(program_of(flat, feeds))) > 1


def test_nothing_is_folded_across_a_value_with_another_reader():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = tf.nn.bias_add(dense(tf, v1, feeds), normal(4))
        tf.add(tf.nn.relu(y), tf.tanh(y), name="out")

    check(build, feeds, ["AddV2", "Relu", "Tanh", "_FusedMatMul"], outputs=["out"])


def test_a_value_that_is_added_to_itself_is_no_bias():
    feeds = {"x": normal(5, 6)}

    def build(tf, v1):
        y = dense(tf, v1, feeds)
        tf.add(y, y, name="out")

    check(build, feeds, ["AddV2", "MatMul"], outputs=["out"])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("how", ["Mul", "AddV2"])
def test_constants_that_are_not_finite_stay_where_they_are(value, how):
    feeds = {"x": np.abs(normal(5, 6)) + 1}
    constant = np.array([1, value, 2, 3], np.float32)

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), np.abs(normal(6, 4)) + 1)
        tf.identity(tf.multiply(y, constant) if how == "Mul" else tf.add(y, constant), name="out")

    check(build, feeds, [how, "MatMul"], outputs=["out"])


def test_a_scale_that_the_type_can_not_hold_stays():
    feeds = {"x": normal(5, 6, dtype=np.float16)}

    def build(tf, v1):
        weights = np.full((6, 4), 60, np.float16)
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"] * np.float16(1e-3)), weights), np.float16(3e4), name="out")

    flat = graph_of(build, outputs=["out"])
    assert kernels(program_of(flat, feeds)) == ["MatMul", "Mul"]


def test_a_constant_per_position_is_no_scale_of_channels():
    feeds = {"x": normal(4, 6)}

    def build(tf, v1):
        tf.multiply(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 4)), normal(4, 1), name="out")

    check(build, feeds, ["MatMul", "Mul"], outputs=["out"])


def test_a_constant_that_makes_the_result_wider_is_no_bias():
    feeds = {"x": normal(4, 6)}

    def build(tf, v1):
        y = tf.add(tf.matmul(placeholder(tf, v1, feeds["x"]), normal(6, 1)), normal(3), name="wide")
        tf.add(y, normal(2, 1, 1), name="out")

    check(build, feeds, ["AddV2", "AddV2", "MatMul"], outputs=["out"])


def test_batch_norm_in_training_or_with_wanted_statistics_stays():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "SAME")
        y, mean, _ = v1.nn.fused_batch_norm(y, normal(4), normal(4), is_training=True)
        tf.identity(y, name="out")
        tf.identity(mean, name="mean")

    check(build, feeds, ["Conv2D", "FusedBatchNormV3"], outputs=["out", "mean"])


def test_a_product_of_integers_is_not_fused():
    feeds = {"x": np.arange(12, dtype=np.int32).reshape(2, 6)}

    def build(tf, v1):
        y = tf.matmul(placeholder(tf, v1, feeds["x"]), np.ones((6, 4), np.int32))
        tf.identity(tf.nn.bias_add(y, np.arange(4, dtype=np.int32)) * 3, name="out")

    check(build, feeds, ["BiasAdd", "MatMul", "Mul"], outputs=["out"])


# Chains at random, in both formats


def source_of(ops, constants):
    """A source of a chain of ops: each reads the one before it, the first one the input."""
    source = Source({}, dict(constants), {"x": (0, 0)}, {}, numbers=1000)
    key = (0, 0)
    for number, (op, attrs, before, after) in enumerate(ops, 1):
        inputs = [*before, key, *after]
        source.ops[number] = Op(number, f"{op}_{number}", op, {"T": "float32", **attrs}, inputs, [number])
        key = (number, 0)
    source.fetches["out"] = key
    return source


@st.composite
def chains(draw):
    """A convolution or product, and ops behind it that scale, shift, reshape or bend."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["Conv2D", "DepthwiseConv2dNative", "MatMul"]))
    layout = draw(st.sampled_from(["NHWC", "NCHW"])) if kind != "MatMul" else "NHWC"
    channels = draw(st.integers(1, 4))
    constants, ops = {}, []

    def constant(array):
        key = (500 + len(constants), 0)
        constants[key] = np.asarray(array, np.float32)
        return key

    if kind == "MatMul":
        x = rng.standard_normal((3, 5))
        turned = draw(st.booleans())
        weights = rng.standard_normal((channels, 5) if turned else (5, channels))
        ops.append(("MatMul", {"transpose_a": False, "transpose_b": turned}, [], [constant(weights)]))
        wide = [(channels,), (1, channels), (), (1, 1)]
    else:
        x = rng.standard_normal((2, 4, 5, 2) if layout == "NHWC" else (2, 2, 4, 5))
        multiplier = channels
        channels = 2 * channels if kind != "Conv2D" else channels
        weights = rng.standard_normal((2, 2, 2, multiplier))
        attrs = {"strides": (1, 1, 1, 1), "padding": "SAME", "data_format": layout}
        ops.append((kind, attrs, [], [constant(weights)]))
        wide = (
            [(channels,), (1, 1, 1, channels), ()] if layout == "NHWC" else [(channels, 1, 1), (1, channels, 1, 1), ()]
        )
    for _ in range(draw(st.integers(0, 6))):
        op = draw(st.sampled_from(["Mul", "AddV2", "Sub", "RealDiv", "BiasAdd", "Relu", "Tanh", "rows"]))
        if op in ("Relu", "Tanh"):
            ops.append((op, {}, [], []))
        elif op == "rows":  # a constant that is not per channel
            shape = (3, 1) if kind == "MatMul" else (2, 1, 1, 1)
            ops.append(("Mul", {}, [], [constant(rng.uniform(0.5, 2, shape))]))
        elif op == "BiasAdd":
            ops.append((op, {"data_format": layout}, [], [constant(rng.standard_normal(channels))]))
        else:
            value = constant(rng.uniform(0.5, 2, draw(st.sampled_from(wide))))
            first = op != "RealDiv" and draw(st.booleans())
            ops.append((op, {}, [value] if first else [], [] if first else [value]))
    return ops, constants, x.astype(np.float32)


def run_source(source, feeds):
    program = trace(source, feeds, CPU)
    lanes = arrange(
        program, plan_for(program, np.zeros(1000, np.int32), None)
    )  # more ids than any graph here has nodes
    return SimulatedExecutable(program, lanes, {}).step(feeds), program


@given(chains())
@settings(max_examples=120, deadline=None)
def test_a_chain_gives_the_same_with_and_without_rewrites(case):
    ops, constants, x = case
    feeds = {"x": x}
    plain = source_of(ops, constants)
    expected, before = run_source(plain, feeds)
    rewritten = source_of(ops, constants)
    infer(rewritten, feeds, CPU)
    rewrite(rewritten)
    found, after = run_source(rewritten, feeds)
    assert compare(found, expected, tolerance=2e-4).passed
    assert len(kernels(after)) <= len(kernels(before))
    covered = [node for step in after.steps for node in step.op.covers]
    assert set(covered) <= set(range(1, len(ops) + 1))
    linear = [op for op, *_ in ops[1:]]
    if linear and all(op in ("AddV2", "Sub", "BiasAdd") for op in linear):
        assert len(kernels(after)) == 1


def test_every_rewritten_op_does_the_work_of_the_nodes_it_replaced():
    feeds = image()

    def build(tf, v1):
        y = tf.nn.conv2d(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), 1, "SAME", name="conv")
        y = tf.nn.relu(tf.multiply(y, normal(4), name="scale") + normal(4), name="out")

    flat = graph_of(build)
    lowered = lower(flat, feeds, CPU)
    (op,) = lowered.source.ops.values()
    names = [flat.graph.names[node] for node in op.covers]
    assert names[0] == "conv"
    assert {"conv", "scale", "out"} <= set(names)
    assert len(names) == len(set(names)) == 4


# Helpers of patterns


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 3, 4), 4, (4,)),
        ((2, 3, 4), 12, (3, 4)),
        ((2, 3, 4), 24, (2, 3, 4)),
        ((2, 3, 4), 6, None),
        ((2, 4, 1), 4, (4, 1)),
        ((), 1, None),
        ((0, 3), 3, (3,)),
    ],
)
def test_trailing_axes(shape, size, expected):
    assert trailing(shape, size) == expected


def test_per_channel_takes_what_is_the_same_everywhere_else():
    shape, last = (2, 5, 3), (2,)
    assert per_channel(np.float32(2), shape, last).tolist() == [2, 2, 2]
    assert per_channel(np.arange(3.0), shape, last).tolist() == [0, 1, 2]
    assert per_channel(np.arange(3.0).reshape(1, 1, 3), shape, last).tolist() == [0, 1, 2]
    assert per_channel(np.arange(5.0).reshape(5, 1), shape, last) is None
    assert per_channel(np.ones((1, 1, 1, 3)), shape, last) is None
    assert per_channel(np.arange(5.0).reshape(5, 1), shape, (1,)).tolist() == [0, 1, 2, 3, 4]
    assert per_channel(np.arange(15.0).reshape(5, 3), shape, (1, 2)).tolist() == list(range(15))
    assert per_channel(np.ones(3), (2, 1), (1,)) is None


# Duplicates


def test_ops_that_compute_the_same_run_once():
    def build(tf, v1):
        x = placeholder(tf, v1, normal(3, 8))
        left, right = tf.nn.relu(x), tf.nn.relu(x)
        v1.identity(tf.tanh(left * 2.0) + tf.sigmoid(right * 2.0) - left, name="out")

    check(build, {"x": normal(3, 8)}, ["AddV2", "Mul", "Relu", "Sigmoid", "Sub", "Tanh"], outputs=["out"])


def test_equal_ops_with_other_attributes_or_random_numbers_are_not_duplicates():
    def build(tf, v1):
        x = placeholder(tf, v1, normal(3, 8))
        sloped = tf.nn.leaky_relu(x, 0.1) + tf.nn.leaky_relu(x, 0.3)
        noise = [tf.random.stateless_uniform([3, 8], [1, seed]) for seed in (1, 2)]
        v1.identity(sloped * noise[0] + noise[1], name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, {"x": normal(3, 8)})
    assert kernels(program_of(flat, {"x": normal(3, 8)})).count("LeakyRelu") == 2


def test_each_convolution_still_takes_its_own_padding_along():
    filters = [normal(3, 3, 3, 4) for _ in range(2)]

    def build(tf, v1):
        x = placeholder(tf, v1, normal(2, 8, 8, 3))
        padded = [tf.pad(tf.nn.relu(x), [[0, 0], [1, 1], [1, 1], [0, 0]]) for _ in range(2)]
        made = [tf.nn.conv2d(p, f, 1, "VALID") for p, f in zip(padded, filters, strict=True)]
        v1.identity(made[0] + made[1], name="out")

    check(build, image(), ["AddV2", "Conv2D", "Conv2D", "Relu"], outputs=["out"])
