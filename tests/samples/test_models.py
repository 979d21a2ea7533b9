"""The benchmark models, built in tiny sizes and run by TensorFlow."""

from functools import cache

import numpy as np
import pytest

from msplit import samples
from msplit.engines.tensorflow.runtime import session_config
from tests.campaign import campaign

pytestmark = pytest.mark.tf

TINY = {
    "bert": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocabulary": 100},
    "deepfm": {"categorical": 4, "numeric": 3, "rows": 50, "width": 4, "units": (16, 8)},
    "dlrm": {"tables": 3, "rows": 50, "width": 8, "bottom": (16,), "top": (16,)},
    "feature_columns": {"columns": 4, "buckets": 9, "width": 3, "units": (16, 8)},
    "googlenet": {"image": 64, "classes": 10},
    "inception_v3": {"image": 75, "classes": 10},
    "lstm": {"layers": 3, "steps": 5, "hidden": 16, "batch": 3},
    "mmoe": {"experts": 4, "features": 16, "units": (16, 8), "tower_units": (8,)},
    "nasnet_mobile": {"image": 64, "classes": 10},
    "squeezenet": {"image": 64, "classes": 10},
    "towers": {"towers": 5, "rows": 50, "width": 8, "units": (16, 8)},
}
BUILT_WITHOUT_KERAS = sorted(set(TINY) - {"inception_v3", "nasnet_mobile"})


@cache
def tiny(name):
    """A model in its tiny size, built once for all tests, which change nothing in it."""
    return samples.build(name, **TINY[name])


def run(sample, feeds):
    (outputs,) = runs(sample, feeds)
    return outputs


def runs(sample, *several):
    """The outputs for each of several feeds."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        own = type(sample.graph_def)()
        own.CopyFrom(sample.graph_def)  # importing writes default attributes into it
        tf.import_graph_def(own, name="")
        with tf.compat.v1.Session(graph=graph, config=session_config(1, cpu_only=True, optimized=False)) as session:
            fetches = [f"{name}:0" for name in sample.outputs]
            return [session.run(fetches, {f"{name}:0": value for name, value in feeds.items()}) for feeds in several]


def check(sample, batch):
    """Hold a sample's outputs to what the benchmarks need: finite, of order one, and a function of the input."""
    first, second = runs(sample, *(samples.make_inputs(sample, batch, seed=seed) for seed in (0, 1)))
    for one, two in zip(first, second, strict=True):
        assert one.shape[0] == batch
        assert np.isfinite(one).all()
        assert 1e-4 < np.abs(one).max() < 50
        # Different inputs give visibly different outputs, and so do the examples of one batch.
        assert np.abs(one - two).max() > 1e-2 * np.abs(one).max()
        assert np.ptp(one, axis=0).max() > 1e-2 * np.abs(one).max()


def test_every_builder_is_tried_here():
    assert sorted(TINY) == samples.names()


@pytest.mark.parametrize("name", BUILT_WITHOUT_KERAS)
def test_a_tiny_model_runs_and_its_outputs_mean_something(name):
    check(tiny(name), batch=3)


@pytest.mark.parametrize("name", BUILT_WITHOUT_KERAS)
def test_equal_seeds_give_equal_bytes_and_other_seeds_other_weights(name):
    one = tiny(name).graph_def
    two, other = (samples.build(name, seed=seed, **TINY[name]).graph_def for seed in (0, 5))
    assert one.SerializeToString(deterministic=True) == two.SerializeToString(deterministic=True)
    assert one != other


@pytest.mark.parametrize("name", BUILT_WITHOUT_KERAS)
def test_stripping_and_filling_is_exact_and_saves_space(name):
    graph_def = tiny(name).graph_def
    stripped = samples.strip(graph_def, threshold=64)
    assert stripped.ByteSize() < graph_def.ByteSize()
    assert samples.fill(stripped) == graph_def


@pytest.mark.parametrize("name", BUILT_WITHOUT_KERAS)
def test_inputs_and_outputs_are_nodes_and_nothing_else_is_a_placeholder(name):
    sample = tiny(name)
    nodes = {node.name: node for node in sample.graph_def.node}
    assert {name for name, node in nodes.items() if node.op == "Placeholder"} == {i.name for i in sample.inputs}
    assert set(sample.outputs) <= set(nodes)
    assert not {node.op for node in nodes.values()} & {"Switch", "While", "VarHandleOp", "ReadVariableOp", "NoOp"}


def shallow(weights, input_shape, classes):
    """An application of a dozen layers, each of a kind that the real ones have, that builds in no time."""
    from keras import layers, models

    assert weights is None
    start = layers.Input(input_shape)
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, strides=2, use_bias=False)(start)))
    one = layers.ReLU()(layers.BatchNormalization(scale=False)(layers.Conv2D(8, 3, padding="same")(x)))
    other = layers.SeparableConv2D(8, 3, padding="same", use_bias=False)(x)
    x = layers.Concatenate()([one, layers.AveragePooling2D(3, 1, "same")(x), layers.Add()([other, x])])
    x = layers.GlobalAveragePooling2D()(x)
    return models.Model(start, layers.Dense(classes, activation="softmax", name="predictions")(x))


@pytest.mark.parametrize(
    "name", ["shallow", *(pytest.param(name, marks=campaign) for name in ("inception_v3", "nasnet_mobile"))]
)
def test_a_keras_application_is_reproducible_runs_and_strips(name, monkeypatch):
    # One test: the real ones take seconds to build.
    if name == "shallow":
        monkeypatch.setattr("keras.applications.InceptionV3", shallow)
        name = "inception_v3"
    sample = samples.build(name, **TINY[name])
    assert sample.graph_def == samples.build(name, **TINY[name]).graph_def
    stripped = samples.strip(sample.graph_def, threshold=64)
    assert stripped.ByteSize() < min(sample.graph_def.ByteSize(), 2_000_000)
    assert samples.fill(stripped) == sample.graph_def
    check(sample, batch=2)


