"""Random models of ragged features, run in C and in NumPy, beside TensorFlow's session: equal in every bit."""

from __future__ import annotations

import importlib
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.runtime.host_stage import lowered
from msplit.engines.host import native
from msplit.engines.host.program import HostGraph, HostProgram
from msplit.errors import InvalidInput
from msplit.formats.wire import parse_binary
from msplit.opset import schema
from tests.campaign import examples
from tests.engines.host.kernels import options, texts

pytestmark = [pytest.mark.tf, pytest.mark.no_cover]

TABLE = np.random.default_rng(0).standard_normal((31, 11)).astype(np.float32)
TABLE[3, 1:4] = np.nan, np.inf, -np.inf
TABLE[5] = 0
WORDS = [b"a", b"b", b"cc", b"\xff\xfe", b"d" * 40, "ü".encode(), b"e", b"f"]


def flat(change):
    """A step that changes single values."""
    return lambda tf, ids: tf.ragged.map_flat_values(change, ids)


def gathered(tf, ids):
    """Rows of a ragged constant, the values of each made one row."""
    rows = tf.ragged.constant([[1, 2], [], [3, 4, 30], [6], [5]], dtype=tf.int64)
    return tf.gather(rows, ids % 5).merge_dims(1, 2)


def again(tf, ids):
    return tf.RaggedTensor.from_sparse(ids.to_sparse())


def dense(tf, ids):
    return tf.RaggedTensor.from_tensor(ids.to_tensor(-1), padding=-1)


