"""What a step over a cluster sends from task to task, as TensorFlow itself counts it."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

_RECEIVED = "RecvTensor"
"""What step statistics call a tensor that came from another task."""

_LABEL = re.compile(r"(?P<tensor>\S+) from (?P<source>/job:\S+) to (?P<target>/job:\S+)$")
_DEVICE = re.compile(r"/job:(?P<job>[^/]+)(?:/replica:\d+)?/task:(?P<task>\d+)")


@dataclass(frozen=True)
class Sent:
    """What goes from one task to another in a step.

    Attributes:
        source: Such as ``worker 0``.
        tensors: How many.
        bytes: All together.
        largest: What the largest of them is of: a node's name.
        largest_bytes: Its size.
    """

    source: str
    target: str
    tensors: int
    bytes: int
    largest: str
    largest_bytes: int


def sent_in(metadata: Any) -> tuple[Sent, ...]:
    """What a traced step sent between tasks, the most bytes first.

    Args:
        metadata: RunMetadata of a run with ``trace_level=FULL_TRACE``.
    """
    between: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            found = _LABEL.search(node.timeline_label) if node.node_name == _RECEIVED else None
            if found is not None:
                size = sum(one.tensor_description.allocation_description.requested_bytes for one in node.output)
                name = re.sub(r"^edge_\d+_", "", found["tensor"])
                between[task_of(found["source"]), task_of(found["target"])].append((size, name))
    sent = [
        Sent(source, target, len(tensors), sum(size for size, _ in tensors), max(tensors)[1], max(tensors)[0])
        for (source, target), tensors in between.items()
    ]
    return tuple(sorted(sent, key=lambda one: (-one.bytes, one.source, one.target)))


def task_of(device: str) -> str:
    """The task of a device, such as ``worker 0``; the device's own name where it says none."""
    found = _DEVICE.search(device)
    return f"{found['job']} {found['task']}" if found is not None else device
