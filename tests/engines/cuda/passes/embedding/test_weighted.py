"""Lookups with weights: dense and captured, equal to TensorFlow whatever ids and weights are fed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.passes.embedding import masked_rows, masked_sums
from msplit.engines.cuda.passes.embedding.proof import Mixed
from msplit.errors import EngineError
from msplit.verify.compare import compare
from tests.campaign import examples, sampled
from tests.engines.cuda.cases import flat_of, graph_of, job, outputs_of_tensorflow, program_of

pytestmark = pytest.mark.tf

TABLE = np.arange(1, 13, dtype=np.float32).reshape(6, 2)
WEIGHTS = [0.0, -0.0, -1.0, 0.5, 1.0, 3.0]
IDS = np.array([[1, -1, 2], [-1, -1, -1], [-2, 5, 5], [0, 0, 0], [3, 4, -1]])
WEIGHTED = np.array([[2, 9, 0.5], [1, 1, 1], [1, -1, 0], [0, 0, -2], [-1, 3, 1]], np.float32)


def sparse(tf, x, *values):
    """What stands where there is an id, as sparse tensors."""
    places = tf.where(tf.not_equal(x, -1))
    shape = tf.shape(x, out_type=tf.int64)
    return [tf.SparseTensor(places, tf.gather_nd(one, places), shape) for one in (x, *values)]


def fed(tf, v1, count=3):
    return v1.placeholder(tf.int64, (None, count), name="x"), v1.placeholder(tf.float32, (None, count), name="w")


def lookup(*parts, **options):
    """The flat graph of a weighted lookup in a table of any number of parts."""

    def build(tf, v1):
        ids, weights = sparse(tf, *fed(tf, v1))
        table = [tf.constant(part) for part in parts]
        tf.identity(v1.nn.safe_embedding_lookup_sparse(table, ids, weights, **options), name="out")

    return graph_of(build, outputs=["out"])


def check(flat, feeds, **options):
    executable = ENGINE.build(job(flat, feeds[0], **options))  # captured: nothing of it depends on values
    for values in feeds:
        found = compare(executable.step(values), outputs_of_tensorflow(flat, values))
        assert found.passed, found.describe()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("default", [None, 4])
def test_a_weighted_lookup_is_captured(combiner, default):
    flat = lookup(TABLE, combiner=combiner, default_id=default)
    feeds = {"x": IDS, "w": WEIGHTED}
    assert program_of(flat, feeds).dynamic == ()
    for fuse in (False, True):
        check(flat, [feeds, {"x": IDS[::-1].copy(), "w": np.abs(WEIGHTED)}], fuse=fuse, group=fuse)


@pytest.mark.parametrize("strategy", ["mod", "div"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_table_of_parts(combiner, strategy):
    flat = lookup(TABLE[:2], TABLE[2:4], TABLE[4:], combiner=combiner, partition_strategy=strategy)
    check(flat, [{"x": IDS, "w": WEIGHTED}, {"x": IDS[::-1].copy(), "w": np.abs(WEIGHTED)}])


@given(
    batch=st.integers(1, 5),
    count=st.integers(1, 3),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    default=st.sampled_from([None, 0, 5]),
    squared=st.booleans(),
    gradient=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(6, 1000), deadline=None)
def test_any_ids_and_any_weights(batch, count, combiner, default, squared, gradient, seed):
    def build(tf, v1):
        x, w = fed(tf, v1, count)
        ids, weights = sparse(tf, x, w)
        if squared:
            weights = tf.SparseTensor(weights.indices, weights.values * weights.values - 0.5, weights.dense_shape)
        found = v1.nn.safe_embedding_lookup_sparse(TABLE, ids, weights, combiner=combiner, default_id=default)
        if gradient:
            (found,) = tf.gradients(tf.reduce_sum(tf.sin(found)), w)
        tf.identity(found, name="out")

    chance = np.random.default_rng(seed)
    feeds = [
        {
            "x": chance.integers(-2, 6, (batch, count)),
            "w": chance.choice(np.array(WEIGHTS, np.float32), (batch, count)),
        }
        for _ in range(3)
    ]
    flat = graph_of(build, outputs=["out"])
    executable = ENGINE.build(job(flat, feeds[0]))
    for values in feeds:
        # A gradient is the rest of what nearly cancels out: with one id in a row the mean does not depend on its weight.
        np.testing.assert_allclose(
            executable.step(values)["out"], outputs_of_tensorflow(flat, values)["out"], 1e-4, 1e-4
        )


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_weights_of_rows_that_are_whole(combiner):
    """All that `embedding_lookup_sparse` without the `safe_` is defined for, without a row that might be empty."""

    def build(tf, v1):
        x, w = fed(tf, v1)
        places = tf.where(tf.ones_like(x, tf.bool))
        shape = tf.shape(x, out_type=tf.int64)
        ids, weights = (tf.SparseTensor(places, tf.gather_nd(one, places), shape) for one in (x, w))
        tf.identity(v1.nn.embedding_lookup_sparse(TABLE, ids, weights, combiner=combiner), name="out")

    check(graph_of(build, outputs=["out"]), [{"x": np.abs(IDS), "w": WEIGHTED}])


def column(combiner="mean", *, dense=False):
    """The flat graph of a weighted column of sparse features, or of dense ones."""
    import tensorflow as tf

    v1, columns = tf.compat.v1, tf.feature_column
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(3)
        x, w = fed(tf, v1)
        features = dict(zip("xw", (x, w) if dense else sparse(tf, x, w), strict=True))
        weighted = columns.weighted_categorical_column(columns.categorical_column_with_identity("x", 6), "w")
        made = columns.embedding_column(weighted, 4, combiner=combiner)
        tf.identity(v1.feature_column.input_layer(features, [made]), name="out")
        with v1.Session(graph=graph) as session:
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["out"])
    return flat_of(frozen, outputs=["out"])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_weighted_column_is_captured(combiner):
    check(column(combiner), [{"x": np.maximum(IDS, -1), "w": WEIGHTED}])


def test_weights_that_lie_elsewhere_than_ids_are_refused():
    """Dense weights are taken for missing where they are 0: there may be another number of them than of ids."""
    flat = column(dense=True)
    with pytest.raises(EngineError, match=r"can not be captured: .*Where"):
        ENGINE.build(job(flat, {"x": np.array([[0, 1, 2]]), "w": np.array([[1, 2, 0.5]], np.float32)}))


def test_rows_that_may_be_empty_at_the_end_are_refused():
    """How many rows `embedding_lookup_sparse` gives depends on the last id."""

    def build(tf, v1):
        ids, weights = sparse(tf, *fed(tf, v1))
        tf.identity(v1.nn.embedding_lookup_sparse(TABLE, ids, weights), name="out")

    feeds = {"x": np.maximum(IDS[2:], 0), "w": WEIGHTED[2:]}
    with pytest.raises(EngineError, match=r"can not be captured: .*SegmentSum"):
        ENGINE.build(job(graph_of(build, outputs=["out"]), feeds))


def at_constant_places(ids, *, parts=2, strategy="div", combiner="sum", end="values"):
    """The flat graph of a safe weighted lookup, one id in each row, at constant places; or of the gradient of its table."""

    def build(tf, v1):
        fed_ids, weights = v1.placeholder(tf.int64, [len(ids)], "ids"), v1.placeholder(tf.float32, [len(ids)], "w")
        table, at = tf.constant(TABLE), np.stack([np.arange(len(ids)), np.zeros(len(ids), np.int64)], 1)
        given = [tf.SparseTensor(at, one, [len(ids), 1]) for one in (fed_ids, weights)]
        divided = np.array_split(TABLE, parts) if end == "values" else [table]
        found = v1.nn.safe_embedding_lookup_sparse(divided, *given, combiner, partition_strategy=strategy)
        if end != "values":
            found = tf.convert_to_tensor(tf.gradients(tf.sin(found), table)[0])
        tf.identity(found, name="out")

    return graph_of(build, outputs=["out"])


@sampled(6, fuse=[False, True], group=[False, True], end=["values", "gradient"], strategy=["mod", "div"])
def test_rows_come_in_the_order_of_their_ids(fuse, group, end, strategy):
    """Distinct ids are a longer list where all places are kept than where some are: rows of the one are not read at places of the other."""
    feeds = {"ids": np.array([1, 5, 0, 5]), "w": np.array([1, 0.5, 3, 1], np.float32)}
    check(at_constant_places(feeds["ids"], end=end, strategy=strategy), [feeds], capture=False, fuse=fuse, group=group)


def test_a_value_with_gaps_never_takes_the_place_of_tensorflows(monkeypatch):
    """A rule that says so is wrong, and is not followed: what was there is read."""
    right = masked_sums.SEGMENT_RULES["_UniquePadded"]

    def wrong(facts, op):
        proof = right(facts, op)
        return proof and replace(proof, outputs={0: facts.ops[-1].out}, stays=True)

    tried = []
    monkeypatch.setitem(masked_rows._RULES, "_UniquePadded", lambda *given: tried.append(wrong(*given)) or tried[-1])
    feeds = {"ids": np.array([1, 5, 0, 5]), "w": np.ones(4, np.float32)}
    check(at_constant_places(feeds["ids"]), [feeds], capture=False)
    assert any(proof and proof.outputs for proof in tried)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_table_that_is_fed_is_looked_up_in(combiner):
    """It is read again once the lookup turns out to leave no row empty."""

    def build(tf, v1):
        (ids,) = sparse(tf, v1.placeholder(tf.int64, IDS.shape, name="x"))
        table = v1.placeholder(tf.float32, TABLE.shape, name="table")
        tf.identity(v1.nn.safe_embedding_lookup_sparse(table, ids, combiner=combiner), name="out")

    check(graph_of(build, outputs=["out"]), [{"x": IDS, "table": TABLE}, {"x": IDS[::-1].copy(), "table": -TABLE}])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_no_ids_at_all_have_a_gradient(combiner):
    def build(tf, v1):
        (ids,) = sparse(tf, v1.placeholder(tf.int64, IDS.shape, name="x"))
        table = v1.placeholder(tf.float32, TABLE.shape, name="table")
        found = v1.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner)
        tf.identity(tf.convert_to_tensor(tf.gradients(tf.sin(found), table)[0]), name="out")

    feeds = [{"x": np.full_like(IDS, -1), "table": TABLE}, {"x": np.maximum(IDS, -1), "table": TABLE}]
    check(graph_of(build, outputs=["out"]), feeds, capture=False)


def test_no_op_reads_rows_with_gaps_beside_rows_without(monkeypatch):
    """Nor can a rule make such an op: it is not followed."""
    refused = []

    def wrong(facts, op):
        kept = facts.kept.get(op.inputs[1])
        try:
            return kept and facts.keep(op, (0, 0), kept.mask, facts.new(op.op, op, [op.inputs[0], kept.dense]))
        except Mixed:
            refused.append(op.op)
            raise

    monkeypatch.setitem(masked_rows._RULES, "SegmentSum", wrong)
    feeds = {"ids": np.array([1, 5, 0, 5]), "w": np.ones(4, np.float32)}
    check(at_constant_places(feeds["ids"]), [feeds], capture=False)
    assert refused == ["SegmentSum"]
