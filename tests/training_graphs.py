"""Small training graphs for tests: every model and optimizer of the benchmark, with resource and with reference variables.

python -m tests.training_graphs FILE.zip      writes those of `STORED`, for tests on machines without TensorFlow
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks import training_models
from benchmarks.training_models import FETCHES, OPTIMIZERS, Training
from msplit.flatten import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read

MODELS = ("mmoe", "deepfm", "lstm", "inception_v3")
KINDS = ("resource", "ref")
BATCH = 8
STORED = [("deepfm", optimizer, kind) for optimizer in OPTIMIZERS for kind in KINDS]
"""Dense and sparse updates of every optimizer."""


@functools.cache
def graph(name: str, optimizer: str, kind: str = "resource") -> tuple[FlatGraph, Training]:
    """A training graph that fetches its loss and runs its train step, made by TensorFlow."""
    meta, training = training_models.build(name, optimizer, resource=kind == "resource", batch=BATCH, small=True)
    return loaded(meta.SerializeToString(deterministic=True)), training


def loaded(meta: bytes) -> FlatGraph:
    """The flat graph of a MetaGraphDef."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.meta"
        path.write_bytes(meta)
        return flatten(read(path, outputs=list(FETCHES)))


def stored(file: Path, name: str, optimizer: str, kind: str = "resource") -> tuple[FlatGraph, Training]:
    """The same from a file that this module wrote. Needs no TensorFlow."""
    with zipfile.ZipFile(file) as archive, tempfile.TemporaryDirectory() as folder:
        key = f"{name}.{optimizer}.{kind}"
        told = Path(folder) / "told.json"
        told.write_bytes(archive.read(f"{key}.json"))
        return loaded(archive.read(f"{key}.meta")), training_models.read(told)


def store(file: Path) -> None:
    """Writes the graphs of `STORED`, equal graphs as equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for name, optimizer, kind in STORED:
            meta, training = training_models.build(
                name, optimizer, resource=kind == "resource", batch=BATCH, small=True
            )
            for ending, data in (
                ("meta", meta.SerializeToString(deterministic=True)),
                ("json", json.dumps(asdict(training)).encode()),
            ):
                archive.writestr(zipfile.ZipInfo(f"{name}.{optimizer}.{kind}.{ending}"), data)


def apart(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """How far each variable is from what it should be, in terms of its root mean square; infinite where NaN is not at the same places."""
    assert got.keys() == expected.keys()
    found = {}
    for name, value in expected.items():
        wide, mine = value.astype(np.float64), got[name].astype(np.float64)
        size = np.sqrt(np.mean(np.square(wide[np.isfinite(wide)]))) if np.isfinite(wide).any() else 1.0
        away = np.where((wide == mine) | (np.isnan(wide) & np.isnan(mine)), 0.0, np.abs(wide - mine))
        found[name] = float(np.nan_to_num(away, nan=np.inf).max() / max(size, 1e-12))
    return found


if __name__ == "__main__":
    store(Path(sys.argv[1]))
