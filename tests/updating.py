"""Models whose values change while they run: one whose outputs tell from two variables which values they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

ROWS = 50
Values = dict[str, Any]


def values_of(version: int) -> Values:
    """Values of a version of the model; those of another one differ in each variable."""
    rng = np.random.default_rng(version)

    def drawn(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "table": drawn(ROWS, 4),
        "w": drawn(7, 8),
        "b": drawn(8),
        "w2": drawn(8, 2),
        "b2": drawn(8),
        "scale": np.float32(1 + version),
        "first": np.full(3, version, np.float32),
        "second": np.full(3, version, np.float32),
    }


def saved(path: Path, version: int, *, width: int = 8) -> Path:
    """A SavedModel of a version. A constant is folded of `scale`; `first` and `second` are read by different ops."""
    import tensorflow as tf

    class Model(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            given = values_of(version)
            if width != 8:
                given |= {"w": np.ones((7, width), np.float32), "b": np.ones(width, np.float32)}
                given |= {"w2": np.ones((width, 2), np.float32), "b2": np.ones(width, np.float32)}
            self.variables_by_name = {name: tf.Variable(value, name=name) for name, value in given.items()}

        @tf.function(
            input_signature=[
                tf.TensorSpec([None, 3], tf.float32, name="x"),
                tf.TensorSpec([None], tf.int64, name="ids"),
            ]
        )
        def run(self, x: Any, ids: Any) -> Any:
            have = self.variables_by_name
            hidden = tf.concat([x, tf.gather(have["table"], ids)], 1)
            hidden = tf.nn.relu(hidden @ have["w"] + have["b"]) + have["b2"]
            return {
                "y": (hidden * (1.0 / have["scale"])) @ have["w2"],
                "first": tf.reduce_max(x * 0.0 + have["first"], axis=1),
                "second": tf.reduce_min(x * 0.0 + have["second"], axis=1),
                "known": have["scale"] * 2.0,
            }

    made = Model()
    tf.saved_model.save(made, str(path), signatures=made.run)
    return path


def feeds_of(rows: int, seed: int = 0) -> Values:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((rows, 3)).astype(np.float32), "ids": rng.integers(0, ROWS, rows)}


def expected(values: Values, feeds: Values) -> Values:
    """What a model with these values gives."""
    hidden = np.concatenate([feeds["x"], values["table"][feeds["ids"]]], 1)
    hidden = np.maximum(hidden @ values["w"] + values["b"], 0) + values["b2"]
    rows = len(feeds["x"])
    return {
        "y": hidden / values["scale"] @ values["w2"],
        "first": np.full(rows, values["first"][0]),
        "second": np.full(rows, values["second"][0]),
        "known": values["scale"] * np.float32(2),
    }


def check(step: Any, values: Values, rows: int = 4, seed: int = 0, tolerance: float = 1e-4) -> None:
    """Holds a step against what its values give."""
    feeds = feeds_of(rows, seed)
    found = step(feeds)
    for name, value in expected(values, feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def version_of(outputs: Values) -> float:
    """The version that made some outputs; an error where one part is of another version than the rest."""
    seen = {*np.asarray(outputs["first"]).tolist(), *np.asarray(outputs["second"]).tolist()}
    seen.add(float(outputs["known"]) / 2 - 1)
    assert len(seen) == 1, f"a mixture of versions: {sorted(seen)}"
    return float(seen.pop())
