"""MS013: more edges or bytes between streams than allowed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.base import Check, Finding, Severity, Skip
from msplit.checks.subject import Longs, Mask, Subject
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.graph import CONTROL


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per limit that is passed."""
    if len(subject.used) < 2:
        raise Skip("all kernels run on one stream")
    limits = subject.settings.limits
    edges, moved, share = crossings(subject.flat, subject.costs, subject.launches, subject.ids)
    fix = "assign whole branches to one stream, or raise the limit"
    if limits.max_cross_edges is not None and edges > limits.max_cross_edges:
        yield Finding(f"{edges:,} tensors cross streams (limit: {limits.max_cross_edges:,})", fix)
    if limits.max_cross_bytes is not None and moved > limits.max_cross_bytes:
        yield Finding(f"{moved:,.0f} bytes cross streams (limit: {limits.max_cross_bytes:,})", fix)
    if share > limits.max_cross_share:
        yield Finding(
            f"{share:.0%} of the dependencies between kernels cross streams (limit: {limits.max_cross_share:.0%})", fix
        )


def crossings(flat: FlatGraph, costs: Costs, launches: Mask, ids: Longs) -> tuple[int, float, float]:
    """What goes from the kernels of one stream to those of another, through nodes that launch nothing.

    Returns:
        (kernel, stream that reads it) pairs; the bytes of these kernels' outputs, once per such stream; and the share of
        the (kernel, kernel that reads it) pairs that cross.
    """
    graph = flat.graph
    edges = graph.edges
    start = graph.in_start.tolist()
    src, port = edges.src.tolist(), edges.port.tolist()
    is_kernel, stream = launches.tolist(), ids.tolist()
    behind: dict[int, tuple[int, ...]] = {}  # of a node that launches nothing: the kernels whose data it hands on
    crossing: set[tuple[int, int]] = set()
    pairs = crossed = 0
    for node in graph.topological.tolist():
        makers: dict[int, None] = {}
        for edge in range(start[node], start[node + 1]):
            if port[edge] != CONTROL:
                producer = src[edge]
                makers.update(dict.fromkeys((producer,) if is_kernel[producer] else behind.get(producer, ())))
        if not is_kernel[node]:
            if makers:
                behind[node] = tuple(makers)
            continue
        pairs += len(makers)
        for maker in makers:
            if stream[maker] != stream[node]:
                crossed += 1
                crossing.add((maker, stream[node]))
    makers_out = np.asarray([maker for maker, _ in sorted(crossing)], dtype=np.int64)
    return len(crossing), float(costs.out_bytes[makers_out].sum()), crossed / pairs if pairs else 0.0


CHECK = Check(
    code="MS013",
    name="too-many-crossings",
    severity=Severity.WARNING,
    title="More edges or bytes cross streams than allowed",
    what="The number of tensors that another stream reads than the one that made them (`max_cross_edges`), their "
    "bytes (`max_cross_bytes`), "
    "or the share of the dependencies between kernels that cross streams (`max_cross_share`) is above its limit. "
    "Constants and weights cross nothing.",
    why="Every crossing that is not implied by another one is a wait, which costs about as much as a small "
    "kernel; on logical devices "
    "of stock TensorFlow it is a copy as well.",
    example="Nodes dealt round-robin to four streams: three of four dependencies cross.",
    mend="Assign whole branches to one stream: rules `branch`, `embedding` or `auto`, and `propagate` behind them.",
    find=find,
    limits=("max_cross_edges", "max_cross_bytes", "max_cross_share"),
)
