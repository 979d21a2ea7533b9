"""Models like others, with weights of their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from msplit import formats
from msplit.formats.bundle import Checkpoint
from msplit.training.checkpoint import OBJECTS


def other_weights(path: Path, seed: int, out: Path) -> Path:
    """A frozen model like another, but for the values of its weights."""
    model = formats.read(path)
    random = np.random.default_rng(seed)
    message = type(model.graph_def)()
    message.CopyFrom(model.graph_def)
    for node in message.node:
        if node.op == "Const" and node.attr["dtype"].type == 1:
            tensor = node.attr["value"].tensor
            value = model.graph.attrs[model.graph.index[node.name]]["value"].load()
            if value.size > 1:
                tensor.ClearField("float_val")
                scaled = value * random.uniform(0.5, 1.5, value.shape)
                tensor.tensor_content = scaled.astype(np.float32).tobytes()
    out.write_bytes(message.SerializeToString())
    return out


def other_variables(path: Path, seed: int, out: Path) -> Path:
    """A SavedModel like another, but for the values of its floating-point variables."""
    from msplit.engines.tensorflow.variables import save_bundle

    model = formats.read(path, tags=["serve"])
    random = np.random.default_rng(seed)
    values = formats.variables(model)
    places = formats.saved_as(model, values)
    saved = Checkpoint(path / "variables" / "variables")
    parts: dict[tuple[str, str], Any] = {(OBJECTS, ""): saved.tensor(OBJECTS)} if OBJECTS in saved else {}
    for name, value in values.items():
        scaled = value * random.uniform(0.5, 1.5, value.shape) if value.dtype.kind == "f" else value
        parts[places[name].key, places[name].part] = scaled.astype(value.dtype)
    shutil.copytree(path, out)
    save_bundle(out / "variables" / "variables", parts)
    return out
