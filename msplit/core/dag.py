"""Dependencies as two arrays: all that analysis and scheduling need to know of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Graph, Ints

_Number = TypeVar("_Number", bound=np.number)


def distinct(values: NDArray[_Number]) -> NDArray[_Number]:
    """Each value once, ascending. `np.unique` of NumPy 2.3 and later hashes, which takes eighty times as long for a million edges."""
    if bool((values[1:] > values[:-1]).all()):
        return values
    values = np.sort(values)
    first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


@dataclass(frozen=True, eq=False)
class Dag:
    """A directed acyclic graph of nodes 0..n-1.

    Attributes:
        start: The producers of node v are ``src[start[v]:start[v + 1]]``.
        src: Producers, grouped by consumer. A producer may be there twice.
    """

    start: Ints
    src: Ints

    def __len__(self) -> int:
        return len(self.start) - 1

    @staticmethod
    def of(count: int, src: Any, dst: Any) -> Dag:
        """From unsorted edges."""
        src, dst = np.asarray(src, np.int32), np.asarray(dst, np.int32)
        order = np.argsort(dst, kind="stable")
        start = np.searchsorted(dst[order], np.arange(count + 1)).astype(np.int32)
        return Dag(start, src[order])

    @staticmethod
    def from_graph(graph: Graph) -> Dag:
        """The data and control edges of a graph."""
        return Dag(graph.in_start, graph.edges.src)

    def dst(self) -> Ints:
        """The consumer of each edge."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.start))

    def consumers(self) -> tuple[Ints, Ints]:
        """(start, dst): the consumers of node u are ``dst[start[u]:start[u + 1]]``, ascending. Sorts the edges anew each time."""
        order = np.argsort(self.src, kind="stable")
        start = np.searchsorted(self.src[order], np.arange(len(self) + 1)).astype(np.int32)
        return start, self.dst()[order]
