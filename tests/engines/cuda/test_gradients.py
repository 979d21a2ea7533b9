"""Graphs of `tf.gradients`, exported for inference as force fields and saliency maps are, against TensorFlow."""

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of

pytestmark = pytest.mark.tf


def weights(*shape):
    return (np.random.default_rng(len(shape)).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def force_field(tf, x):
    """An energy of distances, as DeePMD's descriptors and fitting nets have it."""
    distances = tf.sqrt(tf.reduce_sum(tf.square(x[:, :, None] - x[:, None, :]), -1) + 1e-3)
    inverse = tf.math.reciprocal(distances) + tf.math.rsqrt(distances)
    hidden = tf.nn.tanh(tf.nn.bias_add(tf.matmul(tf.reshape(inverse, [-1, 25]), weights(25, 8)), weights(8)))
    hidden = hidden + tf.nn.sigmoid(tf.matmul(hidden, weights(8, 8)) + weights(8))
    return tf.matmul(tf.nn.softplus(hidden), weights(8, 1)) + weights(1)


def attention(tf, x):
    """One head with layer normalization."""
    mean = tf.reduce_mean(x, -1, keepdims=True)
    x = (x - mean) * tf.math.rsqrt(tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True) + 1e-3)
    q, k, v = (tf.einsum("bsd,de->bse", x, weights(3, 3) * scale) for scale in (1, 2, 3))
    return tf.nn.gelu(tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True)), v))


def image(tf, x):
    """What convolutional nets are made of."""
    x = tf.pad(x[..., None], [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    x = tf.nn.relu(tf.nn.conv2d(x, weights(3, 3, 1, 4), 1, "SAME"))
    x = tf.nn.depthwise_conv2d(x, weights(3, 3, 4, 1), [1, 1, 1, 1], "SAME")
    scale, offset, mean, variance = (np.full(4, value, np.float32) for value in (1.5, 0.5, 0.1, 2.0))
    x = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, mean, variance, is_training=False)[0]
    x = tf.nn.max_pool2d(x, 2, 2, "SAME") + tf.nn.avg_pool2d(x, 3, 2, "SAME")
    return tf.image.resize(x, [6, 5])


@pytest.mark.parametrize("energy", [force_field, attention, image])
@pytest.mark.parametrize("fuse", [False, True])
def test_the_gradient_of_a_net_with_respect_to_its_input(energy, fuse):
    def graph(tf, v1):
        x = v1.placeholder(tf.float32, [None, 5, 3], name="x")
        y = energy(tf, x)
        tf.negative(tf.gradients(tf.reduce_sum(y * y), [x])[0], name="force")

    flat = graph_of(graph, outputs=["force"])
    found = cover(flat)
    assert not found.missing
    assert not found.stuck
    assert not found.host
    assert_equals_tensorflow(flat, {"x": weights(2, 5, 3)}, fuse=fuse, tolerance=2e-4)
