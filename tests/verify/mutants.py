"""Models in which bugs are planted, and how a bug is planted in a lowering or behind a pass."""

from dataclasses import replace

import numpy as np

import msplit
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir import lowering as registry
from msplit.engines.cuda.passes import pipeline
from msplit.engines.cuda.passes.pipeline import Pass
from tests.assignments import assigned_once

FULL, BOTH = ("full",), ("full", "fast")


def values(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def lookup(tf, v1):
    """Rows of a table in two parts, weighted, averaged; ids below zero are pruned."""
    ids, w = v1.placeholder(tf.int64, [20], "ids"), v1.placeholder(tf.float32, [20], "w")
    at = np.array([[row, column] for row in range(10) for column in range(2)], np.int64)
    table = values(11, 3)
    both = tf.SparseTensor(at, ids, [10, 3]), tf.SparseTensor(at, w, [10, 3])
    tf.identity(
        v1.nn.safe_embedding_lookup_sparse([table[:6], table[6:]], *both, "mean", partition_strategy="div"), "y"
    )


def ragged(tf, v1):
    """Sums of rows of a table over ragged rows, and their lengths."""
    ids, splits = v1.placeholder(tf.int64, [None], "x/flat_values"), v1.placeholder(tf.int64, [None], "x/row_splits")
    rows = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
    tf.math.unsorted_segment_sum(tf.gather(values(7, 4), ids), rows.value_rowids(), 9, name="y")
    tf.reduce_max(tf.cast(rows.row_lengths(), tf.float32)[:, None] * values(1, 3), 1, name="longest")


def dense(tf, v1):
    """Numbers, ids and a category: a layer, a norm, probabilities, the best, the best two."""
    x, ids = v1.placeholder(tf.float32, [None, 17], "x"), v1.placeholder(tf.int32, [None], "ids")
    h = tf.concat([x, tf.gather(values(13, 5), ids), tf.one_hot(v1.placeholder(tf.int32, [None], "category"), 6)], 1)
    h = tf.nn.bias_add(tf.matmul(h, values(28, 33) * 0.2), values(33))
    mean, variance = tf.nn.moments(h, [1], keepdims=True)
    h = tf.nn.relu(tf.nn.batch_normalization(h, mean, variance, values(33, seed=1), values(33, seed=2), 1e-5))
    logits = tf.matmul(h, values(33, 7) * 0.3) + values(7)
    tf.nn.softmax(logits, name="p")
    tf.identity(tf.clip_by_value(logits, -1.0, 1.0), "clipped")


def guarded(tf, v1):
    """Ids that are clipped or taken by a remainder first, and prices in buckets."""
    i, hashed = v1.placeholder(tf.int64, [None, 4], "i"), v1.placeholder(tf.int64, [None, 3], "hashed")
    price, n = v1.placeholder(tf.float32, [None, 2], "price"), v1.placeholder(tf.int32, [None, 3], "n")
    parts = [values(rows, 3, seed=number) for number, rows in enumerate((11, 11, 10, 10))]
    rows = v1.nn.embedding_lookup(parts, tf.clip_by_value(tf.reshape(i, [-1]) + 2, 0, 41), partition_strategy="div")
    tf.reshape(rows, [-1, 12], name="rows")
    tf.gather(values(50, 2), tf.math.floormod(tf.cast(hashed, tf.int32), 50), name="hashes")
    tf.gather(
        values(6, 2), tf.raw_ops.Bucketize(input=price, boundaries=[9.99, 99.9, 499.9, 1234.5, 4999.9]), name="costs"
    )
    tf.cast(tf.math.floormod(n, 7), tf.float32, name="left")


def words(tf, v1):
    """Strings, whose rows the host looks up, beside numbers."""
    ids = tf.strings.to_hash_bucket_fast(v1.placeholder(tf.string, [None, 3], "words"), 40)
    h = tf.reduce_mean(tf.gather(values(40, 8), ids), 1) * v1.placeholder(tf.float32, [None, 8], "x")
    tf.nn.relu(tf.matmul(h, values(8, 5)), name="y")


def plain(tf, v1):
    """Functions of numbers as they come in."""
    x, n = v1.placeholder(tf.float32, [None, 6], "x"), v1.placeholder(tf.int32, [None], "n")
    tf.argmax(tf.nn.relu(x), 1, name="best")
    tf.identity(tf.math.top_k(tf.nn.relu6(x), 2)[1], name="top")
    tf.nn.softmax(x, name="p")
    tf.math.log(tf.abs(x), name="log")
    tf.identity(tf.math.l2_normalize(x, 1), "norm")
    tf.math.reciprocal(x, name="inverse")
    mean, variance = tf.nn.moments(x, [1], keepdims=True)
    tf.identity((x - mean) * tf.math.rsqrt(variance + 1e-5), "normal")
    tf.cast(n + n, tf.float32, name="twice")
    tf.cast(tf.sequence_mask(n, 6), tf.float32, name="mask")
    tf.identity(tf.where(x >= 1.0, x, -x), "step")
    tf.round(x, name="round")


PLAIN = ["best", "top", "p", "log", "norm", "inverse", "normal", "twice", "mask", "step", "round"]


def whole(tf, v1):
    """Functions of integers that take any, and lengths of what is turned around."""
    n, m = v1.placeholder(tf.int32, [None, 4], "n"), v1.placeholder(tf.int64, [None], "m")
    tf.cast(n, tf.uint8, name="bytes")
    tf.bitwise.right_shift(n, 2, name="moved")
    tf.reduce_mean(n, 1, name="mean")
    tf.reduce_prod(n, 1, name="product")
    tf.truncatediv(n, 3, name="third")
    tf.identity(m * 3 + 1, "triple")
    x, lengths = v1.placeholder(tf.float32, [None, 6, 3], "x"), v1.placeholder(tf.int32, [None], "lengths")
    tf.cumsum(tf.reverse_sequence(x, lengths, 1, 0), 1, name="turned")
    tf.reduce_any(v1.placeholder(tf.float32, [None, 8], "z") > 0.5, 1, name="any")


WHOLE = ["bytes", "moved", "mean", "product", "third", "triple", "turned", "any"]


def attention(tf, v1):
    """Two masks, of which one may mask all."""
    q, k, v = (v1.placeholder(tf.float32, [None, 5, 16], name) for name in "qkv")
    mask = v1.placeholder(tf.bool, [None, 5], "m")[:, None, :] & tf.ones([5, 5], tf.bool)
    scores = tf.matmul(q, k, transpose_b=True) * 0.25 + np.triu(np.full((5, 5), -1e9, np.float32), 1)
    tf.identity(tf.matmul(tf.nn.softmax(tf.where(mask, scores, -1e9 * tf.ones_like(scores))), v), "y")
    tf.identity(tf.where(mask[:, 0], scores[:, 0], -1e9 * tf.ones_like(scores[:, 0])), "masked")


def gelu(tf, v1):
    tf.identity(tf.nn.gelu(v1.placeholder(tf.float64, [None, 19], "x"), approximate=True), "y")


def gradients(tf, v1):
    """What is fetched are gradients by an input."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    functions = {
        "selu": tf.nn.selu(x),
        "root": tf.where(x > 0, tf.sqrt(x), tf.zeros_like(x)),
        "relu": tf.nn.relu(tf.sqrt(x)),
        "max": tf.reduce_max(x, 1),
        "pool": tf.nn.max_pool1d(x[:, :, None], 2, 2, "VALID"),
        "elu": tf.nn.elu(x),
    }
    for name, y in functions.items():
        tf.identity(tf.gradients(y, x)[0], f"d_{name}")


GRADIENTS = [f"d_{name}" for name in ("selu", "root", "relu", "max", "pool", "elu")]


def pairs(tf, v1):
    """The gradient of a weight by a loss of pairs, which are near each other where their label is 1."""
    a, b = (v1.placeholder(tf.float32, [None, 6], name) for name in "ab")
    same = v1.placeholder(tf.float32, [None], "same")
    w = tf.constant(values(6, 4))
    apart = tf.sqrt(tf.reduce_sum(tf.square(tf.matmul(a, w) - tf.matmul(b, w)), 1))
    loss = tf.reduce_mean(same * tf.square(apart) + (1 - same) * tf.square(tf.maximum(1 - apart, 0)))
    tf.identity(tf.gradients(loss, w)[0], name="y")


def training(tf, v1):
    """A step with rows of a table, biases that begin with zeros, and momentum."""
    x, ids = v1.placeholder(tf.float32, [None, 6], "x"), v1.placeholder(tf.int32, [None], "ids")
    with v1.variable_scope("", use_resource=True):
        table = v1.get_variable("table", initializer=values(300, 4))
        w = v1.get_variable("w", initializer=values(6, 8) * 0.3)
        bias = v1.get_variable("bias", initializer=np.zeros(8, np.float32))
        h = tf.nn.selu(tf.matmul(x, w) + bias) + tf.concat([tf.gather(table, ids)] * 2, 1)
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(h, 1)), name="loss")
        v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss, name="train_op")


def noisy(tf, v1):
    """A step that draws random numbers."""
    x = v1.placeholder(tf.float32, [None, 6], "x")
    with v1.variable_scope("", use_resource=True):
        w = v1.get_variable("w", initializer=values(6, 4) * 0.3)
        h = tf.matmul(x, w) * tf.random.uniform([4], 0.5, 1.5, seed=3)
        loss = tf.reduce_mean(tf.square(h), name="loss")
        v1.train.GradientDescentOptimizer(0.01).minimize(loss, name="train_op")


def scattered(tf, v1):
    """Sums of rows by ids that may be outside, beside scatters whose coordinates may not, some of which large prices are."""
    segments, x = v1.placeholder(tf.int32, [None], "segments"), v1.placeholder(tf.float32, [None, 3], "x")
    price, at = v1.placeholder(tf.float32, [None, 4], "price"), v1.placeholder(tf.int64, [None, 1], "at")
    cell = v1.placeholder(tf.int32, [None, 2], "cell")
    tf.math.unsorted_segment_sum(x, segments, 6, name="sums")
    dearest = tf.cast(tf.reduce_max(tf.square(price), 1), tf.int32)
    tf.scatter_nd(dearest[:, None], x, [16, 3], name="prices")
    tf.scatter_nd(at, x, [11, 3], name="rows")
    tf.tensor_scatter_nd_add(values(4, 9), cell, x[:, 0], name="cells")


def wrapped(tf, v1):
    """Ids of 64 bits, of which 32 count."""
    ids = v1.placeholder(tf.int64, [None, 2], "ids")
    tf.reduce_sum(tf.gather(values(13, 5), tf.cast(tf.reshape(ids, [-1]) + 1, tf.int32)), 1, name="y")


def boxes(tf, v1):
    """Boxes and their scores."""
    corners, scores = v1.placeholder(tf.float32, [16, 4], "boxes"), v1.placeholder(tf.float32, [16], "scores")
    tf.identity(tf.image.non_max_suppression(corners, tf.abs(scores) + 1, 16, 0.6), "y")


MODELS = {
    scattered: (["sums", "prices", "rows", "cells"], {}),
    wrapped: (["y"], {"capture": False}),
    boxes: (["y"], {"capture": False}),
    lookup: (["y"], {"capture": False}),
    ragged: (["y", "longest"], {"capture": False}),
    dense: (["p", "clipped"], {}),
    guarded: (["rows", "hashes", "costs", "left"], {"capture": False}),
    words: (["y"], {}),
    pairs: (["y"], {}),
    plain: (PLAIN, {}),
    whole: (WHOLE, {}),
    attention: (["y", "masked"], {}),
    gelu: (["y"], {}),
    gradients: (GRADIENTS, {}),
    training: (["loss", "train_op"], {}),
    noisy: (["loss", "train_op"], {}),
}


@assigned_once
def prepared(flat, effort, batch=9, streams=1, **more):
    """The model, ready to run, of nothing that was compiled before."""
    ENGINE.forget(flat)
    request = dict(
        engine="cuda",
        device="cpu",
        batch=batch,
        streams=(1, 4),
        fuse=False,
        group=False,
        effort=effort,
        **more,
    )
    try:
        return msplit.prepare(flat, **request)
    finally:
        ENGINE.forget(flat)


PLANTED = []
"""Ops on which a bug has acted: one that is nowhere shows nothing."""


def lowered(op, wrong):
    """Plants a lowering: `wrong` gets what the right one gives, and its arguments."""

    def plant(monkeypatch):
        right = registry.table()[op]

        def planted(node, *inputs):
            PLANTED.append(op)
            return wrong(right.function(node, *inputs), node, *inputs)

        monkeypatch.setitem(registry._TABLE, op, replace(right, function=planted))

    return plant


def rewritten(op, wrong, *, slot=None):
    """Plants a pass: `wrong` changes an op of that kind, and what is constant at its slot."""

    def run(graph, context):
        done = False
        for one in list(graph.ops.values()):
            if one.op == op:
                if slot is None:
                    done |= wrong(graph, one) is not False
                elif one.inputs[slot] in graph.constants:
                    one.inputs[slot] = graph.constant(wrong(graph.constants[one.inputs[slot]]))
                    done = True
        PLANTED.extend([op] * done)
        return done

    def plant(monkeypatch):
        at = next(number for number, one in enumerate(pipeline.PIPELINE) if one.name == "count_nodes_once")
        passes = (*pipeline.PIPELINE[:at], Pass("mutant", run), *pipeline.PIPELINE[at:])
        monkeypatch.setitem(pipeline.run_passes.__kwdefaults__, "pipeline", passes)

    return plant
