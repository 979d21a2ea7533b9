"""Input queues of TensorFlow 1: threads that fill them as the model's file says, and that end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msplit.engines.tensorflow.runtime import first_line, tensorflow
from msplit.errors import EngineError
from msplit.formats.model import Model
from msplit.opset.traits import ops_with

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
    found: set[Any] = set()
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        if operation not in found and operation not in fed:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += operation.control_inputs
    return found


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
