"""Work that depends on some inputs alone: what is computed once where these have the same row in a whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from msplit.analysis.rows.node import LinearSizes, MixedRows
from msplit.analysis.rows.walk import RowPass, independent_rows, walked
from msplit.core.graph import CONTROL
from msplit.cost.costs import Costs
from msplit.cost.estimate import estimate
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import ops_with
from msplit.shapes import Shapes
from msplit.shapes.infer import infer, stated_shapes
from msplit.shapes.registry import known

REPEATING = ops_with("repeat")
"""Ops that a model repeats rows with."""
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
        rows: How often the model repeats it, which is found without a name, and computed once; 0: it does not.
        mixed: The ops that need all these rows, in words.
        mixes: Why a step can not compute it once; "" where it can.
    """

    inputs: tuple[str, ...]
    nodes: int
    time_us: float
    share: float
    flops: float
    bytes: float
    named: bool
    rows: int = 0
    mixed: tuple[str, ...] = ()
    mixes: str = ""

    @property
    def words(self) -> str:
        """What to tell."""
        few = ", ".join(self.inputs[:6]) + (" …" if len(self.inputs) > 6 else "")
        said = (
            f"{few} alone: {self.nodes:,} nodes, {100 * self.share:.0f} % of the kernels' time ({self.time_us:.1f} µs), "
            f"{self.flops / 1e6:,.1f} MFLOP, {self.bytes / 1e6:,.1f} MB"
        )
        if self.rows:
            need = f"; all rows are needed where {'; '.join(self.mixed)}" if self.mixed else ""
            return f"{said} are saved where {self.rows:,} equal rows are computed once, as the cuda engine does where it gains{need}"
        if self.mixes:
            return f"{said}, which --shared can not compute once: {self.mixes}"
        return f"{said}; where a request has one row of them, --shared computes that once"


def called(flat: FlatGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Inputs of these names, or patterns as in ``user_*``, in the model's order."""
    given = tuple(patterns)
    return tuple(tensor.name for tensor in flat.inputs if any(fnmatchcase(tensor.name, pattern) for pattern in given))


def inputs_called(flat: FlatGraph, patterns: Iterable[str], places: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Inputs that are `called` so. `places` says where in a file patterns stand.

    Raises:
        MsplitError: No input is called so.
    """
    given = tuple(patterns)
    for pattern in given:
        if not called(flat, [pattern]):
            names, where = ", ".join(tensor.name for tensor in flat.inputs), (places or {}).get(pattern)
            raise MsplitError(f"no input is called {pattern!r}", where=where, fix=f"the inputs are: {names}")
    return called(flat, given)


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
    reads, total, named = inputs_read(flat), float(costs.time_us.sum()), bool(wanted)
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
        mixes=mixes,
    )


def repeated_work(flat: FlatGraph, costs: Costs, shapes: Shapes) -> SharedWork | None:
    """The work that one row saves where a model repeats what it makes of inputs without rows; None where it does not."""
    sizes = {tensor.name: shapes.shape(tensor.node, tensor.port) for tensor in flat.inputs}
    given = {name: shape for name, shape in sizes.items() if known(shape)}
    found = (
        RepeatedRows.of(flat, given) if len(given) == len(sizes) and not REPEATING.isdisjoint(flat.graph.ops) else None
    )
    if found is None:
        return None
    chosen = np.array([found.entries((node, 0)) > 0 for node in range(len(flat))])
    if not chosen.any():
        return None
    first = {
        name: shape if name in found.inputs else (shape[0] // found.rows, *shape[1:]) for name, shape in given.items()
    }
    once = estimate(flat, infer(flat, shapes=first), costs.gpu)
    time, flops, size = (
        float(np.maximum(getattr(costs, name) - getattr(once, name), 0)[chosen].sum())
        for name in ("time_us", "flops", "bytes")
    )
    total, graph = float(costs.time_us.sum()), flat.graph
    mixing = {
        str(state.refusal)
        for node in range(len(flat))
        if isinstance(state := found.states.state(node, 0), MixedRows)
        and any(chosen[source] for source, _ in graph.inputs(node))
    }
    count, inputs = int(np.count_nonzero(chosen)), tuple(name for name in sizes if name in found.inputs)
    return SharedWork(
        inputs, count, time, time / total if total else 0.0, flops, size, False, found.rows, tuple(sorted(mixing))[:3]
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


@dataclass(frozen=True, eq=False)
class RepeatedRows:
    """Values of which all rows of a step are equal: a model makes them of inputs that have no rows, and of the number of rows.

    Attributes:
        inputs: Names of these inputs.
        rows: Rows of a step.
        states: What was found of all tensors.
        alone: Per node whether it depends on these inputs, and on no other.
    """

    inputs: frozenset[str]
    rows: int
    states: RowPass
    alone: Sequence[bool]

    def entries(self, key: tuple[int, int]) -> int:
        """Entries of a row of such a value, whose rows are apart and lie along the first axis; 0 of any other."""
        return self.states.entries(*key) if key[0] < len(self.alone) and self.alone[key[0]] else 0

    @classmethod
    def of(cls, flat: FlatGraph, shapes: Mapping[str, tuple[int, ...]]) -> RepeatedRows | None:
        """Those at these shapes of all inputs; None where all inputs have rows, or none has several."""
        stated = stated_shapes(flat)
        open_ones = [name for name, shape in shapes.items() if shape and (stated[name] or (None,))[0] is None]
        sizes = Counter(shapes[name][0] for name in open_ones if shapes[name][0] > 1)
        rows = max(sizes, key=lambda size: (sizes[size], size), default=0)
        fixed = frozenset(
            name for name, shape in shapes.items() if name not in open_ones or not rows or shape[0] % rows
        )
        if not rows or not any(shapes[name] for name in fixed):
            return None
        states, _ = walked(flat, rows, shapes, fixed)
        numbers = [isinstance(states.state(node, 0), LinearSizes) for node in range(len(flat))]
        wanted = sum(1 << place for place, tensor in enumerate(flat.inputs) if tensor.name in fixed)
        reads = inputs_read(flat, control=True, but=numbers)
        alone = [bool(mask) and not mask & ~wanted for mask in reads]
        return cls(fixed, rows, states, alone)


def inputs_read(flat: FlatGraph, *, control: bool = False, but: Sequence[bool] = ()) -> list[int]:
    """Per node the inputs that it depends on, a bit for each in the model's order.

    Args:
        control: True to count those that must be there before it runs, or that decide whether it does.
        but: Nodes of which nothing counts.
    """
    graph, back, masks = flat.graph, flat.back_edges, [0] * len(flat)
    for place, tensor in enumerate(flat.inputs):
        masks[tensor.node] |= 1 << place
    src, port, starts = graph.edges.src.tolist(), graph.edges.port.tolist(), graph.in_start.tolist()
    goes_back = [*zip(back.src.tolist(), back.dst.tolist(), strict=True)]
    while True:
        for node in graph.topological.tolist():
            for edge in range(starts[node], starts[node + 1]):
                if (control or port[edge] != CONTROL) and not (but and but[src[edge]]):
                    masks[node] |= masks[src[edge]]
        if all(masks[source] | masks[merge] == masks[merge] for source, merge in goes_back):
            return masks
        for source, merge in goes_back:
            masks[merge] |= masks[source]
