"""Whole models from TensorFlow through analyze, assign and bench, and back into TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.runner import SAMPLES, fine, unchanged

pytestmark = [pytest.mark.tf, pytest.mark.slow]

SAVED_MODELS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=["InceptionV3", "MobileNetV2"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Keras application in full size, exported now, with random weights."""
    import keras

    keras.utils.set_random_seed(7)
    model = getattr(keras.applications, request.param)(weights=None)
    path = tmp_path_factory.mktemp("keras") / request.param
    model.export(path, verbose=False)
    return path


def test_a_keras_application_end_to_end(exported: Path, tmp_path: Path) -> None:
    inception = exported.name == "InceptionV3"
    with unchanged(exported):
        found = fine("analyze", exported, "--format", "json").json
        assert found["model"]["signature"] == "serving_default"
        assert found["unknown_shapes"] == 0
        # Published figures for one image: 5.7 and 0.3 billion multiply-adds.
        assert found["flops"] == pytest.approx(11.5e9 if inception else 0.61e9, rel=0.05)
        assert found["parameters"]["bytes"] == pytest.approx(4 * (23.85e6 if inception else 3.54e6), rel=0.01)
        assert found["suggestion"]["rule_set"] == "vision"
        # 94 and 52 convolutions; what their batch normalizations make of variables is made once, not in every step.
        assert found["nodes"]["kernels"] < (460 if inception else 220)
        text = fine("analyze", exported)
        assert len(text.out.splitlines()) < 60

        rules = found["suggestion"]["rule_set"] or "default"
        done = fine("assign", exported, "--rules", rules, "--streams", "4", "-o", tmp_path / "out", "--format", "json")
        if inception:
            assert sum(load["nodes"] > 0 for load in done.json["loads"]) >= 2
        measured = fine(
            "bench",
            exported,
            *("--streams", "2", "--duration", "0.2", "--builds", "1", "--min-iters", "3", "--format", "json"),
            *("--engine", "tensorflow"),
        ).json
        assert not measured["result"]["failed"]
    shape = (1, 299, 299, 3) if inception else (1, 224, 224, 3)
    image = np.random.default_rng(0).uniform(0, 1, shape).astype(np.float32)
    assert_equal(run(exported, image), run(tmp_path / "out", image))


def run(path: Path, image: np.ndarray) -> dict[str, Any]:
    import tensorflow as tf

    signature = tf.saved_model.load(path).signatures["serving_default"]
    (name,) = signature.structured_input_signature[1]
    return {key: value.numpy() for key, value in signature(**{name: tf.constant(image)}).items()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert np.asarray(one[name]).tobytes() == np.asarray(other[name]).tobytes()


@pytest.mark.parametrize("name", SAVED_MODELS)
def test_tensorflow_runs_what_assign_wrote_and_gives_equal_bits(name: str, tmp_path: Path) -> None:
    import tensorflow as tf

    import msplit
    from msplit.measure.inputs import make_inputs

    tag = ("--tag", "serve") if name == "two_tags" else ()
    fine("assign", SAMPLES / name, *tag, "-o", tmp_path / "out")
    feeds = make_inputs(msplit.load(SAMPLES / name, tags=tag[1:] or None), {}, batch=3, seed=1)
    assert msplit.load(tmp_path / "out", tags=tag[1:] or None).graph.nodes_with("_stream_id")

    def outputs(path: Path) -> dict[str, Any]:
        loaded = tf.saved_model.load(path, tags=["serve"])
        signature = loaded.signatures["serving_default"]
        values = {key: tf.constant(value) for key, value in feeds.items()}
        assert set(values) == set(signature.structured_input_signature[1])
        return {key: value.numpy() for key, value in signature(**values).items()}

    before, after = outputs(SAMPLES / name), outputs(tmp_path / "out")
    assert before.keys() == after.keys()
    assert before
    for key in before:
        assert np.array_equal(before[key], after[key], equal_nan=before[key].dtype.kind == "f")
        assert before[key].dtype == after[key].dtype
