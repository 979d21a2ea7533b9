"""The values of a model's variables, from the checkpoint beside its graph.

Which tensor of the checkpoint belongs to which variable is read off the model's own saver: its RestoreV2 ops list names, and each of
their outputs is assigned to one variable. That holds for TensorFlow 1 (in the graph) and 2 (in the function that the
saver's restore op calls), and for partitioned variables. Names alone do not do: Keras exports hold several variables of one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.errors import LoadError
from msplit.formats.bundle import Checkpoint
from msplit.formats.endpoints import behind, split_tensor
from msplit.formats.model import Model
from msplit.formats.tensors import fits
from msplit.opset.traits import VARIABLES, ops_with

_ASSIGNS, _IDENTITY = ops_with("assigns"), ("Identity",)


class CheckpointEntry(NamedTuple):
    """Key of a variable's value in a checkpoint.

    Attributes:
        key: Name of the tensor.
        part: The slice of it, as a saver writes it; "" for all of it.
        by_saver: Whether the model's own saver says so. What it does not save has a name of its own, and may be missing.
    """

    key: str
    part: str
    by_saver: bool


def saved_as(model: Model, nodes: Iterable[str]) -> dict[str, CheckpointEntry]:
    """Keys of a model's variables in its checkpoints, by the name of their node; each has a key of its own."""
    nodes, sources = list(nodes), _restored(model)
    found = {name: CheckpointEntry(*sources[name], True) for name in nodes if name in sources}
    taken = {(place.key, place.part) for place in found.values()}
    for name in nodes:
        if name not in found:
            own = _own_key(model.graph, name)
            place = CheckpointEntry(name if (own, "") in taken else own, "", False)
            taken.add((place.key, ""))
            found[name] = place
    return found


def variables(
    model: Model, nodes: Iterable[str] | None = None, *, checkpoint: str | Path | None = None
) -> dict[str, NDArray[Any]]:
    """Values of variables by the name of their node (VarHandleOp or VariableV2) in the top-level graph.

    Args:
        model: A SavedModel, or a .meta file with its checkpoint beside it.
        nodes: The variables wanted; all that have a saved value where it is not given.
        checkpoint: Prefix of the checkpoint (the path without ``.index``), where it is not in its usual place.

    Returns:
        Arrays, which may be read-only views of the mapped files.

    Raises:
        LoadError: There is no checkpoint, any tensor of it is damaged, or it does not hold a variable that was asked for.
    """
    graph = model.graph
    if nodes is None:
        wanted = [name for name, op in zip(graph.names, graph.ops, strict=True) if op in VARIABLES]
    elif not (wanted := list(nodes)):
        return {}
    saved = Checkpoint(_prefix(model, checkpoint))
    saved.verify()
    places = saved_as(model, wanted)
    values = {}
    for name in wanted:
        key, part, _ = places[name]
        if key in saved:
            values[name] = _part(saved.tensor(key), part, name)
        elif nodes is not None:
            raise LoadError(
                f"the checkpoint has no value for variable {name!r}",
                where=str(model.path),
                fix="export the model again with all its variables tracked",
            )
    return values


def verify(model: Model) -> None:
    """Refuses a model any tensor of whose own checkpoint is damaged; of a model without a checkpoint none is.

    Raises:
        LoadError: One is; the message names the tensor and the file.
    """
    try:
        prefix = _prefix(model, None)
    except LoadError:
        return
    if Path(f"{prefix}.index").exists():
        Checkpoint(prefix).verify()


def differs(model: Model, name: str, value: NDArray[Any]) -> str:
    """The difference in type or shape between a variable's value and the graph; "" where it fits."""
    dtype, shape = _declared(model, name)
    if dtype and value.dtype.name != dtype and not (dtype == "string" and value.dtype.kind in "OSU"):
        return f"variable {name!r} is {dtype}, there {value.dtype.name}"
    if shape is not None and not fits(value.shape, shape):
        return f"variable {name!r} is {_sizes(shape)}, there {_sizes(value.shape)}"
    return ""


