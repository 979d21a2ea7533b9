"""The values that variables begin with: of the model's checkpoint, or what its initializers give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.placed import unplaced
from msplit.engines.tensorflow.session import SessionExecutable
from msplit.engines.variables import storage
from msplit.errors import EngineError, LoadError
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import VARIABLES
from msplit.progress import phase


def initial_state(flat: FlatGraph, *, op_libraries: Sequence[Path] = ()) -> dict[str, NDArray[Any]]:
    """The value of each variable before the first step, by the name of its node: see `Placed.variables`.

    A checkpoint with the model (a SavedModel's, or that beside a .meta file) is read without TensorFlow. Otherwise TensorFlow runs the
    initializers, once, on the CPU: those that the file names, or those that TensorFlow calls ``VARIABLE/Assign``. Random ones that have
    no seed get one that follows from their name. Variables of the file that the graph does not need are there, too, where they have a
    value, for the file's saver wants them.

    Args:
        flat: The graph.
        op_libraries: Shared objects with custom TensorFlow ops.

    Raises:
        EngineError: A variable that the graph needs has no value.
        LoadError: The checkpoint is damaged.
    """
    needed, others = variables_of(flat)
    names = (*needed, *others)
    found = _of_checkpoint(flat, needed, names) if names else {}
    if found is None:
        found = _of_initializers(flat, names, op_libraries)
    missing = [name for name in needed if name not in found]
    if missing:
        raise EngineError(
            f"variable {missing[0]!r} has no initial value: no checkpoint is with the model, and no initializer is in the file",
            where=str(flat.model.path),
            fix="put a checkpoint beside it, or give the values: msplit.Trainer(…, state={…}), or --restore PREFIX",
        )
    return found


def variables_of(flat: FlatGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The variables that the graph needs, each by the first of its nodes that refers to it, and the others of its file, which a saver may
    save, too."""
    needed = unplaced(flat).variables
    graph = flat.model.graph
    stored = {
        name: storage(op, name, attrs) or name
        for name, op, attrs in zip(graph.names, graph.ops, graph.attrs, strict=True)
        if op in VARIABLES
    }
    seen = {stored[name] for name in needed}
    others: dict[Any, str] = {}
    for name, where in stored.items():
        if where not in seen:
            others.setdefault(where, name)
    return needed, tuple(others.values())


def _of_checkpoint(flat: FlatGraph, needed: Sequence[str], names: Sequence[str]) -> dict[str, NDArray[Any]] | None:
    """What the checkpoint of the model holds; None where it has none, or not all that the graph needs."""
    model = flat.model
    if not model.is_saved_model and not Path(f"{model.path.with_suffix('')}.index").is_file():
        return None
    try:
        values = formats.variables(model)
    except LoadError:
        if model.is_saved_model:
            return None  # without variables of its own, or of a kind that TensorFlow has to read
        raise
    if not all(name in values for name in needed):
        return None
    return {name: np.array(values[name]) for name in names if name in values}


def _of_initializers(flat: FlatGraph, names: tuple[str, ...], op_libraries: Sequence[Path]) -> dict[str, NDArray[Any]]:
    model = flat.model
    if not model.init_ops:
        assigns = [name for name in (f"{name}/Assign" for name in names) if name in model.graph.index]
        model = replace(model, init_ops=tuple(assigns))
    with phase("initializing variables in TensorFlow"):
        runtime.load_op_libraries(op_libraries)
        config = runtime.session_config(1, cpu_only=True, optimized=False)
        session = SessionExecutable(model, replace(unplaced(flat), variables=names), config, ieee=True, facts={})
        try:
            return session.save_state()
        finally:
            session.close()
