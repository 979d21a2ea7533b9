"""Small training graphs for tests: every model and optimizer of the benchmark, with resource and with reference variables.

python -m tests.training_graphs FILE.zip      writes those of `STORED`, for tests on machines without TensorFlow
"""

from __future__ import annotations

import functools
import json
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import training_models
from benchmarks.training_models import FETCHES, OPTIMIZERS, Training
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from tests.campaign import CAMPAIGN

MODELS = ("mmoe", "deepfm", "lstm", "inception_v3")
KINDS = ("resource", "ref")
BATCH = 8
FILE = Path(__file__).parent / "gpu" / "training_graphs.zip"
STORED = [
    *(("deepfm", optimizer, kind) for optimizer in OPTIMIZERS for kind in KINDS),
    ("mmoe", "Adam", "resource"),
    ("lstm", "Momentum", "resource"),
    ("inception_v3", "RMSProp", "resource"),
]
"""What `FILE` holds: dense and sparse updates of every optimizer, and one graph of every other model."""


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


@functools.cache
def stored(name: str, optimizer: str, kind: str) -> tuple[FlatGraph, Training]:
    """The same from `FILE`. Needs no TensorFlow."""
    with zipfile.ZipFile(FILE) as archive, tempfile.TemporaryDirectory() as folder:
        key = f"{name}.{optimizer}.{kind}"
        told = Path(folder) / "told.json"
        told.write_bytes(archive.read(f"{key}.json"))
        return loaded(archive.read(f"{key}.meta")), training_models.read(told)


def kept(name: str, optimizer: str, kind: str = "resource") -> tuple[FlatGraph, Training]:
    """The same from `FILE` where it is there, in a hundredth of the time that TensorFlow takes to make it: a campaign has it make all."""
    return (stored if (name, optimizer, kind) in STORED and not CAMPAIGN else graph)(name, optimizer, kind)


def store() -> None:
    """Writes `FILE`, equal graphs as equal bytes."""
    with zipfile.ZipFile(FILE, "w") as archive:
        for name, optimizer, kind in STORED:
            meta, training = training_models.build(
                name, optimizer, resource=kind == "resource", batch=BATCH, small=True
            )
            _strip(meta)
            for ending, data in (
                ("meta", meta.SerializeToString(deterministic=True)),
                ("json", json.dumps(asdict(training)).encode()),
            ):
                archive.writestr(zipfile.ZipInfo(f"{name}.{optimizer}.{kind}.{ending}"), data, zipfile.ZIP_LZMA)


def _strip(meta: Any) -> None:
    """Leaves out what no step needs: how variables begin, which shapes there are, and the collections."""
    needed, waiting = set[str](), list(FETCHES)
    nodes = {node.name: node for node in meta.graph_def.node}
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting += [text.lstrip("^").partition(":")[0] for text in nodes[name].input]
    del meta.graph_def.node[:]
    meta.graph_def.node.extend(node for name, node in nodes.items() if name in needed)
    for node in meta.graph_def.node:
        node.attr.pop("_output_shapes", None)
    for name in ("collection_def", "meta_info_def"):
        meta.ClearField(name)
    meta.graph_def.ClearField("library")


def run(executable: Any, training: Training, steps: range) -> np.ndarray:
    """The losses of steps, each on data of its own."""
    return np.array([float(executable.step(training.feeds(BATCH, step))["loss"]) for step in steps])


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
    store()
