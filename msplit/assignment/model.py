"""Load, price and save a model.

How results show themselves: one line for a prompt, a small table for a notebook. All of it is in reports and in `--format json`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msplit import cost, formats
from msplit.core import arguments
from msplit.core.graph import Ints
from msplit.core.memory import no_collection
from msplit.cost import profile as profiles
from msplit.cost.costs import Costs
from msplit.cost.gpus import DEFAULT_GPU
from msplit.cost.profile import Workload
from msplit.engines.tensorflow.gradients import expanded
from msplit.errors import LoadError, MsplitError
from msplit.escape import html, line
from msplit.flatten.build import body, flatten
from msplit.flatten.flat import Conflict, FlatGraph, among, to_ids, with_ids
from msplit.formats.model import AssignmentRecord
from msplit.formats.writer import WriteReport
from msplit.progress import phase
from msplit.shapes import Shapes


def load(
    path: str | os.PathLike[str],
    *,
    tags: Sequence[str] | None = None,
    signature: str | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    function: str | None = None,
    record: bool = True,
) -> FlatGraph:
    """Reads a model, without TensorFlow, and makes the flat graph that everything works on.

    One thing is TensorFlow's, where it is installed: the nodes of the gradient of a function, which a graph names (`SymbolicGradient`).

    Args:
        path: A GraphDef (`.pb`, `.pbtxt`), a MetaGraphDef (`.meta`) or a SavedModel's folder; told apart by content.
        tags: Tags of the SavedModel's graph, where it has several.
        signature: Signature of the SavedModel; by default `serving_default`, or the only one.
        inputs: Tensors to feed instead of the model's own inputs.
        outputs: Tensors to fetch instead of the model's own outputs.
        function: Look inside this function of the library, such as the body of a `While`, instead of at the model.
        record: Whether to go by the record that `msplit assign` has left with the model, if it has.

    Raises:
        LoadError: It can not be read, or leaves a choice open that must be made.
        GraphError: It is not a valid graph; every defect is listed.
    """
    with phase("reading"), no_collection():
        model = formats.read(
            arguments.path(path),
            tags=tags,
            signature=signature,
            inputs=inputs,
            outputs=outputs,
            record=record,
            gradients=expanded,
        )
    if function is None:
        with phase("flattening"), no_collection():
            return flatten(model)
    if function not in model.graph.functions:
        raise LoadError(
            f"the model has no function {function!r}",
            where=str(path),
            fix=_others(function, list(model.graph.functions)),
        )
    return body(model, function)


def _others(function: str, known: list[str]) -> str:
    """Advice in place of a function that is not there."""
    near = difflib.get_close_matches(function, known, 3)
    if near:
        return f"did you mean {', '.join(near)}?"
    if not known:
        return "look at the model itself: it has no functions"
    left = len(known) - _LISTED
    return f"it has {', '.join(sorted(known)[:_LISTED])}{f' and {left} more' if left > 0 else ''}"


_LISTED = 6


def opened(model: FlatGraph | str | os.PathLike[str]) -> FlatGraph:
    """The graph of a model that may be named by where it is; with choices to make, call `load` and give its result.

    Raises:
        LoadError: It can not be read.
        MsplitError: It is neither.
    """
    if isinstance(model, FlatGraph):
        return model
    if isinstance(model, str | os.PathLike):
        return load(Path(model))
    raise MsplitError(
        f"{type(model).__name__} is no model",
        fix="give what `msplit.load` returns, or the path of a model's file or folder",
    )


def price(flat: FlatGraph, workload: Workload) -> tuple[Shapes, Costs]:
    """Shapes of all tensors and cost of all nodes, on a GPU's data sheet or as measured; see `api.price`."""
    profile, gpu, shapes = workload.profile, workload.gpu or DEFAULT_GPU, workload.shapes
    if profile is not None:
        profiles.check(profile, flat)
        gpu = profile.device.sheet() or gpu
        if workload.batch is None:
            shapes = {**profile.shapes, **shapes}
    with phase("shapes and costs"), no_collection():
        found = cost.infer(flat, batch=workload.batch, shapes=shapes)
        costs = cost.estimate(flat, found, gpu)
    if profile is not None:
        fed = {tensor.name: found.shape(tensor.node, tensor.port) for tensor in flat.inputs}
        profiles.check_shapes(profile, fed)
        costs = profiles.apply(profile, flat, costs)
    return found, costs


def save(
    flat: FlatGraph | str | os.PathLike[str],
    ids: Ints,
    out: str | os.PathLike[str],
    *,
    costs: Costs | None = None,
    force: bool = False,
    record: AssignmentRecord | None = None,
) -> tuple[WriteReport, tuple[Conflict, ...]]:
    """Writes the model with ids on its nodes; see `api.save`."""
    flat = opened(flat)
    present = with_ids(flat.model)
    kept = present if record is None else record.by_hand
    wanted = np.where(flat.host & ~among(flat, kept), -1, ids).astype(np.int32)
    with phase("writing"):
        named, conflicts = to_ids(flat, wanted.tolist(), costs.time_us.tolist() if costs is not None else None)
        stay = {function: frozenset(names) for function, names in kept.items()}
        gone = {
            (function or None, name): None
            for function, names in present.items()
            for name in names
            if name not in stay.get(function, ())
        }
        return formats.write(flat.model, {**gone, **named}, Path(out), force=force, record=record), conflicts


def strip(flat: FlatGraph | str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> WriteReport:
    """Writes the model without any stream id, in the format it came in, and without the record of an assignment.

    Args:
        flat: The graph: from `load`, or where the model is. Ids are taken off the whole file, nodes that no output needs included.
        out: File or folder to write; appears at once and whole, or not at all.
        force: Replace what is there.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    flat = opened(flat)
    ids = {(function or None, name): None for function, names in with_ids(flat.model).items() for name in names}
    with phase("writing"):
        return formats.write(flat.model, ids, Path(out), force=force)


Facts = Sequence[tuple[str, str]]


class DisplayMixin:
    """Gives a result a short `repr` and a notebook's view, made of its `_facts`."""

    def _facts(self) -> Facts:
        """Facts that are worth a line: (what, value). The first one names the thing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        told = ", ".join(f"{what}: {line(value)}" for what, value in self._facts())
        return f"<{type(self).__name__} {told}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align:left">{html(what)}</th><td style="text-align:left">{html(value)}</td></tr>'
            for what, value in self._facts()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def gain(judgement: Any) -> str:
    """A judgement in a word."""
    return f"{judgement.gain:.2f}x on {judgement.streams} streams"
