"""Rows of any length: random encoders with positions hidden beyond the end of each row, against TensorFlow at each row's own length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.analysis.rows import lengths
from msplit.assignment.cut import with_lengths
from msplit.errors import EngineError, MsplitError
from msplit.report.contents import build_document
from tests.campaign import examples

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

SIMULATED = {"streams": (2,), "device": "cpu", "effort": "fast"}
D, H, LONGEST = 4, 2, 8
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
Layer = Callable[[Any, Any, Any], Any]


def weights(rng: Any, *shape: int) -> Any:
    return tf.constant(rng.standard_normal(shape).astype(np.float32))


def sizes(h: Any) -> tuple[Any, Any]:
    return tf.shape(h)[0], tf.shape(h)[1]


def dense(h: Any, mask: Any, rng: Any) -> Any:
    return tf.reshape(tf.matmul(tf.reshape(h, [-1, D]), weights(rng, D, D)), [*sizes(h), D])


def norm(h: Any, mask: Any, rng: Any) -> Any:
    mean = tf.reduce_mean(h, -1, keepdims=True)
    return (h - mean) * tf.math.rsqrt(tf.reduce_mean(tf.math.squared_difference(h, mean), -1, keepdims=True) + 1e-3)


def places(h: Any, mask: Any, rng: Any) -> Any:
    table = weights(rng, 2 * LONGEST, D)
    return h + table[: sizes(h)[1]] if rng.random() < 0.5 else h + tf.gather(table, tf.range(sizes(h)[1]))


def attention(h: Any, mask: Any, rng: Any) -> Any:
    """As BERT has it, with an additive mask that is far from infinity, a causal one, both, or none."""
    rows, length = sizes(h)
    q, k, v = (
        tf.transpose(tf.reshape(h @ weights(rng, D, D), [rows, length, H, D // H]), [0, 2, 1, 3]) for _ in range(3)
    )
    scores = tf.matmul(q, k, transpose_b=True)
    if rng.random() < 0.5:
        scores += (1.0 - mask[:, None, None, :]) * -5.0
    if rng.random() < 0.5:
        scores += (1.0 - tf.linalg.band_part(tf.ones([length, length]), -1, 0)) * -1e9
    return h + tf.reshape(tf.transpose(tf.nn.softmax(scores) @ v, [0, 2, 1, 3]), [rows, length, D])


def heads_in_rows(h: Any, mask: Any, rng: Any) -> Any:
    """Heads one behind the other along the rows; positions before now by their numbers."""
    q, k, v = (tf.concat(tf.split(h @ weights(rng, D, D), H, 2), 0) for _ in range(3))
    scores, place = tf.matmul(q, tf.transpose(k, [0, 2, 1])), tf.range(sizes(h)[1])
    scores = tf.where((place[:, None] >= place[None, :])[None], scores, -1e9 * tf.ones_like(scores))
    return tf.concat(tf.split(tf.matmul(tf.nn.softmax(scores), v), H, 0), 2)


def by_einsum(h: Any, mask: Any, rng: Any) -> Any:
    q, k = (tf.einsum("bld,dhk->blhk", h, weights(rng, D, H, 2)) for _ in range(2))
    weight = tf.nn.softmax(tf.einsum("bqhk,bjhk->bhqj", q, k))
    return tf.einsum("bhqj,bjd->bqd", weight, h)


def convolution(h: Any, mask: Any, rng: Any) -> Any:
    """Over neighbours, after one that takes each position by itself, without padding."""
    return tf.nn.conv1d(tf.nn.conv1d(h, weights(rng, 1, D, D), 1, "VALID"), weights(rng, 3, D, D), 1, "SAME")


def summed_up(h: Any, mask: Any, rng: Any) -> Any:
    return tf.cumsum(h, 1) * 0.1


def gated(h: Any, mask: Any, rng: Any) -> Any:
    """By what all positions have: a mean without a mask, and the largest and the product of something."""
    of_all = tf.reduce_mean(h, 1, keepdims=True) + tf.reduce_max(h, [1, 2], keepdims=True)
    return h * tf.sigmoid(of_all) + tf.reduce_prod(tf.tanh(h), 1, keepdims=True)


def history(h: Any, mask: Any, rng: Any) -> Any:
    """As DIN attends to a history: beside a row of its own, repeated, where nothing may be masked in a row at all."""
    target = tf.reshape(tf.tile(h[:, 0], [1, sizes(h)[1]]), [-1, sizes(h)[1], D])
    scores = tf.squeeze(tf.nn.relu(tf.concat([target, h, target - h, target * h], -1)) @ weights(rng, 4 * D, 1), -1)
    weight = tf.nn.softmax(tf.where(mask > 0, scores, tf.ones_like(scores) * (-(2.0**32) + 1)))
    return h + tf.matmul(weight[:, None, :], h)


def standardized(h: Any, mask: Any, rng: Any) -> Any:
    """Over the positions: exactly 0 where there is one."""
    mean, variance = tf.nn.moments(h, [1], keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-2)


def loop(h: Any, mask: Any, rng: Any) -> Any:
    """A softmax over the positions in a loop of TensorFlow 1, which goes back by edges that a flat graph has cut."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.nn.softmax(y, 1)), [0, h])[1]
    finally:
        tf.compat.v1.enable_control_flow_v2()


