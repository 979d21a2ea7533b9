"""A SavedModel around a graph: a signature, a saver, and where the variables' values go. TensorFlow 1's form, which all loaders read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msplit.assignment.replicas import Ensemble
from msplit.formats.endpoints import DEFAULT_SIGNATURE, MAIN_OP, split_tensor
from msplit.formats.model import Endpoint, Model
from msplit.formats.tensors import add_node, dtype_number
from msplit.opset import schema
from msplit.opset.traits import ops_with

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
            _describe(signature.inputs[end.name], end, made.inputs[end.name])
    for name, end in made.outputs.items():
        _describe(signature.outputs[name], end, end.tensor)
    if made.init_op:  # where TensorFlow 1 has it: its signature of this name takes no assets
        meta.collection_def[MAIN_OP].node_list.value.append(made.init_op)


def _describe(info: Any, end: Endpoint, tensor: str) -> None:
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
