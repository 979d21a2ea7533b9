"""A compiled function gives what the original gives, in its structure, for whatever it is called with."""

from __future__ import annotations

import gc
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.errors import MsplitError
from msplit.run import function

pytestmark = pytest.mark.tf

ROOT = Path(__file__).parents[2]
SIMULATED = {"engine": "cuda", "device": "cpu"}


@pytest.fixture(scope="module")
def tf() -> Any:
    from msplit.engines.tensorflow.runtime import tensorflow

    return tensorflow()


@pytest.fixture(scope="module")
def keras_model(tf: Any) -> Any:
    """Two inputs and two outputs, by name, and branches between them."""
    import keras

    keras.utils.set_random_seed(3)
    user, item = keras.Input((6,), name="user"), keras.Input((4,), name="item")
    towers = [keras.layers.Dense(8, "relu")(part) for part in (user, item)]
    both = keras.layers.Concatenate()(towers)
    outputs = {"click": keras.layers.Dense(1, "sigmoid")(both), "like": keras.layers.Dense(2)(both)}
    return keras.Model({"user": user, "item": item}, outputs)


def arrays(rows: int, seed: int = 0) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    return {
        "user": chance.standard_normal((rows, 6), np.float32),
        "item": chance.standard_normal((rows, 4), np.float32),
    }


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_keras_model_gives_its_outputs_by_name(keras_model: Any) -> None:
    with msplit.compile(keras_model, **SIMULATED, streams=4) as fast:
        for seed in range(3):
            given = arrays(5, seed)
            found, wanted = fast(given), keras_model(given)
            assert list(found) == list(wanted)
            assert all(isinstance(value, np.ndarray) for value in found.values())
            for name, value in found.items():
                close(value, wanted[name])
        (runner,) = fast.runners
        assert runner.checks
        assert "sets of shapes that are ready: 1" in repr(fast)


def test_gpus_share_the_rows_of_a_function(tf: Any, keras_model: Any) -> None:
    """What is as long as the first argument is cut; an array of another length, and a scalar, are everybody's."""
    asked = {"engine": "cuda", "device": "cpu", "effort": "fast", "devices": (0, 1)}

    def scaled(x: Any, weights: Any, scale: Any) -> Any:
        return {"y": tf.matmul(x, weights) * scale, "best": tf.reduce_max(x, axis=-1)}

    chance = np.random.default_rng(0)
    x, weights = chance.standard_normal((7, 3), np.float32), chance.standard_normal((3, 2), np.float32)
    with msplit.compile(scaled, **asked, streams=2) as fast:
        found = fast(x, weights, np.float32(2))
        close(found["y"], x @ weights * 2)
        close(found["best"], x.max(axis=1))
        (runner,) = fast.runners
        assert runner.facts["step_rows"] == 4

    def mixing(x: Any) -> Any:
        return x - tf.reduce_mean(x, axis=0)

    with msplit.compile(mixing, **asked) as fast, pytest.raises(MsplitError, match="2 devices can not share a step"):
        fast(x)


def test_a_shape_that_is_new_is_prepared_and_the_oldest_goes(keras_model: Any) -> None:
    with msplit.compile(keras_model, **SIMULATED, most=2) as fast:
        for rows in (1, 3, 1, 7):
            given = arrays(rows)
            close(fast(given)["like"], keras_model(given)["like"])
        sizes = [runner.inputs[next(iter(runner.inputs))][1][0] for runner in fast.runners]
        assert sizes == [1, 7], "3 was not called for longest"
    assert fast.runners == ()


def test_structures_of_arguments_and_results_are_kept(tf: Any) -> None:
    @tf.function
    def nested(pair: Any, *, scale: Any) -> Any:
        first, second = pair
        return {"sum": first + second, "more": [tf.matmul(first, second), (scale * first,)]}, tf.reduce_mean(second)

    pair = (np.eye(3, dtype=np.float32), np.arange(9, dtype=np.float32).reshape(3, 3))
    scale = np.float32(2)
    with msplit.compile(nested, **SIMULATED) as fast:
        found, wanted = fast(pair, scale=scale), nested(pair, scale=scale)
        tf.nest.assert_same_structure(found, wanted)
        for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
            close(one, other)


