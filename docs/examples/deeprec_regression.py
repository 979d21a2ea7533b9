"""Two towers on two streams, annotated while the graph is built.

A regression on two inputs: one weight with a bias on stream 0, the other weight on stream 1, trained by gradient descent. Optimizer
and gradient ops follow the streams of the weights. Stock TensorFlow runs the graph as ever; `msplit bench` runs it on two streams.

    python docs/examples/deeprec_regression.py [--steps 1000] [--save graph.meta]
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from msplit.annotate import stream

v1 = tf.compat.v1
TRUE_WEIGHTS = (3.0, -2.0)
TRUE_BIAS = 0.5
RATE = 0.01


def build(graph: tf.Graph) -> dict[str, tf.Tensor | tf.Operation]:
    """Builds the annotated training graph and returns what a training loop needs of it."""
    with graph.as_default():
        first = v1.placeholder(tf.float32, [None], name="first")
        second = v1.placeholder(tf.float32, [None], name="second")
        label = v1.placeholder(tf.float32, [None], name="label")

        with stream(0):
            weight_0 = v1.get_variable("weight_0", initializer=0.0, use_resource=False)
            bias = v1.get_variable("bias", initializer=0.0, use_resource=False)
            left = tf.add(tf.multiply(first, weight_0, name="scale_0"), bias, name="left")
        with stream(1):
            weight_1 = v1.get_variable("weight_1", initializer=0.0, use_resource=False)
            right = tf.multiply(second, weight_1, name="right")

        prediction = tf.add(left, right, name="prediction")
        loss = tf.reduce_mean(tf.math.squared_difference(prediction, label), name="loss")
        train = v1.train.GradientDescentOptimizer(RATE).minimize(loss, name="train")
        return {
            "first": first,
            "second": second,
            "label": label,
            "loss": loss,
            "train": train,
            "init": v1.global_variables_initializer(),
            "weights": tf.stack([weight_0, weight_1, bias]),
        }


def run(steps: int, save: str | None = None) -> tuple[list[float], np.ndarray]:
    """Trains and returns the loss every tenth of the way, and (weight_0, weight_1, bias) at the end."""
    graph = tf.Graph()
    nodes = build(graph)
    random = np.random.default_rng(7)
    losses = []
    with v1.Session(graph=graph) as session:
        session.run(nodes["init"])
        for step in range(steps):
            first, second = random.normal(size=(2, 64))
            label = TRUE_WEIGHTS[0] * first + TRUE_WEIGHTS[1] * second + TRUE_BIAS
            feed = {nodes["first"]: first, nodes["second"]: second, nodes["label"]: label}
            _, loss = session.run([nodes["train"], nodes["loss"]], feed)
            if step % max(steps // 10, 1) == 0 or step == steps - 1:
                losses.append(float(loss))
                print(f"step {step:5d}  loss {loss:.6f}")
        weights = session.run(nodes["weights"])
    if save:
        with graph.as_default():
            v1.train.export_meta_graph(save)
    return losses, weights


def far_off(weights: np.ndarray, steps: int) -> bool:
    """Whether weights are further from the truth than they can be after so many steps.

    A step takes 2 * RATE of what is missing, on average over inputs of variance 1; half of that must have been taken.
    """
    wanted = np.array([*TRUE_WEIGHTS, TRUE_BIAS])
    return bool(np.any(np.abs(weights - wanted) > np.abs(wanted) * (1 - RATE) ** steps + 0.05))


def main() -> None:
    """Trains, shows what was learned, and fails if that is less than so many steps must give."""
    parser = argparse.ArgumentParser(description="A regression on two streams.")
    parser.add_argument("--steps", type=int, default=1000, help="0 or more; 300 come close to what is wanted")
    parser.add_argument("--save", help="write the annotated graph to this .meta file")
    options = parser.parse_args()
    if options.steps < 0:
        parser.error("--steps is 0 or more")
    _, weights = run(options.steps, options.save)
    print(f"weights {weights[0]:.4f} {weights[1]:.4f}, bias {weights[2]:.4f}; wanted {TRUE_WEIGHTS}, {TRUE_BIAS}")
    if far_off(weights, options.steps):
        raise SystemExit(
            f"error: after {options.steps} steps the weights should be closer to {TRUE_WEIGHTS}, {TRUE_BIAS}"
        )


if __name__ == "__main__":
    main()
