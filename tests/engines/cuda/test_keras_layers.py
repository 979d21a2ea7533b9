"""Layers of Keras as they are exported, captured, against TensorFlow."""

import pytest

from msplit.inputs.make import make_inputs
from tests.engines.cuda.cases import assert_equals_tensorflow, exported, program_of

pytestmark = pytest.mark.tf


def test_encodings_of_categories_have_a_known_width(tmp_path):
    """Keras counts up to the largest category it sees, cut off at both ends at the number of categories."""
    from keras import Input, Model, layers

    numbers = Input((2,), dtype="int64", name="numbers")
    words = Input((2,), dtype="string", name="words")
    encoded = [
        layers.CategoryEncoding(4, output_mode="multi_hot")(numbers),
        layers.CategoryEncoding(4, output_mode="count")(numbers),
        layers.StringLookup(vocabulary=["a", "b"], output_mode="count")(words),
    ]
    flat = exported(Model([numbers, words], layers.Concatenate()(encoded)), tmp_path)
    feeds = make_inputs(flat, {}, batch=3)
    assert not program_of(flat, feeds).dynamic
    assert_equals_tensorflow(flat, feeds)


def test_transposed_convolutions_over_three_axes(tmp_path):
    import keras
    from keras import Input, Model, layers

    keras.utils.set_random_seed(1)
    x = Input((3, 4, 3, 2))
    y = layers.Conv3DTranspose(3, 3, strides=2, padding="same", activation="relu")(x)
    flat = exported(Model(x, layers.Conv3DTranspose(2, 2)(y)), tmp_path)
    assert_equals_tensorflow(flat, make_inputs(flat, {}, batch=3))
