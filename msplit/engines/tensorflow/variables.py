"""Variables in a session of TensorFlow: their values, and checkpoints of them.

Variables of a graph in a session: what they hold, and how they are given something to hold.

Writes tensors as a checkpoint, by TensorFlow's own op.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.runtime import OTHER_OUTPUTS, tensorflow
from msplit.errors import EngineError
from msplit.opset.traits import ops_with

_AT_ONCE = 1 << 28
"""Bytes that one run feeds to variables: a message between processes has less than 2 GiB."""


class VariableOps(NamedTuple):
    """Ops of a variable: its handle, whether it has a value, the value, and what gives it the value that `value` is fed."""

    handle: Any
    known: Any
    read: Any
    write: Any
    value: Any


def variable_ops(graph: Any, name: str) -> VariableOps:
    """Adds them to the graph, which is the default one; `name` is a node that refers to the variable."""
    tf = tensorflow()
    holder = graph.get_operation_by_name(name)
    dtype, handle = holder.get_attr("dtype"), holder.outputs[0]
    value = tf.compat.v1.placeholder(dtype)
    if holder.type == "VarHandleOp":
        known = tf.raw_ops.VarIsInitializedOp(resource=handle)
        read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        write = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    else:
        known, read = tf.raw_ops.IsVariableInitialized(ref=handle), tf.raw_ops.Identity(input=handle)
        write = tf.raw_ops.Assign(ref=handle, value=value, validate_shape=False)
    return VariableOps(handle, known, read, write, value)


def fetched(graph: Any, tensors: Mapping[str, str], targets: Iterable[str]) -> tuple[dict[str, Any], list[Any]]:
    """Outputs of a step by name, and the ops that it runs besides. An output that is a variable gives its value when all else is done.

    Args:
        graph: Gets ops that read variables.
        tensors: Name of the tensor, or of a node that gives none, by the output's name.
        targets: Nodes to run.

    Raises:
        EngineError: An output is a handle of something else.
    """
    tf = tensorflow()
    found, runs = {}, [graph.get_operation_by_name(name) for name in targets]
    for name, tensor in tensors.items():
        operation = graph.get_operation_by_name(tensor.rpartition(":")[0])
        if operation.outputs:
            found[name] = graph.get_tensor_by_name(tensor)
        else:
            runs.append(operation)  # a train step: it runs, and gives nothing
    refers = {name: one for name, one in found.items() if one.dtype == tf.resource or one.dtype._is_ref_dtype}
    before = [*runs, *(one.op for name, one in found.items() if name not in refers)]
    with graph.as_default(), tf.control_dependencies([*before, *(one.op for one in refers.values())]):
        for name, one in refers.items():
            found[name] = _read(tf, name, one)
    return found, runs


def _read(tf: Any, name: str, tensor: Any) -> Any:
    """The value of the variable that a tensor refers to."""
    if tensor.dtype != tf.resource:
        return tf.raw_ops.Identity(input=tensor)
    holder = tensor.op
    while holder.type == "Identity":
        holder = holder.inputs[0].op
    if holder.type not in ops_with("variable"):
        raise EngineError(
            f"the output {name!r} is the handle of a {holder.type}, which has no value", fix=OTHER_OUTPUTS
        )
    return tf.raw_ops.ReadVariableOp(resource=tensor, dtype=holder.get_attr("dtype"))


def initialized(session: Any, variables: Mapping[str, VariableOps]) -> set[str]:
    """The names of those that hold a value."""
    found = session.run({name: one.known for name, one in variables.items()})
    return {name for name, has in found.items() if has}


def save(session: Any, variables: Mapping[str, VariableOps]) -> dict[str, NDArray[Any]]:
    """Values of variables, by name; without those that have none."""
    there = initialized(session, variables)
    values = session.run({name: one.read for name, one in variables.items() if name in there})
    return {name: np.array(value) for name, value in values.items()}


def load(session: Any, variables: Mapping[str, VariableOps], state: Mapping[str, NDArray[Any]]) -> None:
    """Gives them values, by name. What is none of them is passed over."""
    for part in _parts((name, value) for name, value in state.items() if name in variables):
        chosen = [(variables[name], value) for name, value in part]
        session.run([one.write for one, _ in chosen], {one.value: value for one, value in chosen})


def _parts(values: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[list[tuple[str, NDArray[Any]]]]:
    part: list[tuple[str, NDArray[Any]]] = []
    size = 0
    for name, value in values:
        if part and size + value.nbytes > _AT_ONCE:
            yield part
            part, size = [], 0
        part.append((name, value))
        size += value.nbytes
    if part:
        yield part


def touched(operation: Any) -> set[str]:
    """The names of the variables that an op, or something that it waits for, reads or writes."""
    seen, waiting, found = {operation.name}, [operation], set()
    while waiting:
        one = waiting.pop()
        if one.type in ops_with("variable"):
            found.add(one.name)
        for before in (*(tensor.op for tensor in one.inputs), *one.control_inputs):
            if before.name not in seen:
                seen.add(before.name)
                waiting.append(before)
    return found


def fills_tables(graph: Any, name: str) -> bool:
    """True if an initializer fills lookup tables: a checkpoint does not hold them."""
    seen = {name}
    waiting = [graph.get_operation_by_name(name)]
    while waiting:
        operation = waiting.pop()
        if operation.type in ops_with("fills a table"):
            return True
        if operation.type == "NoOp":
            for before in operation.control_inputs:
                if before.name not in seen:
                    seen.add(before.name)
                    waiting.append(before)
    return False


_FULL = {"No space left on device": errno.ENOSPC, "File too large": errno.EFBIG, "quota exceeded": errno.EDQUOT}


def save_bundle(prefix: Path, tensors: Mapping[tuple[str, str], Any]) -> None:
    """TensorFlow's SaveV2, in a session that leaves the GPU alone.

    Args:
        prefix: The beginning of the files' names.
        tensors: Values by key and slice, "" for a whole tensor.

    Raises:
        OSError: They can not be written.
    """
    tf = runtime.tensorflow()
    v1 = tf.compat.v1
    keys, parts = zip(*tensors, strict=True)
    values = [np.asarray(value) for value in tensors.values()]
    with v1.Graph().as_default() as graph:
        fed = [v1.placeholder(tf.string if value.dtype.kind in "OSU" else value.dtype) for value in values]
        op = tf.raw_ops.SaveV2(prefix=str(prefix), tensor_names=keys, shape_and_slices=parts, tensors=fed)
        with v1.Session(graph=graph, config=runtime.session_config(1, cpu_only=True)) as session:
            try:
                session.run(op, dict(zip(fed, values, strict=True)))
            except tf.errors.OpError as error:
                said = runtime.first_line(error)
                code = next((code for text, code in _FULL.items() if text.lower() in str(error).lower()), errno.EIO)
                raise OSError(code, said, str(prefix)) from None
