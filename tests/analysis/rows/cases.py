"""What ops do to rows: for each family tensors whose rows stay apart, and such whose rows do not.

A case is (tensor, expected): how many entries of the first axis belong to a row (0: no rows), or part of the refusal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read

Cases = Iterator[tuple[Any, int | str]]

FAMILIES: list[Callable[[Any, Any, SimpleNamespace], Cases]] = []


def family(function: Callable[[Any, Any, SimpleNamespace], Cases]) -> Callable[[Any, Any, SimpleNamespace], Cases]:
    """Registers the cases that a function yields."""
    FAMILIES.append(function)
    return function


SIZES = {"x": (4,), "y": (4,), "image": (6, 6, 2), "text": (5, 4), "id": (), "ids": (3,)}
"""Inputs that carry rows, with their sizes behind the batch."""

KEEP = "keep"
"""An input that carries none."""


def feeds(batch: int, seed: int) -> dict[str, Any]:
    """Values for the inputs, other ones for each seed."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        f"{name}:0": rng.integers(0, 5, (batch, *sizes)).astype(np.int32)
        if name.startswith("id")
        else rng.uniform(-1, 1, (batch, *sizes)).astype(np.float32)
        for name, sizes in SIZES.items()
    }
    return found


def flat_of(graph_def: Any, outputs: Sequence[str] | None = None) -> FlatGraph:
    """The flat graph of a GraphDef, through the reader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pb"
        path.write_bytes(graph_def.SerializeToString())
        return flatten(read(path, outputs=outputs))


def build(tf: Any) -> tuple[Any, dict[str, int | str]]:
    """One graph with all cases, as a GraphDef; and what is expected of each output."""
    expected: dict[str, int | str] = {}
    with tf.Graph().as_default() as graph:
        inputs = {
            name: tf.compat.v1.placeholder(tf.int32 if name.startswith("id") else tf.float32, (None, *sizes), name=name)
            for name, sizes in SIZES.items()
        }
        inputs[KEEP] = tf.compat.v1.placeholder(tf.float32, (), name=KEEP)
        for made in FAMILIES:
            for number, (tensor, verdict) in enumerate(made(tf, tf.raw_ops, SimpleNamespace(**inputs))):
                name = f"out_{made.__name__}_{number}"
                tf.identity(tensor, name=name)
                expected[name] = verdict
    return graph.as_graph_def(), expected


@family
def elements(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Element by element."""
    yield tf.nn.relu(i.x) + i.y * i.keep, 1
    yield i.x + tf.constant([1.0, 2.0, 3.0, 4.0]), 1
    yield tf.expand_dims(i.x, 1) + tf.ones([3, 1]), 1
    yield i.x[:, tf.newaxis] * i.text, 1
    yield tf.add_n([i.x, i.y]), 1
    yield tf.where(i.x > 0, i.x, tf.zeros_like(i.y)), 1
    yield raw.Select(condition=i.id > 1, x=i.x, y=i.y), 1
    yield tf.cast(i.ids, tf.float32), 1
    yield raw.Bucketize(input=i.x, boundaries=[0.0, 0.5]), 1
    yield tf.strings.to_hash_bucket_fast(tf.as_string(i.ids), 7), 1
    yield tf.strings.join([tf.as_string(i.id), "a"]), 1
    yield tf.clip_by_value(i.x, -0.5, 0.5), 1
    yield tf.bitcast(i.x, tf.int32), 1
    yield tf.ones([2, 2]) * i.keep, 0
    yield i.x + tf.transpose(i.y), "AddV2"
    yield i.x + tf.ones([3, 1]), "more than one entry along the rows"
    yield tf.transpose(i.x) + tf.ones([1, 3]), "more than one entry along the rows"
    yield tf.cast(i.id, tf.float32)[:, tf.newaxis] + tf.cast(i.id, tf.float32), "AddV2"
    yield raw.Select(condition=tf.constant([True, False]), x=i.x, y=i.y), "Select"


