"""What the cuda engine is told. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedKernel:
    """Nodes whose work one kernel does.

    Attributes:
        kind: ``"fused"``: pointwise ops that one compiled kernel does; ``"grouped"``: alike nodes of several branches, side by side;
            ``"fused and grouped"``: pointwise ops of several branches; ``"columns"``: lookups of several embedding columns;
            ``"library"``: one of a library's kernels with its epilogue, or another rewrite of several nodes to one.
        nodes: Flat nodes, the one first whose stream decides.
        stream: Where it runs.
    """

    kind: str
    nodes: tuple[int, ...]
    stream: int


@dataclass(frozen=True)
class StoredPlan:
    """A plan of a program, in terms of the flat graph that it was made from.

    Attributes:
        kernels: In record order: (flat node, which of that node's steps, stream). A step belongs to the first node that it covers.
        groups: Nodes that share a kernel, in record order. Nothing runs by them: they say what `kernels` does.
    """

    kernels: tuple[tuple[int, int, int], ...]
    groups: tuple[SharedKernel, ...] = ()
