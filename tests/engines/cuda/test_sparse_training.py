"""Training steps with lookups in embedding tables, whose gradients are sparse, against TensorFlow: variables and losses of some steps."""

import dataclasses
import functools

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.tensorflow.engine import REFERENCE as TENSORFLOW
from msplit.errors import EngineError
from tests.campaign import CAMPAIGN, sampled
from tests.engines.cuda.cases import flat_of, initial_values, options_of, saved, scattered

pytestmark = pytest.mark.tf

ROWS, WIDTH, BATCH, STEPS = 11, 3, 6, 3

FEW = ["sgd", "adam", "ftrl"]

OPTIMIZERS = {
    "sgd": lambda train: train.GradientDescentOptimizer(0.1),
    "momentum": lambda train: train.MomentumOptimizer(0.1, 0.9),
    "nesterov": lambda train: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda train: train.AdamOptimizer(0.1),
    "adagrad": lambda train: train.AdagradOptimizer(0.1),
    "adadelta": lambda train: train.AdadeltaOptimizer(0.5),
    "rmsprop": lambda train: train.RMSPropOptimizer(0.1, momentum=0.5),
    "centered": lambda train: train.RMSPropOptimizer(0.1, centered=True),
    "ftrl": lambda train: train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.1),
    "proximal": lambda train: train.ProximalAdagradOptimizer(0.1, l1_regularization_strength=0.01),
}


def _sparse(v1, tf, name, *values):
    """Ids with gaps as feature columns write them: a dense matrix, of which -1 is left out. Likewise other values at the same places."""
    ids = v1.placeholder(tf.int64, [BATCH, 4], name=name)
    where, shape = tf.where(tf.not_equal(ids, -1)), tf.shape(ids, out_type=tf.int64)
    found = [tf.SparseTensor(where, tf.gather_nd(one, where), shape) for one in (ids, *values)]
    return found if values else found[0]


def _weighted(combiner, **options):
    def lookup(v1, tf, table):
        ids, weights = _sparse(v1, tf, "ids", v1.placeholder(tf.float32, [BATCH, 4], name="importance"))
        return v1.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner, **options)

    return lookup


def _learned(combiner, weights_of):
    """Weights of a variable of their own, some of which are negative."""

    def lookup(v1, tf, table):
        start = v1.random_uniform_initializer(-0.2, 1, seed=3)
        own = v1.get_variable("importance", [ROWS], initializer=start, use_resource=hasattr(table, "handle"))
        ids = _sparse(v1, tf, "ids")
        weights = tf.SparseTensor(ids.indices, weights_of(tf, own, ids), ids.dense_shape)
        return v1.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner)

    return lookup


def _of_ids(tf, own, ids):
    return tf.gather(own, ids.values)


def _of_places(tf, own, ids):
    """Of all places of the matrix, then of those that have an id."""
    return tf.gather_nd(tf.gather(own, tf.reshape(tf.range(BATCH * 4) % ROWS, [BATCH, 4])), ids.indices)


def _curved(tf, own, ids):
    return tf.sigmoid(tf.gather(own, ids.values)) * 2 - 0.9


def _tables(v1, tf, table):
    """Tables of their own beside it, and one that is used twice."""
    found = [tf.gather(table, v1.placeholder(tf.int64, [BATCH], name="more"))]
    for number, width in enumerate((WIDTH, 4, 1)):
        other = v1.get_variable(f"other{number}", [ROWS, width], use_resource=hasattr(table, "handle"))
        ids = v1.placeholder(tf.int64, [BATCH], name=f"ids{number}")
        found.append(tf.reduce_sum(tf.gather(other, ids), 1, keepdims=True))
    return sum(found) + tf.gather(table, ids)


def _ids(v1, tf, *shape):
    return v1.placeholder(tf.int64, shape, name="ids")


LOOKUPS = {
    "gather": lambda v1, tf, table: tf.gather(table, _ids(v1, tf, BATCH)),
    "lookup": lambda v1, tf, table: tf.reduce_mean(v1.nn.embedding_lookup(table, _ids(v1, tf, BATCH, 4)), 1),
    "twice": lambda v1, tf, table: (
        tf.gather(table, _ids(v1, tf, BATCH)) + tf.gather(table, v1.placeholder(tf.int64, [BATCH], name="more"))
    ),
    "tables": _tables,
    "safe": lambda v1, tf, table: v1.nn.safe_embedding_lookup_sparse(table, _sparse(v1, tf, "ids")),
    "column": lambda v1, tf, table: v1.nn.safe_embedding_lookup_sparse(table, _sparse(v1, tf, "ids"), combiner="sqrtn"),
    **{f"weighted {combiner}": _weighted(combiner) for combiner in ("sum", "mean", "sqrtn")},
    "weighted default": _weighted("mean", default_id=2),
    **{
        f"learned {combiner} {number}": _learned(combiner, weights_of)
        for combiner in ("sum", "mean", "sqrtn")
        for number, weights_of in enumerate((_of_ids, _of_places, _curved))
    },
}


