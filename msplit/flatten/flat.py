"""The flat view of a model: a DAG of the nodes that its outputs need, functions inlined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Edges, Graph, Ints
from msplit.escape import html, line
from msplit.formats.model import Model


@dataclass(frozen=True)
class Region:
    """Nodes that must stay on one stream.

    Attributes:
        kind: "loop" (a v1 while frame with everything nested in it), "cond" (a v1 Switch..Merge region) or "variable" (the
            readers and writers of one ref variable).
        name: Frame name, name of the Switch's predicate, or the variable.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Tensor:
    """Output `port` of one node of a flat graph, with the name the user knows it by."""

    name: str
    node: int
    port: int


@dataclass(frozen=True, eq=False, repr=False)
class FlatGraph:
    """What analysis, rules and engines work on.

    Attributes:
        graph: A DAG: back edges of v1 loops are cut, calls are inlined (their nodes are named ``call/body_node``). `While`, `If` and
            their stateless kin stay one node each, `graph.functions` holds their bodies.
        back_edges: The edges that were cut (NextIteration -> Merge), in the numbering of `graph`.
        origin_function: Per node the index in `function_names` of the function it comes from, -1 for the top-level graph.
        origin_node: Per node its index in that function's NodeDefs (not counting parameters) or in the top-level GraphDef. The few
            nodes that inlining adds (NoOp joins of control edges, an Identity where a call gives a parameter back) have the index of
            their call; parameters, which are nodes only in the view of a single function, have -1.
        region: Per node the index of its outermost region in `regions`, or -1.
        host: Per node, whether it has no GPU kernel (string, table, parsing, iterator ops) or is pinned to a CPU device.
        stateful: Per node, whether its op is stateful (reads or writes a resource, or is random).
        targets: Nodes that must run though nothing of them is fetched, those inside of inlined calls included.
    """

    model: Model
    graph: Graph
    back_edges: Edges
    origin_function: Ints
    origin_node: Ints
    function_names: Sequence[str]
    region: Ints
    regions: Sequence[Region]
    host: NDArray[np.bool_]
    stateful: NDArray[np.bool_]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    targets: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.graph)

    def __repr__(self) -> str:
        fed, made = (", ".join(tensor.name for tensor in some[:4]) for some in (self.inputs, self.outputs))
        return f"<FlatGraph model: {line(str(self.model.path))}, nodes: {len(self):,}, inputs: {line(fed)}, outputs: {line(made)}>"

    def _repr_html_(self) -> str:
        return f"<code>{html(repr(self))}</code>"

    def origin(self, node: int) -> tuple[str | None, int]:
        """(function name or None for the top-level graph, index of the NodeDef in it)."""
        function = int(self.origin_function[node])
        return (self.function_names[function] if function >= 0 else None), int(self.origin_node[node])
