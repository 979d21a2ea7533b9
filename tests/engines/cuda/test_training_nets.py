"""Whole training steps of TensorFlow 1 graphs, several of them, against TensorFlow: every variable in the end."""

from dataclasses import replace

import numpy as np
import pytest

from msplit.engines.cuda.coverage import cover
from msplit.engines.cuda.engine import ENGINE
from tests.engines.cuda.cases import flat_of, job, scattered
from tests.training_graphs import apart

pytestmark = pytest.mark.tf

FEEDS = {
    "x": np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32),
    "y": np.array([0, 1, 2, 3, 3, 2, 1, 0], np.int32),
}
STEPS = 3


def weights(v1, name, *shape):
    value = np.random.default_rng(sum(shape)).standard_normal(shape) / np.sqrt(shape[0])
    return v1.get_variable(name, initializer=value.astype(np.float32))


def vision(tf, v1, x, y):
    """What convolutional nets are made of, with a moving mean."""
    h = tf.reshape(tf.tile(x, [1, 24]), [-1, 6, 6, 4])
    h = tf.nn.conv2d(h, weights(v1, "filter", 3, 3, 4, 5), 1, "SAME")
    h, mean, _ = v1.nn.fused_batch_norm(h, weights(v1, "scale", 5), weights(v1, "offset", 5), is_training=True)
    moving = v1.get_variable("moving_mean", initializer=np.zeros(5, np.float32), trainable=False)
    v1.add_to_collection("updates", v1.assign_sub(moving, (moving - mean) * 0.1))
    h = tf.nn.local_response_normalization(tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, "SAME"), 2)
    h = tf.nn.avg_pool2d(
        tf.nn.depthwise_conv2d(h, weights(v1, "depthwise", 3, 3, 5, 2), [1, 1, 1, 1], "SAME"), 2, 1, "SAME"
    )
    h = tf.nn.conv2d_transpose(h, weights(v1, "transposed", 2, 2, 3, 10), [8, 6, 6, 3], 2, "SAME")
    h = tf.image.resize(tf.nn.bias_add(h, weights(v1, "bias", 3)), [9, 9])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        y, tf.tensordot(tf.reduce_mean(h, [1, 2]), weights(v1, "last", 3, 4), 1)
    )


def sequence(tf, v1, x, y):
    """Attention with layer normalization and dropout."""
    h = tf.reshape(tf.tile(x, [1, 8]), [8, 6, 8])
    q, k, v = (tf.reshape(tf.einsum("bsd,dhe->bhse", h, weights(v1, name, 8, 2, 4)), [8, 2, 6, 4]) for name in "qkv")
    h += tf.reshape(
        tf.transpose(tf.matmul(tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / 2.0), v), [0, 2, 1, 3]), [8, 6, 8]
    )
    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    h = tf.nn.batch_normalization(h, mean, variance, weights(v1, "offset", 8), weights(v1, "scale", 8), 1e-3)
    h = tf.nn.dropout(tf.nn.gelu(tf.tensordot(h, weights(v1, "inner", 8, 12), 1)), rate=0.3, seed=3)
    logits = tf.reduce_max(tf.tensordot(h, weights(v1, "outer", 12, 4), 1), 1)
    return tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, 4), logits)


def tables(tf, v1, x, y):
    """Rows of tables by one-hot products, crossed as factorization machines do, and sums over segments."""
    rows, factors = tf.one_hot(y, 10) @ weights(v1, "table", 10, 4), weights(v1, "factors", 6, 4)
    crossed = tf.square(x @ factors) - tf.square(x) @ tf.square(factors)
    a, b = tf.split(rows + crossed, 2, 1)
    together = tf.concat([tf.math.segment_sum(a, [0, 0, 1, 1, 2, 2, 3, 3]), tf.math.unsorted_segment_sum(b, y, 4)], 1)
    sums = tf.reduce_logsumexp(together, 1) + tf.norm(together, axis=1) + tf.math.cumsum(together, 1)[:, 2]
    return tf.nn.l2_loss(sums) + v1.losses.huber_loss(tf.zeros(4), sums) + tf.reduce_mean(tf.nn.top_k(rows, 2)[0])


