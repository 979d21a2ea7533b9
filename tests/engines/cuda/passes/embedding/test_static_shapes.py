"""What the graph proves becomes dense and can be captured, equal to TensorFlow for all inputs; what it does not prove stays as it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.analysis.rows import independent_rows
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.errors import EngineError
from msplit.shapes.infer import inferred
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, job, kernels, outputs_of_tensorflow, program_of
from tests.engines.cuda.passes.embedding.models import EDGES, feeds_of, flat_columns

pytestmark = pytest.mark.tf


def bucketized(columns, name, count=1):
    return columns.bucketized_column(columns.numeric_column(name, shape=count), EDGES)


def identity(columns, name, **options):
    return columns.categorical_column_with_identity(name, 6, **options)


COLUMNS = {
    "one bucket": (lambda c: c.embedding_column(bucketized(c, "x"), 4), ("float32", 1)),
    "mean of buckets": (lambda c: c.embedding_column(bucketized(c, "x", 3), 4), ("float32", 3)),
    "root of buckets": (lambda c: c.embedding_column(bucketized(c, "x", 3), 4, combiner="sqrtn"), ("float32", 3)),
    "sum of buckets": (lambda c: c.embedding_column(bucketized(c, "x", 2), 4, combiner="sum"), ("float32", 2)),
    "buckets as they are": (lambda c: bucketized(c, "x", 2), ("float32", 2)),
    "which buckets": (lambda c: c.indicator_column(bucketized(c, "x", 2)), ("float32", 2)),
    "one id": (lambda c: c.embedding_column(identity(c, "x"), 4), ("int64", 1)),
    "mean of ids": (lambda c: c.embedding_column(identity(c, "x"), 4), ("int64", 3)),
    "root of ids": (lambda c: c.embedding_column(identity(c, "x"), 4, combiner="sqrtn"), ("int32", 3)),
    "sum of ids": (lambda c: c.embedding_column(identity(c, "x"), 4, combiner="sum"), ("int64", 2)),
    "ids or a default": (lambda c: c.embedding_column(identity(c, "x", default_value=2), 4), ("int64", 3)),
    "which ids": (lambda c: c.indicator_column(identity(c, "x")), ("int64", 3)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_dense_and_equal_to_tensorflow(name):
    make, feature = COLUMNS[name]
    flat = flat_columns(lambda columns: ([make(columns)], {"x": feature}))
    high = 40 if "default" in name else 6  # others must be in range: TensorFlow on the CPU refuses them
    feeds = [feeds_of(flat, {"x": feature}, 7, seed, high) for seed in range(3)]
    expected = [outputs_of_tensorflow(flat, values) for values in feeds]
    for group in (False, True):
        program = CudaEngine().compile(job(flat, feeds[0], group=group)).program
        assert program.dynamic == ()
        executable = ENGINE.build(job(flat, feeds[0], group=group))
        for values, outputs in zip(feeds, expected, strict=True):
            found = compare(executable.step(values), outputs)
            assert found.passed, found.describe()


def test_a_bucketized_column_is_a_gather_and_nothing_else():
    flat = flat_columns(lambda c: ([c.embedding_column(bucketized(c, "x"), 4)], {"x": ("float32", 1)}))
    program = program_of(flat, feeds_of(flat, {"x": ("float32", 1)}, 5, 0, 0))
    assert kernels(program) == ["AddV2", "GatherV2", "_Bucketize"]
    (lookup,) = [step.op for step in program.steps if step.op.op == "GatherV2"]
    assert {flat.graph.ops[node] for node in lookup.source_nodes} == {
        "ResourceGather",
        "SparseSegmentMean",
        "Unique",
    } or {flat.graph.ops[node] for node in lookup.source_nodes} == {"GatherV2", "SparseSegmentMean", "Unique"}


def test_ids_with_gaps_are_one_masked_lookup():
    flat = flat_columns(lambda c: ([c.embedding_column(identity(c, "x"), 4)], {"x": ("int64", 3)}))
    assert kernels(program_of(flat, feeds_of(flat, {"x": ("int64", 3)}, 5, 0, 6))) == ["_Columns"]


def equal(executable, flat, feeds):
    found = compare(executable.step(feeds), outputs_of_tensorflow(flat, feeds))
    assert found.passed, found.describe()


def refused(flat, feeds, *ops):
    """Not captured, by name; eagerly it is right."""
    with pytest.raises(EngineError, match="can not be captured") as caught:
        ENGINE.build(job(flat, feeds))
    assert any(op in str(caught.value) for op in ops), caught.value
    equal(ENGINE.build(job(flat, feeds, capture=False)), flat, feeds)


def test_weights_that_may_be_zero_prove_nothing():
    features = {"x": ("int64", 2), "w": ("float32", 2)}
    flat = flat_columns(
        lambda c: ([c.embedding_column(c.weighted_categorical_column(identity(c, "x"), "w"), 4)], features)
    )
    ids, weights = (next(t.name for t in flat.inputs if t.name.startswith(name)) for name in "xw")
    feeds = {ids: np.array([[0, 1], [2, 3], [4, 5]]), weights: np.array([[1, 2], [3, -1], [0.5, 2]], np.float32)}
    refused(flat, feeds, "SparseFillEmptyRows", "Where")


def safe_lookup(tf, x, wanted, table, **options):
    """`safe_embedding_lookup_sparse` of the elements of x where a condition holds."""
    places = tf.where(wanted)
    shape = tf.cast(tf.shape(x), tf.int64)
    ids = tf.SparseTensor(places, tf.gather_nd(x, places), shape)
    return tf.nn.safe_embedding_lookup_sparse(table, ids, **options)


TABLE = np.arange(12, dtype=np.float32).reshape(6, 2) + 1


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("default", [None, 4])
def test_a_default_id_stands_where_a_row_has_none(combiner, default):
    def build(tf, v1):
        x = v1.placeholder(tf.int64, (None, 3), name="x")
        tf.identity(safe_lookup(tf, x, tf.not_equal(x, -1), TABLE, combiner=combiner, default_id=default), name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = {flat.inputs[0].name: np.array([[1, -1, 2], [-1, -1, -1], [-2, 5, 5], [0, 0, 0]])}
    assert program_of(flat, feeds).dynamic == ()
    equal(ENGINE.build(job(flat, feeds)), flat, feeds)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_table_of_parts(combiner):
    def build(tf, v1):
        x = v1.placeholder(tf.int64, (None, 3), name="x")
        parts = [tf.constant(TABLE[:3]), tf.constant(TABLE[3:])]
        tf.identity(safe_lookup(tf, x, tf.not_equal(x, -1), parts, combiner=combiner), name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = {flat.inputs[0].name: np.array([[1, -1, 2], [-1, -1, -1], [-2, 5, 5], [0, 0, 0]])}
    equal(ENGINE.build(job(flat, feeds)), flat, feeds)


@pytest.mark.parametrize("missing", [-1, 0, 3])
@pytest.mark.parametrize("offset", [0, 1, -2])
def test_any_number_may_say_that_there_is_no_id(missing, offset):
    """Also one that is an id, and ids that are computed: the shortest form does not do for them."""

    def build(tf, v1):
        x = v1.placeholder(tf.int64, (None, 2), name="x")
        tf.identity(safe_lookup(tf, x + offset, tf.not_equal(x, missing), TABLE), name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = {flat.inputs[0].name: np.array([[0, 1], [3, -1], [-1, -1], [3, 3], [2, 4], [0, 0]])}
    assert program_of(flat, feeds).dynamic == ()
    equal(ENGINE.build(job(flat, feeds)), flat, feeds)


@given(
    batch=st.integers(1, 5),
    count=st.integers(1, 3),
    missing=st.integers(-2, 2),
    compare_with=st.sampled_from(["not_equal", "greater", "less_equal"]),
    steps=st.lists(st.sampled_from(["cast", "add", "clip", "abs", "where"]), max_size=3),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    default=st.sampled_from([None, 0, 5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(6, 15), deadline=None)
def test_any_condition_and_any_way_from_values_to_ids(
    batch, count, missing, compare_with, steps, combiner, default, seed
):
    def build(tf, v1):
        x = v1.placeholder(tf.int32, (None, count), name="x")
        places = tf.where(getattr(tf, compare_with)(x, missing))
        ids = tf.gather_nd(x, places)
        for step in steps:
            if step == "cast":
                ids = tf.cast(tf.cast(ids, tf.int64), ids.dtype)
            elif step == "add":
                ids = ids + 1
            elif step == "clip":
                ids = tf.minimum(tf.maximum(ids, -1), 4)
            elif step == "abs":
                ids = tf.abs(ids)
            else:
                ids = tf.where(tf.less(ids, 1), tf.fill(tf.shape(ids), tf.constant(2, ids.dtype)), ids)
        sparse = tf.SparseTensor(places, tf.cast(ids, tf.int64), tf.cast(tf.shape(x), tf.int64))
        found = tf.nn.safe_embedding_lookup_sparse(TABLE, sparse, combiner=combiner, default_id=default)
        tf.identity(found, name="out")

    flat = graph_of(build, outputs=["out"])
    chance = np.random.default_rng(seed)
    feeds = {"x": chance.integers(-3, 3, (batch, count)).astype(np.int32)}
    executable = ENGINE.build(job(flat, feeds))  # captured: nothing of it depends on values
    for _ in range(3):
        equal(executable, flat, feeds)
        feeds = {"x": chance.integers(-3, 3, (batch, count)).astype(np.int32)}


def test_sums_that_may_wrap_around_prove_nothing():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (None,), name="x")
        buckets = tf.raw_ops.Bucketize(input=x, boundaries=EDGES)
        tf.identity(tf.where(buckets + np.int32(2**31 - 2) >= 0), name="wraps")
        tf.identity(tf.where(buckets + np.int32(2**31 - 5) >= 0), name="fits")

    feeds = {"x": np.array([0.5, -2.0, 7.0], np.float32)}
    flat = graph_of(build, outputs=["fits"])
    assert program_of(flat, feeds).steps == ()
    refused(graph_of(build, outputs=["wraps"]), feeds, "Where")


@pytest.mark.parametrize(
    "condition",
    [
        lambda tf, x: x >= 0,  # ids may be negative
        lambda tf, x: x * 0 + 1 < 5,  # a product may wrap around for all that is known of x
        lambda tf, x: tf.gather(np.array([1, 2]), x) > 0,  # out of range: 0 on a GPU
        lambda tf, x: tf.cast(x, tf.float32) / 0.0 >= 0.0,
    ],
)
def test_conditions_on_inputs_prove_nothing(condition):
    def build(tf, v1):
        x = v1.placeholder(tf.int64, (None,), name="x")
        tf.identity(tf.where(condition(tf, x)), name="out")

    refused(graph_of(build, outputs=["out"]), {"x": np.array([0, 1, 0, 1])}, "Where")


def test_segments_from_inputs_prove_nothing():
    def build(tf, v1):
        ids = v1.placeholder(tf.int32, (None,), name="ids")
        places = v1.placeholder(tf.int32, (None,), name="places")
        tf.identity(tf.raw_ops.SparseSegmentMean(data=TABLE, indices=places, segment_ids=ids), name="out")

    feeds = {"ids": np.array([0, 0, 2], np.int32), "places": np.array([5, 1, 2], np.int32)}
    refused(graph_of(build, outputs=["out"]), feeds, "SparseSegmentMean")


def test_constant_partitions_and_segments_with_gaps_are_known():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (None, 2), name="x")
        count = tf.shape(x)[0]
        even, odd = tf.dynamic_partition(x, tf.range(count) % 2, 2)
        rows = tf.dynamic_stitch([tf.range(0, count, 2), tf.range(1, count, 2)], [even * 2, odd])
        tf.identity(rows, name="rows")
        ids = tf.range(count) // 2 * 2  # 0 0 2 2 4
        tf.identity(tf.math.segment_sum(x, ids), name="sums")
        tf.identity(tf.math.segment_mean(x[:4], tf.range(4) // 2), name="means")
        tf.identity(tf.sparse.segment_sqrt_n(x, tf.range(count), ids), name="roots")

    flat = graph_of(build, outputs=["rows", "sums", "means", "roots"])
    feeds = {"x": np.arange(10, dtype=np.float32).reshape(5, 2)}
    assert program_of(flat, feeds).dynamic == ()
    equal(ENGINE.build(job(flat, feeds)), flat, feeds)


def test_a_model_of_many_kinds_of_columns_next_to_each_other():
    features = {"a": ("float32", 1), "b": ("float32", 3), "c": ("int64", 1), "d": ("int32", 3), "n": ("float32", 2)}

    def make(c):
        columns = [
            c.embedding_column(bucketized(c, "a"), 4),
            c.embedding_column(bucketized(c, "b", 3), 3, combiner="sqrtn"),
            c.embedding_column(identity(c, "c"), 5),
            c.embedding_column(identity(c, "d"), 2, combiner="sum"),
            c.numeric_column("n", shape=2),
        ]
        return columns, features

    flat = flat_columns(make)
    feeds = feeds_of(flat, features, 9, 0, 6)
    program = CudaEngine().compile(job(flat, feeds, group=True)).program
    assert kernels(program) == ["_Columns"]
    equal(ENGINE.build(job(flat, feeds, group=True)), flat, feeds)


def interactions(own: bool, fields: int = 4):
    """Products of all pairs of fields, of which a triangle is kept: TensorFlow Recommenders' DotInteraction."""

    def build(tf, v1):
        given = [v1.placeholder(tf.float32, [None, 3], name=f"x{at}") for at in range(fields)]
        fed = tf.stack(given, 1)
        pairs = tf.matmul(fed, fed, transpose_b=True)
        ones = tf.ones_like(pairs)
        mask = tf.linalg.band_part(ones, -1, 0) if own else ones - tf.linalg.band_part(ones, 0, -1)
        kept = tf.boolean_mask(pairs, tf.cast(mask, tf.bool))
        tf.reshape(kept, [tf.shape(fed)[0], fields * (fields + (1 if own else -1)) // 2], name="y")

    return build


@pytest.mark.parametrize("own", [True, False])
def test_a_mask_that_goes_by_shapes_is_captured_and_keeps_rows_apart(own):
    flat, rng = graph_of(interactions(own), outputs=["y"]), np.random.default_rng(0)
    feeds = {f"x{at}": rng.standard_normal((5, 3)).astype(np.float32) for at in range(4)}
    feeds["x1"][2], feeds["x2"][3, :2] = np.nan, [np.inf, -0.0]
    assert not ENGINE.compile(job(flat, feeds)).dynamic
    assert_equals_tensorflow(flat, feeds)
    assert independent_rows(flat).outputs == {"y": 1}


@pytest.mark.parametrize("of", ["values", "places"])
def test_a_mask_that_goes_by_more_than_shapes_keeps_no_rows_apart(of):
    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        ones = tf.ones_like(x)
        mask = ones - x > 0.5 if of == "values" else ones * tf.cast(tf.range(tf.shape(x)[0])[:, None], tf.float32) > 0.5
        tf.identity(tf.boolean_mask(x, mask), name="y")

    flat = graph_of(build, outputs=["y"])
    assert independent_rows(flat).outputs == {}
    for seed in range(3):
        feeds = {"x": np.random.default_rng(seed).standard_normal((2 + seed, 4)).astype(np.float32)}
        assert bool(ENGINE.compile(job(flat, feeds, capture=False)).dynamic) == (of == "values")
        assert_equals_tensorflow(flat, feeds, capture=False)


@pytest.mark.parametrize("below", [-1, 0, 1])
@pytest.mark.parametrize("above", [-2, 0, 1])
@pytest.mark.parametrize("size", [(2, 3, 4), (4, 2), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
def test_bands_of_ones_are_known_from_shapes_as_tensorflow_has_them(below, above, size, dtype):
    def build(tf, v1):
        band = tf.linalg.band_part(tf.ones_like(v1.placeholder(dtype, [None] * len(size), name="x")), below, above)
        tf.identity(tf.cast(band, tf.int32) - tf.zeros_like(tf.cast(band, tf.int32)), name="y")

    flat = graph_of(build, outputs=["y"])
    found, _ = inferred(flat, batch=None, shapes={"x": size})
    expected = outputs_of_tensorflow(flat, {"x": np.zeros(size, dtype)})["y"]
    np.testing.assert_array_equal(found.value(flat.graph.index["y"]), expected)


MASKS = {
    "as many rows as there are": (lambda tf, ones, rows: ones * tf.cast(rows > 2, tf.float32) > 0.5, 0),
    "a band by rows": (lambda tf, ones, rows: tf.linalg.band_part(ones, rows - 1, -1) > 0.5, 0),
    "a sum over rows": (lambda tf, ones, rows: ones * tf.reduce_sum(ones, 0) > 2.5, 0),
    "places of rows": (lambda tf, ones, rows: tf.cumsum(ones, 0) > 1.5, 0),
    "a constant": (lambda tf, ones, rows: tf.logical_and(ones > 0.5, tf.constant([True, False, True, False])), 2),
    "all": (lambda tf, ones, rows: tf.cast(tf.cast(ones, tf.float16), tf.bool), 4),
    "none": (lambda tf, ones, rows: tf.cast(tf.zeros_like(ones), tf.bool), 0),
}
"""Masks, and how many entries of a row each is proved to keep; 0: none is proved to."""


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_keeps_rows_apart_only_where_each_row_alone_gives_the_same(name):
    mask, entries = MASKS[name]

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        tf.identity(tf.boolean_mask(x, mask(tf, tf.ones_like(x), tf.shape(x)[0])), name="y")

    flat = graph_of(build, outputs=["y"])
    assert independent_rows(flat).outputs == ({"y": entries} if entries else {})
    for count in (1, 2, 5):
        x = np.random.default_rng(count).standard_normal((count, 4)).astype(np.float32)
        assert_equals_tensorflow(flat, {"x": x}, capture=False)
        if entries:
            alone = [outputs_of_tensorflow(flat, {"x": x[at : at + 1]})["y"] for at in range(count)]
            np.testing.assert_array_equal(outputs_of_tensorflow(flat, {"x": x})["y"], np.concatenate(alone))
