"""Clusters of TensorFlow's servers, and devices of nodes by name.

A cluster of TensorFlow's own servers: whether all of its tasks are there, what devices they have, and what to say when one is lost.

Devices by name, and a device for each node by a function, as `tf.compat.v1.device` takes one. Needs no TensorFlow.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import CONTROL, Graph, Ints
from msplit.engines.tensorflow import runtime
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats.cluster import Cluster, Task
from msplit.progress import phase

Result = TypeVar("Result")

COMING = 10.0
"""Seconds for which tasks are waited for that do not listen yet: clients and servers may be started together."""

ANSWER = 30.0
"""Seconds in which tasks that listen must say what devices they have, and do what is not a step: give variables values, end a session."""

_CONNECT = 2.0
_WATCH = 1.0
_AGAIN = 0.2
_AT_ONCE = 64
_SHOWN = 8


def connect(cluster: Cluster) -> tuple[str, ...]:
    """The devices that compute, in the order of streams: those of one task side by side, its GPUs or, where it has none, its CPUs.

    Raises:
        EngineError: A task can not be reached, or is one of another cluster.
    """
    with phase("asking the cluster's tasks for their devices"):
        absent = missing(cluster.tasks, COMING)
        if absent:
            raise _unreachable(absent, cluster, "can not be reached")
        master = cluster.workers[0]
        tf = runtime.tensorflow()
        try:
            with tf.compat.v1.Session(target(master), graph=tf.Graph(), config=config()) as session:
                listed = [device.name for device in session.list_devices()]
        except tf.errors.OpError as error:
            # All listen, so that one of them is no TensorFlow, is stopped, or waits itself for a task at another address.
            raise EngineError(
                f"the cluster did not say within {ANSWER:g} s what devices it has: {runtime.first_line(error)}",
                where=cluster.source,
                fix="all of its tasks must be TensorFlow servers that were started with the same addresses: msplit worker",
            ) from None
    found: dict[Task, dict[str, list[int]]] = {task: {} for task in cluster.tasks}
    named = {task.name: task for task in cluster.tasks}
    for name in listed:
        parts = re.fullmatch(r"(/job:[^/]+)/replica:\d+(/task:\d+)/device:(\w+):(\d+)", name)
        task = named.get(parts[1] + parts[2]) if parts is not None else None
        if parts is not None and task is not None:
            found[task].setdefault(parts[3], []).append(int(parts[4]))
    without = [task for task, kinds in found.items() if not kinds]
    if without:
        raise EngineError(
            f"{master.name} at {master.address} knows no {without[0].name}: it was started for another cluster",
            where=cluster.source,
            fix="start all tasks with the same file, and each as the task whose address it has",
        )
    return tuple(
        f"{task.name}/device:{kind}:{number}"
        for task in cluster.workers
        for kind in ("GPU" if "GPU" in found[task] else "CPU",)
        for number in sorted(found[task][kind])
    )


def cpu(task: Task) -> str:
    """The device of a task that each has."""
    return f"{task.name}/device:CPU:0"


def target(task: Task) -> str:
    """Address that a session is opened at."""
    return f"grpc://{task.address}"


def config() -> Any:
    """Options of a session over a cluster, in which nothing waits without an end. What a step may take is said with the step."""
    options = runtime.tensorflow().compat.v1.ConfigProto(allow_soft_placement=True)
    options.operation_timeout_in_ms = round(ANSWER * 1000)
    return options


def missing(tasks: Sequence[Task], seconds: float = 0.0) -> dict[Task, str]:
    """The tasks at whose address nobody listens, and what the attempt to connect came to. Waits for them as long as it may."""
    until = time.monotonic() + seconds
    absent: dict[Task, str] = dict.fromkeys(tasks, "")
    with ThreadPoolExecutor(min(len(tasks), _AT_ONCE)) as threads:
        while True:
            said = dict(zip(absent, threads.map(_refusal, absent), strict=True))
            absent = {task: text for task, text in said.items() if text}
            if not absent or time.monotonic() >= until:
                return absent
            time.sleep(_AGAIN)


def _refusal(task: Task) -> str:
    """Why nobody can connect to a task; "" where it listens."""
    try:
        with socket.create_connection(task.place, timeout=_CONNECT):
            return ""
    except TimeoutError:
        return "no answer"
    except socket.gaierror as problem:
        return f"its host has no address ({problem.strerror})"
    except OSError as problem:
        return problem.strerror or str(problem)


def _unreachable(absent: Mapping[Task, str], cluster: Cluster, what: str) -> EngineError:
    tasks = [f"{task.name} at {task.address}: {said}" for task, said in absent.items()]
    first = next(iter(absent))
    if len(tasks) == 1:
        text, details = f"{first.name} at {first.address} {what}: {absent[first]}", []
    else:
        more = [f"… and {len(tasks) - _SHOWN} more"] if len(tasks) > _SHOWN else []
        text, details = f"{len(tasks)} of {len(cluster.tasks)} tasks {what}", [*tasks[:_SHOWN], *more]
    return EngineError(
        text,
        where=cluster.source,
        details=details,
        fix=f"start it (msplit worker --cluster FILE --job {first.job} --task {first.index}), or mend its address",
    )


@contextmanager
def errors_of(cluster: Cluster, model: str, limit_s: float) -> Iterator[None]:
    """Turns TensorFlow's errors into EngineError: a lost task is named. What is the model's own is told as `runtime.errors_of` does."""
    try:
        with runtime.errors_of(model):
            yield
    except EngineError as problem:
        error = problem.__cause__
        if error is None or not is_lost(error):
            raise
        absent = missing(cluster.tasks)
        if absent:
            raise _unreachable(absent, cluster, "was lost") from error
        if isinstance(error, runtime.tensorflow().errors.DeadlineExceededError):
            said = f"a step over the cluster was not done within {limit_s:g} s, though all of its tasks listen"
            fix = "see whether a task is stopped or overloaded, and start it again"
        else:
            said = f"a task of the cluster was started anew, and knows nothing of this session: {runtime.first_line(error)}"
            fix = "run it again; training goes on from its last checkpoint: --resume"
        raise EngineError(said, where=cluster.source, fix=fix) from error


def watched(cluster: Cluster, call: Callable[[], Result]) -> Result:
    """Result of a call over a cluster, which is given up when a task is gone: a client waits for a lost first worker as if it might return.

    Raises:
        tensorflow.errors.OpError: What the call raises; UnavailableError for a lost task.
    """
    found: list[Result] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            failed.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    while not done.wait(_WATCH):
        if missing(cluster.tasks) and not done.wait(_WATCH):
            raise runtime.tensorflow().errors.UnavailableError(None, None, "a task is gone")
    if failed:
        raise failed[0]
    return found[0]


def is_lost(error: BaseException) -> bool:
    """True if an error of TensorFlow's says that a task is gone or does not answer, so that its session is of no use any more."""
    errors = runtime.tensorflow().errors
    kinds = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    return isinstance(error, kinds)