@functools.cache
def graph(lookup, optimizer, resource, clip=False, parts=0):
    """The flat graph of a train step, and values of its variables before the first one."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as made:
        v1.set_random_seed(1)
        divided = v1.fixed_size_partitioner(parts) if parts else None
        table = v1.get_variable("table", [ROWS, WIDTH], use_resource=resource, partitioner=divided)
        weights = v1.get_variable("weights", [WIDTH, 2], use_resource=resource)
        loss = tf.reduce_mean(tf.square(LOOKUPS[lookup](v1, tf, table) @ weights - 1.0), name="loss")
        trainer = OPTIMIZERS[optimizer](v1.train)
        gradients, variables = zip(*trainer.compute_gradients(loss), strict=True)
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        step = trainer.apply_gradients(zip(gradients, variables, strict=True), v1.train.get_or_create_global_step())
        state = initial_values(v1)
    return flat_of(made.as_graph_def(), outputs=["loss", step.name]), state


KERAS = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adadelta": {"clipnorm": 0.1},
    "Adafactor": {},
    "Adamax": {},
    "Nadam": {},
    "Lamb": {},
    "Lion": {},
    "Ftrl": {"l2_shrinkage_regularization_strength": 0.1},
}
"""Names of optimizers, and what else than a learning rate they take."""


def keras_graph(optimizer, folder):
    """The same of a step of a Keras optimizer: sparse gradients are not made distinct there."""
    import keras
    import tensorflow as tf

    layer, trainer = keras.layers.Embedding(ROWS, WIDTH), getattr(keras.optimizers, optimizer)(0.1, **KERAS[optimizer])
    layer.build()
    trainer.build(layer.trainable_variables)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(layer(ids) - 1.0))
        trainer.apply_gradients(
            zip(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables, strict=True)
        )
        return {"loss": loss}

    held = [one.value for one in (*layer.weights, *trainer.variables)]
    return saved(step, [tf.TensorSpec([BATCH], tf.int64, name="ids")], held, folder)


def feeds_of(flat, seed):
    rng = np.random.default_rng(seed)
    feeds = {}
    for tensor in flat.inputs:
        name = tensor.name.split(":")[0]
        if name == "importance":
            feeds[tensor.name] = rng.choice(np.array([-1, 0, 0.25, 1, 3], np.float32), (BATCH, 4))
            continue
        shape = (BATCH, 4) if flat.graph.attrs[tensor.node]["shape"] == (BATCH, 4) else (BATCH,)
        feeds[tensor.name] = rng.integers(-1 if len(shape) > 1 else 0, ROWS, shape)
        if name == "ids" and len(shape) > 1 and not any(op == "Where" for op in flat.graph.ops):
            feeds[tensor.name] = np.abs(feeds[tensor.name])
    return feeds


def job_of(flat, state, streams=3, **options):
    state = state or {}
    return Job(
        flat,
        scattered(flat, streams),
        streams,
        feeds_of(flat, 0),
        precision=Precision.IEEE,
        options=options_of(**options),
        state=state,
    )


def trained(engine, job, state):
    """Losses, and the variables afterwards."""
    executable = engine.build(job)
    if state is not None:
        executable.load_state(state)
    losses = [float(executable.step(feeds_of(job.flat, seed))["loss"]) for seed in range(STEPS)]
    found = executable.save_state()
    executable.close()
    return losses, found


def check(flat, state, **options):
    job = job_of(flat, state, **options)
    program = CudaEngine().compile(job).program
    assert not program.dynamic
    plain = dataclasses.replace(job, ids=np.zeros(len(flat), np.int32))
    (expected_losses, expected), (losses, found) = trained(TENSORFLOW, plain, state), trained(ENGINE, job, state)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert found.keys() <= expected.keys()
    for name, value in found.items():
        scale = np.sqrt(np.mean(np.square(expected[name].astype(float)))) if value.size else 0
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-5 * scale + 1e-12, err_msg=name)
    return program


@sampled(10, lookup=["gather", "lookup", "twice", "tables"], optimizer=OPTIMIZERS, resource=[False, True])
def test_lookups_train_as_in_tensorflow(lookup, optimizer, resource):
    check(*graph(lookup, optimizer, resource))


@sampled(4, lookup=["safe", "column"], optimizer=[*FEW, "centered"], resource=[False, True])
def test_feature_columns_train_as_in_tensorflow(lookup, optimizer, resource):
    check(*graph(lookup, optimizer, resource))


def _lookups(weights_of):
    """Some in one table, whose gradients come one below the other."""

    def lookup(v1, tf, table):
        own = v1.get_variable("importance", [ROWS], use_resource=True)
        ids = _sparse(v1, tf, "ids")
        weights = [tf.SparseTensor(ids.indices, one, ids.dense_shape) for one in weights_of(tf, own, ids.values)]
        pairs = zip(weights, ("sum", "mean", "sqrtn"), strict=True)
        return sum(v1.nn.safe_embedding_lookup_sparse(table, ids, one, combiner=how) for one, how in pairs)

    return lookup


LOOKUPS["learned thrice"] = _lookups(lambda tf, own, ids: [tf.gather(own, ids) for _ in range(3)])
LOOKUPS["shared"] = _lookups(lambda tf, own, ids: [tf.gather(own, ids)] * 3)


WEIGHTED = [name for name in LOOKUPS if name.startswith("weighted")]


@sampled(4, lookup=WEIGHTED, optimizer=OPTIMIZERS if CAMPAIGN else FEW, resource=[False, True])
def test_lookups_with_weights_train_as_in_tensorflow(lookup, optimizer, resource):
    check(*graph(lookup, optimizer, resource))


@sampled(
    4,
    combiner=["sum", "mean", "sqrtn"],
    weights=[0, 1, 2],
    optimizer=OPTIMIZERS if CAMPAIGN else FEW,
    resource=[False, True],
)
def test_weights_train_as_in_tensorflow(combiner, weights, optimizer, resource):
    check(*graph(f"learned {combiner} {weights}", optimizer, resource))


@sampled(1, lookup=["learned thrice"], optimizer=OPTIMIZERS if CAMPAIGN else ["centered"], resource=[False, True])
def test_weights_of_several_lookups_train_as_in_tensorflow(lookup, optimizer, resource):
    check(*graph(lookup, optimizer, resource))


def test_weights_that_several_lookups_share_are_refused():
    """Where filters put their gradients together is not followed."""
    with pytest.raises(EngineError, match="can not be captured"):
        ENGINE.build(job_of(*graph("shared", "adagrad", True)))


@pytest.mark.parametrize("lookup", ["lookup", "weighted mean", "learned mean 0"])
def test_gradients_are_clipped_by_the_norm_of_all(lookup):
    check(*graph(lookup, "adagrad", True, clip=True))


@sampled(
    3,
    lookup=["lookup", "safe", *(WEIGHTED if CAMPAIGN else WEIGHTED[1:2])],
    optimizer=FEW,
    resource=[False, True],
    parts=[2, 3],
)
def test_tables_of_parts_train_as_in_tensorflow(lookup, optimizer, resource, parts):
    check(*graph(lookup, optimizer, resource, parts=parts))


@pytest.mark.parametrize("optimizer", KERAS if CAMPAIGN else ["Adam", "Adagrad", "RMSprop", "Adadelta"])
def test_keras_trains_as_in_tensorflow(optimizer, tmp_path):
    check(keras_graph(optimizer, tmp_path), None)


@sampled(3, optimizer=["sgd", "adagrad", "rmsprop"], resource=[False, True], fuse=[False, True])
def test_tables_are_updated_by_one_op(optimizer, resource, fuse):
    program = check(*graph("tables", optimizer, resource), group=True, fuse=fuse)
    updates = [step.op for step in program.steps if step.op.op == "_ApplyRows"]
    assert [op.attrs["count"] for op in updates] == [4]
    assert not {"_UniquePadded", "UnsortedSegmentSum", "ScatterAdd", "ScatterSub"} & {
        step.op.op for step in program.steps
    }


@pytest.mark.parametrize("resource", [False, True])
def test_a_column_is_updated_by_the_gradient_of_its_segments(resource):
    """Not even the rows of the gradient are made."""
    program = check(*graph("column", "momentum", resource))
    updates = [step.op for step in program.steps if step.op.op == "_ApplyRows"]
    assert [op.attrs["combiner"] for op in updates] == ["sqrtn"]
    assert not [step for step in program.steps if "Unique" in step.op.op or "Segment" in step.op.op]