STEPS = {
    "first": lambda tf, ids: ids[:, :2],
    "last": lambda tf, ids: ids[:, -2:],
    "but one": lambda tf, ids: ids[:, 1:],
    "some rows": lambda tf, ids: tf.concat([ids[1:], ids[:1]], 0),
    "masked": lambda tf, ids: tf.ragged.boolean_mask(ids, ids < 16),
    "masked rows": lambda tf, ids: tf.ragged.boolean_mask(
        ids, tf.strings.length(tf.strings.as_string(ids.row_lengths())) > 0
    ),
    "beside": lambda tf, ids: tf.concat([ids, ids[:, :1]], 1),
    "below": lambda tf, ids: tf.concat([ids, ids], 0)[: ids.nrows()],
    "other numbers": flat(lambda ids: (ids * 7 + 3) % 31),
    "halves": flat(lambda ids: ids // 2),
    "gathered": gathered,
    "sparse": again,
    "dense": dense,
    "reversed": lambda tf, ids: tf.gather(ids, tf.range(ids.nrows())[::-1]),
    "ranges": lambda tf, ids: tf.ragged.range(ids.row_lengths() % 9),
    "stacked": lambda tf, ids: tf.ragged.stack([ids, ids[:, :1]], 1).merge_dims(1, 2),
    "doubled": lambda tf, ids: tf.tile(ids, [1, 2]),
}


def rows_of(tf, ids):
    return tf.ragged.map_flat_values(lambda some: tf.gather(TABLE, some), ids)


def pooled(name, of=rows_of):
    """A reduction of the rows of a table, or of other values of each row."""
    return lambda tf, ids: getattr(tf, f"reduce_{name}")(of(tf, ids), axis=1)


def segments(name, ordered):
    """A reduction by the row of each value."""

    def of(tf, ids):
        values = tf.gather(TABLE, ids.values)
        if ordered:
            return getattr(tf.math, f"segment_{name}")(values, ids.value_rowids())
        return getattr(tf.math, f"unsorted_segment_{name}")(values, ids.value_rowids(), ids.nrows())

    return of


def looked_up(combiner, weighted):
    """A lookup of sparse ids, as feature columns have it."""

    def of(tf, ids):
        sparse = ids.to_sparse()
        weights = sparse.with_values(tf.gather(np.abs(TABLE[:, 5]), sparse.values)) if weighted else None
        return tf.nn.safe_embedding_lookup_sparse(tf.constant(TABLE), sparse, weights, combiner=combiner)

    return of


POOLS = {
    **{name: pooled(name) for name in ("sum", "mean", "max", "min", "prod")},
    **{f"ids {name}": pooled(name, lambda tf, ids: ids) for name in ("sum", "max", "min", "mean")},
    **{f"segments {name}": segments(name, True) for name in ("sum", "mean", "max", "min", "prod")},
    **{f"unsorted {name}": segments(name, False) for name in ("sum", "mean", "max", "min", "prod", "sqrt_n")},
    **{f"looked up {name}": looked_up(name, False) for name in ("sum", "mean", "sqrtn")},
    "weighted": looked_up("sum", True),
    "weighted mean": looked_up("mean", True),
    "any": lambda tf, ids: tf.reduce_any(ids > 9, axis=1),
    "all": lambda tf, ids: tf.reduce_all(ids > 9, axis=1),
    "lengths": lambda tf, ids: tf.sqrt(tf.cast(ids.row_lengths(), tf.float32)),
    "rows": lambda tf, ids: ids.value_rowids(),
    "dense": lambda tf, ids: ids.to_tensor(-1),
    "cut": lambda tf, ids: ids.to_tensor(0, shape=[None, 3]),
    "counts": lambda tf, ids: tf.math.bincount(ids, minlength=31, maxlength=31, axis=-1),
    "mask": lambda tf, ids: tf.sequence_mask(ids.row_lengths()),
    "up to": lambda tf, ids: tf.cumsum(ids.values, exclusive=True),
    "shares": lambda tf, ids: tf.math.divide_no_nan(
        tf.cast(ids, tf.float32), tf.cast(tf.expand_dims(tf.reduce_sum(ids, 1), 1), tf.float32)
    ).values,
}  # fmt: skip


def ids_of(tf, words, twice):
    """Ids of the words of each text; or those of the pieces of its words."""
    found = tf.strings.split(words)
    if twice:
        found = tf.strings.split(found, "c").merge_dims(1, 2)
    return tf.ragged.map_flat_values(lambda word: tf.strings.to_hash_bucket_fast(word, 31), found)


def check(steps, pools, twice, batches):
    """Holds a model in C and in NumPy against TensorFlow."""
    tf = importlib.import_module("tensorflow")
    graph = tf.Graph()
    with graph.as_default():
        words = tf.compat.v1.placeholder(tf.string, [None], name="words")
        ids = ids_of(tf, words, twice)
        for step in steps:
            ids = STEPS[step](tf, ids)
        made = {name: tf.identity(POOLS[name](tf, ids)) for name in pools}
    data = parse_binary(graph.as_graph_def().SerializeToString(), schema.graph_pb2.GraphDef(), "a graph")
    host = HostGraph(data, {"words": words.name}, {name: value.name for name, value in made.items()})
    programs = [HostProgram(host, lowered)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "native", lambda: None)
        programs.append(HostProgram(host, lowered))
    assert not programs[0].missing
    config = options(tf)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # which adds in another order
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        for batch in batches:
            given = texts(*batch)
            try:
                expected = session.run(made, {words: given})
            except tf.errors.OpError:
                expected = None
            for program in programs:
                try:
                    found = program.step({"words": given})
                except InvalidInput:
                    found = None
                assert (found is None) == (expected is None), (found, expected)
                for name, value in (expected or {}).items():
                    one = found[name]
                    assert (one.dtype, one.shape) == (value.dtype, value.shape), name
                    same = operator.eq(one.tobytes(), value.tobytes())
                    assert same or np.array_equal(one, value, equal_nan=True), (name, one, value)


TEXT = st.lists(st.sampled_from(WORDS), max_size=24).map(b" ".join)


@settings(max_examples=examples(25, 400), deadline=None)
@given(
    st.lists(st.sampled_from([*STEPS]), max_size=3),
    st.lists(st.sampled_from([*POOLS]), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.lists(st.lists(TEXT, max_size=6), min_size=1, max_size=3),
)
def test_pooled_features(steps, pools, twice, batches):
    check(steps, pools, twice, batches)


@pytest.mark.parametrize("step", [*STEPS])
def test_each_step(step):
    check([step], ["sum", "dense"], False, BATCHES)


@pytest.mark.parametrize("pool", [*POOLS])
def test_each_pool(pool):
    check([], [pool], False, BATCHES)


BATCHES = [
    [b"a b cc", b"", b" ", b"\xff\xfe d", b"e f " * 20],
    [b""],
    [b"a"],
    [],
]
"""Texts of words, without any, and no text."""
