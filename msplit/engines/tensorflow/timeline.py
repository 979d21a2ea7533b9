"""When each node of a step ran, as TensorFlow's own step statistics tell: only of CPU devices.

The runtime runs the nodes of a CPU device on a pool of threads that all CPU devices share, so several nodes of one stream may run at a
time: each takes the first track of its stream that is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msplit.engines.base import Span, Timeline
from msplit.errors import EngineError
from msplit.opset.traits import ops_with

_SILENT = ops_with("silent")

CLOCK = (
    "TensorFlow's step statistics (RunMetadata, FULL_TRACE) on CPU devices: these times say nothing about GPU streams"
)


def from_metadata(metadata: Any) -> Timeline:
    """The timeline that a traced step's RunMetadata holds.

    Args:
        metadata: Of a run with ``trace_level=FULL_TRACE`` and ``output_partition_graphs=True``.

    Raises:
        EngineError: A node ran on something else than a CPU device.
    """
    ran: list[tuple[int, str, str, int, int]] = []  # stream, name, op, start and end in ns
    for device in metadata.step_stats.dev_stats:
        kind, _, number = device.device.rpartition("/")[2].removeprefix("device:").partition(":")
        if kind != "CPU":
            raise EngineError(
                f"TensorFlow tells no times of single kernels on {device.device}",
                fix="trace the cuda engine (--engine cuda), or run on the CPU",
            )
        for node in device.node_stats:
            op = node.timeline_label.partition(" = ")[2].partition("(")[0] or node.node_name
            if op not in _SILENT and node.node_name != "_SOURCE":
                start = node.all_start_nanos + node.op_start_rel_nanos
                ran.append((int(number), node.node_name, op, start, node.all_start_nanos + node.op_end_rel_nanos))
    ran.sort(key=lambda one: (one[3], one[0], one[1]))
    begin = ran[0][3] if ran else 0
    rows = _rows(ran)
    spans = tuple(
        Span(name, (), stream, (start - begin) / 1e3, (max(start, end) - begin) / 1e3, (op,), row)
        for (stream, name, op, start, end), row in zip(ran, rows, strict=True)
    )
    return Timeline(spans, tuple(_waits(spans, metadata.partition_graphs)), CLOCK)


def _rows(ran: Iterable[tuple[int, str, str, int, int]]) -> list[int]:
    """The first track of its stream that is free when it starts, for each in the order of their starts."""
    busy: dict[int, list[int]] = {}
    rows = []
    for stream, _, _, start, end in ran:
        tracks = busy.setdefault(stream, [])
        row = next((number for number, until in enumerate(tracks) if until <= start), len(tracks))
        tracks[row : row + 1] = [end]
        rows.append(row)
    return rows


def _waits(spans: Iterable[Span], graphs: Iterable[Any]) -> list[tuple[int, int]]:
    """From what made a tensor that goes to another device, to the first node there that reads it."""
    place = {(span.stream, span.name): number for number, span in enumerate(spans)}
    sent: dict[tuple[bytes, bytes], tuple[int, str]] = {}
    received: list[tuple[tuple[bytes, bytes], int, str]] = []
    readers: dict[tuple[int, str], list[str]] = {}
    for graph in graphs:
        for node in graph.node:
            stream = int(node.device.rpartition(":")[2] or 0) if node.device else 0
            sources = [name.lstrip("^").partition(":")[0] for name in node.input]
            for source in sources:
                readers.setdefault((stream, source), []).append(node.name)
            key = _key(node.attr)
            if node.op == "_Send":
                sent[key] = (stream, sources[0])
            elif node.op == "_Recv":
                received.append((key, stream, node.name))
    start = [span.start_us for span in spans]
    waits = []
    for key, stream, name in received:
        before = place.get(sent.get(key, (-1, "")))
        after = [place[stream, reader] for reader in readers.get((stream, name), ()) if (stream, reader) in place]
        if before is not None and after:
            waits.append((before, min(after, key=start.__getitem__)))
    return waits


def _key(attributes: Mapping[str, Any]) -> tuple[bytes, bytes]:
    return (attributes["tensor_name"].s, attributes["recv_device"].s) if "tensor_name" in attributes else (b"", b"")