def _declared(model: Model, name: str) -> tuple[str, tuple[int | None, ...] | None]:
    """Type and shape that the graph gives a variable; "" and None for what it does not say."""
    attrs = model.graph.attrs[model.graph.index[name]]
    dtype, shape = attrs.get("dtype"), attrs.get("shape")
    return dtype if isinstance(dtype, str) else "", shape if isinstance(shape, tuple) else None


def _sizes(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _prefix(model: Model, checkpoint: str | Path | None) -> Path:
    if checkpoint is not None:
        return Path(str(checkpoint).removesuffix(".index"))
    if model.is_saved_model:
        return model.path / "variables" / "variables"
    beside = model.path.with_suffix("")
    if model.meta is not None and Path(f"{beside}.index").exists():
        return beside
    raise LoadError(
        "holds a graph without the values of its variables",
        where=str(model.path),
        fix=f"put the checkpoint beside it ({beside.name}.index and its data files), freeze it, or give a SavedModel",
    )


def _own_key(graph: Graph, name: str) -> str:
    """The key of a variable that no saver restores: its shared name, else its node's."""
    node = graph.index.get(name)
    return name if node is None else graph.attrs[node].get("shared_name") or name


def _restored(model: Model) -> dict[str, tuple[str, str]]:
    """By variable node the tensor that the saver restores it from, and the slice of it."""
    graph = model.graph
    found: dict[str, tuple[str, str]] = {}
    for variable, source in _assignments(graph):
        found.setdefault(graph.names[variable], source)
    restore = graph.index.get(split_tensor(model.meta.saver_def.restore_op_name)[0]) if model.meta is not None else None
    called = None if restore is None else graph.attrs[restore].get("f")
    if restore is None or not isinstance(called, FunctionRef) or called.name not in graph.functions:
        return found
    given = graph.inputs(restore)
    function = graph.functions[called.name]
    for parameter, source in _assignments(function.body):
        if parameter < min(len(function.parameters), len(given)):
            found.setdefault(graph.names[behind(graph, given[parameter], _IDENTITY)[0]], source)
    return found


def _assignments(graph: Graph) -> Iterator[tuple[int, tuple[str, str]]]:
    """(variable or parameter, (tensor name, slice)) for every restored tensor that is assigned."""
    for node, op in enumerate(graph.ops):
        if op != "RestoreV2":
            continue
        inputs = graph.inputs(node)
        names = _constant_strings(graph, inputs[1][0])
        slices = _constant_strings(graph, inputs[2][0])
        for edge in graph.out_edges(node).tolist():
            port = int(graph.edges.port[edge])
            assigned = _assigned_by(graph, edge)
            if assigned is not None and 0 <= port < min(len(names), len(slices)):
                yield assigned, (names[port], slices[port])


def _assigned_by(graph: Graph, edge: int) -> int | None:
    """The variable that the tensor of an edge is assigned to, directly or through Identity ops."""
    edges = graph.edges
    while graph.ops[edges.dst[edge]] == "Identity":
        onward = [e for e in graph.out_edges(int(edges.dst[edge])).tolist() if edges.port[e] != CONTROL]
        if not onward:
            return None
        edge = onward[0]
    target = int(edges.dst[edge])
    if graph.ops[target] not in _ASSIGNS or edges.slot[edge] != 1:
        return None
    return behind(graph, graph.inputs(target)[0], _IDENTITY)[0]


def _constant_strings(graph: Graph, node: int) -> list[str]:
    value = graph.attrs[node].get("value")
    if not isinstance(value, TensorValue) or value.dtype != "string":
        return []
    return [item.decode(errors="replace") for item in value.load().ravel()]


def _part(value: NDArray[Any], spec: str, name: str) -> NDArray[Any]:
    """The slice of a tensor that a saver's spec describes: the full shape, then ``start,length`` or ``-`` per dimension."""
    if not spec:
        return value
    try:
        *_, ranges = spec.split(" ")
        slices = []
        for part in ranges.split(":"):
            start, _, length = part.partition(",")
            slices.append(slice(None) if part == "-" else slice(int(start), int(start) + int(length)))
        return np.ascontiguousarray(value[tuple(slices)])
    except (ValueError, IndexError):
        raise LoadError(f"variable {name!r} is saved as a slice that makes no sense: {spec!r}") from None