LAYERS: tuple[Layer, ...] = (
    *(dense, norm, places, attention, heads_in_rows, by_einsum, convolution, summed_up, gated, history, standardized),
)
LEAKS: dict[str, tuple[Layer, str]] = {
    "reversed": (lambda h, mask, rng: tf.reverse(h, [1]), "ReverseV2"),
    "sorted": (lambda h, mask, rng: tf.sort(h, 1), "TopKV2"),
    "its length as data": (lambda h, mask, rng: h / tf.cast(sizes(h)[1], tf.float32), "Cast"),
    "shifted": (lambda h, mask, rng: tf.pad(h[:, 1:], [[0, 0], [0, 1], [0, 0]]), "StridedSlice"),
    "a position by number": (lambda h, mask, rng: h + h[:, 2:3], "StridedSlice"),
    "over rows, too": (lambda h, mask, rng: h - tf.reduce_mean(h, [0, 1]), "Mean"),
    "summed from the end": (lambda h, mask, rng: tf.cumsum(h, 1, reverse=True), "Cumsum"),
    "narrow windows without padding": (
        lambda h, mask, rng: tf.pad(tf.nn.conv1d(h, weights(rng, 2, D, D), 1, "VALID"), [[0, 0], [0, 1], [0, 0]]),
        "Conv2D",
    ),
    "every other window": (lambda h, mask, rng: tf.nn.conv1d(h, weights(rng, 3, D, D), 2, "SAME"), "Conv2D"),
    "in a loop": (loop, "Softmax"),
    "of TensorFlow 2": (
        lambda h, mask, rng: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.cumsum(y, 1)), [0, h])[1],
        "Cumsum",
    ),
    "rolled": (lambda h, mask, rng: tf.roll(h, 1, 1), "Roll"),
    "what depends on places alone": (
        lambda h, mask, rng: h * tf.reduce_mean(tf.cast(tf.range(sizes(h)[1]), tf.float32)),
        "Mean",
    ),
    "its neighbours in a reshape": (
        lambda h, mask, rng: tf.reshape(tf.transpose(h, [0, 2, 1]), [-1, sizes(h)[1], D]),
        "Reshape",
    ),
    "chosen by values": (lambda h, mask, rng: h + tf.reduce_sum(tf.boolean_mask(h, mask > 0)), "Where"),
}


def model(folder: Path, layers: tuple[Layer, ...], seed: int = 0) -> Any:
    """A frozen graph with these layers, and all kinds of ends."""
    rng = np.random.default_rng(seed)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, None, D], "x")
        mask = tf.compat.v1.placeholder(tf.float32, [None, None], "mask")
        h = x
        for layer in layers:
            h = layer(h, mask, rng)
        tf.identity(h, "every")
        tf.identity(h[:, 0], "first")
        tf.identity(h[:, -1], "last")
        tf.reduce_mean(h, 1, name="average")
        share = tf.reduce_sum(h * mask[..., None], 1) / tf.maximum(tf.reduce_sum(mask, 1, keepdims=True), 1.0)
        tf.identity(share, "share")
        tf.argmax(h, 1, name="best")
    path = folder / "model.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return msplit.load(path, outputs=["every", "first", "last", "average", "share", "best"])


