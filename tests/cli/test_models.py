"""Whole models from TensorFlow through analyze, assign and bench, and back into TensorFlow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.campaign import campaign
from tests.cli.runner import SAMPLES, fine, unchanged

pytestmark = [pytest.mark.tf, pytest.mark.slow]

SAVED_MODELS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


@dataclass(frozen=True)
class Expected:
    """A Keras model, and what is known of it: multiply-adds for one image, parameters, and most kernels that it may take."""

    image: int
    multiply_adds: float
    parameters: float
    kernels: int


# Published figures; 94 and 52 convolutions. What their batch normalizations make of variables is made once, not in every step.
MODELS = {
    "InceptionV3": Expected(299, 5.7e9, 23.85e6, 460),
    "MobileNetV2": Expected(224, 0.3e9, 3.54e6, 220),
    "Branches": Expected(
        32, 32 * 32 * 64 * (27 + 64 + 9 + 64), 64 * (27 + 64 + 9 + 64 + 4 + 1 + 1 + 1 + 1) + 129 * 10, 24
    ),
}


def branches() -> Any:
    """A convolution with batch normalization, then a pointwise and a separable one side by side."""
    from keras import layers, models

    start = layers.Input((32, 32, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(64, 3, padding="same")(start)))
    one = layers.Conv2D(64, 1, activation="relu")(x)
    other = layers.Conv2D(64, 1, activation="relu")(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.GlobalAveragePooling2D()(layers.Concatenate()([one, other]))
    return models.Model(start, layers.Dense(10, activation="softmax")(x))


@pytest.fixture(
    scope="module",
    params=["Branches", *(pytest.param(name, marks=campaign) for name in ("InceptionV3", "MobileNetV2"))],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Keras model, exported now, with random weights; in a campaign applications in full size, too."""
    import keras

    keras.utils.set_random_seed(7)
    model = branches() if request.param == "Branches" else getattr(keras.applications, request.param)(weights=None)
    path = tmp_path_factory.mktemp("keras") / request.param
    model.export(path, verbose=False)
    return path


def test_a_keras_model_end_to_end(exported: Path, tmp_path: Path) -> None:
    expected = MODELS[exported.name]
    with unchanged(exported):
        found = fine("analyze", exported, "--format", "json").json
        assert found["model"]["signature"] == "serving_default"
        assert found["unknown_shapes"] == 0
        assert found["flops"] == pytest.approx(2 * expected.multiply_adds, rel=0.05)
        assert found["parameters"]["bytes"] == pytest.approx(4 * expected.parameters, rel=0.01)
        assert found["suggestion"]["rule_set"] == "vision"
        assert found["nodes"]["kernels"] < expected.kernels
        text = fine("analyze", exported)
        assert len(text.out.splitlines()) < 60

        rules = found["suggestion"]["rule_set"] or "default"
        done = fine("assign", exported, "--rules", rules, "--streams", "4", "-o", tmp_path / "out", "--format", "json")
        if exported.name == "InceptionV3":
            assert sum(load["nodes"] > 0 for load in done.json["loads"]) >= 2
        measured = fine(
            "bench",
            exported,
            *(
                "--streams",
                "2",
                "--measure",
                "duration=0.2",
                "--measure",
                "builds=1",
                "--measure",
                "min-iters=3",
                "--format",
                "json",
            ),
            *("--engine", "tensorflow"),
        ).json
        assert not measured["result"]["failed"]
    shape = (1, expected.image, expected.image, 3)
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
    from msplit.inputs.make import make_inputs

    tags = ("serve",) if name == "two_tags" else None
    tag = () if tags is None else ("--part", "tag=serve")
    fine("assign", SAMPLES / name, *tag, "-o", tmp_path / "out")
    feeds = make_inputs(msplit.load(SAMPLES / name, tags=tags), {}, batch=3, seed=1)
    assert msplit.load(tmp_path / "out", tags=tags).graph.nodes_with("_stream_id")

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


OTHERWISE = ("custom_op.pb", "inception_v3_stripped.pb")
"""Has its own test below; is there in full as a Keras application above."""

GRAPHS = sorted(
    path.name for path in SAMPLES.iterdir() if path.suffix in (".pb", ".pbtxt") and path.name not in OTHERWISE
)


