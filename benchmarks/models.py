"""The benchmark models: which, in what size, at which batch. Writes them stripped, with inputs, for a machine without TensorFlow.

python benchmarks/models.py FOLDER          build every model (needs TensorFlow), weights left out
(on the other machine) `load(FOLDER, name)` puts the weights back, and needs no TensorFlow
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import foreign
import training_models

BATCHES: dict[str, tuple[int, ...]] = {
    "mmoe": (1, 128, 1024),
    "towers": (1, 128, 1024),
    "deepfm": (1, 128, 1024),
    "dlrm": (1, 128, 1024),
    "inception_v3": (1, 16, 128, 1024),
    "googlenet": (1, 16, 128, 1024),
    "nasnet_mobile": (1, 16, 128, 1024),
    "lstm": (1, 16, 128, 1024),
    "bert": (1, 16, 128, 1024),
    "squeezenet": (1, 16, 128, 1024),
    "columns_50": (256, 1, 128, 1024),
    "columns_100": (256, 1, 128, 1024),
    "columns_1000": (256, 1, 128, 1024),
}
"""Model -> batch sizes of the tables, the one to begin with first."""

SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    f"columns_{count}": ("feature_columns", {"columns": count}) for count in (50, 100, 1000)
}
"""Models that are a sample in a size of their own: its name and sizes."""

FIXED_BATCH = {"lstm"}
"""Models whose batch is part of the graph."""

RULES = {
    "mmoe": "default",
    "towers": "recsys",
    "deepfm": "recsys",
    "dlrm": "recsys",
    "inception_v3": "vision",
    "googlenet": "vision",
    "nasnet_mobile": "vision",
    "lstm": "rnn",
    "bert": "default",
    "squeezenet": "vision",
    "columns_50": "recsys",
    "columns_100": "recsys",
    "columns_1000": "recsys",
}
RULES |= dict.fromkeys(foreign.MODELS, "auto")
"""The shipped rule set that fits each."""


def file_name(name: str, batch: int) -> str:
    """File of a model at a batch."""
    return f"{name}_{batch}.pb" if name in FIXED_BATCH else f"{name}.pb"


def rows(text: str) -> list[tuple[str, int]]:
    """Models and batches, from ``mmoe,towers:128``: a model at one batch, or at all of its batches. Those of `foreign` are known, too."""
    found = []
    for item in text.split(","):
        name, _, batch = item.partition(":")
        known = (foreign.MODELS[name].batch,) if name in foreign.MODELS else BATCHES[name]
        found += [(name, int(batch))] if batch else [(name, batch) for batch in known]
    return found


def write(folder: Path) -> None:
    """Builds every model and writes it without weights."""
    from msplit import samples

    folder.mkdir(parents=True, exist_ok=True)
    for name, batches in BATCHES.items():
        for batch in batches if name in FIXED_BATCH else batches[:1]:
            sample_name, sizes = SAMPLES.get(name, (name, {"batch": batch} if name in FIXED_BATCH else {}))
            sample = samples.build(sample_name, **sizes)
            (folder / file_name(name, batch)).write_bytes(
                samples.strip(sample.graph_def).SerializeToString(deterministic=True)
            )
    foreign.write(folder, list(foreign.MODELS))
    training_models.write(folder)


def fill(folder: Path, into: Path, name: str, batch: int) -> Path:
    """Puts the weights back and writes the whole graph, once."""
    target = into / file_name(name, batch)
    if not target.exists():
        from msplit import samples
        from msplit.opset import schema

        graph = schema.graph_pb2.GraphDef.FromString((folder / file_name(name, batch)).read_bytes())
        into.mkdir(parents=True, exist_ok=True)
        own = target.with_suffix(f".{os.getpid()}")  # jobs beside this one may want the same model
        own.write_bytes(samples.fill(graph).SerializeToString())
        own.replace(target)
    return target


if __name__ == "__main__":
    write(Path(sys.argv[1]))