def run(flat: Any, feeds: dict[str, Any]) -> dict[str, Any]:
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(Path(flat.model.path).read_bytes()), name="")
    with tf.compat.v1.Session(graph=graph) as session:
        return dict(
            zip(
                [end.name for end in flat.outputs],
                session.run([f"{end.name}:0" for end in flat.outputs], {f"{name}:0": feeds[name] for name in feeds}),
                strict=True,
            )
        )


def row(length: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, mask = rng.standard_normal((1, length, D)), rng.integers(0, 2, (1, length))
    return {"x": x.astype(np.float32), "mask": mask.astype(np.float32)}


def same(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, **TOLERANCE)


@given(
    st.lists(st.sampled_from(LAYERS), max_size=3), st.lists(st.integers(1, LONGEST), min_size=1, max_size=4), st.data()
)
@settings(max_examples=examples(12, 300), deadline=None)
def test_rows_of_different_lengths_are_what_each_is_alone(
    tmp_path_factory: pytest.TempPathFactory, layers: list[Layer], sizes: list[int], data: st.DataObject
) -> None:
    """Whatever lies beyond the end of a row, NaN too: rows are joined as they are, ragged."""
    folder, seed = tmp_path_factory.mktemp("model"), data.draw(st.integers(0, 1000))
    flat = model(folder, tuple(layers), seed)
    (folder / "made").mkdir()
    proof = lengths.positions_of(flat, LONGEST, {})
    made, name = with_lengths(flat, proof, folder / "made")
    rows = [row(size, seed + number) for number, size in enumerate(sizes)]
    fill = data.draw(st.sampled_from([0.0, 3e38, np.inf, np.nan]))
    padded = {key: np.full((len(rows), LONGEST, *rows[0][key].shape[2:]), fill, np.float32) for key in rows[0]}
    for number, (one, size) in enumerate(zip(rows, sizes, strict=True)):
        for key, value in one.items():
            padded[key][number, :size] = value[0]
    found = run(made, {**padded, name: np.asarray(sizes, np.int32)})
    assert proof.outputs == {"every": (1,)}
    for number, (one, size) in enumerate(zip(rows, sizes, strict=True)):
        for key, expected in run(flat, one).items():
            got = found[key][number : number + 1]
            same(got[:, :size] if key == "every" else got, expected)


def test_the_last_position_keeps_the_sign_of_zero(tmp_path: Path) -> None:
    flat = model(tmp_path, ())
    (tmp_path / "made").mkdir()
    made, name = with_lengths(flat, lengths.positions_of(flat, LONGEST, {}), tmp_path / "made")
    feeds = {"x": np.full((2, LONGEST, D), -0.0, np.float32), "mask": np.ones((2, LONGEST), np.float32)}
    assert np.signbit(run(made, {**feeds, name: np.asarray([3, LONGEST], np.int32)})["last"]).all()


@pytest.mark.parametrize("name", LEAKS)
def test_what_mixes_positions_otherwise_is_refused_by_name(tmp_path: Path, name: str) -> None:
    leak, op = LEAKS[name]
    with pytest.raises(MsplitError, match="can not be padded") as refused:
        lengths.positions_of(model(tmp_path, (dense, leak)), LONGEST, {})
    assert any(op in one for one in refused.value.details), refused.value.details


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model(tmp_path_factory.mktemp("model"), (places, attention, norm, history))


@pytest.fixture(scope="module", params=["prepared", "build"])
def runner(flat: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param == "build":
        path = tmp_path_factory.mktemp("build") / "build"
        made = msplit.build(flat, path, batches=[1, 4], lengths=[LONGEST, 3], **SIMULATED)
        assert [(one.batch, one.inputs["x"][:2]) for one in made.manifest.rungs] == [
            *((1, (1, 3)), (4, (4, 3)), (1, (1, 8)), (4, (4, 8))),
        ]
        assert [command for command, _ in build_document(made).following] == ["msplit bench", "msplit serve"]
        with msplit.open(path) as opened:
            yield opened
    else:
        with msplit.prepare(flat, batch=2, lengths=[3, LONGEST], **SIMULATED) as prepared:
            assert [check.against for check in prepared.checks if "lengths" in check.against] == [
                *("TensorFlow at lengths 1, 2, 3", "TensorFlow at lengths 1, 4, 6, 8"),
            ]
            yield prepared


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8])
def test_any_rows_of_any_length(flat: Any, runner: Any, length: int) -> None:
    for rows in (0, 1, 3, 9):
        some = [row(length, 100 * rows + number) for number in range(rows)] or [row(length, 0)]
        feeds = {name: np.concatenate([one[name] for one in some])[:rows] for name in ("x", "mask")}
        got, expected = runner.step(feeds), run(flat, feeds)
        for name, value in expected.items():
            assert got[name].shape == value.shape
            same(got[name], value)