@pytest.mark.parametrize("name", GRAPHS)
def test_tensorflow_runs_graphs_that_assign_wrote_and_gives_equal_bits(name: str, tmp_path: Path) -> None:
    import msplit
    from msplit import formats, samples
    from msplit.inputs.make import make_inputs

    fine("assign", SAMPLES / name, "--rules", "auto", "--streams", "3", "-o", tmp_path / "out")
    flat = msplit.load(SAMPLES / name)
    feeds = {
        f"{end.node}:{end.port}": value
        for end, value in zip(flat.model.inputs, make_inputs(flat, {}, batch=3, seed=1).values(), strict=True)
    }
    fetches = [f"{end.node}:{end.port}" for end in flat.model.outputs]

    def outputs(path: Path) -> dict[str, Any]:
        import tensorflow as tf

        graph_def = samples.fill(
            formats.read(path).graph_def
        )  # weights that a small file leaves out come from their recipe
        with tf.Graph().as_default() as graph:
            tf.import_graph_def(tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString()), name="")
            with tf.compat.v1.Session(graph=graph) as session:
                return dict(zip(fetches, session.run(fetches, feeds), strict=True))

    assert msplit.load(tmp_path / "out").graph.nodes_with("_stream_id")
    before = outputs(SAMPLES / name)
    assert all(np.ptp(value) > 0 for value in before.values())
    assert_equal(before, outputs(tmp_path / "out"))


@pytest.mark.parametrize("name", ["training.meta", "training_resource.meta"])
def test_tensorflow_trains_what_assign_wrote_to_equal_bits(name: str, tmp_path: Path) -> None:
    import tensorflow as tf

    v1 = tf.compat.v1
    fine("assign", SAMPLES / name, "-o", tmp_path / "out.meta")
    ids = np.arange(100)
    feeds = {"id_0:0": ids, "id_1:0": ids[::-1], "label:0": (ids % 2)[:, None]}

    def trained(path: Path, start: list[Any] | None) -> tuple[list[Any], list[Any]]:
        """Values of the variables before and after a few steps, from given values or from the graph's own."""
        config = v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        with tf.Graph().as_default() as graph:
            v1.train.import_meta_graph(str(path))
            with v1.Session(graph=graph, config=config) as session:
                session.run(v1.global_variables_initializer())
                for variable, value in zip(v1.global_variables(), start or (), strict=False):
                    variable.load(value, session)
                before = session.run(v1.global_variables())
                for _ in range(5):
                    session.run(v1.get_collection("train_op"), feeds)
                return before, session.run([*v1.global_variables(), "loss/value:0"], feeds)

    start, expected = trained(SAMPLES / name, None)
    _, found = trained(tmp_path / "out.meta", start)
    assert [value.tobytes() for value in found] == [value.tobytes() for value in expected]
    assert any(a.tobytes() != b.tobytes() for a, b in zip(start, expected, strict=False))


def test_every_signature_gives_equal_bits(tmp_path: Path) -> None:
    import tensorflow as tf

    fine("assign", SAMPLES / "two_signatures", "--part", "signature=embed", "-o", tmp_path / "out")
    one, other = tf.saved_model.load(SAMPLES / "two_signatures"), tf.saved_model.load(tmp_path / "out")
    feeds = {
        "embed": {"item": np.eye(3, 10, dtype=np.float32)},
        "serving_default": {"left": np.eye(3, 10, dtype=np.float32), "right": np.ones((3, 10), np.float32)},
    }
    for signature, given in feeds.items():
        values = {key: tf.constant(value) for key, value in given.items()}
        assert_equal(
            *(
                {key: value.numpy() for key, value in loaded.signatures[signature](**values).items()}
                for loaded in (one, other)
            )
        )


def test_a_graph_with_unknown_ops_differs_in_ids_only(tmp_path: Path) -> None:
    """No TensorFlow here runs it: that all but the ids stays is what can be shown."""
    from msplit import formats

    fine("analyze", SAMPLES / "custom_op.pb")
    fine("assign", SAMPLES / "custom_op.pb", "-o", tmp_path / "out")
    before, after = (formats.read(path).graph_def for path in (SAMPLES / "custom_op.pb", tmp_path / "out"))
    assert before != after
    for node in after.node:
        if "_stream_id" in node.attr:
            del node.attr["_stream_id"]
    assert before == after
