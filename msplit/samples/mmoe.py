"""MMoE: many experts on one input, mixed by one gate per task."""

from __future__ import annotations

from collections.abc import Sequence

from msplit.samples.layers import Builder
from msplit.samples.types import Sample


def build(
    seed: int,
    *,
    experts: int = 16,
    tasks: int = 2,
    batch: int | None = None,
    features: int = 512,
    units: Sequence[int] = (256, 256, 128),
    tower_units: Sequence[int] = (64,),
) -> Sample:
    """Build the multi-gate mixture of experts of Ma et al. (KDD 2018).

    Args:
        seed: Seed of the weights.
        experts: Number of experts, each an MLP of `units` in the scope `expert_<i>`.
        tasks: Number of tasks, each with a softmax gate (`gate_<t>`) and a tower (`tower_<t>`).
        batch: Size of the batch, None for unknown.
        features: Width of the input.
        units: Widths of an expert's layers.
        tower_units: Widths of a tower's hidden layers.
    """
    b = Builder(seed, batch)
    x = b.input("x", (features,))
    mixed = []
    for expert in range(experts):
        with b.scope(f"expert_{expert}"):
            mixed.append(b.mlp(x, units))
    with b.scope("experts"):
        stacked = b.tf.stack(mixed, axis=1, name="stack")
    outputs = []
    for task in range(tasks):
        with b.scope(f"gate_{task}"):
            logits = b.dense(x, experts, "dense", activation=None)
            shares = b.tf.expand_dims(b.tf.nn.softmax(logits, name="Softmax"), 2, name="ExpandDims")
            mixture = b.tf.reduce_sum(b.tf.multiply(stacked, shares, name="Mul"), axis=1, name="Sum")
        with b.scope(f"tower_{task}"):
            hidden = b.mlp(mixture, tower_units)
            outputs.append(b.dense(hidden, 1, "out", activation="sigmoid"))
    return b.finish("mmoe", outputs)