def test_nothing_in_a_result_stays_nothing(tf: Any) -> None:
    with msplit.compile(lambda x: {"none": None, "one": x + 1.0, "more": [None, x]}, **SIMULATED) as fast:
        found = fast(np.ones((2,), np.float32))
        assert found["none"] is None
        assert found["more"][0] is None
        close(found["one"], [2.0, 2.0])
        close(found["more"][1], [1.0, 1.0])


def test_numbers_of_another_byte_order_are_numbers(tf: Any) -> None:
    with msplit.compile(lambda x: x + 1.0, **SIMULATED) as fast:
        close(fast(np.arange(3, dtype=">f4")), [1.0, 2.0, 3.0])
        close(fast(np.arange(3, dtype="<f4")), [1.0, 2.0, 3.0])
        assert len(fast.runners) == 1


@pytest.mark.parametrize("kind", ["RaggedTensor", "SparseTensor"])
def test_an_argument_that_is_no_array_is_named(tf: Any, kind: str) -> None:
    dense = tf.constant([[1.0, 0.0]])
    given = tf.RaggedTensor.from_tensor(dense) if kind == "RaggedTensor" else tf.sparse.from_dense(dense)
    with (
        msplit.compile(lambda x: x, **SIMULATED) as fast,
        pytest.raises(MsplitError, match=f"an argument is a {kind}, of which there is no array"),
    ):
        fast(given)


def test_tensors_in_tensors_out_and_what_speaks_dlpack(tf: Any, keras_model: Any) -> None:
    """Where streams are simulated, tensors in the host's memory are those that are on the device."""
    torch = pytest.importorskip("torch")
    given = arrays(2)
    wanted = keras_model(given)
    others = {name: torch.from_numpy(value) for name, value in given.items()}
    with msplit.compile(keras_model, **SIMULATED) as fast:
        for call, kind in (
            (given, np.ndarray),
            ({name: tf.constant(value) for name, value in given.items()}, tf.Tensor),
            ({name: tf.Variable(value) for name, value in given.items()}, tf.Tensor),
            (others, torch.Tensor),
            ({**given, "item": others["item"]}, torch.Tensor),
            ({"user": tf.constant(given["user"]), "item": others["item"]}, tf.Tensor),
        ):
            found = fast(call)
            assert list(found) == list(wanted)
            for name, value in found.items():
                assert isinstance(value, kind)
                close(value, wanted[name])
        assert len(fast.runners) == 1


def test_tensors_of_other_libraries_come_back_as_theirs(tf: Any) -> None:
    torch = pytest.importorskip("torch")

    class Space:
        @staticmethod
        def from_dlpack(tensor: Any) -> Any:
            return Tensor(torch.from_dlpack(tensor))

    class Tensor:
        def __init__(self, tensor: Any) -> None:
            self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), np.dtype("float32")

        def __array_namespace__(self) -> Any:
            return Space

        def __dlpack__(self, **asked: Any) -> Any:
            return self.tensor.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    with msplit.compile(lambda x: {"twice": x + x, "shape": tf.shape(x)}, **SIMULATED) as fast:
        found = fast(Tensor(torch.ones(2, 3)))
        assert isinstance(found["twice"], Tensor)
        close(found["twice"].tensor, np.full((2, 3), 2))
        close(found["shape"].tensor, [2, 3])


def test_tensors_in_the_hosts_memory_are_arrays_to_a_gpu(tf: Any) -> None:
    torch = pytest.importorskip("torch")
    request = {"engine": "tensorflow"}
    with msplit.compile(lambda x: tf.cast(x, tf.float32) * 2.0, **request) as fast:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
            found = fast(torch.ones(3).to(dtype))
            assert isinstance(found, np.ndarray)
            close(found, [2, 2, 2])


