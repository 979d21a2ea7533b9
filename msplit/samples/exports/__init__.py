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


EXPORTS = (
    Export("mmoe_small.pb", "frozen.mmoe_small", "frozen GraphDef: mixture of 4 experts with 2 tasks"),
    Export("keras_lookup", "keras.keras_lookup", "Keras SavedModel: string lookup with a vocabulary file, embedding"),
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
        "and `python -m msplit.samples sample_graphs --only NAME` writes one. Weights are seeded, and frozen graphs",
        "come out byte for byte equal; in a SavedModel TensorFlow itself puts a random identifier in `fingerprint.pb`.",
        "",
        "| name | what it is | made by |",
        "| --- | --- | --- |",
    ]
    for export in EXPORTS:
        module, function = export.source.split(".")
        lines.append(f"| `{export.name}` | {export.about} | `{function}` in `msplit/samples/exports/{module}.py` |")
    return "\n".join(lines) + "\n"
