"""Load, price and save a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from msplit import cost, formats
from msplit.cost import profile as profiles
from msplit.cost.costs import Costs
from msplit.cost.profile import Profile
from msplit.cost.shapes import Shapes
from msplit.errors import LoadError
from msplit.flatten.build import body, flatten
from msplit.flatten.flat import FlatGraph
from msplit.flatten.origin import Conflict, to_ids
from msplit.formats import WriteReport
from msplit.graph import Ints
from msplit.memory import no_collection
from msplit.progress import phase


def load(
    path: str | Path,
    *,
    tags: Sequence[str] | None = None,
    signature: str | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    function: str | None = None,
) -> FlatGraph:
    """Reads a model, without TensorFlow, and makes the flat graph that everything works on.

    Args:
        path: A GraphDef (`.pb`, `.pbtxt`), a MetaGraphDef (`.meta`) or a SavedModel's folder; told apart by content.
        tags: Tags of the SavedModel's graph, where it has several.
        signature: Signature of the SavedModel; by default `serving_default`, or the only one.
        inputs: Tensors to feed instead of the model's own inputs.
        outputs: Tensors to fetch instead of the model's own outputs.
        function: Look inside this function of the library, such as the body of a `While`, instead of at the model.

    Raises:
        LoadError: It can not be read, or leaves a choice open that must be made.
        GraphError: It is not a valid graph; every defect is listed.
    """
    with phase("reading"), no_collection():
        model = formats.read(Path(path), tags=tags, signature=signature, inputs=inputs, outputs=outputs)
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
    """What to ask for in place of a function that is not there."""
    near = difflib.get_close_matches(function, known, 3)
    if near:
        return f"did you mean {', '.join(near)}?"
    if not known:
        return "look at the model itself: it has no functions"
    left = len(known) - _LISTED
    return f"it has {', '.join(sorted(known)[:_LISTED])}{f' and {left} more' if left > 0 else ''}"


_LISTED = 6


def price(
    flat: FlatGraph,
    *,
    batch: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    gpu: str = cost.DEFAULT_GPU,
    profile: Profile | None = None,
) -> tuple[Shapes, Costs]:
    """Shapes of all tensors and cost of all nodes, on a GPU's data sheet or as measured.

    Args:
        flat: The graph.
        batch: Size of unknown leading dimensions of inputs; 1 where it is not given.
        shapes: Whole shapes by input name.
        gpu: Name of a data sheet, see `cost.gpu_names`.
        profile: What was measured on this graph. Shapes that are not given are the profile's, and so is the data sheet if there is one
            of its GPU.

    Raises:
        MsplitError: There is no such data sheet, shapes contradict the graph, or the profile is of another graph or of other shapes.
    """
    if profile is not None:
        profiles.check(profile, flat)
        gpu = profile.device.sheet() or gpu
        if batch is None:
            shapes = {**profile.shapes, **(shapes or {})}
    with phase("shapes and costs"), no_collection():
        found = cost.infer(flat, batch=batch, shapes=shapes)
        costs = cost.estimate(flat, found, gpu)
    if profile is not None:
        fed = {tensor.name: found.shape(tensor.node, tensor.port) for tensor in flat.inputs}
        profiles.check_shapes(profile, fed)
        costs = profiles.apply(profile, flat, costs)
    return found, costs


def save(
    flat: FlatGraph, ids: Ints, out: str | Path, *, costs: Costs | None = None, force: bool = False
) -> tuple[WriteReport, tuple[Conflict, ...]]:
    """Writes the model with `_stream_id` on its nodes, in the format it came in. Host nodes get no id but one they had.

    Args:
        flat: The graph.
        ids: Stream id per node of `flat`.
        out: File or folder to write; appears at once and whole, or not at all.
        costs: Decides where call sites of one function want different ids for one node: the costlier wins.
        force: Replace what is there.

    Returns:
        What was written, and the nodes of functions whose call sites wanted different ids.

    Raises:
        WriteError: It can not be written. What was there before is unharmed.
    """
    had = np.zeros(len(flat), dtype=bool)
    had[flat.graph.nodes_with(formats.STREAM_ID)] = True
    wanted = np.where(flat.host & ~had, -1, ids).astype(np.int32)
    with phase("writing"):
        named, conflicts = to_ids(flat, wanted.tolist(), costs.time_us.tolist() if costs is not None else None)
        return formats.write(flat.model, dict(named), Path(out), force=force), conflicts
