"""The structural verifier (being written)."""

from __future__ import annotations

from dataclasses import dataclass

from msplit.graph import Graph


@dataclass(frozen=True)
class Defect:
    """A defect of a graph, as text that names its node."""

    kind: str
    node: str
    text: str


def verify(graph: Graph, *, where: str | None = None) -> list[Defect]:
    """Every defect of a graph."""
    return [
        Defect("input", graph.names[b.node] if b.node >= 0 else "", f"{graph.names[b.node]}: input {b.text!r} {b.why}")
        for b in graph.broken_inputs
    ]
