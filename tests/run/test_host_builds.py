"""Builds of models that are fed strings: opened without TensorFlow, they give its answers."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.inputs.reference import Reference, load_reference, save_reference
from tests import forked
from tests.string_models import MODELS, strings

pytest.importorskip("torch")
pytestmark = pytest.mark.tf

QUICK: dict[str, Any] = {"engine": "cuda", "device": "cpu", "effort": "fast", "streams": 1}
PARTS = (8, 1, 3)
"""Rows of the steps that are held against TensorFlow's; the last fill up a bucket, where rows are independent."""

OPEN = """
import sys
from tests.without_tensorflow import block
block()
import numpy as np, msplit
from pathlib import Path
from msplit.inputs.reference import Reference, load_reference, save_reference
folder = Path(sys.argv[1])
with msplit.open(folder / "build") as model:
    for asked in sorted(folder.glob("asked_*.npz")):
        save_reference(folder / asked.name.replace("asked", "given"), Reference({}, model.step(load_reference(asked).feeds), ""))
assert not {"tensorflow", "keras"} & set(sys.modules)
"""


def answers(path: Path, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """TensorFlow's own."""
    import tensorflow as tf

    asked = {
        name: tf.constant(value.tolist(), tf.string, value.shape) if value.dtype == object else tf.constant(value)
        for name, value in feeds.items()
    }
    return {name: value.numpy() for name, value in _loaded(path).signatures["serving_default"](**asked).items()}


@functools.cache
def _loaded(path: Path) -> Any:
    import tensorflow as tf

    return tf.saved_model.load(str(path))


Opened = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Gives the folder of a model that is built, opened in a process without TensorFlow, and asked there; and what it is asked."""

    @functools.cache
    def one(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        feeds = MODELS[name](folder / "model")
        msplit.build(str(folder / "model"), folder / "build", batches=[1, 8], **QUICK)
        for rows in PARTS if rows_are_independent(folder) else PARTS[:2]:
            few = {key: value[:rows] for key, value in feeds.items()}
            save_reference(folder / f"asked_{rows}.npz", Reference(few, {}, ""))
        (folder / "vocabulary.txt").unlink(missing_ok=True)
        command = [sys.executable, "-c", OPEN, str(folder)]
        done = forked.run(command, server=forked.ENGINE, quick=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return folder, feeds

    return one


def rows_are_independent(folder: Path) -> bool:
    return json.loads((folder / "build" / "manifest.json").read_text())["rows"] is not None


@pytest.fixture
def one(name: str, opened: Opened) -> tuple[Path, Any]:
    return opened(name)


@pytest.mark.parametrize("name", MODELS)
def test_a_build_gives_tensorflows_answers_without_tensorflow(name: str, one: tuple[Path, Any]) -> None:
    """Unknown words, empty strings, bytes that are no UTF-8, missing features, features of another number of values."""
    folder, feeds = one
    given = sorted(folder.glob("given_*.npz"))
    proved = name not in ("ranking", "ragged")  # the longest row's width, and rows of other numbers of values, mix rows
    assert len(given) == 2 + proved
    for path in given:
        few = {key: value[: int(path.stem.partition("_")[2])] for key, value in feeds.items()}
        expected, found = answers(folder / "model", few), load_reference(path).outputs
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6)


def test_vocabularies_are_hashed_data_of_the_build(opened: Opened) -> None:
    folder, _ = opened("estimator")
    manifest = json.loads((folder / "build" / "manifest.json").read_text())
    (graph,) = [name for name in manifest["files"] if name.startswith("host-")]
    data = (folder / "build" / graph).read_bytes()
    assert b"green" in data, "the vocabulary's file is not asked for again"
    try:
        (folder / "build" / graph).write_bytes(data.replace(b"green", b"grean"))
        with pytest.raises(msplit.LoadError, match="is not what was built"):
            msplit.open(folder / "build")
    finally:
        (folder / "build" / graph).write_bytes(data)


def test_a_build_takes_no_values_where_the_hosts_part_has_others(tmp_path: Path) -> None:
    """The host looks words up in a table of its own: half of the new values with half of the old ones would be neither model."""
    import tensorflow as tf

    for version, (table, weight) in enumerate(((1.0, 1.0), (1.0, 2.0), (3.0, 2.0))):
        module = tf.Module()
        module.table, module.weight = tf.Variable(tf.fill([8, 2], table)), tf.Variable(tf.fill([2, 1], weight))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "text")])
        def score(text: Any, module: Any = module) -> dict[str, Any]:
            ids = tf.ragged.map_flat_values(
                lambda word: tf.strings.to_hash_bucket_fast(word, 8), tf.strings.split(text)
            )
            rows = tf.ragged.map_flat_values(lambda some: tf.gather(module.table, some), ids)
            return {"score": tf.reduce_sum(rows, axis=1) @ module.weight}

        tf.saved_model.save(module, str(tmp_path / f"model_{version}"), signatures=score)
        msplit.build(str(tmp_path / f"model_{version}"), tmp_path / f"build_{version}", batches=[1, 4], **QUICK)
    with msplit.open(tmp_path / "build_0") as model:
        for given, expected in (({}, 4.0), ({"source": tmp_path / "build_1"}, 8.0)):
            if given:
                model.update(**given)
            assert model.step({"text": strings(b"a b")})["score"].tolist() == [[expected]]
        with pytest.raises(msplit.EngineError, match="the part that the host runs has other values"):
            model.update(tmp_path / "build_2")
        assert model.step({"text": strings(b"a b")})["score"].tolist() == [[8.0]]


def test_what_tensorflow_refuses_is_refused(opened: Opened) -> None:
    folder, feeds = opened("estimator")
    with msplit.open(folder / "build", verify=False) as model:
        one = {"examples": feeds["examples"][:1]}
        with pytest.raises(
            msplit.EngineError, match="ParseExampleV2 can not take these values: feature price is required"
        ):
            model.step({"examples": strings(b"")})
        with pytest.raises(msplit.EngineError, match="could not parse example 0"):
            model.step({"examples": strings(b"no example")})
        with pytest.raises(msplit.EngineError, match="input examples is string, not float64"):
            model.step({"examples": np.zeros(1)})
        with pytest.raises(msplit.EngineError, match="input examples is given a list, not an array"):
            model.step({"examples": [b""]})
        with pytest.raises(msplit.EngineError, match="holds a NoneType"):
            model.step({"examples": np.array([None], object)})
        with pytest.raises(msplit.EngineError, match="examples has a text that UTF-8 can not have"):
            model.step({"examples": np.array(["\ud800"])})
        assert model.step(one).keys() == {"score"}
        assert model.step({"examples": np.array([feeds["examples"][4].decode()])}).keys() == {"score"}, "text is UTF-8"


def test_an_op_that_only_tensorflow_has_is_named_and_runs_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.string, [None], name="x")
        table = tf.constant(np.arange(12, dtype=np.float32).reshape(4, 3))
        ids = tf.strings.length(tf.strings.unicode_transcode(x, "UTF-8", "UTF-16-BE", name="wide")) % 4
        tf.tanh(tf.gather(table, ids), name="y")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    built = msplit.build(tmp_path / "model.pb", tmp_path / "build", batches=[3], **QUICK)
    (note,) = [note for note in built.manifest.notes if "must be installed" in note]
    assert "UnicodeTranscode (wide" in note
    words = strings(b"a", b"", "äöü".encode())
    with msplit.open(tmp_path / "build") as model:
        np.testing.assert_allclose(
            model.step({"x": words})["y"], np.tanh(np.arange(12.0).reshape(4, 3))[[2, 0, 2]], rtol=1e-6
        )
    monkeypatch.setattr("msplit.engines.tensorflow.frozen.tensorflow", missing)
    with pytest.raises(msplit.EngineError, match=r"TensorFlow is not installed.*UnicodeTranscode"):
        msplit.open(tmp_path / "build")


def missing() -> Any:
    raise msplit.EngineError("TensorFlow is not installed, and this needs it", fix="install it")


def test_data_that_the_model_reads_itself_is_in_no_build(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        read = v1.data.make_one_shot_iterator(tf.data.Dataset.range(100)).get_next()
        tf.add(v1.placeholder(tf.float32, [2], name="x"), tf.cast(read, tf.float32), name="y")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with pytest.raises(msplit.EngineError, match="a build can not hold what the host runs"):
        msplit.build(tmp_path / "model.pb", tmp_path / "build", **QUICK)
    assert not (tmp_path / "build").exists()


def test_assertions_are_in_the_build(tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.string, [None], name="x")
        with tf.control_dependencies([v1.assert_none_equal(x, "forbidden", message="not that")]):
            ids = tf.strings.to_hash_bucket_fast(x, 4)
        tf.tanh(tf.gather(tf.constant(np.arange(12, dtype=np.float32).reshape(4, 3)), ids), name="y")
    (tmp_path / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
    msplit.build(tmp_path / "model.pb", tmp_path / "build", batches=[2], **QUICK)
    with msplit.open(tmp_path / "build") as model:
        assert model.step({"x": strings(b"a", b"b")})["y"].shape == (2, 3)
        with pytest.raises(msplit.EngineError, match="not that"):
            model.step({"x": strings(b"a", b"forbidden")})


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("kind", ["mutable", "dense"])
def test_a_build_holds_a_table_that_can_grow(kind: str, width: int, tmp_path: Path) -> None:
    """Keys that it does not have get the default, be they outside of its type's usual range."""
    import tensorflow as tf

    chance, module, tables = np.random.default_rng(0), tf.Module(), tf.lookup.experimental
    shape = [width] if width else []
    if kind == "mutable":
        module.table = tables.MutableHashTable(tf.int64, tf.float32, tf.zeros(shape))
    else:
        module.table = tables.DenseHashTable(tf.int64, tf.float32, tf.ones(shape), empty_key=-1, deleted_key=-2)
    module.table.insert(
        tf.range(0, 50, 5, tf.int64), tf.constant(chance.standard_normal((10, *shape)).astype(np.float32))
    )

    def read(ids: Any) -> Any:
        return {"y": 2.0 * module.table.lookup(ids)}

    inputs = [tf.TensorSpec([None], tf.int64, name="ids")]
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=tf.function(read, input_signature=inputs))
    built = msplit.build(str(tmp_path / "model"), tmp_path / "build", batches=[4], **QUICK)
    assert not any("must be installed" in note for note in built.manifest.notes)
    feeds = {"ids": np.array([0, 45, 7, -(2**63)])}
    with msplit.open(tmp_path / "build") as model:
        np.testing.assert_array_equal(model.step(feeds)["y"], answers(tmp_path / "model", feeds)["y"])
