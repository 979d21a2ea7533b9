"""Blocks of the random networks (`tests.networks`): each adds a few layers to what a maker has so far."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

BATCH = 4
WIDTHS = (3, 4, 8, 16, 17, 32)
ROWS = 11
"""Of every table."""


class Maker:
    """Adds blocks to a graph and knows what can be read: values of two axes (rows), three (sequences) and four (images)."""

    def __init__(self, tf: Any, random: Random, rng: np.random.Generator, *, trains: bool = False) -> None:
        self.tf, self.random, self.rng, self.trains = tf, random, rng, trains
        self.feeds: dict[str, np.ndarray] = {}
        self.weights: list[Any] = []
        self.inputs = [self._input(f"x{axes}", shape) for axes, shape in _INPUTS.items()]
        self.values = list(self.inputs)

    def _input(self, name: str, shape: tuple[int, ...]) -> Any:
        self.feeds[name] = self.rng.standard_normal(shape).astype(np.float32)
        return self.tf.compat.v1.placeholder(self.tf.float32, shape, name=name)

    def ids(self, *shape: int) -> Any:
        """Rows of tables: fed, or constant."""
        value = self.rng.integers(0, ROWS, shape).astype(self.random.choice([np.int32, np.int64]))
        if self.random.random() < 0.3:
            return self.tf.constant(value)
        name = f"ids{len(self.feeds)}"
        self.feeds[name] = value
        return self.tf.compat.v1.placeholder(value.dtype, shape, name=name)

    def normal(self, *shape: int, scale: float = 1.0) -> Any:
        return self.tf.constant((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def weight(self, *shape: int) -> Any:
        """A constant, or a variable, as large as keeps values as large as they are."""
        inner = int(np.prod(shape[:-1])) if len(shape) > 1 else 4
        value = (self.rng.standard_normal(shape) / np.sqrt(max(inner, 1))).astype(np.float32)
        name = f"weight{len(self.weights)}"
        self.weights.append(
            self.tf.compat.v1.get_variable(name, initializer=value) if self.trains else self.tf.constant(value)
        )
        return self.weights[-1]

    def positive(self, *shape: int) -> Any:
        return self.tf.constant(self.rng.uniform(0.5, 1.5, shape).astype(np.float32))

    def pick(self, axes: int) -> Any:
        """One of the values of so many axes, a late one mostly."""
        fitting = [value for value in self.values if len(value.shape) == axes]
        return fitting[-1] if self.random.random() < 0.5 else self.random.choice(fitting)

    def any(self) -> Any:
        return self.random.choice(self.values[-4:])

    def add(self, *values: Any) -> bool:
        """Keeps values, unless they are large. Whether it did."""
        kept = [value for value in values if 0 < np.prod(value.shape.as_list()) <= 8192]
        self.values += kept
        return bool(kept)

    def act(self, x: Any) -> Any:
        tf = self.tf
        return self.random.choice(
            [
                *(
                    tf.nn.relu,
                    tf.tanh,
                    tf.sigmoid,
                    tf.nn.elu,
                    tf.nn.selu,
                    tf.nn.softplus,
                    tf.nn.swish,
                    tf.nn.leaky_relu,
                ),
                *(lambda x: tf.nn.gelu(x, approximate=False), lambda x: tf.nn.gelu(x, approximate=True)),
                *(tf.identity, tf.nn.relu6, tf.math.erf, tf.nn.softsign),
            ]
        )(x)

    def dense(self, x: Any, units: int) -> Any:
        """A product with all that may come with it."""
        tf, width = self.tf, int(x.shape[-1])
        turned = self.random.random() < 0.3
        weight = self.weight(units, width) if turned else self.weight(width, units)
        if len(x.shape) == 2:
            y = tf.matmul(x, weight, transpose_b=turned)
        else:
            y = tf.tensordot(x, tf.transpose(weight) if turned else weight, 1)
        if self.random.random() < 0.7:
            bias = self.weight(units)
            y = tf.nn.bias_add(y, bias) if self.random.random() < 0.6 else y + bias
        return self.act(y)


_INPUTS = {2: (BATCH, 8), 3: (BATCH, 5, 8), 4: (BATCH, 8, 8, 4)}


def layer(m: Maker) -> bool:
    return m.add(m.dense(m.pick(m.random.choice([2, 2, 3])), m.random.choice(WIDTHS)))


def _towers(m: Maker) -> bool:
    """Alike branches over one value, and what joins them."""
    tf, x, count = m.tf, m.pick(m.random.choice([2, 2, 3])), m.random.choice([2, 3, 4, 6])
    widths = [m.random.choice(WIDTHS) for _ in range(m.random.randint(1, 2))]
    state = m.random.getstate()
    ends = []
    for _ in range(count):
        m.random.setstate(state)  # alike but for their weights
        y = x
        for width in widths:
            y = m.dense(y, width)
        ends.append(y)
    how = m.random.choice(["concat", "sum", "gate", "stack"])
    if how == "concat":
        return m.add(tf.concat(ends, -1))
    if how == "sum":
        return m.add(tf.add_n(ends))
    if how == "stack":
        return m.add(tf.reduce_mean(tf.stack(ends, 1), 1), *ends[:1])
    gates = tf.nn.softmax(m.dense(x, count))
    stacked = tf.stack(ends, -2)
    return m.add(tf.reduce_sum(stacked * gates[..., None], -2))


def _norm(m: Maker) -> bool:
    """Over the last axis, written out in one of the usual ways; or over rows, or as batch normalization."""
    tf, x, small = m.tf, m.any(), m.random.choice([1e-3, 1e-5, 1e-6])
    width = int(x.shape[-1])
    how = m.random.choice(["moments", "written", "rms", "l2", "rows", "batch"])
    if how == "moments":
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        y = tf.nn.batch_normalization(x, mean, variance, m.weight(width), m.positive(width), small)
    elif how == "written":
        away = x - tf.reduce_mean(x, -1, keepdims=True)
        y = away * tf.math.rsqrt(tf.reduce_mean(tf.square(away), -1, keepdims=True) + small)
        y = y * m.positive(width) + m.weight(width)
    elif how == "rms":
        y = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + small) * m.positive(width)
    elif how == "l2":
        y = tf.math.l2_normalize(x, -1, epsilon=1e-3)
    elif how == "rows":
        mean, variance = tf.nn.moments(x, [0])
        y = (x - mean) / tf.sqrt(variance + 1e-2)
    else:
        image = x if len(x.shape) == 4 else tf.reshape(x, [int(x.shape[0]), 1, -1, width])
        given = m.positive(width), m.weight(width), m.weight(width), m.positive(width)
        y = tf.compat.v1.nn.fused_batch_norm(image, *given, epsilon=small, is_training=False)[0]
        y = tf.reshape(y, x.shape)
    return m.add(m.act(y) if m.random.random() < 0.4 else y)


def _attention(m: Maker) -> bool:
    tf, x = m.tf, m.pick(3)
    rows, length, width = map(int, x.shape)
    heads = m.random.choice([1, 2, 4])
    size = m.random.choice([4, 8])

    def projected() -> Any:
        y = tf.tensordot(x, m.weight(width, heads * size), 1)
        return tf.transpose(tf.reshape(y, [rows, length, heads, size]), [0, 2, 1, 3])

    q, k, v = projected(), projected(), projected()
    scores = tf.matmul(q, k, transpose_b=True)
    scores = scores / np.float32(np.sqrt(size)) if m.random.random() < 0.5 else scores * (size**-0.5)
    mask = m.random.choice(["none", "add", "where", "band", "bias"])
    seen = m.rng.random((rows, 1, 1, length)) < 0.7
    seen[..., 0] = True
    if mask == "add":
        scores += tf.constant(((1 - seen) * -1e9).astype(np.float32))
    elif mask == "where":
        scores = tf.where(tf.constant(np.broadcast_to(seen, (rows, heads, length, length)).copy()), scores, -1e9)
    elif mask == "band":
        scores = tf.where(tf.linalg.band_part(tf.ones([length, length]), -1, 0) > 0, scores, -1e9)
    elif mask == "bias":
        scores += m.normal(1, heads, length, length)
    y = tf.matmul(tf.nn.softmax(scores), v)
    y = tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [rows, length, heads * size])
    y = tf.tensordot(y, m.weight(heads * size, width), 1)
    return m.add(x + y if m.random.random() < 0.7 else y)


def _convolution(m: Maker) -> bool:
    tf, x = m.tf, m.pick(4)
    channels, size = int(x.shape[3]), min(int(x.shape[1]), int(x.shape[2]))
    kernel = m.random.choice([k for k in (1, 2, 3, 5) if k <= size])
    stride, padding = m.random.choice([1, 1, 2]), m.random.choice(["SAME", "VALID"])
    how = m.random.choice(["plain", "plain", "depthwise", "separable", "transposed", "dilated"])
    filters = m.random.choice([2, 4, 8, 16])
    if how == "depthwise":
        y = tf.nn.depthwise_conv2d(x, m.weight(kernel, kernel, channels, 1), [1, stride, stride, 1], padding)
    elif how == "separable":
        y = tf.nn.separable_conv2d(
            x, m.weight(kernel, kernel, channels, 1), m.weight(1, 1, channels, filters), [1, 1, 1, 1], padding
        )
    elif how == "transposed":
        shape = [int(x.shape[0]), int(x.shape[1]) * stride, int(x.shape[2]) * stride, filters]
        y = tf.nn.conv2d_transpose(x, m.weight(kernel, kernel, filters, channels), shape, stride, "SAME")
    else:
        dilation = 2 if how == "dilated" and 2 * (kernel - 1) < size else 1
        strides = 1 if dilation > 1 else stride
        y = tf.nn.conv2d(x, m.weight(kernel, kernel, channels, filters), strides, padding, dilations=dilation)
    width = int(y.shape[3])
    if m.random.random() < 0.4:
        y = y * m.positive(width) + m.weight(width)
    elif m.random.random() < 0.5:
        y = tf.nn.bias_add(y, m.weight(width))
    return m.add(m.act(y))


def _siblings(m: Maker) -> bool:
    """As in inception blocks."""
    tf, x = m.tf, m.pick(4)
    channels, ends = int(x.shape[3]), []
    for _ in range(m.random.randint(2, 4)):
        kernel, filters = m.random.choice([1, 1, 3]), m.random.choice([2, 4, 8])
        y = tf.nn.conv2d(x, m.weight(kernel, kernel, channels, filters), 1, "SAME")
        ends.append(tf.nn.relu(tf.nn.bias_add(y, m.weight(filters))))
    return m.add(tf.concat(ends, 3))


def _pool(m: Maker) -> bool:
    tf, x = m.tf, m.pick(4)
    size = min(int(x.shape[1]), int(x.shape[2]))
    if size < 2:
        return False
    kernel, stride = m.random.choice([2, min(3, size)]), m.random.choice([1, 2])
    how = m.random.choice([tf.nn.avg_pool2d, tf.nn.max_pool2d])
    return m.add(how(x, kernel, stride, m.random.choice(["SAME", "VALID"])))


def _to_rows(m: Maker) -> bool:
    """Images and sequences become rows."""
    tf, x = m.tf, m.pick(m.random.choice([3, 4]))
    axes = list(range(1, len(x.shape) - 1))
    how = m.random.choice([tf.reduce_mean, tf.reduce_max, tf.reduce_sum, tf.reduce_logsumexp])
    if m.random.random() < 0.3:
        return m.add(tf.reshape(x, [int(x.shape[0]), -1]))
    return m.add(how(x, axes))


def _to_sequence(m: Maker) -> bool:
    tf, x = m.tf, m.pick(m.random.choice([2, 4]))
    if len(x.shape) == 2:
        return m.add(tf.expand_dims(x, 1) * m.normal(1, m.random.choice([3, 5]), 1))
    return m.add(tf.reshape(x, [int(x.shape[0]), -1, int(x.shape[3])]))


def _pointwise(m: Maker) -> bool:
    tf, x = m.tf, m.any()
    for _ in range(m.random.randint(2, 6)):
        same = [value for value in m.values if value.shape == x.shape]
        other = m.random.choice([*same, m.normal(int(x.shape[-1])), m.positive(*x.shape.as_list())])
        op = m.random.choice([tf.add, tf.subtract, tf.multiply, tf.maximum, tf.minimum, tf.math.squared_difference])
        x = op(x, other) if m.random.random() < 0.5 else op(other, x)
        x = m.act(x) if m.random.random() < 0.6 else tf.tanh(x)
    return m.add(x)


def _divisions(m: Maker) -> bool:
    """Functions that are not defined everywhere, where they are."""
    tf, x = m.tf, m.any()
    positive = tf.square(x) + 0.5
    how = m.random.choice([tf.sqrt, tf.math.rsqrt, tf.math.log, tf.math.reciprocal, tf.math.log1p])
    y = how(positive)
    return m.add(y * x if m.random.random() < 0.5 else x / positive)


def _reduction(m: Maker) -> bool:
    tf, x = m.tf, m.any()
    axis = m.random.randrange(1, len(x.shape))
    how = m.random.choice([tf.reduce_mean, tf.reduce_sum, tf.reduce_max, tf.reduce_logsumexp, tf.nn.softmax])
    if how is tf.nn.softmax:
        return m.add(m.random.choice([tf.nn.softmax, tf.nn.log_softmax])(x))
    return m.add(x - how(x, axis, keepdims=True) if m.random.random() < 0.5 else how(x, axis, keepdims=True) * x)


def _moves(m: Maker) -> bool:
    """What computes nothing."""
    tf, x = m.tf, m.any()
    axes = len(x.shape)
    how = m.random.choice(["transpose", "slice", "pad", "concat", "split", "tile", "reverse", "gather", "stride"])
    last = int(x.shape[-1])
    if how == "transpose" and axes > 2:
        return m.add(tf.transpose(x, [0, 2, 1, *range(3, axes)]))
    if how == "slice" and last > 1:
        begin = m.random.randrange(last - 1)
        return m.add(x[..., begin : begin + m.random.randint(1, last - begin)])
    if how == "pad":
        return m.add(tf.pad(x, [[0, 0], *[[m.random.randrange(2), m.random.randrange(2)] for _ in range(axes - 1)]]))
    if how == "split" and last % 2 == 0:
        first, second = tf.split(x, 2, -1)
        return m.add(first * tf.sigmoid(second), second)
    if how == "tile":
        return m.add(tf.tile(x, [1] * (axes - 1) + [2]))
    if how == "reverse":
        return m.add(tf.reverse(x, [axes - 1]))
    if how == "gather":
        return m.add(tf.gather(x, m.rng.integers(0, last, m.random.randint(1, 6)).astype(np.int32), axis=axes - 1))
    if how == "stride" and last > 2:
        return m.add(x[..., ::2])
    same = [value for value in m.values if value.shape[:-1] == x.shape[:-1]]
    return m.add(tf.concat([x, m.random.choice(same)], -1))


def _lookup(m: Maker) -> bool:
    """One row for each id, of a table in one part or in two."""
    tf, width = m.tf, m.random.choice([3, 4, 8])
    shape = m.random.choice([(BATCH,), (BATCH, 3), (BATCH, 5)])
    parts = m.random.choice([1, 1, 2])
    tables = [m.weight((ROWS + parts - 1 - part) // parts, width) for part in range(parts)]
    strategy = m.random.choice(["mod", "div"])
    found = tf.compat.v1.nn.embedding_lookup(tables, m.ids(*shape), partition_strategy=strategy)
    if len(shape) > 1 and m.random.random() < 0.4:
        found = tf.reduce_sum(found, 1)
    return m.add(found)


def _columns(m: Maker) -> bool:
    """Several alike tables whose rows are concatenated, as embedding columns are."""
    tf, width = m.tf, m.random.choice([4, 8])
    count = m.random.choice([2, 3, 5])
    found = [tf.gather(m.weight(ROWS, width), m.ids(BATCH)) for _ in range(count)]
    return m.add(tf.concat(found, 1) if m.random.random() < 0.7 else tf.add_n(found))


def _bag(m: Maker) -> bool:
    """Several rows for each id: sums and means over segments, of sparse ids, weighted or not."""
    tf, width = m.tf, m.random.choice([3, 4, 8])
    count = m.random.randint(BATCH, 9)
    rows = np.sort(m.rng.integers(0, BATCH, count))
    rows[-1] = BATCH - 1
    places = np.stack([rows, np.arange(count)], 1).astype(np.int64)
    shape = np.array([BATCH, count], np.int64)
    ids = tf.SparseTensor(places, tf.cast(m.ids(count), tf.int64), shape)
    weights = None
    if m.random.random() < 0.5:
        weights = tf.SparseTensor(places, m.positive(count), shape)
    parts = m.random.choice([1, 1, 2])
    tables = [m.weight((ROWS + parts - 1 - part) // parts, width) for part in range(parts)]
    how = m.random.choice(["sum", "mean", "sqrtn"])
    if m.random.random() < 0.5:
        found = tf.compat.v1.nn.safe_embedding_lookup_sparse(tables, ids, weights, combiner=how)
    else:
        found = tf.compat.v1.nn.embedding_lookup_sparse(tables, ids, weights, combiner=how)
    return m.add(tf.reshape(found, [BATCH, width]))


def _product(m: Maker) -> bool:
    """Values times each other."""
    tf, x = m.tf, m.pick(m.random.choice([2, 3]))
    y = tf.matmul(x, x, transpose_b=True) / np.float32(x.shape[-1])
    if m.random.random() < 0.5:
        y = tf.matmul(tf.nn.softmax(y), x)
    return m.add(y)


def _recurrent(m: Maker) -> bool:
    """A cell over the turns of a loop, or unrolled."""
    tf, x = m.tf, m.pick(3)
    turns, width, units = min(int(x.shape[1]), 6), int(x.shape[2]), m.random.choice([3, 4, 8])
    rows, kernel, bias = int(x.shape[0]), m.weight(width + units, 2 * units), m.weight(2 * units)

    def turn(now: Any, h: Any) -> Any:
        gate, value = tf.split(tf.nn.bias_add(tf.matmul(tf.concat([now, h], 1), kernel), bias), 2, 1)
        gate = tf.sigmoid(gate)
        return gate * h + (1.0 - gate) * tf.tanh(value)

    h = tf.zeros([rows, units])
    if m.random.random() < 0.5:
        for number in range(turns):
            h = turn(x[:, number], h)
        return m.add(h)
    steps = tf.transpose(x, [1, 0, 2])
    _, h = tf.compat.v1.while_loop(
        lambda number, _: number < turns, lambda number, h: (number + 1, turn(steps[number], h)), (0, h)
    )
    h.set_shape([rows, units])
    return m.add(h)


BLOCKS: tuple[Callable[[Maker], bool], ...] = (
    *(layer, _towers, _norm, _attention, _convolution, _siblings, _pool, _to_rows, _to_sequence, _pointwise),
    *(_divisions, _reduction, _moves, _lookup, _columns, _bag, _product, _recurrent, _norm, layer, _attention, _bag),
)
