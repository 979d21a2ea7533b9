"""Any number of rows through a runner: cut, filled up and joined where rows are independent, refused by name where they are not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msplit
from msplit.errors import EngineError
from tests.campaign import examples

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf

SIMULATED = {"streams": (2,), "engine": "cuda", "device": "cpu", "effort": "fast", "batch": 4}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def placeholder(name: str, *shape: int | None, dtype: Any = None) -> Any:
    return tf.compat.v1.placeholder(dtype or tf.float32, shape, name)


def towers() -> None:
    """Of inputs `scale` has no rows, of outputs `twice` and `known` have none; of `pairs` two entries belong to a row."""
    rng = np.random.default_rng(0)
    x, ids, scale = placeholder("x", None, 3), placeholder("ids", None, dtype=tf.int64), placeholder("scale")
    table = tf.constant(rng.standard_normal((10, 4)).astype(np.float32))
    hidden = tf.nn.relu(x @ tf.constant(rng.standard_normal((3, 4)).astype(np.float32)) + tf.gather(table, ids))
    tf.identity(hidden * scale, "y")
    tf.reshape(hidden, [-1, 2], "pairs")
    tf.argmax(hidden, axis=1, name="best")
    tf.multiply(scale, 2.0, "twice")
    tf.constant([1.0, 2.0, 3.0], name="known")


OUTPUTS = ("y", "pairs", "best", "twice", "known")


def mixing() -> None:
    x = placeholder("x", None, 3)
    tf.identity(x - tf.reduce_mean(x, axis=0, name="over_the_batch"), "y")


def dropout() -> None:
    x = placeholder("x", None, 3)
    tf.multiply(x, tf.random.uniform(tf.shape(x), seed=3, name="drawn"), "y")


def counting() -> None:
    x = placeholder("x", None, 3)
    tf.shape(x, name="rows")
    tf.identity(x * 2.0, "y")


def loaded(build: Any, folder: Path, outputs: tuple[str, ...] = ("y",)) -> Any:
    with tf.Graph().as_default() as graph:
        build()
    path = folder / f"{build.__name__}.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return msplit.load(path, outputs=list(outputs))


def feeds_of(rows: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, 3)).astype(np.float32),
        "ids": rng.integers(0, 10, rows),
        "scale": np.float32(rng.uniform(0.5, 2.0)),
    }


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(towers, tmp_path_factory.mktemp("models"), OUTPUTS)


@pytest.fixture(scope="module")
def session(flat: Any) -> Any:
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(Path(flat.model.path).read_bytes()), name="")
    session = tf.compat.v1.Session(graph=graph)

    def run(feeds: dict[str, Any]) -> dict[str, Any]:
        values = session.run([f"{name}:0" for name in OUTPUTS], {f"{name}:0": value for name, value in feeds.items()})
        return dict(zip(OUTPUTS, values, strict=True))

    return run


@pytest.fixture(scope="module", params=["prepared", "build", "one batch", "two GPUs", "tensorflow"])
def runner(flat: Any, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    batches = {"build": [1, 4], "one batch": [4]}.get(request.param)
    if batches is not None:
        path = tmp_path_factory.mktemp("build") / "build"
        options = {name: value for name, value in SIMULATED.items() if name != "batch"}
        msplit.build(flat, path, batches=batches, **options)
        made = msplit.open(path)
    else:
        more = {"two GPUs": {"devices": (0, 1)}, "tensorflow": {"engine": "tensorflow"}}.get(request.param, {})
        made = msplit.prepare(flat, **{**SIMULATED, **more})
    with made:
        yield made


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype), name
        np.testing.assert_allclose(found[name], value, **TOLERANCE, err_msg=name)


@settings(max_examples=examples(8, 300), deadline=None)
@given(rows=st.lists(st.integers(0, 12), min_size=1, max_size=4))
def test_any_number_of_rows_gives_what_tensorflow_gives(runner: Any, session: Any, rows: list[int]) -> None:
    for seed, count in enumerate(rows):
        feeds = feeds_of(count, seed)
        same(runner.step(feeds), session(feeds))


def test_parts_are_equal_to_the_bit_to_steps_of_the_batch(runner: Any) -> None:
    feeds = feeds_of(12)
    parts = [runner.step({**feeds, **{name: feeds[name][at : at + 4] for name in ("x", "ids")}}) for at in (0, 4, 8)]
    whole = runner(**feeds)
    for name in ("y", "pairs", "best"):
        np.testing.assert_array_equal(whole[name], np.concatenate([part[name] for part in parts]))


def test_outputs_are_the_callers_own(runner: Any) -> None:
    first = runner.step(feeds_of(9))
    kept = {name: value.copy() for name, value in first.items()}
    runner.step(feeds_of(9, 1))
    same(first, kept)
    for value in first.values():
        value[...] = 0
    same(runner.step(feeds_of(9)), kept)


def test_rows_on_the_device_and_steps_that_are_told_ahead(runner: Any, session: Any) -> None:
    if runner.engine == "tensorflow":
        with pytest.raises(EngineError, match="on the host"):
            runner.step(feeds_of(9), on_device=True)
        return
    for rows in (0, 3, 9):
        feeds = feeds_of(rows, rows)
        given = {name: torch.from_numpy(np.array(value)) for name, value in feeds.items()}
        outputs = runner.step(given, on_device=True)
        same({name: np.asarray(value) for name, value in outputs.items()}, session(feeds))
    fed = [feeds_of(rows, number) for number, rows in enumerate((4, 9, 4, 4, 0, 1, 4))]
    for feeds, then in itertools.pairwise(fed):
        same(runner.step(feeds, then=then), session(feeds))
    called: list[int] = []
    for rows in (0, 9):
        runner.step(feeds_of(rows), then=lambda: called.append(1))
    assert called == [1, 1]


def test_inputs_that_do_not_fit_are_refused(runner: Any) -> None:
    right = feeds_of(9)
    for wrong, words in (
        ({**right, "ids": right["ids"][:8]}, "inputs have different numbers of rows|was prepared as"),
        ({**right, "x": right["x"][:, :2]}, "input x was prepared as"),
        ({**right, "x": right["x"].astype(np.float64)}, "input x was prepared as"),
        ({**right, "scale": np.ones(9, np.float32)}, "input scale was prepared as"),
        ({"x": right["x"], "scale": right["scale"]}, "no value for input ids"),
        ({"scale": right["scale"]}, "no value for input (x|ids)"),
        ({**right, "x": right["x"].tolist()}, "input x is given a list, not an array"),
        ({**right, "x": None, "ids": {"ids": 1}}, "input (x is given a NoneType|ids is given a dict), not an array"),
        ({**right, "x": np.float32(1), "ids": np.int64(1)}, "input (x|ids) was prepared as"),
        ([right["x"]], "inputs are given by name, not as a list"),
    ):
        with pytest.raises(EngineError, match=words):
            runner.step(wrong)
    assert len(runner.step(right)["y"]) == 9


@pytest.mark.parametrize(
    ("build", "outputs", "words"),
    [
        (mixing, ("y",), r"over_the_batch.*Mean|Mean.*over_the_batch"),
        (dropout, ("y",), "draws other random numbers"),
        (counting, ("y", "rows"), "output 'rows'.*number of rows"),
    ],
    ids=["mean", "dropout", "shape"],
)
def test_where_rows_depend_on_each_other_the_op_is_named(build: Any, outputs: Any, words: str, tmp_path: Path) -> None:
    flat = loaded(build, tmp_path, outputs)
    with msplit.prepare(flat, **SIMULATED) as runner:
        for rows in (0, 3, 9):
            with pytest.raises(EngineError, match=rf"(?s)was prepared as.*{words}.*fix: .*prepare one per shape"):
                runner.step({"x": np.ones((rows, 3), np.float32)})
        assert len(runner.step({"x": np.ones((4, 3), np.float32)})["y"]) == 4
    pooled = {name: value for name, value in SIMULATED.items() if name != "batch"}
    with (
        msplit.pool(flat, **pooled, groups=1, batches=[4]) as pool,
        pytest.raises(EngineError, match=rf"(?s)none of the batches that are ready \(4\).*{words}.*fix: .*--batch"),
    ):
        pool.step({"x": np.ones((9, 3), np.float32)})
