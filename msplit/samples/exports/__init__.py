"""The files of `sample_graphs/`: small graphs exported by TensorFlow itself, one function each.

`python -m msplit.samples OUT_DIR` writes them all, with the table that describes them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXPORTS", "Export", "readme"]


@dataclass(frozen=True)
class Export:
    """One file or folder of `sample_graphs/`.

    Attributes:
        name: Its name there.
        source: `module.function` in this package that writes it, given its path.
        about: One line that says what it is.
    """

    name: str
    source: str
    about: str

    def write(self, path: Path) -> None:
        """Write the file or folder at `path`."""
        module, function = self.source.split(".")
        writer: Callable[[Path], None] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        writer(path)


# In this order, in one process: Keras and TensorFlow number what they name.
EXPORTS = (
    Export("mmoe_small.pb", "frozen.mmoe_small", "frozen GraphDef: mixture of 4 experts with 2 tasks"),
    Export("mmoe_small.pbtxt", "frozen.mmoe_small_text", "GraphDef in text format: a still smaller mixture of experts"),
    Export("towers_small.pb", "frozen.towers_small", "frozen GraphDef: 6 embedding towers"),
    Export("lstm_small.pb", "frozen.lstm_small", "frozen GraphDef: LSTM of 3 layers unrolled over 8 steps"),
    Export(
        "inception_v3_stripped.pb",
        "frozen.inception_v3_stripped",
        "frozen GraphDef: Inception-v3 in full size, without weight values (`msplit.samples.fill` brings them back)",
    ),
    Export("annotated.pb", "frozen.annotated", "frozen GraphDef with `_stream_id`: 6 towers on streams 0, 1 and 2"),
    Export(
        "custom_op.pb",
        "frozen.custom_op",
        "frozen GraphDef, its custom nodes written by hand: stock TensorFlow lacks their ops",
    ),
    Export(
        "training.meta", "tf1.training", "TF1 MetaGraphDef: training graph, ref variables, gradients, Adagrad, saver"
    ),
    Export("training_resource.meta", "tf1.training_resource", "the same with resource variables and Adam"),
    Export("tf1_saved_model", "tf1.tf1_saved_model", "TF1 SavedModel: embedding in 3 partitions, two towers"),
    Export("two_tags", "tf1.two_tags", "TF1 SavedModel with the tag sets `serve` and `serve,gpu`"),
    Export("feature_columns", "tf1.feature_columns", "TF1 SavedModel: string, integer and bucketized feature columns"),
    Export("while_v1.pb", "tf1.while_v1", "GraphDef: nested v1 loops (Enter, Switch, Merge, NextIteration, Exit)"),
    Export("cond_v1.pb", "tf1.cond_v1", "GraphDef: v1 cond (Switch, Merge)"),
    Export(
        "two_signatures",
        "tf2.two_signatures",
        "TF2 SavedModel: signatures `serving_default` and `embed` share a function",
    ),
    Export("control_flow_v2", "tf2.control_flow_v2", "TF2 SavedModel: While, a While inside it, and If"),
    Export("ragged_sparse", "tf2.ragged_sparse", "TF2 SavedModel: a ragged and a sparse input"),
    Export("keras_lookup", "keras.keras_lookup", "Keras SavedModel: string lookup with a vocabulary file, embedding"),
    Export("gru_while", "keras.gru_while", "Keras SavedModel: GRU as a While node"),
    Export("keras_inception", "keras.keras_inception", "Keras SavedModel: image classifier of two inception blocks"),
)


def readme() -> str:
    """Return the text of `sample_graphs/README.md`."""
    lines = [
        "# Sample graphs",
        "",
        "Small graphs exported by TensorFlow. One command writes them all, this table included:",
        "",
        "    python -m msplit.samples sample_graphs",
        "",
        "and `python -m msplit.samples sample_graphs --only NAME` writes one. Weights are seeded, and files come out byte",
        "for byte equal, except for what TensorFlow and Keras themselves leave to chance: a SavedModel's `fingerprint.pb`,",
        "the names of feature columns' hash tables, and the order of variables in Keras exports.",
        "",
        "| name | what it is | made by |",
        "| --- | --- | --- |",
    ]
    for export in EXPORTS:
        module, function = export.source.split(".")
        lines.append(f"| `{export.name}` | {export.about} | `{function}` in `msplit/samples/exports/{module}.py` |")
    return "\n".join(lines) + "\n"
