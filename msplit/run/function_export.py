"""Export of a function of TensorFlow's as a SavedModel, without what the cuda engine can not run.

A function of TensorFlow's as a SavedModel of one signature, for arguments of some shapes, and what it does to variables.

Train steps without what the cuda engine has no graph for, as far as that can be said otherwise.

A cond that assigns becomes two calls, and each assignment inside of them one of a chosen value: the new one on the side that is taken, else
what the variable has, and where it adds, zeros. Keras accumulates gradients so, scales losses and overwrites weights by their averages. And
what XLA would compile as a whole is a call like any other.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from msplit import formats
from msplit.core.dag import reached
from msplit.engines.base import is_array, type_name
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.engines.tensors import as_array
from msplit.errors import MsplitError
from msplit.formats.model import Model
from msplit.opset.traits import CALLS, ops_with, written

_CONDS = ops_with("if")
_ASSIGNS = frozenset({"AssignVariableOp"})
_ADDS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp"}) | ops_with("adds rows")
"""What is added, to all or to some rows, comes last among the inputs."""
_BOOL, _NO_VALUES = 10, frozenset({20, 21})  # DT_BOOL; DT_RESOURCE and DT_VARIANT
_COMPILED = "_XlaMustCompile"


def straighten(graph_def: Any) -> None:
    """Changes a GraphDef in place: conds and compiled calls that write variables. A cond in which something else than an assignment
    writes, or a loop assigns, stays as it is."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    changing = _changing(functions)
    for body in [graph_def.node, *(function.node_def for function in functions.values())]:
        for node in body:
            if _COMPILED in node.attr and not changing.isdisjoint(_called(node)):
                del node.attr[_COMPILED]
    conds = _Conds(graph_def.library, deepcopy(functions), changing)
    for name in sorted(changing):
        conds.straighten(functions[name], None)


def _called(node: Any) -> Iterator[str]:
    """Functions that a node calls."""
    for attr in node.attr.values():
        if attr.HasField("func"):
            yield attr.func.name
        yield from (function.name for function in attr.list.func)


def _changing(functions: Mapping[str, Any]) -> set[str]:
    """Functions that write variables, themselves or in what they call."""
    callers: dict[str, set[str]] = {}
    found = set()
    for name, function in functions.items():
        for node in function.node_def:
            for called in _called(node):
                callers.setdefault(called, set()).add(name)
        if any(written(node.op) for node in function.node_def):
            found.add(name)
    return reached(found, lambda name: callers.get(name, ()))