def test_what_is_no_length(runner: Any) -> None:
    x, mask = row(LONGEST + 1, 0).values()
    with pytest.raises(EngineError, match="rows are 9 long, and lengths up to 8 were prepared"):
        runner(x=x, mask=mask)
    for feeds in (
        {"x": x[:, :0], "mask": mask[:, :0]},
        {"x": x[:, :2], "mask": mask[:, :3]},
        {"x": x[:, :3], "mask": 1.0},
    ):
        with pytest.raises(EngineError, match="rows"):
            runner.step(feeds)
    with pytest.raises(EngineError):
        runner.step({"x": x[:, :3], "lengths": np.ones(1, np.int32)})
    with pytest.raises(EngineError, match="float64"):
        runner(x=x[:, :3].astype(np.float64), mask=mask[:, :3])
    with pytest.raises(EngineError, match="input x has masked values"):
        runner(x=np.ma.masked_array(x[:, :2], mask=x[:, :2] > 0), mask=mask[:, :2])


def test_a_leak_that_the_proof_misses_is_caught(flat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = lengths.positions_of(flat, LONGEST, {})
    for op, fill in (("Mean", lengths.MEAN), ("Softmax", lengths.LOWEST)):
        kept = {at: mask for at, mask in proof.masks.items() if mask.fill != fill}
        monkeypatch.setattr("msplit.run.prepare.positions_of", lambda *_, kept=kept: replace(proof, masks=kept))
        with pytest.raises(EngineError, match="rows that are 1 long give other outputs, padded to 4"):
            msplit.prepare(flat, lengths=[4], **SIMULATED)
        assert op in lengths.about_lengths(flat)


def test_what_cancels_and_what_nobody_reads(tmp_path: Path) -> None:
    """Of equal values the variance is 0 in one order of sums and 1e-14 in another. An input that no output reads stays one."""

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, None, D], "x")
        tf.compat.v1.placeholder(tf.float32, [None, None], "mask")
        tiled = tf.reshape(tf.tile(x[:, 0], [1, sizes(x)[1]]), [-1, sizes(x)[1], D])
        tf.identity(tf.nn.moments(tiled, [1])[1], "out")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    flat = msplit.load(tmp_path / "model.pb", inputs=["x", "mask"], outputs=["out"])
    with msplit.prepare(flat, lengths=[13, 100], batch=2, **SIMULATED) as runner:
        assert runner.inputs.keys() == {"x", "mask"}
        assert np.abs(runner.step(row(57, 1))["out"]).max() < 1e-12


def test_what_lengths_do_not_go_with(flat: Any, tmp_path: Path) -> None:
    with pytest.raises(MsplitError, match="lengths excludes"):
        msplit.prepare(flat, lengths=[4], improve=True, **SIMULATED)
    with pytest.raises(MsplitError, match="lengths excludes shared"):
        msplit.build(flat, tmp_path / "build", lengths=[4], shared=["mask"], **SIMULATED)
    with pytest.raises(MsplitError, match="length"):
        msplit.prepare(flat, lengths=[0], **SIMULATED)
    with pytest.raises(MsplitError, match="no input leaves the length"):
        msplit.prepare(flat, lengths=[4], shapes={"x": (1, 4, D), "mask": (1, 4)}, **SIMULATED)
