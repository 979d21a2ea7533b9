"""Measured timelines as a trace: a process per variant, a track per stream, rule and cost with each slice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msplit import formats
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.measure.benchmark import Bench, Traced
from msplit.report.trace import Run, Slice, from_runs, node_args, to_bytes


def trace(flat: FlatGraph, found: Bench) -> dict[str, Any]:
    """The trace of what `bench` timed.

    Args:
        flat: The graph.
        found: From `bench` with `timelines`.
    """
    known = {name: node for node, name in enumerate(flat.graph.names)}
    return from_runs([_run(flat, found.costs, one, known) for one in found.traced])


def write(flat: FlatGraph, found: Bench, path: Path, *, force: bool = False) -> None:
    """Writes the trace of what `bench` timed.

    Raises:
        WriteError: It can not be written.
    """
    formats.write_bytes_atomic(path, to_bytes(trace(flat, found)), force=force)


def _run(flat: FlatGraph, costs: Costs | None, traced: Traced, known: dict[str, int]) -> Run:
    slices = []
    for span in traced.timeline.spans:
        nodes = [node for node in span.nodes if node < len(flat)]
        if not span.nodes and span.name in known:
            nodes = [known[span.name]]
        args: dict[str, Any] = {"ran": ", ".join(span.ran)}
        stream = span.stream
        if nodes and costs is not None:
            args |= node_args(flat, costs, nodes[0], traced.assignment)
        if span.nodes and nodes:
            stream = int(traced.ids[nodes[0]])  # the plan numbers streams without gaps
        if len(nodes) > 1:
            args["nodes"] = ", ".join(flat.graph.names[node] for node in nodes)
        slices.append(Slice(span.name, stream, span.start_us, span.end_us - span.start_us, args, span.row))
    return Run(f"msplit bench: {traced.label}", slices, traced.timeline.waits, {"clock": traced.timeline.clock})
