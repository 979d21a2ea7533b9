"""Variables in a session of TensorFlow: their values, and checkpoints of them, which TensorFlow's own op writes.

Also the input queues of TensorFlow 1: threads that fill them as the model's file says, and that end.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from msplit.core import dag
from msplit.engines.table_rows import saved
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.runtime import OTHER_OUTPUTS, first_line, tensorflow
from msplit.errors import EngineError
from msplit.formats.model import Model
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


def callable_of(
    session: Any,
    feeds: list[Any],
    fetches: list[Any],
    targets: list[Any],
    *,
    timeout: float | None = None,
    trace: bool = False,
) -> Any:
    """The least costly way to run the same step again and again: a user who cares about time runs it so."""
    v1 = tensorflow().compat.v1
    make = getattr(session, "_make_callable_from_options", None)
    if make is None:
        if trace or timeout is not None:
            what = "tells nothing of single nodes" if trace else "gives no step up that takes long"
            raise EngineError(f"TensorFlow {tensorflow().__version__} {what}")
        run = session.make_callable([*fetches, *targets], feed_list=feeds)
        return lambda *values: run(*values)[: len(fetches)]
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    options = CallableOptions()
    options.feed.extend(tensor.name for tensor in feeds)
    options.fetch.extend(tensor.name for tensor in fetches)
    options.target.extend(operation.name for operation in targets)
    if timeout is not None:
        options.run_options.timeout_in_ms = max(1, round(timeout * 1000))
    if trace:
        options.run_options.trace_level = v1.RunOptions.FULL_TRACE
        options.run_options.output_partition_graphs = True
    return make(options)


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
    if not any(_is_large(one.read) for one in variables.values()):
        values = session.run({name: one.read for name, one in variables.items() if name in there})
        return {name: np.array(value) for name, value in values.items()}
    # One after the other: TensorFlow's own copy of each goes again.
    return {name: saved(name, session.run(one.read)) for name, one in variables.items() if name in there}


def _is_large(tensor: Any) -> bool:
    return bool((tensor.shape.num_elements() or 0) * tensor.dtype.size > _AT_ONCE // 16)


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
    return {one.name for one in reached([operation]) if one.type in ops_with("variable")}


def fills_tables(graph: Any, name: str) -> bool:
    """True if an initializer fills lookup tables: a checkpoint does not hold them."""
    grouped = dag.reached(
        [graph.get_operation_by_name(name)], lambda op: op.control_inputs if op.type == "NoOp" else ()
    )
    return any(op.type in ops_with("fills a table") for op in grouped)


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


WAITS, _SOURCES, _FILLS = ops_with("waits"), ops_with("data source"), ops_with("fills a source")

_COLLECTION = "queue_runners"

_GRACE = 5.0
"""Seconds that threads have to end when nobody reads their queues any more."""


@dataclass(frozen=True, eq=False)
class Filling:
    """Threads that fill the queues of a session."""

    coordinator: Any
    threads: tuple[Any, ...]

    def check(self) -> None:
        """Raises what a thread failed with, if it was more than the end of its data.

        Raises:
            EngineError: That.
        """
        tf = tensorflow()
        try:
            self.coordinator.raise_requested_exception()
        except tf.errors.OutOfRangeError:
            return
        except Exception as error:
            raise EngineError(
                f"an input queue of the model could not be filled: {first_line(error)}",
                fix="see that what it reads is there, or feed what it gives (--part inputs=)",
            ) from error

    def stop(self) -> None:
        """Ends the threads. What they put into queues that nobody reads is given up."""
        self.coordinator.request_stop()
        with suppress(Exception):  # what they failed with was told where a step failed for it
            self.coordinator.join(self.threads, stop_grace_period_secs=_GRACE, ignore_live_threads=True)


def reached(operations: Iterable[Any], fed: Collection[Any] = ()) -> set[Any]:
    """Operations that others depend on, and they themselves; what is fed depends on nothing."""

    def before(operation: Any) -> set[Any]:
        return {*(tensor.op for tensor in operation.inputs), *operation.control_inputs}.difference(fed)

    return dag.reached(set(operations).difference(fed), before)


def waits_inside(model: Model) -> bool:
    """Tell whether an op that waits for others is in a function of a model, which any of its nodes may call."""
    return any(node.op in WAITS for body in model.graph_def.library.function for node in body.node_def)


def awaited(waits: Sequence[Any], free: Sequence[str]) -> tuple[str, str]:
    """Error that names what a step waits for, and a way to do without.

    Args:
        waits: The operations of a step that wait.
        free: Outputs that need none of them.
    """
    behind = [one for one in waits[0].graph.get_operations() if one.type in _FILLS] if waits else []
    behind = [one for one in behind if not reached([one]).isdisjoint(waits)]  # nor is then what would be put into these
    names = [f"{one.name} ({one.type})" for one in dict.fromkeys(map(_holder, [*waits, *behind]))]
    fed = [one.name for one in waits if one.type in _SOURCES]
    ways = [f"run what does not wait (--part outputs={','.join(free)})"] if free else []
    ways += [f"feed what it gives (--part inputs={','.join(fed[:3])})"] if fed else []
    ways += ["export the graph for one replica"] if len(fed) < len(waits) else []
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return listed or "something in a function", ", ".join([*ways, "or give it more time with --tensorflow timeout="])


def _holder(operation: Any) -> Any:
    """The queue or accumulator that an operation takes from or puts into; itself where it names none."""
    refers = [tensor for tensor in operation.inputs if tensor.dtype.name == "resource" or tensor.dtype._is_ref_dtype]
    return refers[-1].op if refers else operation  # a reader comes before its queue


def filling(model: Model, session: Any, read: set[Any]) -> Filling | None:
    """Starts what fills the queues that a step reads, and the queues that those are filled from; None where there is nothing to start.

    Args:
        read: The operations of a step.

    Raises:
        EngineError: The file says it in a way that TensorFlow does not understand.
    """
    meta = model.meta
    if meta is None or _COLLECTION not in meta.collection_def:
        return None
    v1 = tensorflow().compat.v1
    graph = session.graph
    with graph.as_default():
        runners = [_runner(v1, data) for data in meta.collection_def[_COLLECTION].bytes_list.value]
    wanted: list[Any] = []
    while more := [one for one in runners if one not in wanted and getattr(one.queue, "op", one.queue) in read]:
        wanted += more
        read = reached([*read, *(operation for one in more for operation in one.enqueue_ops)])
    if not wanted:
        return None
    coordinator = _quiet(v1.train.Coordinator())
    threads = [
        thread for one in wanted for thread in one.create_threads(session, coord=coordinator, daemon=True, start=True)
    ]
    return Filling(coordinator, tuple(threads))


def _quiet(coordinator: Any) -> Any:
    """A coordinator that raises nothing in a thread that fails when all are to end: Python would print it."""
    told = coordinator.request_stop

    def request_stop(problem: Any = None) -> None:
        with suppress(Exception):
            told(problem)

    coordinator.request_stop = request_stop
    return coordinator


def _runner(v1: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf.queue_runner_pb2 import QueueRunnerDef

    try:
        return v1.train.QueueRunner.from_proto(QueueRunnerDef.FromString(data))
    except (DecodeError, KeyError, ValueError) as error:
        raise EngineError(f"the file's collection {_COLLECTION!r} is damaged: {first_line(error)}") from error