def serve(
    cluster: Cluster,
    task: Task,
    *,
    devices: int = 1,
    op_libraries: Sequence[Path] = (),
    ready: Callable[[Sequence[str]], None],
    ended: threading.Event | None = None,
) -> None:
    """Is a task of a cluster until a signal ends the process: runs what clients and other tasks send, whoever they are.

    Args:
        devices: How many CPU devices it offers. GPUs are offered as they are.
        op_libraries: Shared objects with custom ops to load first.
        ready: Called when it listens, with the names of its devices.
        ended: Ends it, too.

    Raises:
        EngineError: Its port is taken, or TensorFlow can not start the server.
    """
    _refuse_taken(task)
    tf = runtime.tensorflow()
    runtime.load_op_libraries(op_libraries)
    options = config()
    options.device_count["CPU"] = devices
    options.gpu_options.allow_growth = True
    v1 = tf.compat.v1
    try:
        with runtime.quiet_stderr(), phase("starting the server"):
            server = v1.train.Server(
                v1.train.ClusterSpec(cluster.spec()), job_name=task.job, task_index=task.index, config=options
            )
    except (tf.errors.OpError, ValueError) as error:
        raise EngineError(
            f"TensorFlow can not start a server for {task.name}: {runtime.first_line(error)}",
            where=cluster.source,
            fix=f"see whether port {task.place[1]} is free on this machine",
        ) from error
    with v1.Session(server.target, graph=tf.Graph(), config=_only(task)) as session:
        found = [name.rpartition("/device:")[2] for name in (device.name for device in session.list_devices())]
    ready(found)
    (ended or threading.Event()).wait()


def _refuse_taken(task: Task) -> None:
    """Raises an EngineError where another process listens at a task's port."""
    port = task.place[1]
    try:
        with closing(socket.socket()) as made:
            # A port that closed connections still hold has no server.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("", port))
    except OSError as problem:
        raise EngineError(
            f"{task.name} can not listen on port {port}: {problem.strerror}",
            fix="end what has it (an earlier worker?), or give the task another port in the cluster's file",
        ) from None


def _only(task: Task) -> Any:
    """Options of a session that sees one task only, and so waits for no other."""
    options = config()
    options.device_filters.append(task.name)
    return options


_NAME = re.compile(
    r"(?:/job:(?P<job>[a-zA-Z_][\w.-]*))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"(?:/?(?:device:)?(?P<kind>[a-zA-Z]+)(?::(?P<index>\d+|\*))?)?"
)

_THIS = {"job:localhost", "replica:0", "task:0"}
"""This process as TensorFlow writes it in devices."""

