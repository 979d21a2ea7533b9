"""DeepRec's example, trained on msplit's engine: two towers on two streams, annotated while the graph is built.

    python docs/examples/deeprec_training.py [--steps 300] [--device cuda]

The graph is that of `deeprec_regression.py`, whose training loop is TensorFlow's. With `--device cpu` the streams are simulated.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf
from deeprec_regression import TRUE_BIAS, TRUE_WEIGHTS, build

import msplit


def batches(rows: int = 64) -> Iterator[dict[str, np.ndarray]]:
    """Data without an end."""
    random = np.random.default_rng(7)
    while True:
        first, second = random.normal(size=(2, rows)).astype(np.float32)
        label = np.float32(TRUE_WEIGHTS[0]) * first + np.float32(TRUE_WEIGHTS[1]) * second + np.float32(TRUE_BIAS)
        yield {"first": first, "second": second, "label": label}


def run(steps: int, device: str) -> dict[str, np.ndarray]:
    """Trains, and gives the variables."""
    with tempfile.TemporaryDirectory() as folder:
        graph, path = tf.Graph(), Path(folder) / "graph.meta"
        build(graph)
        with graph.as_default():
            tf.compat.v1.train.export_meta_graph(str(path))
        effort = "fast" if device == "cpu" else "full"
        request = {"engine": "cuda", "device": device, "streams": (2,), "effort": effort}
        with msplit.Trainer(path, target="train", fetches=["loss"], **request) as trainer:
            for fetched in trainer.each(batches(), steps, fetch_every=max(steps // 10, 1)):
                print(f"step {fetched.step:5d}  loss {fetched.values['loss']:.6f}")
            return trainer.variables


def main() -> None:
    """Trains, and shows what was learned."""
    parser = argparse.ArgumentParser(description="A regression on two streams, on msplit's engine.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    found = run(options.steps, options.device)
    print({name: round(float(value), 4) for name, value in found.items()}, "wanted", TRUE_WEIGHTS, TRUE_BIAS)


if __name__ == "__main__":
    main()
