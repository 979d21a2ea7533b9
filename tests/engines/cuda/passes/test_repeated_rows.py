"""Rows that a model repeats itself, in front of what joins them with items, are computed once, and give what TensorFlow makes of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.passes import shared_rows
from tests.cli.runner import fine
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, job, run

pytestmark = pytest.mark.tf

ROWS = 256

Tiled = Callable[[Any, Any, Any], Any]
"""Gives all rows of the one of a user, from TensorFlow, that row, and the items."""

WAYS: dict[str, Tiled] = {
    "tile": lambda tf, user, item: tf.tile(user, [tf.shape(item)[0], 1]),
    "repeat": lambda tf, user, item: tf.repeat(user, tf.shape(item)[0], axis=0),
    "broadcast": lambda tf, user, item: tf.broadcast_to(user, [tf.shape(item)[0], user.shape[1]]),
    "rows of several axes": lambda tf, user, item: tf.reshape(
        tf.tile(user[None], [tf.shape(item)[0], 1, 1]), [-1, user.shape[1]]
    ),
}


def weights(tf: Any, *sizes: int) -> Any:
    rng = np.random.default_rng(sizes)
    return tf.constant((rng.standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32))


def ranker(way: Tiled, first: int | None = 1) -> Callable[[Any, Any], None]:
    """An encoder of the user behind the rows that are repeated, and layers of both side by side."""

    def build(tf: Any, v1: Any) -> None:
        user = v1.placeholder(tf.float32, [first, 96], name="user")
        item = v1.placeholder(tf.float32, [None, 32], name="item")
        wide = way(tf, user, item)
        deep = tf.nn.relu(wide @ weights(tf, 96, 128) + weights(tf, 128))
        deep = tf.nn.relu(deep @ weights(tf, 128, 96) + weights(tf, 96))
        both = tf.nn.relu(tf.concat([deep, item], 1) @ weights(tf, 128, 64) + weights(tf, 64))
        tf.sigmoid(both @ weights(tf, 64, 1) + tf.reduce_sum(deep[:, :32] * item, 1, keepdims=True), name="y")

    return build


def fed(rows: int = ROWS, users: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    sizes = {"user": (users, 96), "item": (rows, 32)}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def products(flat: Any, feeds: Any, **options: Any) -> list[tuple[int, ...]]:
    graph = ENGINE.compile(job(flat, feeds, **options)).optimized.graph
    return sorted(graph.shapes[op.out] for op in graph.ops.values() if op.op.removeprefix("_Fused") == "MatMul")


@pytest.mark.parametrize("larger", [{}, {"fuse": True, "group": True}])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_behind_the_repetition_is_computed_of_one_row(way: str, larger: dict[str, bool]) -> None:
    flat, feeds = graph_of(ranker(WAYS[way]), outputs=["y"]), fed()
    assert_equals_tensorflow(flat, feeds, **larger)
    assert products(flat, feeds)[:3] == [(1, 64), (1, 96), (1, 128)]


def test_a_user_whose_number_of_rows_is_open_is_found_where_one_row_is_given() -> None:
    flat = graph_of(ranker(WAYS["tile"], None), outputs=["y"])
    assert_equals_tensorflow(flat, fed())
    assert products(flat, fed())[:3] == [(1, 64), (1, 96), (1, 128)]


def test_special_values_are_those_of_the_one_row() -> None:
    flat, feeds = graph_of(ranker(WAYS["tile"]), outputs=["y"]), fed()
    feeds["user"][0, :3] = [np.nan, -0.0, np.inf]
    assert np.isnan(run(flat, feeds)["y"]).all()


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_few_rows_stay_as_they_are_or_are_right(rows: int) -> None:
    assert_equals_tensorflow(graph_of(ranker(WAYS["tile"]), outputs=["y"]), fed(rows))


def test_where_costs_say_that_nothing_is_gained_all_rows_are_computed() -> None:
    """A product of two would take one kernel more than a few columns of a product take."""

    def build(tf: Any, v1: Any) -> None:
        user = v1.placeholder(tf.float32, [1, 2], name="user")
        item = v1.placeholder(tf.float32, [None, 32], name="item")
        wide = tf.tile(user, [tf.shape(item)[0], 1])
        tf.identity(tf.concat([item[:, :8], wide, tf.exp(item)], 1) @ weights(tf, 42, 8), name="y")

    flat, feeds = graph_of(build, outputs=["y"]), {"user": np.ones((1, 2), np.float32), "item": fed(8)["item"]}
    assert_equals_tensorflow(flat, feeds)
    assert products(flat, feeds) == [(8, 8)]


@pytest.mark.parametrize("place", ["behind", "in front"])
def test_rows_that_are_mixed_or_numbered_stay_all(place: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_rows, "pays", lambda *_: True)
    monkeypatch.setattr(shared_rows, "pays_to_split", lambda *_, alone: True)

    def build(tf: Any, v1: Any) -> None:
        user = v1.placeholder(tf.float32, [1, 96], name="user")
        item = v1.placeholder(tf.float32, [None, 32], name="item")
        count = tf.shape(item)[0]
        wide = tf.tile(user, [count, 1])
        if place == "in front":
            wide += tf.cast(tf.range(count), tf.float32)[:, None]
            made = tf.nn.relu(wide @ weights(tf, 96, 128))
        else:
            made = tf.nn.relu(wide @ weights(tf, 96, 128))
            made = tf.cumsum(made, 0) + tf.reduce_mean(made, 0) / tf.cast(count, tf.float32)
        tf.identity(tf.concat([made, item], 1) @ weights(tf, 160, 8), name="y")
        tf.reduce_sum(tf.tile(user, [count, 2]), name="total")
        tf.reshape(tf.tile(user, [count, 1]), [-1, 2, 96], name="pairs")
        tf.transpose(tf.exp(tf.tile(user, [count, 1])), name="columns")
        matrices = tf.reshape(tf.tile(item, [1, 3]), [-1, 96, 1])
        tf.linalg.matmul(tf.exp(tf.tile(user, [count, 1])), matrices, name="a_matrix_for_each")

    flat = graph_of(build, outputs=["y", "total", "pairs", "columns", "a_matrix_for_each"])
    for rows in (2, 256):
        assert_equals_tensorflow(flat, fed(rows))


def test_attention_of_items_over_one_history() -> None:
    """A history of one user that is repeated for each item, as DIN reads it, with a mask."""

    def build(tf: Any, v1: Any) -> None:
        clicks = v1.placeholder(tf.int32, [1, 20], name="user")
        item = v1.placeholder(tf.float32, [None, 32], name="item")
        count, table = tf.shape(item)[0], weights(tf, 50, 32)
        read = tf.nn.tanh(tf.tensordot(tf.gather(table, tf.tile(clicks, [count, 1])), weights(tf, 32, 32), 1))
        there = tf.tile(clicks, [count, 1]) > 0
        query = tf.tile(item[:, None], [1, 20, 1])
        hidden = tf.concat([query, read, query - read, query * read], -1)
        score = tf.tensordot(tf.nn.sigmoid(tf.tensordot(hidden, weights(tf, 128, 16), 1)), weights(tf, 16, 1), 1)[
            ..., 0
        ]
        score = tf.nn.softmax(tf.where(there, score, tf.fill(tf.shape(score), -1e9)))
        tf.reduce_sum(score[..., None] * read, 1, name="y")

    flat = graph_of(build, outputs=["y"])
    rng = np.random.default_rng(0)
    feeds = {"user": rng.integers(0, 50, (1, 20)).astype(np.int32), "item": fed()["item"]}
    for larger in ({}, {"fuse": True, "group": True}):
        assert_equals_tensorflow(flat, feeds, **larger)
    assert (20, 32) in products(flat, feeds)


def test_analyze_says_what_one_row_saves_and_which_op_needs_all() -> None:
    def build(tf: Any, v1: Any) -> None:
        ranker(WAYS["tile"])(tf, v1)
        user = tf.compat.v1.get_default_graph().get_tensor_by_name("user:0")
        item = tf.compat.v1.get_default_graph().get_tensor_by_name("item:0")
        tf.reduce_mean(tf.tile(user, [tf.shape(item)[0], 1]), 0, name="over_the_rows")

    path = graph_of(build, outputs=["y", "over_the_rows"]).model.path
    told = fine("analyze", path, "--batch", "512", "--format", "json").json["repeated"]
    assert (told["inputs"], told["rows"]) == (["user"], 512)
    assert told["flops"] == pytest.approx(511 * 2 * (96 * 128 + 128 * 96), rel=0.1)
    assert told["time_us"] > 0
    assert told["mixed"] == ["Mean (over_the_rows) reduces over the rows"]
    text = " ".join(fine("analyze", path, "--batch", "512").out.split())
    assert "are saved where 512 equal rows are computed once, as the cuda engine does where it gains" in text
    assert "all rows are needed where Mean (over_the_rows) reduces over the rows" in text
    path = graph_of(ranker(lambda tf, user, item: user + 0.0 * item[:, :1]), outputs=["y"]).model.path
    assert "repeated" not in fine("analyze", path, "--batch", "512", "--format", "json").json
