"""Kernels whose cost is a guess because shapes are unknown, and whether the user could tell those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.analysis.dense import proved
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.shapes import Shapes
from msplit.shapes.registry import known


@dataclass(frozen=True, eq=False)
class Guesses:
    """Kernels of unknown shape.

    Attributes:
        nodes: These kernels, ascending.
        kernels: All kernels of the graph.
        ops: Ops of `nodes` by number, most first.
        dense: Further kernels whose shapes depend on values as far as shape inference can see; the cuda engine proves them dense, and
            they are no guess to it.
        inputs: Inputs of the model whose shapes are not known in full and that such a kernel depends on: the shapes that would help.
            Where there are none, the shapes depend on values.
    """

    nodes: Ints
    kernels: int
    ops: Mapping[str, int]
    dense: int
    inputs: tuple[str, ...]

    @property
    def share(self) -> float:
        """Share of the kernels."""
        return len(self.nodes) / self.kernels if self.kernels else 0.0

    @property
    def mend(self) -> str:
        """What the user can do about it, as a sentence."""
        if not self.inputs:
            return "No option settles it: the shapes depend on values, or on ops that nothing is known of."
        named = ", ".join(f"--shape {name}=…" for name in self.inputs[:3])
        return f"{named}{' and so on' if len(self.inputs) > 3 else ''} may settle it."


def guesses(flat: FlatGraph, costs: Costs, shapes: Shapes) -> Guesses:
    """Finds the kernels whose cost is a guess. Linear."""
    launches = (costs.time_us > 0) & ~flat.host
    unknown = np.flatnonzero(launches & ~costs.known).astype(np.int32)
    settled = proved(flat.graph, shapes) if len(unknown) else np.zeros(len(flat), np.bool_)
    nodes = np.asarray([node for node in unknown.tolist() if not _settled(flat, node, settled)], np.int32)
    ops = flat.graph.ops
    return Guesses(
        nodes=nodes,
        kernels=int(np.count_nonzero(launches)),
        ops=dict(Counter(ops[node] for node in nodes.tolist()).most_common()),
        dense=len(unknown) - len(nodes),
        inputs=_open_inputs(flat, shapes, nodes) if len(nodes) else (),
    )


def _settled(flat: FlatGraph, node: int, settled: NDArray[np.bool_]) -> bool:
    """Whether a kernel's own shapes and those of what it reads are proved."""
    return bool(settled[node]) and all(settled[source] for source, _ in flat.graph.inputs(node))


def _open_inputs(flat: FlatGraph, shapes: Shapes, nodes: Ints) -> tuple[str, ...]:
    """Inputs of unknown shape in front of some nodes."""
    graph = flat.graph
    before = np.zeros(len(graph), np.bool_)
    before[nodes] = True
    starts, sources, reached = graph.in_start.tolist(), graph.edges.src.tolist(), before.tolist()
    for node in graph.topological[::-1].tolist():
        if reached[node]:
            for source in sources[starts[node] : starts[node + 1]]:
                reached[source] = True
    return tuple(
        tensor.name.removesuffix(":0")
        for tensor in flat.inputs
        if reached[tensor.node] and not known(shapes.shape(tensor.node, tensor.port))
    )