def rate(tf, v1, step):
    """A warm-up, then a decay in stairs, cut off by a cosine."""
    stairs = v1.train.exponential_decay(0.1, step, 2, 0.9, staircase=True)
    first = v1.train.piecewise_constant(step, [0, 1], [0.02, 0.05, 0.1])
    return tf.minimum(tf.minimum(stairs, first), v1.train.cosine_decay(0.1, step, 10))


def trained(tf, v1, net, optimizer):
    """A train step with all that comes with one: clipping, decay of weights, a schedule, moving averages of what was updated."""
    x, y = v1.placeholder(tf.float32, [8, 6], name="x"), v1.placeholder(tf.int32, [8], name="y")
    loss = tf.reduce_mean(net(tf, v1, x, y), name="loss")
    step = v1.train.get_or_create_global_step()
    chosen = optimizer(v1, rate(tf, v1, step))
    pairs = chosen.compute_gradients(loss + 1e-3 * tf.add_n([tf.nn.l2_loss(one) for one in v1.trainable_variables()]))
    gradients, _ = tf.clip_by_global_norm([tf.clip_by_norm(gradient, 0.4) for gradient, _ in pairs], 0.5)
    with v1.control_dependencies(v1.get_collection("updates")):
        update = chosen.apply_gradients(
            zip(gradients, (variable for _, variable in pairs), strict=True), global_step=step
        )
    with v1.control_dependencies([update]):
        averages = v1.train.ExponentialMovingAverage(0.9, num_updates=step).apply(v1.trainable_variables())
    v1.group(averages, name="train")


OPTIMIZERS = {
    "adam": lambda v1, rate: v1.train.AdamOptimizer(rate),
    "momentum": lambda v1, rate: v1.train.MomentumOptimizer(rate, 0.9, use_nesterov=True),
    "rmsprop": lambda v1, rate: v1.train.RMSPropOptimizer(rate, centered=True),
}


@pytest.mark.parametrize(
    ("net", "optimizer", "kind"),
    [
        (vision, "momentum", "resource"),
        (sequence, "adam", "resource"),
        (sequence, "adam", "reference"),
        (tables, "rmsprop", "reference"),
    ],
)
def test_steps_leave_the_variables_that_tensorflow_leaves(net, optimizer, kind):
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.variable_scope("", use_resource=kind == "resource"):
        trained(tf, v1, net, OPTIMIZERS[optimizer])
        variables = {variable.op.name: variable for variable in v1.global_variables()}
        with v1.Session() as session:
            session.run([one.initializer for one in v1.trainable_variables()])  # averages begin with their values
            session.run(v1.global_variables_initializer())
            initial = session.run(variables)
            for _ in range(STEPS):
                loss, _ = session.run(["loss:0", "train"], {f"{name}:0": value for name, value in FEEDS.items()})
            wanted = session.run(variables)
    flat = flat_of(graph.as_graph_def(), outputs=["loss", "train"])
    found = cover(flat)
    assert not found.missing
    assert not found.stuck
    assert not found.host
    ours = ENGINE.build(
        replace(job(flat, FEEDS, scattered(flat, 3), streams=3, group=kind == "resource"), state=initial)
    )
    losses = [ours.step(FEEDS)["loss"] for _ in range(STEPS)]
    np.testing.assert_allclose(losses[-1], loss, rtol=2e-6)
    saved = {name: value for name, value in ours.save_state().items() if name in wanted}
    away = apart(saved, wanted)
    assert max(away.values()) < 1e-5, away


@pytest.mark.parametrize("resource", [True, False], ids=["resource", "reference"])
def test_a_counter_gives_the_number_before(resource):
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.int64, [2], name="x")
        counter = v1.Variable(np.int64(3), use_resource=resource, name="counter")
        number = (
            tf.raw_ops.ResourceCountUpTo(resource=counter.handle, limit=5, T=tf.int64)
            if resource
            else tf.raw_ops.CountUpTo(ref=counter._ref(), limit=5)
        )
        tf.add(x, number, name="out")
    flat, feeds = flat_of(graph.as_graph_def(), outputs=["out"]), {"x": np.array([10, 20])}
    ours = ENGINE.build(replace(job(flat, feeds), state={"counter": np.int64(3)}))
    assert [ours.step(feeds)["out"].tolist() for _ in range(3)] == [[13, 23], [14, 24], [15, 25]]
    assert ours.save_state() == {"counter": 5}
