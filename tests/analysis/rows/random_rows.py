"""Random graphs over inputs with rows: whole numbers as floats, so that results have to be equal to the bit.

Some steps keep rows apart, some mix them, and most do one or the other as axes fall. A tensor has its rows along the axis whose size
TensorFlow does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Choose = Callable[[Sequence[Any]], Any]
Step = Callable[[Any, "Builder", Any], Any]

INPUTS = {"a": (4,), "b": (4,), "c": (3, 4), "d": (2, 3, 4)}
"""Sizes behind the batch."""

MOST_ELEMENTS = 200
"""Of one row."""


class Builder:
    """Adds tensors to the default graph."""

    def __init__(self, tf: Any, choose: Choose) -> None:
        self.tf, self.choose = tf, choose
        self.values = [
            tf.compat.v1.placeholder(tf.float32, (None, *sizes), name=name) for name, sizes in INPUTS.items()
        ]

    def axis(self, tensor: Any, more: int = 0) -> int:
        """Any axis of a tensor."""
        return self.choose(range(tensor.shape.rank + more))

    def other(self) -> Any:
        """Any tensor."""
        return self.choose(self.values)

    def like(self, tensor: Any) -> Any:
        """Any tensor of the same sizes."""
        sizes = tensor.shape.as_list()
        return self.choose([value for value in self.values if value.shape.as_list() == sizes] or [tensor])

    def weights(self, *sizes: int) -> Any:
        """Small whole numbers."""
        return self.tf.constant(np.random.default_rng(sum(sizes)).integers(-2, 3, sizes).astype(np.float32))

    def step(self, steps: Sequence[Step], tensor: Any) -> Any:
        """A tensor made by one of some steps; None where it does not go."""
        try:
            made = self.choose(steps)(self.tf, self, tensor)
        except (ValueError, TypeError, IndexError, self.tf.errors.InvalidArgumentError):
            return None
        sizes = made.shape.as_list() if made.shape.rank is not None else [9] * 9
        if not 1 <= len(sizes) <= 4 or np.prod([size or 1 for size in sizes]) > MOST_ELEMENTS:
            return None
        # Numbers stay small, and so exact.
        return self.tf.math.floormod(self.tf.cast(made, self.tf.float32), 16.0)


def rows_of(tensor: Any) -> int | None:
    """The axis of the rows, if there is one that may be it."""
    unknown = [axis for axis, size in enumerate(tensor.shape.as_list()) if size is None]
    return unknown[0] if len(unknown) == 1 else None


def _reshape(tf: Any, g: Builder, t: Any) -> Any:
    sizes, size = t.shape.as_list(), tf.shape(t)
    known = int(np.prod([s or 1 for s in sizes]))
    part = g.choose([n for n in (1, 2, 3, 4, 6, 8) if known % n == 0])
    options = [
        lambda: [-1, part],
        lambda: [part, -1],
        lambda: tf.stack([size[0], -1]),
        lambda: tf.stack([size[0] * size[1], *(sizes[2:] or [1])]),
        lambda: tf.concat([size[:1], [part, -1]], 0),
        lambda: tf.stack([-1, *(s for s in sizes if s)]),
        lambda: tf.shape(g.like(t)),
    ]
    return tf.reshape(t, g.choose(options)())


def _cut(tf: Any, g: Builder, t: Any) -> Any:
    axis = g.axis(t)
    index: list[Any] = [slice(None)] * t.shape.rank
    end = tf.shape(g.other())[0]
    index[axis] = g.choose(
        [slice(1, None), slice(None, 2), slice(None, None, -1), slice(None, -1), 0, -1, slice(None, end)]
    )
    return t[tuple(index)]


def _gather(tf: Any, g: Builder, t: Any) -> Any:
    axis = g.axis(t)
    ids = g.choose(
        [lambda: tf.constant([1, 0]), lambda: tf.cast(g.other(), tf.int32) % 2, lambda: tf.range(tf.shape(t)[axis])]
    )()
    batch = g.choose([0, 0, 1])
    return tf.gather(t, ids, axis=axis, batch_dims=batch)


def _lookup(tf: Any, g: Builder, t: Any) -> Any:
    table = g.weights(5, 4)
    return tf.gather(table, tf.cast(t, tf.int32) % g.choose([4, 5]), axis=g.choose([0, 0, 1]))


def _numbered(tf: Any, g: Builder, t: Any) -> Any:
    numbers = tf.range(tf.shape(g.other())[0])
    other = tf.cast(g.other(), tf.int32)
    column = other[:, 0] if other.shape.rank > 1 else other
    pair = g.choose([[numbers, column % 2], [column % 2, numbers], [numbers, numbers]])
    return tf.gather_nd(t, tf.stack(pair, g.choose([1, 1, 0])))


def _moved(tf: Any, g: Builder, t: Any) -> Any:
    """The same numbers, some of them, or others, of whole numbers along two axes."""
    return g.choose([
        lambda: t, lambda: t[..., :], lambda: t[:, ::-1], lambda: t[:, :1], lambda: t[:, 1:], lambda: tf.tile(t, [1, 2]),
        lambda: tf.tile(t, [2, 1]), lambda: tf.gather(t, [1, 0], axis=1), lambda: tf.gather(t, [0], axis=1), lambda: tf.transpose(t),
        lambda: tf.reshape(t, [-1, 2]), lambda: tf.expand_dims(t, g.choose([0, 1]))[0], lambda: tf.concat([t, t], g.choose([0, 1])),
        lambda: tf.reverse(t, [g.choose([0, 1])]), lambda: tf.cast(tf.cast(t, tf.int64), tf.int32),
    ])()  # fmt: skip


def _coordinates(tf: Any, g: Builder, t: Any) -> Any:
    """Elements by the number of the row and another number, moved about."""
    numbers = tf.range(tf.shape(g.other())[0])
    other = tf.cast(g.other(), tf.int32) % 2
    column = other[:, 0] if other.shape.rank > 1 else other
    pairs = _moved(tf, g, _moved(tf, g, tf.stack([numbers, column], 1)))
    return g.choose([
        lambda: tf.gather_nd(t, pairs), lambda: tf.gather(t, pairs[:, 0]), lambda: tf.cast(pairs, tf.float32),
        lambda: tf.gather(g.weights(2, 3), pairs[:, -1]), lambda: tf.math.segment_sum(t, pairs[:, 0]),
        lambda: tf.math.unsorted_segment_sum(t, pairs[:, 0], tf.shape(t)[0]),
    ])()  # fmt: skip


def _places(tf: Any, g: Builder, t: Any) -> Any:
    """A partition of all elements, put together again where they were, or about where they were."""
    flat = tf.reshape(t, [-1])
    odd = tf.cast(flat, tf.int32) % 2
    width = int(np.prod([size or 1 for size in t.shape.as_list()]))
    places = tf.reshape(tf.range(tf.size(flat)), [-1, width])
    places = tf.reshape(_moved(tf, g, _moved(tf, g, places)), [-1])
    if g.choose([False, True]):
        return tf.reshape(tf.gather(flat, places), [-1, width])
    parts = tf.dynamic_partition(g.choose([flat, flat + 1.0]), odd, 2)
    made = tf.dynamic_stitch(tf.dynamic_partition(places, odd, 2), parts)
    return tf.reshape(made, [-1, g.choose([width, 1])])


def _filled(tf: Any, g: Builder, t: Any) -> Any:
    """A sparse tensor of what is positive, every row with an entry."""
    places = tf.where(t > 1.0)
    values = tf.gather_nd(g.like(t), places)
    size = tf.shape(g.choose([t, g.like(t)]), out_type=tf.int64)
    sparse = tf.SparseTensor(places, values, size)
    if g.choose([False, True]):
        sparse = tf.sparse.reshape(sparse, tf.stack([g.choose([size[0], -1]), g.choose([size[1], 2, -1])]))
    if g.choose([False, True]):
        return tf.sparse.to_dense(sparse)
    filled, empty = tf.sparse.fill_empty_rows(sparse, 5.0)
    if g.choose([False, False, True]):
        return empty
    values, index = g.choose([lambda: (filled.values, None), lambda: tf.unique(filled.values)])()
    looked = (
        tf.gather(g.weights(5, 2), tf.cast(values, tf.int32) % 5) if g.choose([True, False]) else values[:, tf.newaxis]
    )
    rows = filled.indices[:, g.choose([0, 0, 0, 1])]
    if index is not None:
        return tf.raw_ops.SparseSegmentSum(data=looked, indices=index, segment_ids=tf.cast(rows, tf.int32))
    return tf.math.segment_sum(looked, rows)


def _chosen(tf: Any, g: Builder, t: Any) -> Any:
    places = tf.where(t > 0)
    values = tf.gather_nd(g.like(t), places)
    count = tf.cast(tf.shape(g.other())[0], tf.int64)
    column = places[:, g.choose([0, 0, 0, -1])]
    return tf.math.unsorted_segment_sum(values, column, count)[:, tf.newaxis]


def _partitioned(tf: Any, g: Builder, t: Any) -> Any:
    parts = tf.cast(t[:, 0], tf.int32) % 2
    data = g.choose([t, g.like(t)])
    places = tf.range(tf.shape(g.choose([t, data]))[0])
    first, second = tf.dynamic_partition(data, parts, 2)
    ats = tf.dynamic_partition(places, parts, 2)
    return tf.dynamic_stitch(ats, g.choose([[first, second + 1.0], [first * 2.0, tf.cumsum(second)]]))


def _loop(tf: Any, g: Builder, t: Any) -> Any:
    other = g.like(t)
    limit = g.choose([2, 3, tf.shape(t)[0], tf.cast(tf.reduce_max(other), tf.int32) % 3])
    body = g.choose([
        lambda a, b: (b, a + b), lambda a, b: (a + 1.0, a), lambda a, b: (b, tf.reverse(a, [0])),
        lambda a, b: (a - tf.reduce_sum(b, 0), b),
    ])  # fmt: skip
    return tf.compat.v1.while_loop(lambda i, *_: i < limit, lambda i, a, b: (i + 1, *body(a, b)), (0, t, other))[1]


def _listed(tf: Any, g: Builder, t: Any) -> Any:
    axis = g.axis(t)
    order = [axis, *(place for place in range(t.shape.rank) if place != axis)]
    taken = tf.transpose(t, order)
    listed = tf.raw_ops.TensorListFromTensor(tensor=taken, element_shape=tf.constant(-1))
    return tf.raw_ops.TensorListStack(input_handle=listed, element_shape=tf.shape(taken)[1:], element_dtype=tf.float32)


def _choice(tf: Any, g: Builder, t: Any) -> Any:
    condition = g.choose([tf.reduce_sum(t) > 0, tf.shape(t)[0] > 3, tf.constant(True)])
    other = g.like(t)
    return tf.cond(condition, lambda: t + 1.0, g.choose([lambda: other, lambda: tf.reverse(other, [0])]))


def _einsum(tf: Any, g: Builder, t: Any) -> Any:
    equation = g.choose(
        ["ab,ab->ab", "ab,cb->ac", "ab,ab->b", "ab,ab->a", "abc,abd->acd", "abc,dbc->adb", "...a,...a->...a"]
    )
    return tf.einsum(equation, t, g.like(t))


def _pooled(tf: Any, g: Builder, t: Any) -> Any:
    image = t if t.shape.rank == 4 else tf.expand_dims(tf.expand_dims(t, 1), -1)
    return tf.nn.max_pool2d(image, g.choose([[1, 2, 2, 1], [1, 1, 2, 1]]), [1, 1, 1, 1], "SAME")


STEPS: list[Step] = [
    lambda tf, g, t: g.choose([tf.nn.relu, tf.abs, tf.negative, tf.square, tf.zeros_like])(t),
    lambda tf, g, t: g.choose([tf.add, tf.multiply, tf.maximum, tf.math.squared_difference])(t, g.other()),
    lambda tf, g, t: g.choose([tf.add, tf.subtract])(t, g.like(t)),
    lambda tf, g, t: t + g.weights(*[s or 1 for s in t.shape.as_list()][g.choose([0, 1]) :]),
    lambda tf, g, t: tf.tensordot(t, g.weights(t.shape[-1], g.choose([2, 3])), 1),
    lambda tf, g, t: tf.matmul(t, g.weights(t.shape[-1], 3)),
    lambda tf, g, t: tf.matmul(t, g.other(), transpose_a=g.choose([False, True]), transpose_b=g.choose([False, True])),
    _reshape,
    _reshape,
    lambda tf, g, t: tf.transpose(t, list(np.random.default_rng(g.choose(range(6))).permutation(t.shape.rank))),
    lambda tf, g, t: tf.expand_dims(t, g.axis(t, 1)),
    lambda tf, g, t: tf.squeeze(t, [g.axis(t)]),
    lambda tf, g, t: g.choose([tf.reduce_sum, tf.reduce_max, tf.reduce_min])(t, g.axis(t), keepdims=g.choose([False, True])),
    lambda tf, g, t: tf.argmax(t, g.axis(t)),
    lambda tf, g, t: g.choose([tf.cumsum, tf.math.cumprod])(t, g.axis(t)),
    lambda tf, g, t: tf.reverse(t, [g.axis(t)]),
    lambda tf, g, t: tf.roll(t, 1, g.axis(t)),
    lambda tf, g, t: tf.sort(t),
    lambda tf, g, t: tf.concat([t, g.choose([g.like(t), g.other()])], g.axis(t)),
    lambda tf, g, t: tf.stack([t, g.like(t)], g.axis(t, 1)),
    lambda tf, g, t: g.choose(tf.split(t, 2, g.axis(t))),
    lambda tf, g, t: g.choose(tf.unstack(t, axis=g.axis(t))),
    _cut,
    _cut,
    _gather,
    _lookup,
    _numbered,
    _chosen,
    _coordinates,
    _filled,
    _partitioned,
    _places,
    _loop,
    _listed,
    _choice,
    _einsum,
    _pooled,
    lambda tf, g, t: tf.tile(t, [g.choose([1, 1, 2]) for _ in t.shape]),
    lambda tf, g, t: tf.tile(g.weights(1, 3), tf.stack([tf.shape(t)[g.axis(t)], 1])),
    lambda tf, g, t: tf.fill(tf.stack([tf.shape(t)[g.axis(t)], 2]), 3.0),
    lambda tf, g, t: tf.broadcast_to(t, tf.shape(g.other())),
    lambda tf, g, t: tf.pad(t, [[g.choose([0, 0, 1]), 0] for _ in t.shape]),
    lambda tf, g, t: tf.one_hot(tf.cast(t, tf.int32), 3, axis=g.axis(t, 1)),
    lambda tf, g, t: t * tf.cast(tf.shape(t)[g.axis(t)], tf.float32),
    lambda tf, g, t: tf.reverse_sequence(t, tf.cast(t[:, 0, 0], tf.int32) % 3, seq_axis=1),
    lambda tf, g, t: tf.where(g.other() > 1.0, t, g.like(t)),
    lambda tf, g, t: tf.round(tf.nn.softmax(t) * 7.3),
    lambda tf, g, t: tf.linalg.band_part(t, 1, g.choose([0, -1])),
]  # fmt: skip

MIXERS: list[Callable[[Any, Any, int], Any]] = [
    lambda tf, t, axis: tf.reverse(t, [axis]),
    lambda tf, t, axis: tf.roll(t, 1, axis),
    lambda tf, t, axis: t - tf.reduce_max(t, axis, keepdims=True),
    lambda tf, t, axis: tf.cumsum(t, axis),
    lambda tf, t, axis: t + tf.cast(tf.shape(t)[axis], tf.float32),
    lambda tf, t, axis: tf.gather(t, tf.random.shuffle(tf.range(tf.shape(t)[axis])), axis=axis),
    lambda tf, t, axis: t + tf.reduce_sum(t),
]
"""What makes each row depend on others, or on how many there are, and keeps the shape."""


def feeds(batch: int, seed: int) -> dict[str, np.ndarray]:
    """Values for the inputs."""
    rng = np.random.default_rng(seed)
    return {f"{name}:0": rng.integers(-2, 4, (batch, *sizes)).astype(np.float32) for name, sizes in INPUTS.items()}
