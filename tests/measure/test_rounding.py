"""Tolerances of models of mixed precision."""

import numpy as np
import pytest

from msplit.inputs.make import make_inputs
from msplit.measure.verification import compare, computed_in
from tests.inputs.graphs import flat_of


def graph(dtype, outputs=("y", "z")):
    """y is computed in a narrow type and cast back, z is not."""
    return flat_of(
        [
            ("x", "Placeholder", [], {"dtype": "float32"}),
            ("down", "Cast", ["x"], {"SrcT": "float32", "DstT": dtype}),
            ("sum", "AddV2", ["down", "down"], {"T": dtype}),
            ("y", "Cast", ["sum"], {"SrcT": dtype, "DstT": "float32"}),
            ("z", "Tanh", ["x"], {"T": "float32"}),
        ],
        [("x", "float32", (2,))],
        outputs,
    )


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.02), ("float16", 0.002)])
def test_an_output_is_held_to_what_it_was_computed_in(dtype, error):
    computed = computed_in(graph(dtype))
    assert computed == {"y": dtype}
    expected = {"y": np.ones(2, np.float32), "z": np.ones(2, np.float32)}
    got = {name: value * np.float32(1 + error) for name, value in expected.items()}
    found = compare(got, expected, computed=computed)
    assert {output.name: output.passed for output in found.outputs} == {"y": True, "z": False}
    assert not compare(got, expected, computed=computed, tolerance=1e-4).outputs[0].passed
    assert not compare({**expected, "y": got["y"] * np.float32(1.3)}, expected, computed=computed).passed


def test_weights_that_are_only_stored_in_a_narrow_type_round_nothing():
    flat = flat_of(
        [
            ("x", "Placeholder", [], {"dtype": "float32"}),
            ("w", "Const", [], {"dtype": "float16"}),
            ("kept", "Identity", ["w"], {"T": "float16"}),
            ("wide", "Cast", ["kept"], {"SrcT": "float16", "DstT": "float32"}),
            ("y", "Mul", ["x", "wide"], {"T": "float32"}),
        ],
        [("x", "float32", (2,))],
        ("y",),
    )
    assert not computed_in(flat)


@pytest.mark.tf
def test_a_loop_and_layers_of_keras_in_mixed_precision(tmp_path):
    import keras

    from msplit.engines.tensorflow.engine import reference
    from tests.engines.cuda.cases import exported, run

    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        keras.utils.set_random_seed(1)
        x = keras.Input((5, 8))
        y = keras.layers.LSTM(16)(x)
        y = keras.layers.Dense(16, activation="relu")(y)
        flat = exported(keras.Model(x, keras.layers.Dense(4, dtype="float32")(y)), tmp_path)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    feeds = make_inputs(flat, {}, batch=8)
    assert set(computed_in(flat).values()) == {"bfloat16"}
    found = compare(run(flat, feeds), reference(flat, feeds), computed=computed_in(flat))
    assert found.passed, found.describe()
    assert found.needed > 2e-4  # float32's own tolerance would not do