@family
def normal(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Norms and softmax."""
    vector = tf.ones([2])
    for training, verdict in ((False, 1), (True, "FusedBatchNormV3")):
        mean = tf.constant([], tf.float32) if training else vector
        norm = raw.FusedBatchNormV3(
            x=i.image, scale=vector, offset=vector, mean=mean, variance=mean, is_training=training
        )
        yield norm[0], verdict
    yield tf.nn.bias_add(i.image, vector), 1
    yield tf.nn.softmax(i.x), 1
    yield tf.nn.log_softmax(i.text), 1
    yield tf.nn.softmax(tf.transpose(i.x)), "works along the rows"
    yield tf.nn.bias_add(tf.transpose(i.x), tf.ones([1])), "BiasAdd"
    mean, variance = tf.nn.moments(i.x, [1], keepdims=True)
    yield (i.x - mean) / tf.sqrt(variance), 1
    yield i.x - tf.reduce_mean(i.x, 0), "Mean"
    yield tf.nn.local_response_normalization(i.image), 1
    yield tf.nn.sparse_softmax_cross_entropy_with_logits(labels=i.id % 4, logits=i.x), 1


@family
def reductions(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Reductions, scans, sorting."""
    yield tf.reduce_sum(i.text, 1), 1
    yield tf.reduce_max(i.text, [1, 2], keepdims=True), 1
    yield tf.reduce_mean(i.text, -1), 1
    yield tf.reduce_sum(tf.transpose(i.text, [1, 0, 2]), 0), 1
    yield tf.reduce_sum(i.x, []), 1
    yield tf.argmax(i.x, 1), 1
    yield tf.argmax(tf.transpose(i.x), 0), 1
    yield tf.nn.top_k(i.x, 2).values, 1
    yield tf.cumsum(i.text, 1), 1
    yield tf.reverse(i.text, [1]), 1
    yield tf.roll(i.text, 2, 1), 1
    yield tf.sort(i.x), 1
    yield tf.reduce_sum(i.x), "Sum"
    yield tf.reduce_max(i.text, [0, 1]), "Max"
    yield tf.reduce_all(i.x > 0, 0), "All"
    yield tf.argmax(i.x, 0), "ArgMax"
    yield tf.nn.top_k(tf.transpose(i.x), 1).values, "TopKV2"
    yield tf.cumsum(i.x, 0), "Cumsum"
    yield tf.reverse(i.x, [0]), "ReverseV2"
    yield tf.roll(i.x, 1, 0), "Roll"
    yield tf.nn.l2_loss(i.x), "L2Loss"
    yield tf.unique(i.id).y, "different values of all rows"
    yield tf.reduce_sum(i.text, i.id[:1] % 2), "StridedSlice"


@family
def shapes(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Reshapes, and the number of rows as a value."""
    size = tf.shape(i.text)
    yield tf.reshape(i.text, [-1, 20]), 1
    yield tf.reshape(i.text, [-1, 4]), 5
    yield tf.reshape(tf.reshape(i.text, [-1, 4]) @ tf.ones([4, 3]), [-1, 5, 3]), 1
    yield tf.reshape(i.text, [size[0], 2, 10]), 1
    yield tf.reshape(i.text, tf.stack([size[0] * size[1], size[2]])), 5
    yield tf.reshape(i.text, tf.stack([size[0] * size[1], -1])), 5
    yield tf.reshape(i.text, tf.concat([size[:1], [-1]], 0)), 1
    yield tf.reshape(i.text, [tf.size(i.text) // 4, 4]), 5
    yield tf.reshape(tf.transpose(i.text, [1, 0, 2]), [5, -1, 2]), "along axis 1"
    swapped = tf.reshape(tf.transpose(i.text, [1, 0, 2]), [-1, 4])
    yield swapped, "several places"
    yield tf.transpose(tf.reshape(swapped @ tf.ones([4, 2]), [5, -1, 2]), [1, 0, 2]), 1
    yield tf.squeeze(tf.expand_dims(i.x, 1), [1]), 1
    yield raw.Squeeze(input=tf.expand_dims(i.x, 1)), "Squeeze"
    yield tf.reshape(i.text, [5, -1]), "reshapes rows into each other"
    yield tf.reshape(i.text, [-1, 8]), "reshapes rows into each other"
    yield tf.reshape(i.ids, [-1, 2]), "reshapes rows into each other"
    yield tf.reshape(i.x, [3, 4]), "one batch only"
    yield tf.reshape(i.text, [size[1], size[0], size[2]]), "reshapes rows into each other"
    yield tf.reduce_sum(i.text, 1) / tf.cast(size[1], tf.float32), 1
    yield i.x / tf.cast(size[0], tf.float32), "Cast"
    yield i.ids * tf.shape(i.ids)[0], "Mul"
    yield tf.one_hot(i.ids, tf.shape(i.ids)[0]), "OneHot"
    yield tf.reduce_sum(i.x, 0) / 2.0, "Sum"
    yield size, "gives the number of rows"
    yield size[1:], 0
    yield tf.rank(i.x) + tf.size(i.x) // tf.shape(i.x)[0], 0
    yield tf.fill([size[0], 3], 2.0) + tf.ones([3]), 1
    yield tf.zeros_like(i.x) + tf.zeros(tf.stack([tf.shape(i.x)[0], 4])), 1
    yield tf.zeros([size[0], size[0]]), "Fill"
    yield tf.eye(size[0]), "MatrixDiagV3"
    yield tf.ones([tf.shape(i.x)[0] + 1, 4]), "Fill"
    yield tf.broadcast_to(tf.ones([1, 7]), tf.stack([size[0], 7])), 1
    yield tf.broadcast_to(i.x[:, tf.newaxis], size), 1
    yield tf.broadcast_to(i.x, tf.concat([[3], tf.shape(i.x)], 0)), "along axis 1"
    yield tf.tile(tf.ones([1, 3]), [size[0], 1]), 1
    yield tf.tile(tf.ones([2, 3]), [size[0], 1]), 2
    yield tf.tile(i.x, [1, 2]), 1
    yield tf.tile(i.x, [2, 1]), "several places"
    yield tf.tile(i.x, tf.stack([size[0], 1])), "Tile"
    yield tf.maximum(tf.shape(i.x)[0], 1) * tf.ones([2], tf.int32), "gives the number of rows"
    yield tf.minimum(tf.shape(i.x)[0], 1), 0
    yield tf.shape(i.x)[0] % 2, "FloorMod"
    yield tf.shape(tf.reshape(i.text, [-1, 4]))[0] % 5, 0
    yield tf.reshape(i.x, tf.broadcast_dynamic_shape(tf.shape(i.x), [1, 4])), 1
    yield tf.reshape(i.image, [-1, 6, 6, 2])[:, 1], 1
    yield raw.Range(start=0, limit=size[0], delta=1), "place of a row"
    yield tf.cast(tf.range(size[0]), tf.float32)[:, tf.newaxis] * i.x, "Cast"


@family
def movement(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """What cuts, joins and pads."""
    both = tf.concat([i.x, i.y], 0)
    yield tf.concat([i.x, i.y], 1), 1
    yield tf.stack([i.x, i.y], 1), 1
    yield tf.unstack(i.text, axis=1)[2], 1
    yield tf.split(i.text, [1, 4], 1)[1], 1
    yield tf.split(tf.nn.relu(both) @ tf.ones([4, 2]), 2)[1], 1
    yield tf.nn.relu(both)[tf.shape(i.x)[0] :], 1
    yield tf.nn.relu(both)[: tf.shape(i.x)[0]], 1
    yield tf.slice(i.text, [0, 1, 0], [-1, 2, -1]), 1
    yield tf.slice(i.text, [0, 1, 0], tf.stack([tf.shape(i.text)[0], 2, 4])), 1
    yield i.text[:, ::-1, 1:3], 1
    yield i.text[..., 0], 1
    yield i.text[:, tf.newaxis, -1], 1
    yield i.text[: tf.shape(i.text)[0], 1], 1
    yield tf.transpose(i.text, [2, 1, 0])[0, ...], "along axis 1"
    yield tf.transpose(tf.transpose(i.text, [2, 1, 0])[0]), 1
    yield tf.pad(i.x, [[0, 0], [1, 2]]), 1
    yield tf.pad(i.text, [[0, 0], [1, 2], [0, 0]], "REFLECT"), 1
    yield tf.one_hot(i.ids, 5), 1
    yield tf.one_hot(i.ids, 5, axis=1), 1
    yield tf.reverse_sequence(i.text, i.id, seq_axis=1), 1
    yield tf.concat([i.x, tf.zeros([1, 4])], 0), "ConcatV2"
    yield both, "several places"
    yield tf.reshape(both, [-1, 8]), "Reshape"
    yield tf.concat([i.x, tf.ones([3, 2])], 1), "ConcatV2"
    yield tf.stack([i.x, i.y]), "along axis 1"
    yield i.x[0], "takes single rows out"
    yield i.x[1:], "cuts some of the rows out"
    yield i.x[:2], "cuts some of the rows out"
    yield i.x[::-1], "cuts some of the rows out"
    yield i.text[:, : tf.shape(i.text)[0]], "cuts another axis at the number of rows"
    yield i.text[:, i.id[0]], "takes single rows out"
    yield tf.slice(i.x, [1, 0], [-1, -1]), "Slice"
    yield tf.pad(i.x, [[0, 1], [0, 0]]), "adds rows"
    yield tf.pad(tf.transpose(i.x), [[0, 0], [1, 0]]), "adds rows"
    yield tf.one_hot(i.id, tf.reduce_max(i.id) + 1), "Max"
    yield raw.Where(condition=i.x > 0), "place of a row"


@family
def products(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Products and convolutions."""
    weights = tf.constant(np.random.default_rng(1).uniform(-1, 1, (4, 3)).astype(np.float32))
    yield i.x @ weights, 1
    yield tf.matmul(i.x, weights, transpose_a=False), 1
    yield tf.matmul(weights, i.x, transpose_a=True, transpose_b=True), "along axis 1"
    yield tf.matmul(tf.transpose(i.x), weights, transpose_a=True), 1
    yield tf.linalg.matmul(i.text, weights), 1
    yield tf.linalg.matmul(i.text, i.text, transpose_b=True), 1
    yield tf.linalg.matmul(tf.nn.softmax(tf.linalg.matmul(i.text, i.text, transpose_b=True)), i.text), 1
    yield tf.linalg.matmul(i.text, tf.expand_dims(i.x, 2)), 1
    yield tf.einsum("btd,de->bte", i.text, weights), 1
    yield tf.einsum("btd,bsd->bts", i.text, i.text), 1
    yield tf.einsum("...d,de->...e", i.text, weights), 1
    yield tf.einsum("bd,bd->b", i.x, i.y), 1
    yield tf.tensordot(i.text, weights, 1), 1
    kernel = tf.constant(np.random.default_rng(2).uniform(-1, 1, (3, 3, 2, 4)).astype(np.float32))
    convolved = tf.nn.conv2d(i.image, kernel, 2, "SAME")
    yield convolved, 1
    yield tf.nn.depthwise_conv2d(i.image, kernel, [1, 1, 1, 1], "VALID"), 1
    yield tf.nn.conv2d(i.image, kernel, 1, "SAME", dilations=2), 1
    yield tf.nn.max_pool2d(i.image, 2, 2, "SAME"), 1
    yield tf.nn.avg_pool2d(i.image, 3, 1, "VALID"), 1
    yield tf.nn.conv2d_transpose(convolved, kernel, tf.stack([tf.shape(i.image)[0], 6, 6, 2]), 2), 1
    yield tf.nn.conv1d(i.text, tf.ones([2, 4, 3]), 1, "SAME"), 1
    yield tf.nn.space_to_depth(i.image, 2), 1
    yield tf.image.resize(i.image, [3, 4]), 1
    yield tf.nn.with_space_to_batch(i.image, [2, 2], "SAME", lambda inside, *_: inside * 2.0, filter_shape=[3, 3]), 1
    yield tf.linalg.cholesky(tf.linalg.matmul(i.text, i.text, transpose_a=True) + tf.eye(4)), 1
    yield tf.matmul(i.x, i.y, transpose_b=True), "multiplies rows with rows"
    yield tf.matmul(i.x, i.y, transpose_a=True), "sums over the rows"
    yield tf.matmul(tf.transpose(i.x), tf.ones([3, 4])), "sums over the rows"
    yield tf.linalg.matmul(tf.transpose(i.text, [1, 0, 2]), weights), "along axis 1"
    yield (
        tf.linalg.matmul(tf.transpose(i.text, [1, 0, 2]), tf.transpose(i.text, [1, 2, 0])),
        "multiplies rows with rows",
    )
    yield tf.einsum("bd,cd->bc", i.x, i.y), "multiplies rows with rows"
    yield tf.einsum("bd->d", i.x), "sums over the rows"
    yield tf.einsum("bd,b->bd", i.x, tf.ones([3])), "has an entry for each"
    yield tf.nn.conv2d(tf.transpose(i.image, [1, 0, 2, 3]), kernel, 1, "SAME"), "Conv2D"
    yield raw.MaxPool(input=i.image, ksize=[1, 2, 2, 1], strides=[2, 1, 1, 1], padding="SAME"), "several items"
    yield tf.linalg.cholesky(tf.transpose(i.text, [1, 2, 0]) @ tf.transpose(i.text, [1, 0, 2])), "sums over the rows"


@family
def lookups(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Tables, and picking by index."""
    table = tf.constant(np.random.default_rng(3).uniform(-1, 1, (8, 4)).astype(np.float32))
    size = tf.shape(i.x)[0]
    numbers = tf.range(size)
    yield tf.gather(table, i.ids), 1
    yield tf.gather(table, i.ids % 4, axis=1), "along axis 1"
    yield tf.transpose(tf.gather(table, i.id % 4, axis=1)), 1
    yield tf.gather(i.text, [1, 3], axis=1), 1
    yield tf.gather(i.text, i.ids, axis=1, batch_dims=1), 1
    yield tf.gather_nd(table, tf.stack([i.ids, i.ids % 4], -1)), 1
    yield tf.gather_nd(i.x, tf.stack([numbers, i.id % 4], 1)), 1
    yield tf.gather_nd(i.text, tf.concat([numbers[:, tf.newaxis], i.ids[:, :2] % 4], 1)), 1
    yield tf.gather_nd(i.text, tf.stack([tf.tile(numbers[:, tf.newaxis], [1, 3]), i.ids], -1)), 1
    yield tf.gather_nd(i.x, numbers[:, tf.newaxis]), 1
    yield tf.gather(i.x, numbers), 1
    yield raw.DenseBincount(input=i.ids, size=5, weights=tf.constant([], tf.float32)), 1
    yield tf.math.unsorted_segment_sum(tf.transpose(i.x), [0, 1, 1, 0], 2), "along axis 1"
    yield tf.searchsorted(tf.constant([[0.0, 0.5, 0.7]]), tf.reshape(i.x, [1, -1])), "along axis 1"
    yield tf.gather(i.x, [0]), "picks some of the rows"
    yield tf.gather(i.x, i.id), "picks rows by what differs"
    yield tf.gather(table, numbers), "place of a row"
    yield tf.gather(tf.ones([3, 4, 2]), i.ids, axis=1, batch_dims=1), "fixed entries for each row"
    yield tf.gather_nd(i.x, tf.stack([i.id, numbers], 1)), "Pack"
    yield tf.gather_nd(i.x, tf.stack([i.id, i.id], 1)), "GatherNd"
    yield tf.gather_nd(i.x, [[0, 1]]), "GatherNd"
    yield tf.gather_nd(i.text, tf.stack([numbers, numbers], 1)), "GatherNd"
    pairs = tf.stack([numbers, i.id % 4], 1)
    yield tf.cast(pairs[..., :], tf.float32) * i.x[:, :2], "StridedSlice"
    yield tf.gather_nd(i.x, tf.gather(pairs, [1, 0], axis=1)), "GatherV2"
    yield tf.gather_nd(i.x, pairs[:, ::-1]), "StridedSlice"
    yield tf.gather_nd(i.x, tf.reverse(pairs, [1])), "ReverseV2"
    yield tf.gather_nd(i.x, pairs + 0), "AddV2"
    yield tf.gather_nd(i.x, tf.transpose(tf.reshape(tf.transpose(pairs), [2, -1]))), "Reshape"
    yield tf.gather(table, pairs[:, 1]), 1
    yield tf.gather(table, pairs[:, 0]), "place of a row"
    yield tf.gather(table, tf.gather_nd(pairs, [[0, 1]])), "GatherNd"
    yield tf.math.segment_sum(i.x, tf.sort(i.id)), "TopKV2"
    yield tf.math.unsorted_segment_sum(i.x, i.id, 5), "ids may join several rows"
    yield tf.math.unsorted_segment_sum(i.x, i.id, size), "ids may join several rows"
    yield tf.scatter_nd(i.ids[:, :1], i.x, [8, 4]), "ScatterNd"
    yield tf.gather(i.x, tf.range(size - 1)), "Range"


@family
def chosen(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Entries that rows choose, and back."""
    size = tf.shape(i.ids, out_type=tf.int64)
    table = tf.constant(np.random.default_rng(4).uniform(-1, 1, (8, 3)).astype(np.float32))
    places = tf.where(i.ids > 1)
    values = tf.gather_nd(i.ids, places)
    sparse = tf.SparseTensor(places, values, size)
    yield tf.nn.safe_embedding_lookup_sparse(table, sparse), 1
    yield tf.sparse.to_dense(sparse), 1
    given = tf.SparseTensor(tf.cast(i.ids[:, :2], tf.int64), i.id, [8, 8])
    yield tf.nn.embedding_lookup_sparse(table, given, None, combiner="sum"), "SparseSegmentSum"
    yield tf.nn.safe_embedding_lookup_sparse(table, given), "the indices of a sparse tensor, which may name any row"
    yield tf.sparse.to_dense(given), "the indices of a sparse tensor, which may name any row"
    filled, empty = tf.sparse.fill_empty_rows(sparse, 7)
    yield empty, 1
    rows = filled.indices[:, 0]
    yield raw.SparseSegmentSum(data=table, indices=filled.values, segment_ids=rows), 1
    yield tf.math.segment_sum(tf.gather(table, filled.values), rows), 1
    yield tf.math.unsorted_segment_max(tf.gather(table, values), places[:, 0], size[0]), 1
    yield tf.sparse.to_dense(tf.sparse.reshape(sparse, tf.stack([size[0], 3]))), 1
    count = tf.cast(i.id > 2, tf.int32)
    parts = tf.dynamic_partition(i.x, count, 2)
    at = tf.dynamic_partition(tf.range(tf.shape(i.x)[0]), count, 2)
    yield tf.dynamic_stitch(at, [parts[0] * 2.0, tf.nn.relu(parts[1])]), 1
    flat = tf.reshape(i.ids, [-1])
    odd = flat % 2
    split = tf.dynamic_partition(flat, odd, 2)
    where = tf.dynamic_partition(tf.range(tf.size(flat)), odd, 2)
    yield tf.reshape(tf.dynamic_stitch(where, [tf.gather(table, part) for part in split]), [-1, 9]), 1
    all_places = tf.reshape(tf.range(tf.size(flat)), [-1, 3])
    some = tf.reshape(tf.tile(all_places[:, :1], [1, 3]), [-1])
    yield tf.dynamic_stitch(tf.dynamic_partition(some, odd, 2), split), "place of a row"
    yield tf.gather(flat, tf.tile(tf.range(tf.size(flat)), [2])), "place of a row"
    yield tf.gather(flat, tf.reshape(all_places, [-1])), 3
    yield tf.boolean_mask(i.x, i.id > 1), "as many entries as were chosen"
    yield values, "as many entries as were chosen"
    yield tf.reduce_sum(values), "Sum"
    yield tf.shape(values), "depends on all rows"
    yield tf.ones(tf.shape(values)), "as many entries as were chosen"
    yield tf.math.unsorted_segment_sum(tf.ones_like(values), places[:, 0], size[0]), 1
    yield tf.ones(tf.concat([tf.shape(values), tf.shape(i.x)[:1]], 0)), "depends on all rows"
    yield tf.reshape(values, tf.concat([tf.shape(values), [1]], 0)), "as many entries as were chosen"
    yield tf.reshape(values, tf.shape(tf.gather_nd(i.ids, tf.where(i.ids > 0)))), "each row has another number"
    yield values + 1 + tf.gather_nd(i.ids, tf.where(i.ids > 0)), "AddV2"
    yield tf.math.segment_sum(tf.gather(table, values), places[:, 0]), "the last ones have no entry"
    yield tf.math.unsorted_segment_sum(tf.gather(table, values), places[:, 1], 3), "UnsortedSegmentSum"
    yield tf.dynamic_stitch(at[::-1], parts), "DynamicStitch"
    yield tf.dynamic_stitch(at, parts[::-1]), "DynamicStitch"
    yield tf.dynamic_stitch(at, tf.dynamic_partition(i.x, 1 - count, 2)), "DynamicStitch"
    features = {"a": tf.io.FixedLenFeature([2], tf.float32, [0.0, 0.0]), "b": tf.io.VarLenFeature(tf.int64)}
    parsed = tf.io.parse_example(tf.fill(tf.shape(i.id), ""), features)
    yield parsed["a"], 1
    yield parsed["b"].values, "as many entries as were chosen"
    yield tf.sparse.to_dense(parsed["b"]), "place of a row"
    dense = tf.cast(i.ids, tf.int64)
    yield tf.sparse.to_dense(tf.sparse.cross_hashed([dense, dense[:, :2]], 50)), 1
    yield tf.sparse.to_dense(tf.sparse.cross_hashed([parsed["b"], dense], 50)), "place of a row"
    yield tf.sparse.cross_hashed([tf.sparse.transpose(parsed["b"]), dense], 50).values, "GatherV2"
    yield tf.sparse.cross_hashed([tf.transpose(dense), tf.transpose(dense)], 50).values, "SparseCross"
    unique, index = tf.unique(i.id)
    yield tf.gather(tf.gather(table, unique), index), 1
    yield tf.gather(table, unique), "different values of all rows"
    yield index, "place of a row"
    yield tf.sparse.to_dense(tf.sparse.reshape(sparse, tf.stack([size[0] * 3, 1]))), "SparseReshape"
    yield tf.reduce_sum(tf.where(i.id > 1)), "Sum"


def _examples(tf: Any) -> list[bytes]:
    """Records of which each has another number of values."""
    made = []
    for words in ([], [b"a"], [b"b", b"a", b""], [b""], [b"c"] * 5):
        strings = tf.train.Feature(bytes_list=tf.train.BytesList(value=words))
        numbers = tf.train.Feature(int64_list=tf.train.Int64List(value=range(-1, len(words) - 1)))
        features = {"words": strings, "ids": numbers} if words else {}
        made.append(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return made


@family
def lists(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Rows with another number of values each: parts of strings, and features of records, sparse and ragged."""
    table = tf.constant(np.random.default_rng(4).uniform(-1, 1, (8, 3)).astype(np.float32))
    records = tf.gather(tf.constant(_examples(tf)), i.id)
    text = tf.gather(tf.constant(["a,b", "", "c", "a,,b,c", "\u00fc,x"]), i.id)
    features = {"ids": tf.io.VarLenFeature(tf.int64), "words": tf.io.RaggedFeature(tf.string)}
    ids, words = tf.io.parse_example(records, features).values()
    split = tf.strings.split(text, ",")
    hashed = tf.ragged.map_flat_values(lambda value: tf.strings.to_hash_bucket_fast(value, 8), split)
    # Looked up as feature columns do: what is not an id is left out, and rows without any get zeros.
    for combiner in ("mean", "sum", "sqrtn"):
        yield tf.nn.safe_embedding_lookup_sparse(table, ids, combiner=combiner), 1
        yield tf.nn.safe_embedding_lookup_sparse(table, hashed.to_sparse(), combiner=combiner), 1
    weights = tf.SparseTensor(ids.indices, tf.cast(ids.values, tf.float32), ids.dense_shape)
    yield tf.nn.safe_embedding_lookup_sparse(table, ids, weights), 1
    yield tf.nn.safe_embedding_lookup_sparse(table, tf.sparse.transpose(ids)), "place of a row"
    same = tf.SparseTensor(ids.indices, ids.values, tf.strings.split(text, "b").to_sparse().dense_shape)
    yield tf.nn.safe_embedding_lookup_sparse(table, same), 1  # the length of the longest row is nowhere used
    crossed = tf.sparse.cross_hashed([ids, hashed.to_sparse(), tf.cast(i.ids, tf.int64)], 8)
    yield tf.nn.safe_embedding_lookup_sparse(table, crossed, combiner="sum"), 1
    yield tf.reduce_sum(tf.one_hot(tf.sparse.to_dense(crossed, default_value=-1), 8), axis=-2), 1
    # Indicator columns: ones for what is there.
    dense = tf.sparse.to_dense(ids, default_value=-1)
    yield tf.reduce_sum(tf.one_hot(dense, 8), axis=-2), 1
    yield tf.reduce_sum(tf.one_hot(dense, 8), axis=1, keepdims=True), 1
    yield tf.reduce_sum(tf.one_hot(dense, 8, axis=1), axis=2), 1
    yield tf.reduce_max(tf.one_hot(dense, 8), axis=-2), "place of a row"
    yield tf.reduce_sum(tf.one_hot(dense, 8), axis=-1), "place of a row"
    yield tf.reduce_sum(tf.one_hot(dense, 8, off_value=0.5), axis=-2), "place of a row"
    yield tf.reduce_sum(tf.one_hot(tf.sparse.to_dense(ids), 8), axis=-2), "beyond the end of a row"
    yield tf.reduce_sum(dense + 1, axis=1), "place of a row"
    yield dense, "place of a row"
    yield tf.shape(dense), "place of a row"
    # A fixed number of each row.
    yield split.to_tensor("-", shape=[None, 3]), 1
    yield tf.strings.ngrams(split, 2).to_tensor("-", shape=[None, 2]), 1
    padded = raw.StringNGrams(
        data=split.flat_values,
        data_splits=split.row_splits,
        separator=" ",
        ngram_widths=[2],
        left_pad="<",
        right_pad=">",
        pad_width=1,
        preserve_short_sequences=False,
    )
    yield tf.RaggedTensor.from_row_splits(*padded).to_tensor("-", shape=[None, 2]), "not where all are"
    yield words.to_tensor("-", shape=[None, 3]), 1
    yield tf.strings.unicode_decode(text, "UTF-8").to_tensor(0, shape=[None, 3]), 1
    yield tf.strings.bytes_split(text).to_tensor("", shape=[None, 3]), 1
    yield split.row_lengths(), 1
    yield split.row_lengths() * 2 + 1, 1
    yield split.to_tensor("-"), "as many columns as the longest row has"
    yield split.flat_values, "as many entries as were chosen"
    yield split.row_splits, "the places of rows in a list"
    yield split.with_values(words.values).to_tensor("-", shape=[None, 3]), "do not belong to each other"
    yield words.with_values(split.values).to_tensor("-", shape=[None, 3]), "do not belong to each other"
    yield words.row_lengths(), 1
    yield words.row_starts() - words.row_limits(), "can not be followed"
    yield tf.math.bincount(split.value_rowids(), minlength=9), "place of a row"
    yield tf.cumsum(split.row_lengths() * 2), "Cumsum"
    yield tf.cumsum(split.row_lengths(), exclusive=True), "Cumsum"
    yield tf.cumsum(split.row_lengths(), reverse=True), "Cumsum"
    yield tf.cumsum(split.row_lengths()), "places of rows in a list"
    yield tf.reshape(ids.dense_shape[1:], [1]) + tf.zeros([1], tf.int64), "length of the longest"
    yield tf.zeros(tf.cast(ids.dense_shape, tf.int32)), "length of the longest"
    yield tf.fill(ids.dense_shape[:1], 1.0), 1
    # The length of the longest row is another one in each round.
    rounds = tf.while_loop(lambda n, shape: n < 2, lambda n, shape: (n + 1, shape), (0, ids.dense_shape))
    yield tf.fill(rounds[1][:1], 1.0), "into a function"


@family
def ragged(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Rows with another number of values each, reduced as ragged tensors are."""
    table = tf.constant(np.random.default_rng(5).uniform(-1, 1, (8, 3)).astype(np.float32))
    text = tf.gather(tf.constant(["a b", "", "c", "a  b c", " "]), i.id)
    records = tf.gather(tf.constant(_examples(tf)), i.id)
    features = {"ids": tf.io.VarLenFeature(tf.int64), "words": tf.io.RaggedFeature(tf.string)}
    ids, words = tf.io.parse_example(records, features).values()
    size = tf.shape(i.id)[0]

    def hashed(given: Any) -> Any:
        return tf.ragged.map_flat_values(lambda value: tf.strings.to_hash_bucket_fast(value, 8), given)

    def embedded(given: Any) -> Any:
        return tf.ragged.map_flat_values(lambda value: tf.gather(table, value), hashed(given))

    split = tf.strings.split(text)
    for given in (split, words, tf.RaggedTensor.from_sparse(tf.strings.split(text, "b").to_sparse())):
        rows = embedded(given)
        for reduce in (tf.reduce_mean, tf.reduce_sum, tf.reduce_max, tf.reduce_min, tf.reduce_prod):
            yield reduce(rows, axis=1), 1
            yield reduce(tf.cast(hashed(given), tf.float32), axis=-1), 1
        yield tf.math.reduce_variance(rows, axis=1), 1
        yield tf.math.reduce_std(rows, axis=1), 1
        yield tf.reduce_any(hashed(given) > 3, axis=1), 1
        yield tf.reduce_all(hashed(given) > 3, axis=1), 1
        yield tf.reduce_mean(rows, axis=1, keepdims=True), 1
        yield tf.reduce_mean(rows, axis=[1, 2]), 1
        yield tf.reduce_sum(rows, axis=2).to_tensor(shape=[None, 4]), 1
        yield tf.reduce_sum(rows, axis=0), "RaggedRange"
        yield tf.reduce_sum(rows), "Sum"
    yield tf.reduce_sum(tf.RaggedTensor.from_sparse(ids), axis=1), 1
    yield tf.reduce_mean(embedded(tf.strings.ngrams(split, 2)), axis=1), 1
    yield tf.reduce_sum(tf.gather(table, tf.strings.unicode_decode(text, "UTF-8") % 8), axis=1), 1
    yield tf.reduce_sum(tf.strings.unicode_decode_with_offsets(text, "UTF-8")[1], axis=1), 1
    # The first of each row, all but those, the last, every other one.
    for part in (slice(None, 2), slice(1, None), slice(1, 2), slice(-2, None), slice(None, -1), slice(None, None, 2)):
        yield tf.reduce_sum(embedded(words[:, part]), axis=1), 1
        yield tf.reduce_mean(embedded(split)[:, part], axis=1), 1
    yield hashed(split)[:, :2].to_tensor(shape=[None, 3]), 1
    yield tf.reduce_sum(embedded(split)[:, ::-1], axis=1), "Sub"
    yield tf.reduce_sum(embedded(split)[:2], axis=1), "cuts where rows begin"
    yield tf.reduce_sum(embedded(split)[::-1], axis=1), "StridedSlice"
    yield tf.reduce_sum(embedded(split)[:, i.id[0] :], axis=1), "takes single rows out"
    other_limits = tf.cast(words.row_limits(), tf.int64)
    for starts, limits in (
        (split.row_starts(), split.row_limits() + 1),
        (split.row_starts() - 1, split.row_limits()),
        (split.row_starts(), tf.minimum(split.row_starts() + 2, other_limits)),
        (split.row_starts(), tf.maximum(split.row_starts() + 2, split.row_limits())),
        (split.row_starts() + 1, split.row_limits()),
        (split.row_starts(), split.row_starts() + 2),
        (split.row_starts(), other_limits),
        (tf.cast(i.id, tf.int64), split.row_limits()),
        (tf.constant(0, tf.int64), split.row_limits()),
        (split.row_limits()[:-1], split.row_limits()[1:]),
    ):
        taken = tf.gather(embedded(split).values, tf.ragged.range(starts, limits))
        yield tf.reduce_sum(taken, axis=1), ""
    # What is made of each row goes back to each of its entries.
    numbers = split.value_rowids()
    yield tf.math.unsorted_segment_mean(tf.gather(table, hashed(split).values), numbers, size), 1
    rows = embedded(split)
    above = tf.gather(tf.reduce_max(rows, axis=1), numbers)
    weights = tf.exp(rows.values - above)
    whole = tf.gather(tf.math.unsorted_segment_sum(weights, numbers, size), numbers)
    yield tf.math.unsorted_segment_sum(rows.values * weights / whole, numbers, size), 1
    yield above, "as many entries as were chosen"
    counted = tf.repeat(tf.range(size), tf.cast(split.row_limits() - split.row_starts(), tf.int32))
    yield tf.math.unsorted_segment_sum(rows.values, counted, size), 1
    yield tf.gather(i.x, tf.tile(tf.range(size)[:, tf.newaxis], [1, 3])), 1
    yield tf.reshape(tf.gather(i.x, tf.reshape(tf.tile(tf.range(size)[:, tf.newaxis], [1, 3]), [-1])), [-1, 12]), 1
    # What is of another list, another order or another number.
    yield tf.reduce_sum(hashed(split.with_values(words.values)), axis=1), "UnsortedSegmentSum"
    yield tf.math.unsorted_segment_sum(rows.values, words.value_rowids(), size), "UnsortedSegmentSum"
    yield tf.math.unsorted_segment_sum(rows.values, numbers, size + 1), "another number of rows"
    yield tf.math.unsorted_segment_sum(rows.values, numbers, 9), "another number of rows"
    yield tf.math.segment_sum(rows.values, numbers), "the last ones have no entry"
    yield tf.math.unsorted_segment_sum(rows.values, numbers + 1, size), "place of a row"
    yield tf.gather(table, numbers), "place of a row"
    lengths = split.row_lengths()
    for order, count in (
        (tf.range(size) + 0, lengths),
        (tf.range(size)[::-1], lengths),
        (tf.range(size), lengths[::-1]),
        (tf.range(size), lengths * 2),
        (tf.range(size), words.row_lengths()),
        (tf.range(size), i.id),
    ):
        yield tf.math.unsorted_segment_sum(rows.values, tf.repeat(order, count), size), ""
    yield tf.repeat(tf.range(size), lengths), "place of a row"
    for longest, start, delta in ((3, 0, 1), (None, 1, 1), (None, 0, 2)):
        longest = tf.reduce_max(lengths) if longest is None else tf.constant(longest, tf.int64)
        places = tf.range(start, longest, delta, tf.int64)
        mask = places < lengths[:, tf.newaxis]
        tiled = tf.tile(tf.range(size)[:, tf.newaxis], tf.stack([1, tf.size(places)]))
        yield tf.math.unsorted_segment_sum(rows.values, tf.boolean_mask(tiled, mask), size), ""
    # Places of rows that are fed, and rows of rows.
    yield tf.reduce_sum(tf.RaggedTensor.from_row_splits(i.x, i.id, validate=False), axis=1), "Range"
    yield tf.reduce_sum(tf.RaggedTensor.from_row_lengths(i.x, i.id, validate=False), axis=1), "works along the rows"
    yield tf.reduce_sum(tf.RaggedTensor.from_value_rowids(i.x, i.id, tf.cast(size, tf.int32), False), axis=1), ""
    yield tf.reduce_mean(tf.reduce_mean(embedded(tf.strings.bytes_split(split)), axis=2), axis=1), "StringSplit"


@family
def control(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Lists, loops and choices."""
    steps = tf.transpose(i.text, [1, 0, 2])
    listed = tf.raw_ops.TensorListFromTensor(tensor=steps, element_shape=[-1, 4])
    yield raw.TensorListGetItem(input_handle=listed, index=2, element_shape=[-1, 4], element_dtype=tf.float32), 1

    def counted(body: Callable[..., Any], limit: Any, *carried: Any) -> Any:
        return tf.compat.v1.while_loop(
            lambda step, *_: step < limit, lambda step, *more: (step + 1, *body(step, *more)), (0, *carried)
        )

    yield counted(lambda step, state: (tf.tanh(state + i.y),), 3, i.x)[1], 1
    yield counted(lambda step, a, b: (b, a), 3, i.x, i.y)[2], 1
    yield counted(lambda step, state: (state - tf.reduce_mean(state, 0),), 3, i.x)[1], "Mean"
    yield counted(lambda step, a, b: (b, tf.reverse(a, [0])), 3, i.x, i.y)[1], "ReverseV2"
    yield counted(lambda step, state: (state + 1.0,), tf.reduce_max(i.id), i.x)[1], "Max"
    yield counted(lambda step, state: (state + 1.0,), tf.shape(i.x)[0], i.x)[1], "number of rows"
    yield counted(lambda step, a, b: (b, tf.zeros_like(a)), 3, tf.zeros_like(i.x), i.y)[2], 1
    array = tf.TensorArray(tf.float32, size=5, element_shape=[None, 4]).unstack(steps)
    made = tf.TensorArray(tf.float32, size=5, element_shape=[None, 4])
    rnn = counted(lambda step, state, out: (state + array.read(step), out.write(step, state)), 5, i.x, made)
    yield tf.transpose(rnn[2].stack(), [1, 0, 2]), 1
    yield rnn[1], 1
    yield tf.TensorArray(tf.float32, size=tf.shape(i.x)[0]).unstack(i.x).stack(), "TensorArray"
    yield tf.map_fn(tf.reduce_sum, i.x), "TensorArray"
    yield tf.compat.v1.cond(i.keep > 0, lambda: i.x + 1.0, lambda: i.x * 2.0), 1
    yield tf.compat.v1.cond(i.keep > 0, lambda: i.x + 1.0, lambda: i.x - tf.reduce_mean(i.x)), "Mean"
    yield tf.compat.v1.cond(tf.reduce_sum(i.x) > 0, lambda: i.x + 1.0, lambda: i.x * 2.0), "Sum"
    yield tf.compat.v1.cond(tf.reduce_sum(i.x) > 0, lambda: tf.constant(1.0), lambda: tf.constant(2.0)), "Sum"
    yield tf.compat.v1.cond(tf.shape(i.x)[0] > 2, lambda: i.x, lambda: i.y), "Greater"


@family
def frames(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """The same in TensorFlow 1's form."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield from control(tf, raw, i)
    finally:
        tf.compat.v1.enable_control_flow_v2()


@family
def random(tf: Any, raw: Any, i: SimpleNamespace) -> Cases:
    """Random numbers, and state."""
    yield i.x * tf.random.uniform([4]), "draws"
    yield tf.nn.dropout(i.x, 0.5), "draws"
    yield i.x + tf.random.stateless_uniform([4], [1, 2]), 1
    yield i.x + tf.random.stateless_uniform(tf.shape(i.x), [1, 2]), "Stateless"
    yield tf.py_function(lambda v: v, [i.x], tf.float32), "EagerPyFunc"
