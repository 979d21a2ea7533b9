"""Devices by name, and a device for each node by a function, as `tf.compat.v1.device` takes one. Needs no TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import CONTROL, Graph, Ints
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph

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
