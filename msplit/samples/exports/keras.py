"""SavedModels as Keras writes them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from msplit.samples.weights import Recipe, generate


def set_weights(model: Any, seed: int = 0) -> None:
    """Give the floating-point weights of a Keras model seeded values, by their paths."""
    for variable in model.weights:
        if np.dtype(variable.dtype).kind == "f":
            limit = (3.0 / max(1, int(np.prod(variable.shape[:-1])))) ** 0.5
            variable.assign(generate(Recipe(variable.path, seed, -limit, limit), tuple(variable.shape)))


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