class _Conds:
    """A library, and those of its functions that were made anew: what they assign is chosen by one argument more."""

    def __init__(self, library: Any, originals: Mapping[str, Any], changing: set[str]) -> None:
        self.library, self.originals, self.changing = library, originals, changing
        self.guarded: dict[str, str] = {}
        self.known: dict[str, bool] = {}

    def straighten(self, function: Any, only_if: str | None) -> None:
        """Changes a function in place.

        Args:
            only_if: The argument that says whether it writes; None: it does.
        """
        instead: dict[str, str] = {}  # of outputs of conds
        sides: dict[str, tuple[str, str]] = {}  # of conds
        nodes: list[Any] = []
        for node in map(deepcopy, function.node_def):
            if self._writes(node) and self._is_plain(node) and self._fits(node):
                for number in range(len(node.attr["Tout"].list.type)):
                    instead[f"{node.name}:output:{number}"] = f"{node.name}/chosen_{number}:output:0"
                sides[node.name] = f"{node.name}/then", f"{node.name}/else"
                nodes += self._both(node, only_if)
                continue
            if only_if is not None and written(node.op):
                nodes += _chosen(node, only_if)
            elif only_if is not None and self._writes(node):
                self._give(node, only_if)
            nodes.append(node)
        if not sides and only_if is None:
            return
        for node in nodes:
            given: list[str] = []
            for text in node.input:
                if text.startswith("^") and text[1:] in sides:
                    given += [f"^{side}" for side in sides[text[1:]]]
                else:
                    given.append(instead.get(text, text))
            node.input[:] = given
        del function.node_def[:]
        function.node_def.extend(nodes)
        for name, text in list(function.ret.items()):
            function.ret[name] = instead.get(text, text)
        for name, text in list(function.control_ret.items()):
            if text in sides:
                function.control_ret[name], function.control_ret[f"{name}_else"] = sides[text]
                function.signature.control_output.append(f"{name}_else")

    def _writes(self, node: Any) -> bool:
        """Whether a node calls what writes."""
        return not self.changing.isdisjoint(_called(node))

    def _is_plain(self, node: Any) -> bool:
        """Whether a node is a cond of a truth value that gives values."""
        attr = node.attr
        return node.op in _CONDS and attr["Tcond"].type == _BOOL and _NO_VALUES.isdisjoint(attr["Tout"].list.type)

    def _fits(self, node: Any) -> bool:
        """Whether all that a node writes can be chosen."""
        if written(node.op):
            return node.op in _ASSIGNS | _ADDS
        if not self._writes(node):
            return True
        return (node.op in CALLS or self._is_plain(node)) and all(map(self._all_fit, _called(node)))

    def _all_fit(self, name: str) -> bool:
        if name in self.changing and name not in self.known:
            self.known[name] = False  # for one that calls itself
            self.known[name] = all(map(self._fits, self.originals[name].node_def))
        return self.known.get(name, True)

    def _both(self, node: Any, only_if: str | None) -> list[Any]:
        """A cond's sides as calls, and its outputs chosen from theirs."""
        condition, *given = (text for text in node.input if not text.startswith("^"))
        waits = [text for text in node.input if text.startswith("^")]
        made = [_node(node, "not", "LogicalNot", [condition])]
        for side, is_it in (("then", condition), ("else", f"{node.name}/not:y:0")):
            if only_if is not None:
                made.append(_node(node, f"{side}_if", "LogicalAnd", [is_it, only_if]))
                is_it = f"{node.name}/{side}_if:z:0"
            call = _node(node, side, "StatefulPartitionedCall", [*given, *waits])
            for name in ("Tin", "Tout"):
                call.attr[name].CopyFrom(node.attr[name])
            call.attr["f"].CopyFrom(node.attr[f"{side}_branch"])
            if self._writes(call):
                self._give(call, is_it)
            made.append(call)
            # One after the other: what is assigned there already may be what the other side has just assigned.
            waits = [f"^{call.name}"]
        for number, dtype in enumerate(node.attr["Tout"].list.type):
            both = [f"{node.name}/{side}:output:{number}" for side in ("then", "else")]
            made.append(_node(node, f"chosen_{number}", "SelectV2", [condition, *both], T=dtype))
        return made

    def _give(self, call: Any, only_if: str) -> None:
        """Has a call say whether what it calls writes."""
        name = call.attr["f"].func.name
        if name not in self.guarded:
            made = deepcopy(self.originals[name])
            made.signature.name = self.guarded[name] = f"{name}_only_if"
            made.attr.pop("_input_shapes", None)  # they have as many entries as arguments
            argument = made.signature.input_arg.add(name="only_if_it_is_so", type=_BOOL)
            self.straighten(made, argument.name)
            self.library.function.append(made)
        call.attr["f"].func.name = self.guarded[name]
        call.attr["Tin"].list.type.append(_BOOL)
        place = next((at for at, text in enumerate(call.input) if text.startswith("^")), len(call.input))
        call.input.insert(place, only_if)
        call.attr.pop("_read_only_resource_inputs", None)


def _chosen(assign: Any, only_if: str) -> list[Any]:
    """Has an assignment assign what was there already, or add nothing, unless an argument says so; and what that takes."""
    last = max(number for number, text in enumerate(assign.input) if not text.startswith("^"))
    handle, value, waits = assign.input[0], assign.input[last], assign.input[last + 1 :]
    dtype = assign.attr["dtype"].type
    if assign.op in _ADDS:
        other = _node(assign, "nothing", "ZerosLike", [value], T=dtype)
        otherwise = f"{other.name}:y:0"
    else:
        other = _node(assign, "before", "ReadVariableOp", [handle, *waits], dtype=dtype)
        otherwise = f"{other.name}:value:0"
    choice = _node(assign, "chosen", "SelectV2", [only_if, value, otherwise], T=dtype)
    assign.input[last] = f"{choice.name}:output:0"
    return [other, choice]


def _node(beside: Any, name: str, op: str, inputs: list[str], **types: int) -> Any:
    made = type(beside)(name=f"{beside.name}/{name}", op=op, input=inputs, device=beside.device)
    for key, dtype in types.items():
        made.attr[key].type = dtype
    return made


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
    # Handles of variables inside.
    handles = {inner.ref(): by_handle[id(outer)] for outer, inner in graph.captures if id(outer) in by_handle}
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