def test_what_is_no_array_is_part_of_the_function(tf: Any) -> None:
    def scaled(x: Any, twice: bool = False, name: str | None = None) -> Any:
        return x * 2.0 if twice else x * 1.0

    x = np.ones((2, 2), np.float32)
    with msplit.compile(scaled, **SIMULATED) as fast:
        close(fast(x), x)
        close(fast(x, True), 2 * x)
        close(fast(x, twice=True, name="a"), 2 * x)
        assert len(fast.runners) == 3


def test_weights_that_were_assigned_since_are_taken_over(tf: Any) -> None:
    weight = tf.Variable(np.full((3, 2), 2.0, np.float32))

    @tf.function
    def product(x: Any) -> Any:
        return x @ weight

    x = np.ones((1, 3), np.float32)
    with msplit.compile(product, **SIMULATED) as fast:
        close(fast(x), [[6.0, 6.0]])
        weight.assign(weight * 2.0)
        close(fast(x), [[6.0, 6.0]])
        fast.refresh()
        close(fast(x), [[12.0, 12.0]])


def test_a_saved_model_is_called_by_the_names_of_its_signature(tf: Any, tmp_path: Any) -> None:
    module = tf.Module()
    module.weight = tf.Variable(np.eye(3, dtype=np.float32) * 3.0)
    spec = tf.TensorSpec([None, 3], tf.float32, name="x")
    serve = tf.function(lambda x: {"y": x @ module.weight}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=serve)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    x = np.ones((2, 3), np.float32)
    with msplit.compile(loaded, **SIMULATED) as fast:
        close(fast(x=x)["y"], 3 * x)
        close(fast(x)["y"], 3 * x)
    with msplit.compile(serve.get_concrete_function(), **SIMULATED) as fast:
        close(fast(x)["y"], 3 * x)


@pytest.mark.parametrize("kind", [object, str])
def test_words_go_through_a_table(tf: Any, kind: Any) -> None:
    import keras

    words, numbers = keras.Input((2,), dtype="string"), keras.Input((3,))
    ids = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words)
    embedded = keras.layers.Flatten()(keras.layers.Embedding(5, 4)(ids))
    model = keras.Model([words, numbers], [embedded, keras.layers.Dense(2)(numbers)])
    given = [np.array([["a", "c"], ["z", "b"]], kind), np.ones((2, 3), np.float32)]
    with msplit.compile(model, **SIMULATED) as fast:
        for found, wanted in zip(fast(given), model([tf.constant(one) for one in given]), strict=True):
            close(found, wanted)


def test_the_original_answers_until_another_shape_is_ready(tf: Any) -> None:
    calls = []

    @tf.function
    def double(x: Any) -> Any:
        return x + x

    def told(x: Any) -> Any:
        calls.append(type(x))
        return double(x)

    x = np.ones((4,), np.float32)
    with msplit.compile(told, **SIMULATED, fallback="tensorflow") as fast:
        close(fast(x), 2 * x)
        end = time.monotonic() + 60
        while not fast.runners and time.monotonic() < end:
            time.sleep(0.05)
        assert fast.runners
        answered = len(calls)
        close(fast(x), 2 * x)
        assert len(calls) == answered, "the prepared one answers"


