"""What stands in front of a convolution rides on its load: found where it can, equal to TensorFlow. The kernel is tested on a GPU."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.windows import PROLOGUE
from msplit.engines.cuda.passes.convolution.fuse_prologue import PROLOGUES
from msplit.engines.cuda.passes.measured import deciding
from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import normal, placeholder

pytestmark = pytest.mark.tf

CHANNELS = 16


@pytest.fixture
def takes_all():
    """Every convolution takes its prologue, as if that had measured faster."""
    with deciding({PROLOGUES: lambda graph, found: (True, None)}):
        yield


def prologues(program):
    return [step.op.attrs[PROLOGUE] for step in program.steps if step.op.op == "_PrologueConv2D"]


def test_a_normalization_and_relu_in_front_of_a_convolution():
    feeds = {"x": normal(2, 5, 5, CHANNELS), "y": normal(2, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"]) + placeholder(tf, v1, feeds["y"], "y")
        mean, variance = normal(CHANNELS), np.abs(normal(CHANNELS)) + 0.1
        z = v1.nn.fused_batch_norm(x, normal(CHANNELS), normal(CHANNELS), mean, variance, is_training=False)[0]
        z = tf.nn.bias_add(tf.nn.conv2d(tf.nn.relu(z), normal(1, 1, CHANNELS, 8), 1, "SAME"), normal(8))
        tf.identity(tf.nn.relu(z) + tf.reduce_sum(x), name="out")

    flat = graph_of(build)
    assert prologues(program_of(flat, feeds)) == [("scale", "shift", "relu")]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, fuse=True)


def test_factors_of_squeeze_and_excitation():
    feeds = {"x": normal(3, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        squeezed = tf.nn.conv2d(tf.reduce_mean(x, [1, 2], keepdims=True), normal(1, 1, CHANNELS, CHANNELS), 1, "SAME")
        tf.nn.conv2d(x * tf.sigmoid(squeezed), normal(1, 1, CHANNELS, 8), 1, "SAME", name="out")

    flat = graph_of(build)
    assert prologues(program_of(flat, feeds)) == [("scale",)]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


@pytest.mark.parametrize("what", ["window", "channels", "read twice", "fetched", "along height", "sum of the result"])
def test_what_stays(what):
    channels = 8 if what == "channels" else CHANNELS
    feeds = {"x": normal(2, 5, 5, channels)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = tf.nn.relu(x) if what != "along height" else x * normal(5, 1, channels)
        size = 3 if what == "window" else 1
        z = tf.nn.conv2d(y, normal(size, size, channels, channels), 1, "SAME")
        if what == "sum of the result":
            z = tf.nn.relu(tf.nn.bias_add(z, normal(channels)) + y)
        tf.identity(z + y if what == "read twice" else z, name="out")
        tf.identity(y, name="part")

    flat = graph_of(build, outputs=["out", "part"] if what == "fetched" else ["out"])
    assert prologues(program_of(flat, feeds)) == []
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


def test_of_two_relus_the_last_one_rides_along():
    feeds = {"x": normal(2, 5, 5, CHANNELS)}

    def build(tf, v1):
        y = tf.nn.relu(tf.nn.relu(placeholder(tf, v1, feeds["x"])) * normal(CHANNELS))
        tf.nn.conv2d(y, normal(1, 1, CHANNELS, 4), 1, "SAME", name="out")

    flat = graph_of(build)
    assert prologues(program_of(flat, feeds)) == [("scale", "relu")]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


@settings(max_examples=examples(8, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.sampled_from(["mul", "mul first", "own", "scalar", "add", "sub", "relu", "read", "neg"]),
        min_size=1,
        max_size=5,
    ),
    window=st.sampled_from([1, 1, 3]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from(["SAME", "VALID", [[0, 0], [1, 0], [0, 2], [0, 0]]]),
    epilogue=st.sampled_from(["", "bias", "relu", "swish"]),
    dtype=st.sampled_from(["float32", "float32", "float16", "bfloat16"]),
    options=st.sampled_from([{}, {"fuse": True}, {"group": True}]),
)
def test_whatever_stands_in_front(takes_all, steps, window, stride, padding, epilogue, dtype, options):
    feeds = {"x": normal(2, 6, 5, CHANNELS)}

    def build(tf, v1):
        def constant(*shape):
            return tf.constant(normal(*shape), dtype)

        x = tf.cast(placeholder(tf, v1, feeds["x"]), dtype)
        y, others = x, []
        for step in steps:
            if step == "read":
                others.append(y)
                continue
            y = {
                "mul": lambda y: y * constant(CHANNELS),
                "mul first": lambda y: constant(1, 1, CHANNELS) * y,
                "own": lambda y: y * tf.tanh(tf.reduce_mean(x, [1, 2], keepdims=True)),
                "scalar": lambda y: y * constant(),
                "add": lambda y: constant(CHANNELS) + y,
                "sub": lambda y: y - constant(CHANNELS),
                "relu": tf.nn.relu,
                "neg": tf.negative,
            }[step](y)
        z = tf.nn.conv2d(y, constant(window, window, CHANNELS, 4) / 4, stride, padding)
        z = tf.nn.bias_add(z, constant(4)) if epilogue else z
        z = tf.nn.relu(z) if epilogue == "relu" else z * tf.sigmoid(z) if epilogue == "swish" else z
        tf.cast(z, tf.float32, name="out")
        for number, other in enumerate(others):
            tf.cast(other, tf.float32, name=f"other_{number}")

    flat = graph_of(build)
    tolerance = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}[dtype]
    assert_equals_tensorflow(flat, feeds, tolerance=tolerance, streams=(1, 4), **options)


def test_a_whole_dense_block_is_two_kernels_a_layer():
    layers, feeds = 3, {"x": normal(2, 6, 6, CHANNELS)}

    def build(tf, v1):
        x = tf.nn.max_pool2d(placeholder(tf, v1, feeds["x"]), 2, 1, "SAME")
        for _ in range(layers):
            channels = int(x.shape[-1])
            y = tf.nn.relu(x * normal(channels) + normal(channels))
            y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(y, normal(1, 1, channels, 16), 1, "SAME"), normal(16)))
            x = tf.concat([x, tf.nn.conv2d(y, normal(3, 3, 16, 4), 1, "SAME")], 3)
        tf.reduce_mean(x, [1, 2], name="out")

    flat = graph_of(build)
    assert kernels(program_of(flat, feeds)) == ["Conv2D"] * layers + ["MaxPool", "Mean"] + ["_PrologueConv2D"] * layers
    for options in ({}, {"fuse": True, "group": True}):
        assert_equals_tensorflow(flat, feeds, tolerance=1e-3, streams=(1, 4), **options)
