"""Writes the files of `sample_graphs/`, small graphs exported by TensorFlow itself, and the table that describes them.

    python -m tools.sample_graphs OUT_DIR [--only NAME ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.sample_graphs import frozen, keras, tf1, tf2


@dataclass(frozen=True)
class Export:
    """One file or folder of `sample_graphs/`.

    Attributes:
        name: Its name there.
        write: Writes it, given its path.
        about: One line that says what it is.
    """

    name: str
    write: Callable[[Path], None]
    about: str


# In this order, in one process: Keras and TensorFlow number what they name.
EXPORTS = (
    Export("mmoe_small.pb", frozen.mmoe_small, "frozen GraphDef: mixture of 4 experts with 2 tasks"),
    Export("mmoe_small.pbtxt", frozen.mmoe_small_text, "GraphDef in text format: a still smaller mixture of experts"),
    Export("towers_small.pb", frozen.towers_small, "frozen GraphDef: 6 embedding towers"),
    Export("lstm_small.pb", frozen.lstm_small, "frozen GraphDef: LSTM of 3 layers unrolled over 8 steps"),
    Export(
        "inception_v3_stripped.pb",
        frozen.inception_v3_stripped,
        "frozen GraphDef: Inception-v3 in full size, without weight values (`msplit.samples.fill` brings them back)",
    ),
    Export("annotated.pb", frozen.annotated, "frozen GraphDef with `_stream_id`: 6 towers on streams 0, 1 and 2"),
    Export(
        "custom_op.pb",
        frozen.custom_op,
        "frozen GraphDef, its custom nodes written by hand: stock TensorFlow lacks their ops",
    ),
    Export(
        "training.meta", tf1.training, "TF1 MetaGraphDef: training graph, ref variables, gradients, Adagrad, saver"
    ),
    Export("training_resource.meta", tf1.training_resource, "the same with resource variables and Adam"),
    Export("tf1_saved_model", tf1.tf1_saved_model, "TF1 SavedModel: embedding in 3 partitions, two towers"),
    Export("two_tags", tf1.two_tags, "TF1 SavedModel with the tag sets `serve` and `serve,gpu`"),
    Export("feature_columns", tf1.feature_columns, "TF1 SavedModel: string, integer and bucketized feature columns"),
    Export("while_v1.pb", tf1.while_v1, "GraphDef: nested v1 loops (Enter, Switch, Merge, NextIteration, Exit)"),
    Export("cond_v1.pb", tf1.cond_v1, "GraphDef: v1 cond (Switch, Merge)"),
    Export(
        "two_signatures",
        tf2.two_signatures,
        "TF2 SavedModel: signatures `serving_default` and `embed` share a function",
    ),
    Export("control_flow_v2", tf2.control_flow_v2, "TF2 SavedModel: While, a While inside it, and If"),
    Export("ragged_sparse", tf2.ragged_sparse, "TF2 SavedModel: a ragged and a sparse input"),
    Export("keras_lookup", keras.keras_lookup, "Keras SavedModel: string lookup with a vocabulary file, embedding"),
    Export("gru_while", keras.gru_while, "Keras SavedModel: GRU as a While node"),
    Export("keras_inception", keras.keras_inception, "Keras SavedModel: image classifier of two inception blocks"),
)


def readme() -> str:
    """The text of `sample_graphs/README.md`."""
    lines = [
        "# Sample graphs",
        "",
        "Small graphs exported by TensorFlow. One command writes them all, this table included:",
        "",
        "    python -m tools.sample_graphs sample_graphs",
        "",
        "and `python -m tools.sample_graphs sample_graphs --only NAME` writes one. Weights are seeded, and files come out byte",
        "for byte equal, except for what TensorFlow and Keras themselves leave to chance: a SavedModel's `fingerprint.pb`,",
        "the names of feature columns' hash tables, and the order of variables in Keras exports.",
        "",
        "| name | what it is | made by |",
        "| --- | --- | --- |",
    ]
    for export in EXPORTS:
        file = export.write.__module__.replace(".", "/")
        lines.append(f"| `{export.name}` | {export.about} | `{export.write.__name__}` in `{file}.py` |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the sample graphs named on the command line, or all of them, and the table that describes them."""
    parser = argparse.ArgumentParser(prog="python -m tools.sample_graphs", description="Write small sample graphs.")
    parser.add_argument("out_dir", type=Path, help="folder to write to; files of the same names are replaced")
    parser.add_argument(
        "--only",
        action="append",
        choices=[export.name for export in EXPORTS],
        metavar="NAME",
        help="write just this one",
    )
    options = parser.parse_args(arguments)
    out_dir: Path = options.out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    for export in EXPORTS:
        if options.only and export.name not in options.only:
            continue
        path = out_dir / export.name
        if path.is_dir():
            shutil.rmtree(path)
        export.write(path)
        sys.stderr.write(f"wrote {path}\n")
    (out_dir / "README.md").write_text(readme(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    # TensorFlow's notes about the CPU and a missing GPU say nothing about the files. Set here and not in `main`, which
    # may share its process with others.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    sys.exit(main())
