"""Command `replicate`: an ensemble of copies of a model, written as a SavedModel.

Ensembles: several copies of a model in one graph, with weights of their own, written as a model.

A SavedModel around a graph: a signature, a saver, and where the variables' values go. TensorFlow 1's form, which all loaders read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit import formats
from msplit.assignment.model import opened
from msplit.assignment.replicas import Ensemble, Replica, ensemble, has_variables
from msplit.errors import LoadError, MsplitError
from msplit.flatten.flat import FlatGraph, original
from msplit.formats import writer
from msplit.formats.endpoints import DEFAULT_SIGNATURE, MAIN_OP, split_tensor
from msplit.formats.model import Endpoint, Format, Model
from msplit.formats.reader import SAVED_MODEL_FILES
from msplit.formats.tensors import add_node, dtype_number
from msplit.opset import schema
from msplit.opset.traits import ops_with
from msplit.progress import phase

_REFERENCES = ops_with("reference variable")
_PREDICT = "tensorflow/serving/predict"


def saved_model(model: Model, made: Ensemble) -> Any:
    """The message of a SavedModel.

    Args:
        model: What the copies were made of: what it says of itself is kept, and its signature with the inputs of it.
        made: The copies. Their checkpoint has the variables under the names of their nodes.
    """
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    if model.meta is not None:
        meta.meta_info_def.CopyFrom(model.meta.meta_info_def)
        meta.meta_info_def.function_aliases.clear()
    if not model.is_saved_model:
        meta.meta_info_def.tags[:] = ["serve"]
    meta.graph_def.CopyFrom(made.graph_def)
    kept = {node.name for node in made.graph_def.node}
    for asset in model.meta.asset_file_def if model.meta is not None else ():
        if split_tensor(asset.tensor_info.name)[0] in kept:
            meta.asset_file_def.add().CopyFrom(asset)
    _sign(meta, model, made)
    if made.variables:
        _save(meta, list(made.variables))
    return saved


def _sign(meta: Any, model: Model, made: Ensemble) -> None:
    signature = meta.signature_def[model.signature or DEFAULT_SIGNATURE]
    signature.method_name = _PREDICT
    if model.signature is not None:
        own = model.meta.signature_def[model.signature]
        signature.method_name = own.method_name
    if model.signature is not None and model.choice.inputs is None:
        for name, info in own.inputs.items():  # one may be of several tensors: a sparse or a ragged one
            signature.inputs[name].CopyFrom(info)
    else:
        for end in (end for end in model.inputs if end.name in made.inputs):
            describe(signature.inputs[end.name], end, made.inputs[end.name])
    for name, end in made.outputs.items():
        describe(signature.outputs[name], end, end.tensor)
    if made.init_op:  # where TensorFlow 1 has it: its signature of this name takes no assets
        meta.collection_def[MAIN_OP].node_list.value.append(made.init_op)


def describe(info: Any, end: Endpoint, tensor: str) -> None:
    """Says in a signature what an end is."""
    node, port = split_tensor(tensor)
    info.name = f"{node}:{port}"
    info.dtype = dtype_number(end.dtype) if end.dtype else 0
    if end.shape is None:
        info.tensor_shape.unknown_rank = True
    for size in end.shape or ():
        info.tensor_shape.dim.add().size = -1 if size is None else size


def _save(meta: Any, variables: Sequence[str]) -> None:
    """A saver as TensorFlow 1 makes it: it names the tensors of a checkpoint as the variables."""
    graph_def = meta.graph_def
    nodes = {node.name: node for node in graph_def.node}
    scope = "save"
    while any(name.startswith(f"{scope}/") for name in nodes):
        scope += "s"
    types = [dtype for name in variables for dtype in [nodes[name].attr["dtype"].type]]
    references = [nodes[name].op in _REFERENCES for name in variables]

    def add(name: str, op: str, inputs: Sequence[str] = (), **attrs: Any) -> str:
        add_node(graph_def, f"{scope}/{name}", op, inputs, **attrs)
        return f"{scope}/{name}"

    default = add("filename/input", "Const", dtype="string", value=("string", "model"))
    file = add("filename", "PlaceholderWithDefault", [default], dtype="string", shape=())
    keys = add("tensor_names", "Const", dtype="string", value=("string", list(variables)))
    slices = add("shape_and_slices", "Const", dtype="string", value=("string", [""] * len(variables)))
    restored = add("RestoreV2", "RestoreV2", [file, keys, slices])
    graph_def.node[-1].attr["dtypes"].list.type.extend(types)
    reads, assigns = [], []
    for number, (name, dtype, reference) in enumerate(zip(variables, types, references, strict=True)):
        reads.append(add(f"Read_{number}", "Identity" if reference else "ReadVariableOp", [name]))
        graph_def.node[-1].attr["T" if reference else "dtype"].type = dtype
        assigns.append(
            add(f"Assign_{number}", "Assign" if reference else "AssignVariableOp", [name, f"{restored}:{number}"])
        )
        graph_def.node[-1].attr["T" if reference else "dtype"].type = dtype
    written = add("SaveV2", "SaveV2", [file, keys, slices, *reads])
    graph_def.node[-1].attr["dtypes"].list.type.extend(types)
    saver = meta.saver_def
    saver.version = saver.V2
    saver.filename_tensor_name = f"{file}:0"
    saver.save_tensor_name = f"{add('control_dependency', 'Identity', [file, f'^{written}'], T='string')}:0"
    saver.restore_op_name = add("restore_all", "NoOp", [f"^{assign}" for assign in assigns])
    listed = meta.collection_def["variables"].bytes_list.value
    for number, (name, reference) in enumerate(zip(variables, references, strict=True)):
        described = schema.variable_pb2.VariableDef(
            variable_name=f"{name}:0",
            initializer_name=assigns[number],
            initial_value_name=f"{restored}:{number}",
            snapshot_name=f"{reads[number]}:0",
            is_resource=not reference,
            trainable=True,
        )
        listed.append(described.SerializeToString(deterministic=True))


COMBINE = ("mean", "stack")

_DEVICE = re.compile(r"(/(job:[a-z0-9_]+|replica:\d+|task:\d+|(device:)?[A-Za-z_]+:(\d+|\*)))+")


@dataclass(frozen=True)
class Replication:
    """Settings of an ensemble.

    Attributes:
        times: Replicas.
        weights: Of the first replicas, where they are not the model's own: the beginning of a checkpoint's file names or a SavedModel;
            for a model without variables, one like it with other constants.
        combine: What becomes of the outputs: ``mean``, or ``stack`` along a new first axis.
        streams: Replica k has stream id k modulo this; None: each has a stream of its own.
        devices: Replica k is on device k modulo their number; none: what the model says.
    """

    times: int
    weights: Sequence[str | os.PathLike[str]] = ()
    combine: str = "mean"
    streams: int | None = None
    devices: Sequence[str] = ()


@dataclass(frozen=True)
class Replicated:
    """Report of a written ensemble.

    Attributes:
        path: The file or folder.
        outputs: The tensor that has it, by the name of each output.
        shared: Nodes that are there once.
        copied: Nodes of one replica.
        notes: What a user should know.
    """

    path: Path
    outputs: Mapping[str, str]
    shared: int
    copied: int
    notes: tuple[str, ...] = ()


def replicate(
    model: FlatGraph | str | os.PathLike[str],
    replication: Replication,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
) -> Replicated:
    """Writes an ensemble: one graph of several copies of a model, which share inputs and tables and whose outputs are combined.

    A GraphDef becomes one in the same format, anything else a SavedModel. For variables TensorFlow is needed, which writes checkpoints.

    Args:
        model: From `load`, or where the model is. It is not modified.
        replication: What to make of it.
        out: File or folder to write; appears at once and whole, or not at all.
        force: Replace what is there.

    Raises:
        MsplitError: The model can not be copied, or its outputs not be combined; or the options make no sense.
        LoadError: Weights can not be read, or are of another model.
        WriteError: It can not be written. What was there before is unharmed.
    """
    _check(replication)
    flat = opened(model)
    source = flat.model
    bare = source.format.binary is Format.GRAPH_DEF
    target = replace(source, format=source.format if bare else Format.SAVED_MODEL)
    writer.check_place(target, Path(out), force=force)
    trained = has_variables(source)
    if trained and bare and len(replication.weights) < replication.times:
        raise LoadError(
            "holds a graph without the values of its variables",
            where=str(source.path),
            fix="give --weights for each replica, freeze the model, or give a SavedModel",
        )
    frozen = [] if trained else [_like(source, Path(path)) for path in replication.weights]
    streams = replication.streams or replication.times
    devices = replication.devices or ("",)
    host = frozenset(
        original(flat, int(flat.origin_function[node]), int(flat.origin_node[node]))[:2]
        for node in np.flatnonzero(flat.host & (flat.origin_node >= 0)).tolist()
    )
    with phase("copying"):
        replicas = [
            Replica(
                frozen[number].graph_def if number < len(frozen) else source.graph_def,
                number % streams,
                devices[number % len(devices)],
                number,
                host,
            )
            for number in range(replication.times)
        ]
        made = ensemble(source, replicas, replication.combine)
    if bare and not made.variables:
        with phase("writing"):
            writer.write_message(target, made.graph_def, Path(out), force=force)
    else:
        values = values_of(source, made, [Path(path) for path in replication.weights]) if made.variables else {}
        with phase("writing"):
            message = saved_model(source, made)
            target = replace(target, format=Format.SAVED_MODEL)
            writer.write_message(target, message, Path(out), force=force, beside=beside(source, values))
    tensors = {name: end.tensor.removesuffix(":0") for name, end in made.outputs.items()}
    return Replicated(Path(out), tensors, made.shared, made.copied, _notes(source, replication))


def _check(replication: Replication) -> None:
    if replication.times < 1:
        raise MsplitError(f"{replication.times} replicas are none", fix="give --times 2 or more")
    if len(replication.weights) > replication.times:
        raise MsplitError(
            f"there are weights for {len(replication.weights)} replicas, and {replication.times} are to be made",
            fix="give --times as many, or leave it out",
        )
    if replication.combine not in COMBINE:
        raise MsplitError(
            f"outputs can not be combined by {replication.combine!r}", fix=f"one of: {', '.join(COMBINE)}"
        )
    wrong = next((device for device in replication.devices if not _DEVICE.fullmatch(device)), None)
    if wrong is not None:
        raise MsplitError(f"{wrong!r} is no device", fix="write it as /gpu:0, or /job:worker/task:1/device:GPU:0")


def _like(model: Model, path: Path) -> Model:
    """A model that differs from another one in constants alone."""
    other = formats.read(path, **vars(model.choice), record=False)
    if formats.structure_hash(other) != formats.structure_hash(model):
        raise LoadError(
            f"is not the same graph as {model.source}: more than its constants differ",
            where=str(path),
            fix="export both by the same code; other models are joined by the code that builds them",
        )
    return other


def values_of(model: Model, made: Ensemble, weights: Sequence[Path]) -> dict[str, NDArray[Any]]:
    """Values of all variables of an ensemble."""
    names = list(dict.fromkeys(name for _, name in made.variables.values()))
    read: dict[Path | None, Mapping[str, NDArray[Any]]] = {}
    found = {}
    for variable, (number, name) in made.variables.items():
        path = weights[number] if number < len(weights) else None
        if path not in read:
            read[path] = _of_model(model, names, path)
        found[variable] = read[path][name]
    return found


def _of_model(model: Model, names: Sequence[str], path: Path | None) -> Mapping[str, NDArray[Any]]:
    """Values of a model's variables: its own, or those of a checkpoint."""
    if path is None:
        return formats.variables(model, names)
    if any((path / name).is_file() for name in SAVED_MODEL_FILES):
        path = path / "variables" / "variables"
    values = formats.variables(model, names, checkpoint=path)
    wrong = [said for name in names if (said := formats.differs(model, name, values[name]))]
    if wrong:
        raise LoadError(f"is of another model than {model.source}", where=str(path), details=wrong[:8])
    return values


def beside(model: Model, values: Mapping[str, NDArray[Any]]) -> Callable[[Path], None]:
    """Files that fill the folder of a SavedModel, its main file aside: assets, and the values of variables."""

    def fill(folder: Path) -> None:
        if model.is_saved_model:
            writer.copy_beside(model, folder, lambda name: name in ("assets", "assets.extra"))
        if values:
            (folder / "variables").mkdir()
            save_values(folder / "variables" / "variables", values)

    return fill


def save_values(prefix: Path, values: Mapping[str, NDArray[Any]]) -> None:
    """Writes a checkpoint of whole variables."""
    from msplit.engines.tensorflow.variables import save_bundle

    save_bundle(prefix, {(name, ""): value for name, value in values.items()})


def _notes(model: Model, replication: Replication) -> tuple[str, ...]:
    notes = []
    own = replication.times - len(replication.weights)
    if len({os.path.realpath(path) for path in replication.weights}) + min(own, 1) < replication.times:
        notes.append("Replicas have equal weights, and so give equal results: --weights PATH gives each its own.")
    if model.targets:
        notes.append(f"Left out, as it gives no tensor: {', '.join(model.targets[:8])}.")
    return tuple(notes)
