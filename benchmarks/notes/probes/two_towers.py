"""A step of two towers with eight string features, 200 rows, beside the same model fed with ids, and TensorFlow's signature: p50 in turns.

    PYTHONPATH=. python benchmarks/notes/probes/two_towers.py [cpu]

Each side makes a model of Keras, builds it for 200 rows on four streams, and opens it; one client waits for each answer.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

import msplit

WORDS, ROWS, SECONDS, TURNS = 1500, 200, 0.25, 5
NAMES = [f"{side}_{number}" for side in ("user", "item") for number in range(4)]


def model(strings: bool, path: Path) -> None:
    import keras

    vocabulary = [f"item_{number}" for number in range(WORDS)]

    def tower(side: str) -> tuple[list[Any], Any]:
        inputs = [keras.Input((), dtype="string" if strings else "int64", name=f"{side}_{i}") for i in range(4)]
        columns = []
        for number, ids in enumerate(inputs):
            if strings and number % 2 == 0:
                ids = keras.layers.StringLookup(vocabulary=vocabulary, num_oov_indices=2)(ids)
            elif strings:
                ids = keras.layers.Hashing(2000)(ids)
            columns.append(keras.layers.Embedding(2002, 32)(ids))
        hidden = keras.layers.Concatenate()(columns)
        for units in (256, 128):
            hidden = keras.layers.Dense(units, activation="relu")(hidden)
        return inputs, keras.layers.Dense(64)(hidden)

    (users, user), (items, item) = tower("user"), tower("item")
    keras.Model(users + items, keras.layers.Dot(axes=1)([user, item])).export(path)


def main() -> None:
    folder, cpu = Path(mkdtemp()), "cpu" in sys.argv[1:]
    rng = np.random.default_rng(0)
    ids = [{name: rng.integers(0, 2000, ROWS) for name in NAMES} for _ in range(8)]
    words = [
        {name: np.array([b"item_%d" % one for one in values], object) for name, values in row.items()} for row in ids
    ]
    opened = {}
    for name, strings in (("strings", True), ("ids", False)):
        model(strings, folder / name)
        command = [sys.executable, "-m", "msplit", "build", folder / name, "-o", folder / f"{name}.build"]
        more = ["--device", "cpu", "--cuda", "effort=fast"] if cpu else []
        subprocess.run([*command, "--batch", str(ROWS), "--streams", "4", *more], check=True, capture_output=True)
        start = time.perf_counter()
        opened[name] = msplit.open(folder / f"{name}.build")
        print(f"opened {name} in {time.perf_counter() - start:.2f} s", flush=True)

    import tensorflow as tf

    signature = tf.saved_model.load(str(folder / "strings")).signatures["serving_default"]
    constants = [{name: tf.constant(value) for name, value in row.items()} for row in words]
    ways: dict[str, Callable[[int], Any]] = {
        "TensorFlow": lambda k: {name: value.numpy() for name, value in signature(**constants[k % 8]).items()},
        "strings": lambda k: opened["strings"].step(words[k % 8]),
        "ids": lambda k: opened["ids"].step(ids[k % 8]),
    }
    wanted, got = (next(iter(ways[name](3).values())) for name in ("TensorFlow", "strings"))
    print(f"outputs differ by {np.abs(got - wanted).max():.1e}, the largest is {np.abs(wanted).max():.1e}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            end = time.perf_counter() + SECONDS
            while (start := time.perf_counter()) < end:
                way(len(times[name]))
                times[name].append(time.perf_counter() - start)
    for name, found in times.items():
        tenth, half, ninetieth = np.percentile(found, (10, 50, 90)) * 1e6
        print(f"{name:12} p50 {half:8.1f} µs (10th {tenth:.0f}, 90th {ninetieth:.0f})")


if __name__ == "__main__":
    main()
