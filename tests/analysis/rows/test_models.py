"""Whole models: those of the repository, and one of Keras's layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from msplit import samples
from msplit.analysis.rows.walk import independent_rows
from msplit.assignment.model import load
from msplit.errors import MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read

GRAPHS = Path(__file__).parents[3] / "sample_graphs"

INDEPENDENT = {
    "annotated.pb": {"head/out/Sigmoid": 1},
    "cond_v1.pb": {"output": 1},
    "control_flow_v2": {"y": 1},
    "gru_while": {"output_0": 1},
    "inception_v3_stripped.pb": {"Identity": 1},
    "keras_inception": {"output_0": 1},
    "keras_lookup": {"output_0": 1},
    "mmoe_small.pb": {"tower_0/out/Sigmoid": 1, "tower_1/out/Sigmoid": 1},
    "tf1_saved_model": {"score": 1},
    "feature_columns": {"score": 1},
    "two_signatures": {"score": 1},
    "while_v1.pb": {"output": 1},
}

REFUSED = {
    "custom_op.pb": "Vendor>FusedCross (head/concat) is an op that msplit does not know",
    "ragged_sparse": "counts to a number that depends on rows",
    "training.meta": "changes a state",
    "training_resource.meta": "changes a state",
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_of_a_sample_are_independent(name):
    rows = independent_rows(load(GRAPHS / name))
    assert rows.outputs == INDEPENDENT[name]
    assert rows.independent
    rows.check()


@pytest.mark.parametrize("name", REFUSED)
def test_a_sample_that_can_not_be_proved_says_why(name):
    rows = independent_rows(load(GRAPHS / name))
    assert not rows.outputs
    with pytest.raises(MsplitError) as raised:
        rows.check()
    assert REFUSED[name] in str(raised.value)


def test_a_scalar_input_carries_no_rows():
    assert independent_rows(load(GRAPHS / "cond_v1.pb")).inputs == {"x": 1, "flag": 0}


def test_a_model_with_a_batch_of_its_own_has_no_rows():
    rows = independent_rows(load(GRAPHS / "lstm_small.pb"))
    assert (rows.inputs, rows.outputs, rows.refusals) == ({"x": 0}, {"output": 0}, {})
    with pytest.raises(MsplitError, match="no input of the model carries rows"):
        rows.check()


BUILT = {
    "bert": {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 50, "sequence": 8},
    "deepfm": {"categorical": 4, "rows": 100},
    "dlrm": {"tables": 4, "rows": 100},
    "feature_columns": {"columns": 2},
}


@pytest.mark.tf
@pytest.mark.parametrize("name", BUILT)
def test_rows_of_a_built_model_are_independent(name, tmp_path):
    sample = samples.build(name, **BUILT[name])
    path = tmp_path / "model.pb"
    path.write_bytes(sample.graph_def.SerializeToString())
    rows = independent_rows(flatten(read(path)))
    assert rows.independent, [str(why) for why in rows.refusals.values()]


@pytest.mark.tf
def test_rows_of_keras_layers_are_independent(tmp_path):
    """Norms, recurrence with a mask, attention, convolutions, encodings: in one model."""
    from keras import Input, Model, layers, ops

    words, picture = Input((7,), dtype="int32", name="words"), Input((8, 8, 3), name="picture")
    text = layers.Embedding(20, 6, mask_zero=True)(words)
    read_through = layers.Bidirectional(layers.LSTM(5))(text)
    looked_at = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(text, text, use_causal_mask=True))
    seen = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same", activation="relu")(picture))
    seen = layers.GlobalAveragePooling2D()(layers.Conv2DTranspose(3, 3, 2)(seen))
    counted = layers.CategoryEncoding(20, output_mode="count")(words)
    joined = layers.Concatenate()([read_through, layers.GRU(4)(looked_at), seen, counted])
    chances = layers.Softmax()(layers.Dense(3)(layers.Dropout(0.5)(joined)))
    model = Model([words, picture], [chances, chances - ops.mean(chances, axis=0)])
    model.export(tmp_path / "model", verbose=False)
    rows = independent_rows(load(tmp_path / "model"))
    assert rows.inputs == {"words": 1, "picture": 1}
    assert rows.outputs == {"output_0": 1}
    assert [why.op for why in rows.refusals.values()] == ["Mean"]
