"""SavedModels as Keras writes them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from msplit.samples.networks import recipe_for
from msplit.samples.layers import generate


def set_weights(model: Any, seed: int = 0) -> None:
    """Give the floating-point weights of a Keras model seeded values, by their paths."""
    for variable in model.weights:
        if np.dtype(variable.dtype).kind == "f":
            recipe = recipe_for(variable.path, seed, variable.path, tuple(variable.shape))
            variable.assign(generate(recipe, tuple(variable.shape)))


def keras_lookup(path: Path) -> None:
    """Write a model of one string and one numeric feature, whose vocabulary is an asset file."""
    import keras

    words = [f"city_{number}" for number in range(40)]
    path = path.absolute()
    # The path of the vocabulary becomes part of the table's name, so it must not hold the name of a temporary folder.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("cities.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        city = keras.Input((), dtype="string", name="city")
        amount = keras.Input((4,), name="amount")
        index = keras.layers.StringLookup(vocabulary="cities.txt", name="city_index")(city)
        vector = keras.layers.Embedding(len(words) + 1, 16, name="city_embedding")(index)
        left = keras.layers.Dense(16, "relu", name="city_dense")(vector)
        right = keras.layers.Dense(16, "relu", name="amount_dense")(amount)
        joined = keras.layers.Concatenate(name="joined")([left, right])
        score = keras.layers.Dense(1, "sigmoid", name="score")(joined)
        model = keras.Model({"city": city, "amount": amount}, score)
        set_weights(model)
        model.export(str(path), verbose=False)


def gru_while(path: Path) -> None:
    """Write a sequence model whose GRU is a While node."""
    import keras

    ids = keras.Input((12,), dtype="int32", name="ids")
    vectors = keras.layers.Embedding(60, 8, name="embedding")(ids)
    state = keras.layers.GRU(16, name="gru")(vectors)
    score = keras.layers.Dense(1, "sigmoid", name="score")(state)
    model = keras.Model(ids, score)
    set_weights(model)
    model.export(str(path), verbose=False)


def keras_inception(path: Path) -> None:
    """Write a small image classifier: two inception blocks with batch normalization."""
    import keras

    layers = keras.layers

    def convolution(x: Any, filters: int, size: int, name: str) -> Any:
        x = layers.Conv2D(filters, size, padding="same", use_bias=False, name=f"{name}_conv")(x)
        x = layers.BatchNormalization(name=f"{name}_norm")(x)
        return layers.Activation("relu", name=f"{name}_relu")(x)

    image = keras.Input((32, 32, 3), name="image")
    x = layers.MaxPooling2D(name="stem_pool")(convolution(image, 16, 3, "stem"))
    for block in ("block_0", "block_1"):
        narrow = convolution(x, 8, 1, f"{block}_a")
        middle = convolution(convolution(x, 8, 1, f"{block}_b_reduce"), 16, 3, f"{block}_b")
        pooled = convolution(layers.AveragePooling2D(3, 1, "same", name=f"{block}_pool")(x), 8, 1, f"{block}_c")
        x = layers.Concatenate(name=f"{block}_joined")([narrow, middle, pooled])
    x = layers.GlobalAveragePooling2D(name="global_pool")(x)
    model = keras.Model(image, layers.Dense(10, "softmax", name="classes")(x))
    set_weights(model)
    model.export(str(path), verbose=False)
