"""A depthwise convolution takes squeeze-and-excitation's layers along: where it can, equal to TensorFlow. The kernel is tested apart."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.autotune.tuner import Tuner, timed_by
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS, SQUEEZES
from msplit.engines.cuda.passes.measured import deciding
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import normal, placeholder

pytestmark = pytest.mark.tf

CHANNELS = 16
SQUEEZE = "_SqueezeDepthwiseConv2dNative"


@pytest.fixture(autouse=True)
def takes_all():
    """Every convolution takes its layers along, as if that had measured faster."""
    with deciding({SQUEEZES: lambda graph, found: (True, None)}):
        yield


def inverted_residual(tf, x, *, stride=1, padding="SAME", bias=True, activation="swish", size=3, kept=True):
    """Depthwise, squeezed and excited, projected, as EfficientNet has it; a block without its expansion."""
    channels = int(x.shape[-1])
    y = tf.nn.depthwise_conv2d(x, normal(size, size, channels, 1), [1, stride, stride, 1], padding)
    y = tf.nn.bias_add(y, normal(channels)) if bias else y
    y = y * tf.sigmoid(y) if activation == "swish" else getattr(tf.nn, activation)(y) if activation else y
    mean = tf.reduce_mean(y, [1, 2], keepdims=kept)
    mean = mean if kept else tf.reshape(mean, [-1, 1, 1, channels])
    inner = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(mean, normal(1, 1, channels, 4), 1, "SAME"), normal(4)))
    outer = tf.nn.bias_add(tf.nn.conv2d(inner, normal(1, 1, 4, channels), 1, "SAME"), normal(channels))
    return tf.nn.conv2d(y * tf.sigmoid(outer), normal(1, 1, channels, channels) / 4, 1, "SAME")


def test_a_block_is_two_kernels():
    feeds = {"x": normal(2, 6, 5, CHANNELS)}

    def build(tf, v1):
        tf.identity(inverted_residual(tf, placeholder(tf, v1, feeds["x"])), name="out")

    flat = graph_of(build)
    assert kernels(program_of(flat, feeds)) == ["_PrologueConv2D", SQUEEZE]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


@pytest.mark.parametrize("what", ["several filters of a channel", "NCHW", "elu", "no depthwise"])
def test_what_stays(what):
    feeds = {"x": normal(2, 6, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        filters = 2 if what == "several filters of a channel" else 1
        if what == "no depthwise":
            y = tf.nn.max_pool2d(x, 2, 1, "SAME")
        elif what == "NCHW":
            filter, format = normal(3, 3, CHANNELS, 1), "NCHW"
            y = tf.nn.depthwise_conv2d(tf.transpose(x, [0, 3, 1, 2]), filter, [1] * 4, "VALID", data_format=format)
        else:
            y = tf.nn.depthwise_conv2d(x, normal(3, 3, CHANNELS, filters), [1] * 4, "SAME")
        y = tf.nn.elu(tf.nn.bias_add(y, normal(int(y.shape[-1])))) if what == "elu" else y
        z = tf.nn.relu(tf.matmul(tf.reduce_mean(y, [1, 2]), normal(int(y.shape[-1]), 3)))
        tf.matmul(z, normal(3, 5), name="out")

    flat = graph_of(build)
    found = kernels(program_of(flat, feeds))
    assert SQUEEZE not in found
    assert "_MLP" in found
    if what != "NCHW":  # which TensorFlow has no kernel for on a CPU
        assert_equals_tensorflow(flat, feeds, tolerance=1e-3)


@pytest.mark.parametrize("faster", ["apart", "<lambda>"])
@pytest.mark.parametrize("fusion", [MLPS, SQUEEZES])
def test_a_kernel_is_taken_where_it_is_faster_than_what_it_replaces(fusion, faster):
    """On a CPU both compute the same."""
    feeds = {"x": normal(2, 6, 5, CHANNELS)}

    def build(tf, v1):
        tf.identity(inverted_residual(tf, placeholder(tf, v1, feeds["x"])), name="out")

    def times(lanes):
        lanes[0]()
        return 1.0 if getattr(lanes[0].run, "__name__", "") == faster else 2.0

    graph = optimize(graph_of(build), feeds, CPU).graph
    (found,) = (fusion.ahead or fusion.find)(graph)
    with torch.no_grad(), timed_by(times):
        tiles = [tiles for tiles, _ in fusion.trial(graph, found, CPU).candidates]
        chosen = fusion.choose(Tuner(Device(CPU)), fusion.trial(graph, found, CPU))
    assert chosen == (tiles[0] if faster == "<lambda>" else None)


@settings(max_examples=examples(7, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    block=st.fixed_dictionaries(
        {
            "stride": st.sampled_from([1, 2]),
            "padding": st.sampled_from(["SAME", "VALID"]),
            "bias": st.booleans(),
            "activation": st.sampled_from(["", "relu", "relu6", "swish", "sigmoid"]),
            "size": st.sampled_from([1, 3]),
            "kept": st.booleans(),
        }
    ),
    read=st.sampled_from(["", "convolution", "factors"]),
    options=st.sampled_from([{}, {"fuse": True}, {"group": True}]),
)
def test_whatever_block(batch, block, read, options):
    feeds = {"x": normal(batch, 6, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = inverted_residual(tf, x, **block)
        if read:  # by a second output, too
            name = {"convolution": "depthwise", "factors": "Sigmoid"}[read]
            seen = [op for op in y.graph.get_operations() if op.type in ("DepthwiseConv2dNative", "Sigmoid")]
            one = next(op for op in reversed(seen) if name in op.name)
            tf.reduce_max(one.outputs[0], name="seen")
        tf.identity(inverted_residual(tf, y, **{**block, "stride": 1, "size": 1}), name="out")

    flat = graph_of(build, outputs=["out", "seen"] if read else ["out"])
    assert not block["bias"] or SQUEEZE in kernels(
        program_of(flat, feeds)
    )  # most activations ride along with a bias only
    assert_equals_tensorflow(flat, feeds, tolerance=1e-3, streams=(1, 4), **options)
