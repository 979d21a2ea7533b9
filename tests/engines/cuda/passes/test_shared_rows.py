"""Rows that are the same in a step are computed once, and give what TensorFlow makes of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from msplit.analysis.rows.walk import independent_rows
from msplit.engines.base import USERS
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import SharedRows
from msplit.errors import EngineError, WrongShape
from tests.analysis.rows import random_rows
from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, flat_of, graph_of, job, outputs_of_tensorflow, run

pytestmark = pytest.mark.tf

ROWS = 6


def shared_of(flat: Any, *names: str, users: int = 1, whole: bool = False) -> SharedRows:
    return SharedRows(names, tuple(independent_rows(flat).inputs.items()), users, whole)


def of_users(feeds: Any, of_row: Any, *names: str) -> dict[str, Any]:
    """Inputs of which those that are shared have the rows of users, by the user of each row."""
    return {name: value[of_row] if name in names else value for name, value in feeds.items()}


def shapes_of(flat: Any, feeds: Any, shared: SharedRows | None) -> dict[str, list[tuple[int, ...]]]:
    """Shapes that products of matrices give, and those that lookups give."""
    compiled = ENGINE.compile(job(flat, feeds, shared=shared))
    graph = compiled.optimized.graph
    found: dict[str, list[tuple[int, ...]]] = {}
    for op in graph.ops.values():
        found.setdefault(op.op.removeprefix("_Fused"), []).append(graph.shapes[op.out])
    return found


def ranker(tf: Any, v1: Any) -> None:
    """Tables, an encoder over clicks, and layers over the user beside the items, as Keras flattens them."""
    rng = np.random.default_rng(0)

    def weights(*sizes: int) -> Any:
        return tf.constant((rng.standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32))

    clicks = v1.placeholder(tf.int32, [None, 5], name="user_clicks")
    age = v1.placeholder(tf.float32, [None, 1], name="user_age")
    item = v1.placeholder(tf.int32, [None], name="item")
    price = v1.placeholder(tf.float32, [None, 3], name="item_price")
    read = tf.gather(weights(20, 8), clicks)
    weight = tf.nn.softmax(tf.matmul(tf.tensordot(read, weights(8, 8), 1), read, transpose_b=True))
    flat = tf.reshape(tf.matmul(weight, read), [tf.shape(clicks)[0], 40])
    user = tf.nn.relu(tf.concat([flat, age], 1) @ weights(41, 16) + weights(16))
    items = tf.concat([tf.gather(weights(30, 8), item), price], 1)
    both = tf.concat([user, items], 1)
    deep = tf.nn.relu(tf.nn.bias_add(both @ weights(27, 16), weights(16)))
    tf.sigmoid(deep @ weights(16, 1) + tf.reduce_sum(user[:, :11] * items, 1, keepdims=True), name="y")
    tf.identity(user, name="who")


def ranked(rows: int, users: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    of_row = np.arange(rows) * users // rows
    return {
        "user_clicks": rng.integers(0, 20, (users, 5)).astype(np.int32)[of_row],
        "user_age": rng.standard_normal((users, 1)).astype(np.float32)[of_row],
        "item": rng.integers(0, 30, rows).astype(np.int32),
        "item_price": rng.standard_normal((rows, 3)).astype(np.float32),
    }


@pytest.mark.parametrize("larger", [{}, {"fuse": True}, {"group": True}, {"fuse": True, "group": True}])
def test_the_user_s_side_has_one_row(larger: dict[str, bool]) -> None:
    flat, feeds = graph_of(ranker, outputs=["y", "who"]), ranked(ROWS)
    shared = shared_of(flat, "user_clicks", "user_age")
    assert_equals_tensorflow(flat, feeds, shared=shared, **larger)
    made = shapes_of(flat, feeds, shared)
    assert sorted(made["MatMul"]) == [(1, 16), (1, 16), (5, 8), (ROWS, 1), (ROWS, 16)], "u · W_u + i · W_i"
    assert "ConcatV2" not in made or (ROWS, 27) not in made["ConcatV2"]


USER = ("user_clicks", "user_age")


@pytest.mark.parametrize("larger", [{}, {"fuse": True}, {"group": True}, {"fuse": True, "group": True}])
@pytest.mark.parametrize("of_row", [[0, 0, 1, 1, 2, 2], [2, 0, 0, 2, 0, 0], [4] * 6, [3, 5, 0, 3, 5, 0]])
def test_the_side_of_several_users_has_one_row_for_each(larger: dict[str, bool], of_row: list[int]) -> None:
    flat, feeds = graph_of(ranker, outputs=["y", "who"]), of_users(ranked(ROWS, users=ROWS), of_row, *USER)
    shared = shared_of(flat, *USER, users=3)
    assert_equals_tensorflow(flat, feeds, shared=shared, **larger)
    made = shapes_of(flat, feeds, shared)
    assert sorted(made["MatMul"]) == [(3, 16), (3, 16), (ROWS, 1), (ROWS, 16), (15, 8)], "(u · W_u)[users] + i · W_i"
    assert "ConcatV2" not in made or (ROWS, 27) not in made["ConcatV2"]


@pytest.mark.parametrize("larger", [{}, {"fuse": True}, {"group": True}, {"fuse": True, "group": True}])
@pytest.mark.parametrize("users", [1, 3])
def test_users_are_repeated_in_front_where_all_rows_are_computed(larger: dict[str, bool], users: int) -> None:
    flat, feeds = graph_of(ranker, outputs=["y", "who"]), ranked(ROWS, users)
    shared = shared_of(flat, *USER, users=users, whole=True)
    assert_equals_tensorflow(flat, feeds, shared=shared, **larger)
    assert sorted(shapes_of(flat, feeds, shared)["MatMul"]) == sorted(shapes_of(flat, feeds, None)["MatMul"])
    executable = ENGINE.build(job(flat, feeds, shared=shared, **larger))
    assert executable.buffers().keys().isdisjoint(USER)
    if users == 1:
        one = {name: value[:1] if name in USER else value for name, value in feeds.items()}
        assert np.array_equal(executable.step(one)["y"], executable.step(feeds)["y"])
    executable.close()


@pytest.mark.parametrize("dense", [False, True])
def test_lookups_of_a_user_who_is_repeated_read_the_one_row_of_ids(dense: bool) -> None:
    def towers(tf: Any, v1: Any) -> None:
        rng = np.random.default_rng(1)
        table = tf.constant(rng.standard_normal((40, 4)).astype(np.float32))
        user = v1.placeholder(tf.int32, [None], name="user")
        bag = v1.placeholder(tf.int32, [None, 3], name="user_bag")
        item = v1.placeholder(tf.int32, [None], name="item")
        mine = [tf.gather(table, user % 40), tf.reduce_mean(tf.gather(table, bag), 1)]
        mine += [tf.cast(bag, tf.float32)] if dense else []
        tf.concat([*mine, tf.gather(table, item)], 1, name="y")

    flat = graph_of(towers, outputs=["y"])
    rng = np.random.default_rng(2)
    feeds = {
        "user": np.full(ROWS, 47, np.int32),
        "user_bag": rng.integers(-1, 41, (1, 3)).astype(np.int32)[[0] * ROWS].clip(0, 39),
        "item": rng.integers(0, 40, ROWS).astype(np.int32),
    }
    shared = shared_of(flat, "user", "user_bag", whole=True)
    assert_equals_tensorflow(flat, feeds, shared=shared, group=True)
    graph = ENGINE.compile(job(flat, feeds, shared=shared, group=True)).optimized.graph
    (columns,) = [op for op in graph.ops.values() if op.op == "_Columns"]
    steps = sorted(
        term.step for segment in columns.attrs["columns"].segments for term in segment.terms if term.table >= 0
    )
    assert steps == [0, 0, 1]


def test_users_are_given_in_one_of_three_forms() -> None:
    flat, each = graph_of(ranker, outputs=["y", "who"]), ranked(ROWS, users=ROWS)
    executable = ENGINE.build(job(flat, of_users(each, [0] * ROWS, *USER), shared=shared_of(flat, *USER, users=2)))
    of_row = np.array([1, 0, 0, 1, 1, 0], np.int32)
    feeds = of_users(each, of_row, *USER)
    expected = outputs_of_tensorflow(flat, feeds)
    compact = {**{name: value[:2] if name in USER else value for name, value in each.items()}, USERS: of_row}
    for given_ in (feeds, compact, {name: torch.from_numpy(value) for name, value in feeds.items()}):
        found = executable.step_prefetching(given_, lambda: compact)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    one = {name: value[:1] if name in USER else value for name, value in each.items()}
    assert np.array_equal(executable.step(one)["y"], executable.step(of_users(each, [0] * ROWS, *USER))["y"])
    age = np.array([[np.nan], [0.0], [-0.0], [np.nan], [0.0], [-0.0]], np.float32)
    with pytest.raises(WrongShape, match="rows of user_clicks, user_age are of 3 users, and a step has room for 2"):
        executable.step({**of_users(each, [0] * ROWS, *USER), "user_age": age})
    with pytest.raises(EngineError, match="rows of input user_age differ"):
        executable.step({**feeds, "user_clicks": feeds["user_clicks"][:1]})
    for wrong in (
        {"user_age": age[:4]},
        {"user_age": feeds["user_age"][:, 0]},
        {"user_age": age[0, 0]},
        {"item": feeds["item"][:4]},
    ):
        with pytest.raises(WrongShape, match=f"input {next(iter(wrong))} (was prepared as|has the shape)"):
            executable.step({**feeds, **wrong})
    for missing in ({}, {"user_age": [[1.0]]}):
        with pytest.raises(EngineError, match=r"no value for input user_age|user_age is given a list"):
            executable.step({**{name: value for name, value in feeds.items() if name != "user_age"}, **missing})
    executable.close()


def test_a_step_of_few_rows_for_each_user_computes_all() -> None:
    flat, feeds = graph_of(ranker, outputs=["y", "who"]), ranked(ROWS, users=ROWS)
    shared = shared_of(flat, *USER, users=4)
    assert_equals_tensorflow(flat, feeds, shared=shared)
    assert (ROWS, 16) in shapes_of(flat, feeds, shared)["MatMul"]
    executable = ENGINE.build(job(flat, feeds, shared=shared))
    compact = {name: value[:2] if name in USER else value for name, value in feeds.items()}
    of_row = np.array([1, 0, 0, 1, 1, 1], np.int32)
    found, expected = executable.step({**compact, USERS: of_row}), executable.step(of_users(feeds, of_row, *USER))
    assert np.array_equal(found["y"], expected["y"])
    executable.close()


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_one_row_or_equal_ones_are_taken(rows: int) -> None:
    flat, feeds = graph_of(ranker, outputs=["y", "who"]), ranked(rows)
    executable = ENGINE.build(job(flat, feeds, shared=shared_of(flat, "user_clicks", "user_age")))
    expected = executable.step(feeds)
    assert expected["who"].shape == (rows, 16)
    one = {name: value[:1] if name.startswith("user") else value for name, value in feeds.items()}
    for given_ in (one, {**feeds, "user_age": np.broadcast_to(feeds["user_age"][:1], (rows, 1))}):
        found = executable.step(given_)
        assert all(np.array_equal(found[name], value) for name, value in expected.items())
    nan = {**feeds, "user_age": np.full((rows, 1), np.nan, np.float32)}
    for given_ in (nan, {**nan, "user_age": np.broadcast_to(nan["user_age"][:1], (rows, 1))}):
        assert np.isnan(executable.step(given_)["y"]).all()
    of_torch = {name: torch.from_numpy(value) for name, value in nan.items()}
    assert np.isnan(executable.step(of_torch)["y"]).all()
    if rows > 1:
        zeros = {**feeds, "user_age": np.array([[0.0], [-0.0]] * (rows // 2), np.float32)}
        for given_ in (zeros, {name: torch.from_numpy(value) for name, value in zeros.items()}):
            with pytest.raises(EngineError, match="rows of input user_age differ"):
                executable.step(given_)
    if rows > 1:
        other = {**feeds, "user_clicks": feeds["user_clicks"] + np.arange(rows, dtype=np.int32)[:, None] % 2}
        with pytest.raises(EngineError, match="rows of input user_clicks differ"):
            executable.step(other)
    assert np.array_equal(executable.step_prefetching(feeds, lambda: one)["y"], expected["y"])
    assert np.array_equal(executable.step(one)["y"], expected["y"])
    executable.close()


def test_what_depends_on_the_number_of_rows_is_not_taken_of_one_row() -> None:
    """A count that goes from the user's side to the items', and rows that lie along another axis or are several entries."""

    def build(tf: Any, v1: Any) -> None:
        user = v1.placeholder(tf.float32, [None, 4], name="user")
        item = v1.placeholder(tf.float32, [None, 4], name="item")
        count = tf.shape(user)[0]
        tf.reshape(item * 2.0, tf.stack([count, 2, 2]), name="counted")
        along = tf.transpose(tf.exp(user)) + tf.transpose(item)
        tf.transpose(along, name="along")
        halves = tf.reshape(tf.exp(user), [-1, 2])
        tf.reshape(halves * tf.reshape(item, [-1, 2]), [-1, 4], name="halves")
        tf.stack([tf.exp(user), item], 1, name="stacked")
        numbers = tf.cast(tf.range(count), tf.float32)[:, None] + 0.0 * user[:, :1]
        tf.gather_nd(item, tf.cast(numbers, tf.int32), name="numbered")

    flat = graph_of(build, outputs=["counted", "along", "halves", "stacked", "numbered"])
    rng = np.random.default_rng(0)
    feeds = {"user": np.repeat(rng.standard_normal((1, 4)), ROWS, 0), "item": rng.standard_normal((ROWS, 4))}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    assert_equals_tensorflow(flat, feeds, shared=shared_of(flat, "user"))


@pytest.mark.parametrize("of_row", [[0, 0, 0, 1, 1, 1], [2, 0, 1, 1, 0, 2]])
@pytest.mark.parametrize("larger", [{}, {"fuse": True, "group": True}])
def test_what_is_added_up_or_lies_side_by_side_is_gathered_in_one_piece(
    of_row: list[int], larger: dict[str, bool]
) -> None:
    def build(tf: Any, v1: Any) -> None:
        user, item = (v1.placeholder(tf.float32, [None, 4], name=name) for name in ("user", "item"))
        one, two, three = tf.exp(user), tf.sin(user), tf.reduce_sum(tf.abs(user), 1, keepdims=True) * tf.ones([1, 4])
        v1.add_n([one, item, two, three], name="total")
        tf.nn.softmax(tf.concat([one, two[:, :1], item, three, one], 1), name="beside")
        tf.concat([two[:, None], three[:, None], item[:, None]], 1, name="below")
        v1.add_n([item, item, three], name="one_of_them")

    flat = graph_of(build, outputs=["total", "beside", "below", "one_of_them"])
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((ROWS, 4)).astype(np.float32) for name in ("user", "item")}
    feeds, shared = of_users(feeds, of_row, "user"), shared_of(flat, "user", users=3)
    assert_equals_tensorflow(flat, feeds, shared=shared, **larger)
    assert sorted(shapes_of(flat, feeds, shared)["GatherV2"]) == [(6, 2, 4), (6, 4), (6, 4), (6, 5), (6, 8)]


def test_an_input_of_which_all_rows_are_read_is_refused() -> None:
    def build(tf: Any, v1: Any) -> None:
        user, item = (v1.placeholder(tf.float32, [None, 4], name=name) for name in ("user", "item"))
        tf.reshape(user * item, [-1, 8], name="y")

    flat, feeds = graph_of(build, outputs=["y"]), dict.fromkeys(("user", "item"), np.ones((ROWS, 4), np.float32))
    with pytest.raises(EngineError, match="input user can not be shared"):
        ENGINE.build(job(flat, feeds, shared=shared_of(flat, "user")))


def words(tf: Any, v1: Any) -> None:
    """Text of the user and of the item, each looked up by its hash, and text of both together."""
    rng = np.random.default_rng(0)

    def weights(*sizes: int) -> Any:
        return tf.constant((rng.standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32))

    city, title = (v1.placeholder(tf.string, [None], name=name) for name in ("user_city", "title"))
    age = v1.placeholder(tf.float32, [None, 3], name="user_age")
    user = tf.gather(weights(50, 8), tf.strings.to_hash_bucket_fast(city, 50))
    user = tf.nn.relu(tf.concat([user, age], 1) @ weights(11, 16))
    item = tf.gather(weights(50, 8), tf.strings.to_hash_bucket_fast(title, 50))
    cross = tf.gather(weights(50, 8), tf.strings.to_hash_bucket_fast(tf.strings.join([city, title]), 50))
    tf.identity(tf.concat([user, item, cross], 1) @ weights(32, 4), name="y")


def said(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows)
    city = [b"Paris", b"", b"\xff", "Zürich".encode()][rows % 4]
    return {
        "user_city": np.array([city] * rows, object),
        "title": np.array([b"title %d" % number for number in rng.integers(0, 99, rows)], object),
        "user_age": np.repeat(rng.standard_normal((1, 3)).astype(np.float32), rows, 0),
    }


def test_text_of_the_user_is_looked_up_once() -> None:
    flat, feeds = graph_of(words, outputs=["y"]), said(ROWS)
    shared = shared_of(flat, "user_city", "user_age")
    assert_equals_tensorflow(flat, feeds, shared=shared)
    assert (1, 16) in shapes_of(flat, feeds, shared)["MatMul"]
    executable = ENGINE.build(job(flat, feeds, shared=shared))
    one = {name: value[:1] if name.startswith("user") else value for name, value in feeds.items()}
    assert np.array_equal(executable.step(one)["y"], executable.step(feeds)["y"])
    with pytest.raises(EngineError, match="rows of input user_city differ"):
        executable.step({**feeds, "user_city": np.array([b"a"] * (ROWS - 1) + [b"b"], object)})
    executable.close()


@pytest.mark.parametrize("users", [1, 2])
def test_text_of_users_goes_into_what_is_made_behind_the_device(users: int) -> None:
    def build(tf: Any, v1: Any) -> None:
        city, age = (
            v1.placeholder(tf.string, [None], name="user_city"),
            v1.placeholder(tf.float32, [None], name="user_age"),
        )
        item = v1.placeholder(tf.float32, [None], name="item")
        score = tf.strings.as_string(tf.cast(tf.exp(age) * item, tf.int32))
        tf.strings.join([city, score], separator=": ", name="label")

    flat = graph_of(build, outputs=["label"])
    city, age = np.array([b"Paris", b""], object), np.array([1.0, -0.5], np.float32)
    of_row = np.array([0, 1, 1, 0, 1, 0] if users > 1 else [1] * ROWS, np.int32)
    feeds = {"user_city": city[of_row], "user_age": age[of_row], "item": np.arange(ROWS, dtype=np.float32)}
    executable = ENGINE.build(job(flat, feeds, shared=shared_of(flat, "user_city", "user_age", users=users)))
    expected = outputs_of_tensorflow(flat, feeds)["label"].tolist()
    each = {"user_city": city, "user_age": age, "item": feeds["item"], USERS: of_row} if users > 1 else feeds
    one = {name: value[-1:] if name.startswith("user") else value for name, value in feeds.items()}
    for given_ in (feeds, each, *([one] if users == 1 else [])):
        assert executable.step_prefetching(given_, lambda: each)["label"].tolist() == expected
    executable.close()


@pytest.mark.parametrize("larger", [{}, {"fuse": True, "group": True}])
def test_text_of_several_users_is_looked_up_for_each(larger: dict[str, bool]) -> None:
    flat, of_row = graph_of(words, outputs=["y"]), [2, 0, 0, 2, 0, 2]
    each = [said(rows) for rows in range(1, 4)]
    feeds = {name: np.concatenate([one[name][:1] for one in each])[of_row] for name in each[0]}
    feeds["title"] = said(ROWS)["title"]
    shared = shared_of(flat, "user_city", "user_age", users=3)
    assert_equals_tensorflow(flat, feeds, shared=shared, **larger)
    assert (3, 16) in shapes_of(flat, feeds, shared)["MatMul"]
    executable = ENGINE.build(job(flat, feeds, shared=shared))
    with pytest.raises(WrongShape, match="are of 6 users, and a step has room for 3"):
        executable.step({**feeds, "user_city": np.array([b"%d" % row for row in range(ROWS)], object)})
    executable.close()


def texts(tf: Any, v1: Any) -> None:
    """Text of the user in whatever forms hosts meet: hashed, split into words, parsed, an output, and beside text of the item."""
    rng = np.random.default_rng(0)

    def weights(*sizes: int) -> Any:
        return tf.constant((rng.standard_normal(sizes) / sizes[0] ** 0.5).astype(np.float32))

    city, said, example, title = (
        v1.placeholder(tf.string, [None], name=name) for name in ("user_city", "user_said", "user_example", "title")
    )
    price = v1.placeholder(tf.float32, [None, 3], name="price")
    lower = tf.strings.lower(city)
    words_said = tf.strings.split(said, " ")
    padded = tf.strings.to_hash_bucket_fast(words_said.to_tensor("", shape=[None, 3]), 50)
    read = v1.parse_example(
        example,
        {
            "age": v1.FixedLenFeature([2], tf.float32, [0.5, 1.5]),
            "tags": v1.FixedLenFeature([2], tf.string, ["", "b"]),
        },
    )
    tags = tf.gather(weights(50, 4), tf.strings.to_hash_bucket_fast(read["tags"], 50))
    counted = tf.cast(words_said.row_lengths(), tf.float32)[:, None]
    user = tf.concat(
        [
            tf.gather(weights(50, 8), tf.strings.to_hash_bucket_fast(lower, 50)),
            tf.reduce_sum(tf.gather(weights(50, 4), padded), 1),
            tf.reshape(tags, [-1, 8]),
            read["age"],
            counted,
        ],
        1,
    )
    cross = tf.strings.join([lower, tf.strings.reduce_join(words_said, 1), read["tags"][:, 1], title], "|")
    item = tf.gather(weights(50, 8), tf.strings.to_hash_bucket_fast(cross, 50))
    deep = tf.concat([tf.nn.relu(user @ weights(23, 16)), item, price], 1)
    tf.identity(deep @ weights(27, 2), name="y")
    tf.strings.upper(lower, name="upper")
    tf.strings.join([lower, title], name="both")


def made_texts(tf: Any, rows: int, users: int = 1, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([rows, users, seed])
    of_row = rng.integers(0, users, rows)
    cities = [b"Paris", b"", b"\xffA", "ZÜRICH".encode()]

    def example(number: int) -> bytes:
        features = tf.train.Features()
        if number % 3:
            features.feature["age"].float_list.value.extend([number, -number])
        if number % 2:
            features.feature["tags"].bytes_list.value.extend([b"t%d" % number, b""])
        return bytes(tf.train.Example(features=features).SerializeToString())

    return {
        "user_city": np.array([cities[one % 4] for one in of_row], object),
        "user_said": np.array([b" ".join([b"w%d" % one] * (one % 5)) for one in of_row], object),
        "user_example": np.array([example(int(one)) for one in of_row], object),
        "title": np.array([b"title %d" % number for number in rng.integers(0, 99, rows)], object),
        "price": rng.standard_normal((rows, 3)).astype(np.float32),
    }


TEXTS = ("user_city", "user_said", "user_example")


@pytest.mark.parametrize("users", [1, 3])
def test_the_host_makes_what_is_of_the_user_alone_once_for_each(users: int) -> None:
    import tensorflow as tf

    flat, feeds = graph_of(texts, outputs=["y", "upper", "both"]), made_texts(tf, 12, users)
    shared = shared_of(flat, *TEXTS, users=users)
    assert_equals_tensorflow(flat, feeds, shared=shared)
    compiled = ENGINE.compile(job(flat, feeds, shared=shared))
    host = compiled.optimized.host
    assert host is not None
    assert host.once is not None
    made, outputs = host.run(feeds)
    assert [len(made[name]) for name in compiled.optimized.once.entries] == [users]
    assert [len(outputs[name]) for name in ("upper", "both")] == [12, 12]
    assert host.reads == ("user_said", "title"), (
        "ragged words are made for all rows, and the rest of the cross is of one of each user"
    )
    seen = list[tuple[int, ...]]()
    step = host.once.step
    host.once.step = lambda given: (seen.extend(given[name].shape for name in TEXTS), step(given))[1]  # type: ignore[method-assign]
    executable = ENGINE.build(job(flat, feeds, shared=shared))
    for seed in range(4):
        other = made_texts(tf, 12, users, seed)
        expected, found = outputs_of_tensorflow(flat, other), executable.step(other)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-6)
        assert all(found[name].tolist() == expected[name].tolist() for name in ("upper", "both"))
    assert max(seen) <= (users,)
    executable.close()


@pytest.mark.parametrize("how", ["carried", "chosen"])
def test_what_loops_and_choices_bring_to_text_of_the_user_is_not_the_user_s(how: str) -> None:
    def build(tf: Any, v1: Any) -> None:
        city, title = (v1.placeholder(tf.string, [None], name=name) for name in ("user_city", "title"))
        flag = v1.placeholder(tf.bool, [], name="flag")
        if how == "carried":
            _, text = v1.while_loop(
                lambda step, text: step < 2, lambda step, text: (step + 1, tf.strings.join([text, title])), [0, city]
            )
        else:
            text = tf.strings.join([city, v1.cond(flag, lambda: tf.constant("a"), lambda: tf.constant("b"))])
        ids = tf.strings.to_hash_bucket_fast(text, 50)
        tf.gather(tf.constant(np.eye(50, 4, dtype=np.float32)), ids, name="y")
        tf.gather(tf.constant(np.eye(50, 4, dtype=np.float32)), tf.strings.to_hash_bucket_fast(title, 50), name="z")

    import tensorflow as tf

    tf.compat.v1.disable_control_flow_v2()
    try:
        flat = graph_of(build, outputs=["y", "z"])
    finally:
        tf.compat.v1.enable_control_flow_v2()
    feeds = {
        "user_city": np.array([b"Paris"] * ROWS, object),
        "title": np.array([b"%d" % row for row in range(ROWS)], object),
        "flag": np.array(True),
    }
    feeds = {tensor.name: feeds[tensor.name] for tensor in flat.inputs}
    shared = SharedRows(("user_city",), (("user_city", 1), ("title", 1)))
    executable = ENGINE.build(job(flat, feeds, shared=shared))
    for flag in (True, False):
        other = {**feeds, "flag": np.array(flag)} if "flag" in feeds else feeds
        for name, value in outputs_of_tensorflow(flat, other).items():
            np.testing.assert_array_equal(executable.step(other)[name], value)
    executable.close()


def test_an_input_that_is_an_output_and_a_choice_by_rows() -> None:
    def build(tf: Any, v1: Any) -> None:
        user, item, other = (v1.placeholder(tf.float32, [None, 4], name=name) for name in ("user", "item", "user_b"))
        rows = item[:, 0] > 0
        v1.where(rows, tf.exp(user), item, name="by_rows")
        v1.where(tf.exp(user)[:, 0] > 1, item, -item, name="by_user")
        tf.where(tf.exp(user) > 1, item, tf.exp(other), name="by_element")

    outputs = ["by_rows", "by_user", "by_element"]
    rng = np.random.default_rng(0)
    feeds = {name: np.repeat(rng.standard_normal((1, 4)).astype(np.float32), ROWS, 0) for name in ("user", "user_b")}
    feeds["item"] = rng.standard_normal((ROWS, 4)).astype(np.float32)
    flat = graph_of(build, outputs=outputs)
    assert_equals_tensorflow(flat, feeds, shared=shared_of(flat, "user", "user_b"))
    flat = graph_of(build, outputs=[*outputs, "user"])
    with pytest.raises(EngineError, match="input user can not be shared"):
        ENGINE.build(job(flat, feeds, shared=shared_of(flat, "user")))


def _side_by_side(tf: Any, g: Any, t: Any, *, multiplied: bool) -> Any:
    other = g.choose([one for one in g.values if one.shape.rank == t.shape.rank])
    beside = tf.concat(g.choose([[t, tf.abs(t), other], [other, t], [t, other, tf.square(t), -t]]), -1)
    return tf.tensordot(beside, g.weights(beside.shape[-1], 2), 1) if multiplied else beside


def _sum(tf: Any, g: Any, t: Any) -> Any:
    others = [g.like(t), g.like(t)]
    return tf.add_n(g.choose([[t, tf.abs(t), *others], [others[0], t, others[1], tf.square(t)]]))


MEETINGS: list[Any] = [
    _sum,
    lambda tf, g, t: _side_by_side(tf, g, t, multiplied=True),
    lambda tf, g, t: _side_by_side(tf, g, t, multiplied=False),
] * 4
"""Steps that several values go into, of users and of rows."""


@settings(max_examples=examples(20, 5_000), suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_graphs_give_the_same_numbers(data: st.DataObject) -> None:
    import tensorflow as tf

    fed = {name.removesuffix(":0"): value for name, value in random_rows.feeds(ROWS, 1).items()}
    shared = data.draw(st.lists(st.sampled_from(sorted(fed)), min_size=1, max_size=3, unique=True))
    users = data.draw(st.integers(1, ROWS // 2 + 1), "users")
    of_row = data.draw(st.lists(st.integers(0, users - 1), min_size=ROWS, max_size=ROWS), "user of each row")
    fed = of_users(fed, of_row, *shared)
    with tf.Graph().as_default() as graph:
        builder = random_rows.Builder(tf, lambda options: data.draw(st.sampled_from(list(options))))
        for _ in range(data.draw(st.integers(2, 14))):
            made = builder.step([*random_rows.STEPS, *MEETINGS], builder.other())
            builder.values += [] if made is None else [made]
        names = [tensor.op.name for tensor in builder.values[len(random_rows.INPUTS) :]]
        assume(names)
        rows = independent_rows(flat_of(graph.as_graph_def(), outputs=names))
        flat = flat_of(graph.as_graph_def(), outputs=list(rows.outputs))
        feeds = {tensor.name: fed[tensor.name] for tensor in flat.inputs}
        taken = tuple(name for name in shared if name in feeds)
        assume(taken and rows.outputs)
        with tf.compat.v1.Session(graph=graph) as session:
            try:
                expected = session.run([f"{name}:0" for name in rows.outputs], {f"{k}:0": v for k, v in feeds.items()})
                plain = run(flat, feeds)
            except (tf.errors.OpError, EngineError):
                assume(False)
    try:
        larger = data.draw(st.sampled_from([{}, {"fuse": True, "group": True}]))
        whole = data.draw(st.booleans(), "all rows are computed")
        found = run(flat, feeds, 3, shared=shared_of(flat, *taken, users=users, whole=whole), **larger)
    except EngineError as problem:
        if "can not be shared" not in problem.what:
            raise
        assume(False)
    for name, value in zip(rows.outputs, expected, strict=True):
        if np.array_equal(plain[name], value):  # which not all of TensorFlow's errors on a CPU are
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, {taken} shared")