def test_a_batch_can_be_fixed():
    sample = samples.build("towers", batch=6, **TINY["towers"])
    assert sample.inputs[0].shape == (6,)
    (output,) = run(sample, samples.make_inputs(sample, batch=99))
    assert output.shape == (6, 1)


def test_integer_inputs_stay_inside_their_tables():
    sample = samples.build("towers", towers=1, rows=3)
    ids = samples.make_inputs(sample, batch=500)["id_0"]
    assert set(ids.tolist()) == {0, 1, 2}


def test_equal_seeds_give_equal_inputs():
    sample = tiny("mmoe")
    one, two, other = (samples.make_inputs(sample, 4, seed)["x"] for seed in (0, 0, 1))
    assert (one == two).all()
    assert (one != other).any()


def test_branches_have_scopes_that_a_pattern_can_name():
    names = {node.name for node in tiny("mmoe").graph_def.node}
    assert {"expert_3/dense_1/MatMul", "gate_1/Softmax", "tower_1/out/Sigmoid", "experts/stack"} <= names
    names = {node.name for node in tiny("googlenet").graph_def.node}
    assert {"mixed5b/branch_3x3/reduce/Conv2D", "mixed3a/branch_pool/project/Relu", "mixed4c/concat"} <= names
    names = {node.name for node in tiny("lstm").graph_def.node}
    assert {"layer_2/step_4/MatMul_h", "layer_0/step_0/Split", "layer_1/kernel"} <= names


def test_an_lstm_cell_agrees_with_numpy():
    sample = samples.build("lstm", layers=1, steps=2, hidden=4, batch=1)
    weights = {
        node.name: np.frombuffer(node.attr["value"].tensor.tensor_content, np.float32)
        for node in sample.graph_def.node
        if node.op == "Const" and node.name.startswith("layer_0/")
    }
    kernel, recurrent = (weights[f"layer_0/{name}"].reshape(4, 16) for name in ("kernel", "recurrent_kernel"))
    feeds = samples.make_inputs(sample)
    h = c = np.zeros((1, 4), np.float32)
    for step in range(2):
        gates = feeds["x"][:, step] @ kernel + h @ recurrent + weights["layer_0/bias"]
        i, f, g, o = np.split(gates, 4, axis=1)
        i, f, o = (1 / (1 + np.exp(-value)) for value in (i, f, o))
        c = f * c + i * np.tanh(g)
        h = o * np.tanh(c)
    (output,) = run(sample, feeds)
    np.testing.assert_allclose(output, h, rtol=1e-5, atol=1e-6)


def test_a_factorization_machine_counts_every_pair_once():
    sample = samples.build("deepfm", categorical=2, numeric=1, rows=5, width=3, units=(4,))
    feeds = samples.make_inputs(sample, batch=2)
    probe = samples.Sample("probe", sample.graph_def, sample.inputs, ("fields/concat", "second_order/Sum_2"))
    fields, pairs = run(probe, feeds)
    expected = 2 * sum((fields[:, i] * fields[:, j]).sum(axis=1) for i in range(3) for j in range(i))
    np.testing.assert_allclose(pairs[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_dlrm_interacts_every_pair_of_vectors_once():
    sample = samples.build("dlrm", tables=3, rows=5, width=4, bottom=(4,), top=(4,))
    feeds = samples.make_inputs(sample, batch=2)
    outputs = ("interaction/scale", "interaction/lower_triangle")
    vectors, pairs = run(samples.Sample("probe", sample.graph_def, sample.inputs, outputs), feeds)
    expected = [(vectors[:, i] * vectors[:, j]).sum(axis=1) for i in range(4) for j in range(i)]
    np.testing.assert_allclose(pairs, np.stack(expected, axis=1), rtol=1e-4, atol=1e-5)


def test_padding_does_not_reach_the_first_token_of_bert():
    sample = tiny("bert")
    feeds = samples.make_inputs(sample, batch=2)
    feeds["input_mask"] = np.tile(np.arange(16) < 9, (2, 1)).astype(np.int32)
    pooled, _ = run(sample, feeds)
    feeds["input_ids"] = np.where(feeds["input_mask"] == 1, feeds["input_ids"], 0)
    changed, _ = run(sample, feeds)
    np.testing.assert_allclose(pooled, changed, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "megabytes"),
    [
        ("bert", 21.5),
        ("deepfm", 22.8),
        pytest.param("dlrm", 68.6, marks=campaign),
        ("googlenet", 26.7),
        pytest.param("inception_v3", 95.9, marks=campaign),
        pytest.param("lstm", 22.3, marks=campaign),
        ("mmoe", 14.9),
        pytest.param("nasnet_mobile", 22.5, marks=campaign),
        ("squeezenet", 5.0),
        pytest.param("towers", 103.0, marks=campaign),
    ],
)
def test_the_full_size_keeps_its_bytes_and_runs(name, megabytes):
    sample = samples.build(name)
    assert sample.graph_def.ByteSize() / 1e6 == pytest.approx(megabytes, abs=0.1)
    assert samples.strip(sample.graph_def).ByteSize() < 2_000_000
    for output in run(sample, samples.make_inputs(sample, batch=1)):
        assert np.isfinite(output).all()
        assert np.ptp(output) > 0 or output.size == 1
