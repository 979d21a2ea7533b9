"""A function of TensorFlow's as a SavedModel of one signature, for arguments of some shapes, and what it does to variables."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msplit import formats
from msplit.engines.base import is_array, type_name
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.engines.tensors import as_array
from msplit.errors import MsplitError
from msplit.formats.model import Model
from msplit.opset.traits import written
from msplit.run.function_conds import straighten


@dataclass(frozen=True, eq=False)
class ExportedFunction:
    """What was exported.

    Attributes:
        structure: The result's, with the names of its outputs, and None where it has None.
        variables: TensorFlow's variables that the function reads or writes, which the SavedModel lists as ``weights`` in this order.
        changed: Those that it writes.
    """

    structure: Any
    variables: tuple[Any, ...]
    changed: tuple[Any, ...]

    def by_node(self, model: Model, nodes: Iterable[str]) -> dict[str, Any]:
        """TensorFlow's variables by their nodes in the graph.

        Args:
            model: The SavedModel, read.
            nodes: Names of nodes that are variables.
        """
        names = _checkpoint_names(model.path, len(self.variables))
        numbers = {name: number for number, name in enumerate(names)}
        places = formats.saved_as(model, nodes)
        return {node: self.variables[numbers[place.key]] for node, place in places.items() if place.key in numbers}


def export(
    function: Callable[..., Any],
    call: Any,
    values: Sequence[Any],
    folder: Path,
    *,
    straight: bool = False,
    rows: int | None = None,
) -> ExportedFunction:
    """Writes a function as a SavedModel.

    Inputs are called ``input_N`` by their place among all leaves of the arguments, outputs ``output_N``.

    Args:
        function: Whatever `tf.function` takes.
        call: Its arguments and its arguments by name.
        values: Of each leaf of these the array or tensor, which gives shape and type, or None where it is a part of the function.
        folder: Where to write.
        rows: What is as long as that along its first axis may become longer or shorter: that axis is left open.
        straight: Whether one that writes variables is to be without compiled calls and conds around that; see `function_conds`.

    Raises:
        MsplitError: A result is no tensor.
    """
    tf = tensorflow()
    leaves = tf.nest.flatten(call)
    structure: list[Any] = []
    others: list[str] = []

    def by_name(**tensors: Any) -> dict[str, Any]:
        given = [tensors.get(f"input_{number}", leaf) for number, leaf in enumerate(leaves)]
        arguments, named = tf.nest.pack_sequence_as(call, given)
        result = function(*arguments, **named)
        found = {f"output_{number}": _tensor(one) for number, one in enumerate(tf.nest.flatten(result))}
        names = [None if one is None else name for name, one in found.items()]
        structure[:] = [tf.nest.pack_sequence_as(result, names)]
        others[:] = [type(one).__name__ for one in found.values() if not isinstance(one, tf.Tensor | None)]
        tensors = {name: tf.identity(one) for name, one in found.items() if isinstance(one, tf.Tensor)}
        # A signature without outputs is no graph to run: what only trains gives something, too.
        return tensors or {"nothing": tf.constant(0)}

    def shape(value: Any) -> Any:
        is_open = rows is not None and tuple(value.shape[:1]) == (rows,)
        return (None, *value.shape[1:]) if is_open else value.shape

    specs = {
        name: tf.TensorSpec(shape(value), tf.as_dtype(value.dtype if is_array(value) else type_name(value)), name=name)
        for name, value in ((f"input_{number}", value) for number, value in enumerate(values))
        if value is not None
    }
    traced = tf.function(by_name).get_concrete_function(**specs)
    if others:
        raise MsplitError(
            f"the function gives a {others[0]}, which is no tensor of numbers or words",
            fix="let it give tensors, or lists, tuples and dicts of them: of a ragged one its values and row_splits",
        )
    holder = tf.Module()
    owners = [function, getattr(function, "__self__", None), *_tables(traced)]
    holder.owned = [one for one in owners if isinstance(one, tf.Module) or hasattr(one, "_trackable_children")]
    variables = tuple(traced.variables)
    holder.weights = list(variables)
    # Nobody differentiates it again, and some gradients, such as that of `tf.recompute_grad`, can not be traced by themselves.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    try:
        tf.saved_model.save(holder, str(folder), signatures=traced, options=options)
    except AssertionError as problem:  # TensorFlow's word for a resource that no object holds
        raise MsplitError(
            "the function uses a lookup table, or another resource, whose Python object is gone",
            fix="keep what has made it: the table, layer or module, or the loaded model whose signature this is",
        ) from problem
    changed = _changed(traced.graph, variables)
    if changed and straight:
        _straighten(folder / "saved_model.pb")
    return ExportedFunction(structure[0], variables, changed)


def _tables(traced: Any) -> list[Any]:
    """The objects of lookup tables, and of other resources beside variables, that a traced function captures. It knows their handles only,
    and a SavedModel holds what belongs to an object."""
    tf = tensorflow()
    handles = {id(outer) for outer, _ in traced.graph.captures if outer.dtype == tf.resource}
    handles -= {id(variable.handle) for variable in traced.variables}
    kind = tf.saved_model.experimental.TrackableResource
    objects = gc.get_objects() if handles else ()
    return [one for one in objects if issubclass(type(one), kind) and id(one._resource_handle) in handles]


def _tensor(result: Any) -> Any:
    """A result as a `tf.function` gives it: of a variable and of a number a tensor."""
    tf = tensorflow()
    is_value = isinstance(result, tf.Variable | bool | int | float | np.ndarray | np.generic)
    return tf.convert_to_tensor(result) if is_value or hasattr(result, "__tf_tensor__") else result


def _straighten(path: Path) -> None:
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    saved = SavedModel()
    saved.ParseFromString(path.read_bytes())
    for meta_graph in saved.meta_graphs:
        straighten(meta_graph.graph_def)
    formats.write_bytes_atomic(path, saved.SerializeToString(), force=True)


def write_inputs(values: Sequence[Any], names: Sequence[str], folder: Path) -> dict[str, Path]:
    """Arguments as files of inputs. Strings and types that only TensorFlow has do not come back from a file as they are."""
    written = {}
    for number, value in enumerate(values):
        name = f"input_{number}"
        if value is not None and name in names:
            array = as_array(name, value)
            if array.dtype.kind in "biufc":
                content = io.BytesIO()
                np.lib.format.write_array(content, array)
                written[name] = folder / f"{name}.npy"
                formats.write_bytes_atomic(written[name], content.getvalue())
    return written


def _changed(graph: Any, variables: Sequence[Any]) -> tuple[Any, ...]:
    """The variables that a traced function writes, itself or in what it calls."""
    by_handle = {id(variable.handle): number for number, variable in enumerate(variables)}
    handles = {
        inner.ref(): by_handle[id(outer)] for outer, inner in graph.captures if id(outer) in by_handle
    }  # of variables inside
    found: set[int] = set()
    for operation in graph.get_operations():
        slots = {slot: handles[one.ref()] for slot, one in enumerate(operation.inputs) if one.ref() in handles}
        if operation.type == "Identity" and slots:
            handles[operation.outputs[0].ref()] = slots[0]
        elif slots:
            found.update(number for slot, number in slots.items() if slot in _writes(operation))
    return tuple(variable for number, variable in enumerate(variables) if number in found)


def _writes(operation: Any) -> Sequence[int]:
    """Slots of the handles whose variables an operation writes. What calls functions says which ones it only reads."""
    if not any(attr.HasField("func") or attr.list.func for attr in operation.node_def.attr.values()):
        return written(operation.type)
    only_read = operation.node_def.attr["_read_only_resource_inputs"].list.i
    return [slot for slot in range(len(operation.inputs)) if slot not in only_read]


def _checkpoint_names(folder: Path, count: int) -> list[str]:
    """Names of variables in a SavedModel's checkpoint, by their numbers in its ``weights``. An object has one name, that of whatever
    else it belongs to, perhaps: the checkpoint's own list of objects tells."""
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    objects = TrackableObjectGraph()
    reader = tensorflow().train.load_checkpoint(str(folder / "variables" / "variables"))
    objects.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))

    def children(number: int) -> dict[str, int]:
        return {one.local_name: one.node_id for one in objects.nodes[number].children}

    weights = children(children(0)["weights"])
    return [objects.nodes[weights[str(number)]].attributes[0].checkpoint_key for number in range(count)]
