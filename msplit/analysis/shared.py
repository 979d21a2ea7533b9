"""Work that depends on some inputs alone: what is computed once where these have the same row in a whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from msplit.analysis.rows.walk import independent_rows
from msplit.core.graph import CONTROL
from msplit.cost.costs import Costs
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph

_WORTH = 0.2
"""Share of the kernels' time from which on inputs are pointed out."""
_MOST = 64
"""Most sets of inputs that are looked at."""


@dataclass(frozen=True)
class SharedWork:
    """Work that depends on some inputs alone.

    Attributes:
        inputs: Their names.
        nodes: How many nodes do it.
        time_us: Time of these nodes at the batch that was priced.
        share: That of the time of all.
        flops, bytes: Likewise.
        named: Whether the user named the inputs.
        mixes: Why a step can not compute it once; "" where it can.
    """

    inputs: tuple[str, ...]
    nodes: int
    time_us: float
    share: float
    flops: float
    bytes: float
    named: bool
    mixes: str = ""

    @property
    def words(self) -> str:
        """What to tell."""
        few = ", ".join(self.inputs[:6]) + (" …" if len(self.inputs) > 6 else "")
        said = (
            f"{few} alone: {self.nodes:,} nodes, {100 * self.share:.0f} % of the kernels' time ({self.time_us:.1f} µs), "
            f"{self.flops / 1e6:,.1f} MFLOP, {self.bytes / 1e6:,.1f} MB"
        )
        if self.mixes:
            return f"{said}, which --shared can not compute once: {self.mixes}"
        return f"{said}; where a request has one row of them, --shared computes that once"


def inputs_called(flat: FlatGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Inputs of these names, or patterns as in ``user_*``, in the model's order.

    Raises:
        MsplitError: No input is called so.
    """
    names, given = [tensor.name for tensor in flat.inputs], tuple(patterns)
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MsplitError(f"no input is called {pattern!r}", fix=f"the inputs are: {', '.join(names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in given))


def shared_work(
    flat: FlatGraph,
    costs: Costs,
    patterns: Iterable[str] = (),
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
) -> SharedWork | None:
    """The work that inputs of these names have to themselves; without names, that of those which have the most and are not all, if a
    step can compute it once. `shapes` are those that the user gave inputs.

    Raises:
        MsplitError: No input is called so.
    """
    names, found = [tensor.name for tensor in flat.inputs], inputs_called(flat, patterns)
    wanted = sum(1 << place for place, name in enumerate(names) if name in found)
    reads, total, named = _reads(flat), float(costs.time_us.sum()), bool(wanted)
    wanted = wanted or _largest(reads, costs, (1 << len(names)) - 1)
    mixes = _mixes(flat, shapes) if wanted else ""
    if not wanted or (mixes and not named):
        return None
    chosen = np.array([bool(mask) and not mask & ~wanted for mask in reads])
    time = float(costs.time_us[chosen].sum())
    return SharedWork(
        tuple(name for place, name in enumerate(names) if wanted >> place & 1),
        int(np.count_nonzero(chosen)),
        time,
        time / total if total else 0.0,
        float(costs.flops[chosen].sum()),
        float(costs.bytes[chosen].sum()),
        named,
        mixes,
    )


def _mixes(flat: FlatGraph, shapes: Mapping[str, tuple[int | None, ...]] | None) -> str:
    """Why rows depend on each other; "" where they do not."""
    try:
        independent_rows(flat, shapes=shapes).check()
    except MsplitError as problem:
        return "; ".join([problem.what, *problem.details])
    return ""


def _largest(reads: Sequence[int], costs: Costs, every: int) -> int:
    """The set of inputs, but not all, that has most of the time to itself; 0 where that is little."""
    times = Counter[int]()
    for mask, time in zip(reads, costs.time_us.tolist(), strict=True):
        times[mask] += time
    sets = [mask for mask, _ in times.most_common(_MOST) if mask not in (0, every)]
    alone = {one: sum(time for mask, time in times.items() if mask and not mask & ~one) for one in sets}
    best = max(alone, key=lambda one: alone[one], default=0)
    return best if best and alone[best] >= _WORTH * float(costs.time_us.sum()) else 0


def _reads(flat: FlatGraph) -> list[int]:
    """Per node the inputs that it depends on, a bit for each."""
    graph, masks = flat.graph, [0] * len(flat)
    for place, tensor in enumerate(flat.inputs):
        masks[tensor.node] |= 1 << place
    src, port, starts = graph.edges.src.tolist(), graph.edges.port.tolist(), graph.in_start.tolist()
    for node in graph.topological.tolist():
        for edge in range(starts[node], starts[node + 1]):
            if port[edge] != CONTROL:
                masks[node] |= masks[src[edge]]
    return masks
