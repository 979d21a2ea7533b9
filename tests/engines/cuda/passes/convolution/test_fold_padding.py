"""Zeros around an image become padding of the convolution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import assert_equals_itself, check, image, normal, normalized, placeholder

pytestmark = pytest.mark.tf


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


@settings(max_examples=examples(7, 100), deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=1, max_size=1),
    st.sampled_from(["relu", "none"]),
    st.lists(
        st.sampled_from(["conv", "depthwise", "pool", "strided pool", "mean pool", "other"]), min_size=1, max_size=3
    ),
)
def test_whatever_reads_an_image_with_zeros_around_it(around, first, kinds):
    feeds, ((top, bottom, left, right),) = image(channels=4, size=6), around

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        x = tf.pad(tf.nn.relu(x) if first == "relu" else x - 1, [[0, 0], [top, bottom], [left, right], [0, 0]])
        for number, kind in enumerate(kinds):
            y = {
                "conv": lambda: tf.nn.conv2d(x, normal(3, 3, 4, 5), 2, "VALID"),
                "depthwise": lambda: tf.nn.depthwise_conv2d(x, normal(3, 2, 4, 1), [1, 2, 2, 1], "VALID"),
                "pool": lambda: tf.nn.max_pool2d(x, 3, 1, "VALID"),
                "strided pool": lambda: tf.nn.max_pool2d(x, 3, 2, "VALID"),
                "mean pool": lambda: tf.nn.avg_pool2d(x, 3, 1, "VALID"),
                "other": lambda: x * 2,
            }[kind]()
            tf.identity(y, name=f"out_{number}")

    flat = graph_of(build)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    takers = {"conv", "depthwise"} | ({"pool", "strided pool"} if first == "relu" and max(*around[0]) < 3 else set())
    if takers.issuperset(kinds) and any(around[0]):
        assert "Pad" not in kernels(program_of(flat, feeds))


@pytest.mark.parametrize("axis", [1, 2])
def test_zeros_around_a_sequence_become_padding(axis):
    feeds = {"x": normal(2, 9, 3)}

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), [[0, 0], [2, 1], [0, 0]])
        filter = np.expand_dims(normal(3, 3, 4), axis - 1)
        tf.squeeze(tf.nn.conv2d(tf.expand_dims(x, axis), filter, 1, "VALID"), axis, name="out")

    check(build, feeds, ["Conv2D"], outputs=["out"])


def test_zeros_around_a_sequence_stay_in_front_of_a_pool():
    """Such as of MaxPooling1D, which adds an axis. A pool has no filter to look at."""
    feeds = {"x": normal(2, 9, 3)}

    def build(tf, v1):
        x = tf.pad(placeholder(tf, v1, feeds["x"]), [[0, 0], [2, 1], [0, 0]])
        tf.nn.avg_pool2d(tf.expand_dims(x, 1), [1, 1, 2, 1], [1, 1, 2, 1], "VALID", name="out")

    assert_equals_tensorflow(graph_of(build, outputs=["out"]), feeds)


def spelled(tf, x, filter, block, pads, crops):
    """A convolution of images or, with one block, of sequences."""
    y = tf.space_to_batch(x, block, pads)
    if len(block) == 1:
        y = tf.squeeze(tf.nn.conv2d(tf.expand_dims(y, 1), filter[None], 1, "VALID"), 1)
    else:
        y = tf.nn.conv2d(y, filter, 1, "VALID")
    return tf.batch_to_space(y, block, crops)


@pytest.mark.parametrize("mode", ["SAME", "VALID"])
def test_layers_of_images(mode):
    feeds = image(size=11)

    def build(tf, v1):
        y = tf.nn.convolution(placeholder(tf, v1, feeds["x"]), normal(3, 3, 3, 4), dilations=[2, 2], padding=mode)
        y = tf.nn.relu(normalized(tf, y + normal(4), 4)[0])
        y = tf.nn.convolution(y, normal(2, 2, 4, 4), dilations=[3, 3], padding=mode)
        tf.identity(tf.nn.atrous_conv2d(y, normal(2, 3, 4, 2), 2, "SAME"), name="out")

    program = check(build, feeds, ["Conv2D", "Conv2D", "_FusedConv2D"], outputs=["out"], tolerance=1e-4)
    assert [len(set(step.op.source_nodes)) > 2 for step in program.steps if step.launches] == [True] * 3


@pytest.mark.parametrize("padding", ["same", "valid", "causal"])
def test_layers_of_sequences(padding):
    feeds = {"x": normal(2, 30, 3)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        if padding == "causal":
            x = tf.pad(x, [[0, 0], [8, 0], [0, 0]])
        mode = "SAME" if padding == "same" else "VALID"
        y = tf.nn.convolution(x, normal(3, 3, 5), dilations=[4], padding=mode)
        y = tf.nn.relu(tf.nn.bias_add(y, normal(5)))
        tf.identity(tf.nn.convolution(y, normal(2, 5, 4), dilations=[2], padding="SAME"), name="out")

    check(build, feeds, ["Conv2D", "_FusedConv2D"], outputs=["out"], tolerance=1e-4)


def test_depthwise():
    feeds = image(channels=4, size=9)

    def build(tf, v1):
        y = tf.nn.depthwise_conv2d(
            tf.space_to_batch(placeholder(tf, v1, feeds["x"]), [2, 3], [[2, 3], [3, 3]]),
            normal(3, 3, 4, 1),
            [1] * 4,
            "VALID",
        )
        tf.batch_to_space(y, [2, 3], [[0, 1], [0, 0]], name="out")

    check(build, feeds, ["DepthwiseConv2dNative"], outputs=["out"], tolerance=1e-4)


@settings(max_examples=examples(10, 60), deadline=None)
@given(st.data())
def test_any_blocks_pads_and_crops(data):
    """Equal to TensorFlow, whether it is one convolution or must stay as it is because more is cut off than was put around."""
    axes = data.draw(st.integers(1, 2))
    block = data.draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes))
    kernel = data.draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes))
    size, pads, crops = [], [], []
    for step, width in zip(block, kernel, strict=True):
        whole = step * data.draw(st.integers(width, width + 3))
        before, after = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
        before, after = (before, after) if before + after < whole else (0, 0)
        left = whole - step * (width - 1)
        start = data.draw(st.integers(0, min(2, left - 1)))
        pads.append([before, after])
        size.append(whole - before - after)
        crops.append([start, data.draw(st.integers(0, min(2, left - 1 - start)))])
    feeds = {"x": normal(2, *size, 3)}
    filter = normal(*kernel, 3, 4)

    def build(tf, v1):
        tf.identity(spelled(tf, placeholder(tf, v1, feeds["x"]), filter, block, pads, crops), name="out")

    flat = graph_of(build, outputs=["out"])
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    more = any(crop > pad for pair, own in zip(crops, pads, strict=True) for crop, pad in zip(pair, own, strict=True))
    assert more or kernels(program_of(flat, feeds)) == ["Conv2D"]


@pytest.mark.parametrize("change", ["read", "stride", "block", "same"])
def test_what_is_no_dilation_stays(change):
    feeds = image(size=8)

    def build(tf, v1):
        x = tf.space_to_batch(placeholder(tf, v1, feeds["x"]), [2, 2], [[0, 0], [0, 0]])
        filter = normal(1, 1, 3, 4)
        y = tf.nn.conv2d(x, filter, 2 if change == "stride" else 1, "SAME" if change == "same" else "VALID")
        if change == "read":
            tf.nn.relu(y, name="middle")
        tf.batch_to_space(y, [4, 1] if change == "block" else [2, 2], np.zeros((2, 2), np.int32), name="out")

    flat = graph_of(build)
    assert_equals_itself(flat, feeds)
    assert {"SpaceToBatchND", "BatchToSpaceND"} <= set(kernels(program_of(flat, feeds)))
