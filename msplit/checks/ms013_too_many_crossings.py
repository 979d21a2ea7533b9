"""More edges or bytes cross streams than allowed.

Finds: The number of tensors that another stream reads than the one that made them (`max_cross_edges`), their bytes (`max_cross_bytes`), or
the share of the dependencies between kernels that cross streams (`max_cross_share`) is above its limit. Constants and weights cross
nothing.

Why: Every crossing that is not implied by another one is a wait, which costs about as much as a small kernel; on logical devices of stock
TensorFlow it is a copy as well.

Example: Nodes dealt round-robin to four streams: three of four dependencies cross.

Mend: Assign whole branches to one stream: rules `branch`, `embedding` or `auto`, and `propagate` behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from msplit.checks.subject import Check, Finding, Longs, Mask, Severity, Skip, Subject
from msplit.core.graph import CONTROL
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph


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
    """Edges from the kernels of one stream to those of another, through nodes that launch nothing.

    Returns:
        (kernel, stream that reads it) pairs; the bytes of these kernels' outputs, once per such stream; and the share of
        the (kernel, kernel that reads it) pairs that cross.
    """
    graph = flat.graph
    edges = graph.edges
    start = graph.in_start.tolist()
    src, port = edges.src.tolist(), edges.port.tolist()
    is_kernel, stream = launches.tolist(), ids.tolist()
    behind: dict[int, _Makers] = {}  # of a node that launches nothing
    unions: dict[frozenset[int], _Makers] = {}
    crossing: set[tuple[int, int]] = set()
    told: set[tuple[int, int]] = set()  # (makers, stream) that are in `crossing` already
    pairs = crossed = 0
    for node in graph.topological.tolist():
        direct: dict[int, None] = {}
        through: dict[int, _Makers] = {}
        for edge in range(start[node], start[node + 1]):
            if port[edge] != CONTROL:
                producer = src[edge]
                if is_kernel[producer]:
                    direct[producer] = None
                elif producer in behind:
                    through[id(behind[producer])] = behind[producer]
        shared = _union(through, unions, stream)
        own = [maker for maker in direct if maker not in shared.kernels]
        if not is_kernel[node]:
            if own or shared.kernels:
                behind[node] = _Makers.of({*shared.kernels, *own}, stream) if own else shared
            continue
        here = stream[node]
        away = [maker for maker in own if stream[maker] != here]
        pairs += len(shared.kernels) + len(own)
        crossed += len(shared.kernels) - shared.on.get(here, 0) + len(away)
        crossing.update((maker, here) for maker in away)
        if (id(shared), here) not in told:
            told.add((id(shared), here))
            crossing.update((maker, here) for maker in shared.kernels if stream[maker] != here)
    makers_out = np.asarray([maker for maker, _ in sorted(crossing)], dtype=np.int64)
    return len(crossing), float(costs.out_bytes[makers_out].sum()), crossed / pairs if pairs else 0.0


@dataclass(frozen=True, eq=False)
class _Makers:
    """Kernels whose data nodes that launch nothing hand on, and how many of them are on each stream. Thousands may read the same."""

    kernels: Set[int]
    on: Mapping[int, int]

    @staticmethod
    def of(kernels: Set[int], stream: Sequence[int]) -> _Makers:
        return _Makers(kernels, Counter(stream[kernel] for kernel in kernels))


_NOBODY = _Makers(frozenset(), {})


def _union(parts: Mapping[int, _Makers], known: dict[frozenset[int], _Makers], stream: Sequence[int]) -> _Makers:
    if len(parts) < 2:
        return next(iter(parts.values()), _NOBODY)
    key = frozenset(parts)
    if key not in known:
        known[key] = _Makers.of(frozenset().union(*(part.kernels for part in parts.values())), stream)
    return known[key]


CHECK = Check.of(
    __name__,
    __doc__,
    Severity.WARNING,
    find,
    limits=("max_cross_edges", "max_cross_bytes", "max_cross_share"),
    depends="costs",
)
