"""Graphs of TF1: variables, training, SavedModels of tags, and control flow by Switch and Merge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msplit.samples.recommenders import dense, load_seeded_values
from msplit.samples.layers import generate, kernel
from tools.sample_graphs.frozen import write_binary


def training(path: Path) -> None:
    """Write a training graph of ref variables: two embedding towers, Adagrad."""
    _training(path, use_resource=False)


def training_resource(path: Path) -> None:
    """Write the same training graph with resource variables and Adam."""
    _training(path, use_resource=True)


def _training(path: Path, use_resource: bool) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        label = v1.placeholder(tf.float32, (None, 1), name="label")
        parts = []
        with v1.variable_scope("", use_resource=use_resource):
            for tower in range(2):
                ids = v1.placeholder(tf.int32, (None,), name=f"id_{tower}")
                with v1.variable_scope(f"tower_{tower}"):
                    table = v1.get_variable("embedding", (100, 8), initializer=v1.random_normal_initializer(seed=tower))
                    parts.append(dense(tf.nn.embedding_lookup(table, ids), 16, "dense"))
            logits = dense(tf.concat(parts, axis=1), 1, "logits", None)
        tf.sigmoid(logits, name="score")
        with v1.name_scope("loss"):
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=label, logits=logits), name="value")
        with v1.variable_scope("", use_resource=use_resource):
            step = v1.train.get_or_create_global_step()
        optimizer = v1.train.AdamOptimizer(0.01) if use_resource else v1.train.AdagradOptimizer(0.1)
        optimizer.minimize(loss, global_step=step, name="train")
        v1.global_variables_initializer()
        saver = v1.train.Saver()
        saver.export_meta_graph(str(path))


def tf1_saved_model(path: Path) -> None:
    """Write a served model whose embedding is split into three partitions."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        ids = v1.placeholder(tf.int64, (None,), name="item")
        numbers = v1.placeholder(tf.float32, (None, 6), name="numbers")
        with v1.variable_scope("items", partitioner=v1.fixed_size_partitioner(3)):
            table = v1.get_variable("embedding", (120, 8), initializer=v1.random_normal_initializer(seed=1))
        left = dense(tf.nn.embedding_lookup(table, ids, name="items/lookup"), 16, "item_tower")
        right = dense(numbers, 16, "number_tower")
        score = dense(tf.concat([left, right], axis=1), 1, "score", "sigmoid")
        with v1.Session(graph=graph) as session:
            load_seeded_values(session, v1.global_variables(), seed=0)
            v1.saved_model.simple_save(session, str(path), {"item": ids, "numbers": numbers}, {"score": score})


def two_tags(path: Path) -> None:
    """Write one model for the tags `serve` and, with its batch fixed, for `serve` and `gpu`."""
    import tensorflow as tf

    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(path))
    for tags, batch in ((["serve"], None), (["serve", "gpu"], 8)):
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, (batch, 12), name="x")
            branches = [dense(x, 8, f"branch_{branch}") for branch in range(3)]
            y = dense(tf.concat(branches, axis=1), 2, "head", None)
            signatures = {"serving_default": v1.saved_model.predict_signature_def({"x": x}, {"y": y})}
            with v1.Session(graph=graph) as session:
                load_seeded_values(session, v1.global_variables(), seed=0)
                if batch is None:
                    builder.add_meta_graph_and_variables(session, tags, signatures, strip_default_attrs=True)
                else:
                    builder.add_meta_graph(tags, signatures, strip_default_attrs=True)
    builder.save()


def feature_columns(path: Path) -> None:
    """Write a model of string, integer and bucketized feature columns."""
    import tensorflow as tf

    v1, columns = tf.compat.v1, tf.feature_column
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        features = {
            "country": v1.placeholder(tf.string, (None, 1), name="country"),
            "device": v1.placeholder(tf.string, (None, 1), name="device"),
            "user": v1.placeholder(tf.int64, (None, 1), name="user"),
            "age": v1.placeholder(tf.float32, (None, 1), name="age"),
            "price": v1.placeholder(tf.float32, (None, 1), name="price"),
        }
        age = columns.bucketized_column(columns.numeric_column("age"), [18.0, 25.0, 35.0, 50.0, 65.0])
        country = columns.categorical_column_with_vocabulary_list(
            "country", ["de", "fr", "jp", "us"], num_oov_buckets=2
        )
        device = columns.categorical_column_with_hash_bucket("device", 50)
        user = columns.categorical_column_with_hash_bucket("user", 200, dtype=tf.int64)
        x = v1.feature_column.input_layer(
            features,
            [
                columns.embedding_column(age, 4),
                columns.embedding_column(country, 4),
                columns.embedding_column(device, 8),
                columns.embedding_column(user, 8),
                columns.embedding_column(columns.crossed_column([age, "country"], 64), 4),
                columns.indicator_column(country),
                columns.numeric_column("price"),
            ],
        )
        score = dense(dense(x, 32, "hidden"), 1, "score", "sigmoid")
        with v1.Session(graph=graph) as session:
            load_seeded_values(session, v1.global_variables(), seed=0)
            session.run(v1.tables_initializer())
            v1.saved_model.simple_save(
                session, str(path), features, {"score": score}, legacy_init_op=v1.tables_initializer()
            )


@contextmanager
def _lowered_control_flow() -> Iterator[None]:
    """Make `while_loop` and `cond` emit Enter, Switch, Merge, … while the context lasts."""
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        yield
    finally:
        if before:
            v1.enable_control_flow_v2()


def while_v1(path: Path) -> None:
    """Write a lowered loop of six steps beside a branch that does not loop, and a loop inside the loop."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, _lowered_control_flow():
        x = v1.placeholder(tf.float32, (None, 8), name="x")

        def body(step: Any, state: Any) -> Any:
            state = tf.tanh(tf.matmul(state, _constant("recurrent", (8, 8))) + x)
            _, state = v1.while_loop(
                lambda inner, _: inner < 2,
                lambda inner, s: (inner + 1, s * 0.5 + 0.1),
                (tf.constant(0), state),
                name="inner",
            )
            return step + 1, state

        start = (tf.constant(0, name="start"), tf.zeros_like(x, name="initial"))
        _, state = v1.while_loop(lambda step, _: step < 6, body, start, name="loop")
        beside = tf.nn.relu(tf.matmul(x, _constant("side/kernel", (8, 8))), name="side/relu")
        tf.add(state, beside, name="output")
    write_binary(path, graph.as_graph_def())


def cond_v1(path: Path) -> None:
    """Write a lowered cond of two unequal branches, followed by a branch of its own."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, _lowered_control_flow():
        x = v1.placeholder(tf.float32, (None, 8), name="x")
        flag = v1.placeholder(tf.bool, (), name="flag")
        chosen = v1.cond(
            flag,
            lambda: tf.nn.relu(tf.matmul(x, _constant("true/kernel", (8, 8)))),
            lambda: tf.tanh(tf.tanh(x) * 2.0),
            name="choice",
        )
        beside = tf.sigmoid(tf.matmul(x, _constant("side/kernel", (8, 8))), name="side/sigmoid")
        tf.multiply(chosen, beside, name="output")
    write_binary(path, graph.as_graph_def())


def _constant(name: str, shape: tuple[int, ...]) -> Any:
    import tensorflow as tf

    return tf.constant(generate(kernel(name, 0, shape), shape), name=name)