KINDS = ("CPU", "GPU")


@dataclass(frozen=True)
class Node:
    """A node, as a function that places it sees it: what functions for `tf.compat.v1.device` read is here by the same names.

    Attributes:
        name: With the names of the calls around it.
        op: Such as ``"MatMul"``.
        device: What the file asks for; mostly "".
        attrs: As in ``{"T": "float32"}``.
        inputs: Names of the nodes whose tensors it takes, in order.
    """

    name: str
    op: str
    device: str
    attrs: Mapping[str, Any]
    inputs: tuple[str, ...]

    @property
    def type(self) -> str:
        """The op, as operations call it."""
        return self.op

    @property
    def node_def(self) -> Node:
        """The node itself."""
        return self


Function = Callable[[Node], Any]
"""Gives a node's device, as text or as a `tf.DeviceSpec`; None or "" leaves it to TensorFlow."""


@dataclass(frozen=True, eq=False)
class DevicesOfNodes:
    """Device of each node.

    Attributes:
        ids: Per node of the flat graph a position in `devices`.
        devices: As in ``/device:GPU:1``; "" leaves a node to TensorFlow.
    """

    ids: Ints
    devices: tuple[str, ...]


def places(flat: FlatGraph, function: Function, where: str = "") -> DevicesOfNodes:
    """Asks a function for the device of every node that has a kernel on devices; what only the host can run stays there.

    Args:
        where: What the function is called, for messages.

    Raises:
        MsplitError: It gives no device of this machine. What it raises is passed on.
    """
    graph = flat.graph
    numbers: dict[str, int] = {}
    ids = np.zeros(len(flat), np.int32)
    for v in np.flatnonzero(~flat.host).tolist():
        asked = function(_node(graph, v))
        try:
            device = canonical(asked)
        except ValueError as problem:
            raise MsplitError(
                f"node {graph.names[v]!r} is put on {_text(asked)!r}: {problem}",
                where=where or None,
                fix='give "/device:CPU:0", "/device:GPU:1" and the like, or None to leave it to TensorFlow',
            ) from None
        ids[v] = numbers.setdefault(device, len(numbers))
    return DevicesOfNodes(ids, tuple(numbers) or ("",))


def _node(graph: Graph, v: int) -> Node:
    into = slice(int(graph.in_start[v]), int(graph.in_start[v + 1]))
    made = zip(graph.edges.src[into].tolist(), graph.edges.port[into].tolist(), strict=True)
    names = tuple(graph.names[u] for u, port in made if port != CONTROL)
    return Node(graph.names[v], graph.ops[v], graph.devices[v], graph.attrs[v], names)


def _text(device: Any) -> Any:
    to_string = getattr(device, "to_string", None)  # a tf.DeviceSpec
    return to_string() if callable(to_string) else device


def canonical(device: Any) -> str:
    """A device of this machine as ``/device:GPU:1``; "" for None.

    Raises:
        ValueError: It is none; says why, as the end of a sentence.
    """
    text = _text(device)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError("that is no device")
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError("that is no device")
    if found["job"] not in (None, "localhost") or int(found["task"] or 0):
        raise ValueError("that is a task of a cluster, not this machine")
    if found["kind"] is None:
        return ""
    kind = found["kind"].upper()
    if kind not in KINDS:
        raise ValueError(f"there are devices of the kinds {', '.join(KINDS)}")
    index = 0 if found["index"] in (None, "*") else int(found["index"])
    if index >= MAX_STREAMS:
        raise ValueError(f"the largest number of a device is {MAX_STREAMS - 1}")
    return f"/device:{kind}:{index}"


def short(device: str) -> str:
    """A device of this machine without its name, as in ``/device:CPU:0``."""
    return device.removeprefix("/job:localhost").removeprefix("/replica:0").removeprefix("/task:0")


def here(device: str) -> str:
    """A device as written, without a job, replica or task that is not this process."""
    parts = device.split("/")
    named = [part for part in parts if part.lower().startswith(("job:", "replica:", "task:"))]
    return device if {*named} <= _THIS else "/".join(part for part in parts if part not in named)


def foreign_text(devices: Iterable[str]) -> str:
    """That jobs and tasks of a cluster are left out of devices, as one sentence; "" where none names any."""
    found = [device for device in dict.fromkeys(devices) if here(device) != device]
    if not found:
        return ""
    listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"nodes name devices of a cluster ({listed}): its jobs and tasks are left out here; --tensorflow cluster= runs the model on one"


def how_many(devices: Iterable[str], kind: str) -> int:
    """Number of devices of a kind that it takes to have all of these."""
    numbers = [int(name.rpartition(":")[2]) for name in devices if name.startswith(f"/device:{kind}:")]
    return max(numbers, default=-1) + 1