def test_what_can_not_be_prepared_goes_on_in_tensorflow_with_a_warning(tf: Any) -> None:
    count = tf.Variable(0.0)

    @tf.function
    def counts(x: Any) -> Any:
        for _ in tf.range(1):
            count.assign_add(1.0)
        return x + count

    x = np.zeros((2,), np.float32)
    with msplit.compile(counts, **SIMULATED) as strict, pytest.raises(MsplitError):
        strict(x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with msplit.compile(counts, **SIMULATED, fallback="tensorflow") as fast:
            before = float(count)
            close(fast(x), x + before + 1)
            next(iter(fast._made.values())).exception(60)
            close(fast(x), x + before + 2)
    assert any("TensorFlow goes on running it" in str(one.message) for one in said)


def test_a_warning_escapes_what_a_model_says_and_is_given_once(tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hostile(*arguments: Any, **named: Any) -> Any:
        raise MsplitError("node 'a\x1b[2J'", fix="::error::b")

    monkeypatch.setattr(function, "prepare_for", hostile)
    x = np.ones((2,), np.float32)
    with msplit.compile(lambda x: x + 1.0, **SIMULATED, fallback="tensorflow") as fast:
        fast(x)
        next(iter(fast._made.values())).exception(60)
        with pytest.warns(RuntimeWarning) as said:
            close([fast(x), fast(x)], [x + 1, x + 1])
    (text,) = (str(one.message) for one in said)
    assert "node 'a" in text
    assert "\x1b" not in text
    assert "\n" not in text


def test_what_is_wrong_is_told_in_words(tf: Any) -> None:
    with pytest.raises(MsplitError, match="a str can not be called"):
        msplit.compile("model.pb")
    with pytest.raises(MsplitError, match="at least one set"):
        msplit.compile(lambda x: x, most=0)
    x = np.ones((2, 2), np.float32)
    with msplit.compile(lambda x: tf.RaggedTensor.from_tensor(x), **SIMULATED) as ragged:
        with pytest.raises(MsplitError, match="gives a RaggedTensor, which is no tensor"):
            ragged(x)
        assert ragged.runners == ()
    with (
        msplit.compile(lambda x: "text", **SIMULATED) as text,
        pytest.raises(MsplitError, match="gives a str, which is no tensor"),
    ):
        text(x)
    with msplit.compile(lambda x: x + 1, **SIMULATED) as fast:
        outer = tf.function(lambda x: fast(x), autograph=False)
        with pytest.raises(MsplitError, match="a tensor has no value yet"):
            outer(x)


def test_the_notebook_runs() -> None:
    book = json.loads((ROOT / "docs" / "examples" / "compile.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in code for line in cell.splitlines() if line.strip()]
    assert len(lines) <= 10
    names: dict[str, Any] = {}
    for cell in code:
        exec(cell, names)
    names["fast"].close()


class Words:
    """A module with a table of words, and what else looks words up."""

    def __init__(self, tf: Any) -> None:
        import keras

        module = tf.Module()
        module.table = table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), 0.0)
        layer = keras.layers.StringLookup(vocabulary=["b", "a"])
        changed = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
        changed.insert(["a"], [5.0])

        class WithMethod(tf.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.table = table

            @tf.function  # type: ignore[untyped-decorator]
            def doubled(self, words: Any) -> Any:
                return self.table.lookup(words) * 2.0

        self.owner = WithMethod()
        self.kinds = {
            "table": tf.function(lambda words: table.lookup(words) * 2.0),
            "layer": tf.function(lambda words: tf.cast(layer(words), tf.float32)),
            "mutable": tf.function(lambda words: changed.lookup(words)),
            "plain": lambda words: table.lookup(words),
            "method": self.owner.doubled,
        }


@pytest.fixture(scope="module")
def words(tf: Any) -> Words:
    return Words(tf)


@pytest.mark.parametrize("kind", ["table", "layer", "mutable", "plain", "method"])
def test_tables_that_a_function_captures_go_with_it(tf: Any, words: Words, kind: str) -> None:
    call, text = words.kinds[kind], tf.constant(["a", "b", "c"])
    with msplit.compile(call, **dict(SIMULATED, effort="fast")) as fast:
        np.testing.assert_allclose(fast(text), call(text))


def test_tables_of_a_loaded_signature_do_while_the_model_is_there(tf: Any, words: Words, tmp_path: Path) -> None:
    spec = tf.TensorSpec([None], tf.string, name="words")
    tf.saved_model.save(
        words.owner, str(tmp_path / "model"), signatures=words.owner.doubled.get_concrete_function(spec)
    )
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    signature, text = loaded.signatures["serving_default"], tf.constant(["a", "b"])
    request = dict(SIMULATED, effort="fast")
    with msplit.compile(signature, **request) as fast:
        np.testing.assert_allclose(fast(words=text)["output_0"], [2.0, 0.0])
    del loaded
    gc.collect()
    with pytest.raises(MsplitError, match="Python object is gone"), msplit.compile(signature, **request) as fast:
        fast(words=text)
