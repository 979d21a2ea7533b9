"""Pieces of a graph that run one after the other, and which of them are alike: the modules of an inception network.

What helps in one module helps in its likes. A change of all of them together gains as many times as much, which can be measured where
the gain of one drowns in noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.problem import Problem
from msplit.schedule.reachability import between_cuts

ROUNDS = 4
"""Of telling blocks apart by their neighbours' neighbours."""


@dataclass(frozen=True, eq=False)
class Section:
    """Blocks between two that everything passes through.

    Attributes:
        blocks: Its blocks; the i-th corresponds to the i-th of any section of its kind.
        kind: Equal for sections whose blocks hang together in the same way and have as many kernels each.
    """

    blocks: Ints
    kind: int


def sections(problem: Problem) -> list[Section]:
    """The sections of more than one block, in order. O((blocks + edges) × rounds).

    Blocks are told apart by colour refinement (Weisfeiler and Leman 1968): by their kernels, then by the colours around them. Blocks
    that it can not tell apart correspond in the order of their numbers.
    """
    found = []
    kinds: dict[object, int] = {}
    for low, high in between_cuts(problem.dag):
        blocks, signature = _canonical(problem, low, high)
        found.append(Section(blocks, kinds.setdefault(signature, len(kinds))))
    return found


def _canonical(problem: Problem, low: int, high: int) -> tuple[Ints, object]:
    """The blocks of a range in an order that does not depend on their numbers but between equals, and what is equal for equal ranges."""
    count = high - low
    inputs: list[list[int]] = [[] for _ in range(count)]
    outputs: list[list[int]] = [[] for _ in range(count)]
    for node in range(low, high):
        for producer in problem.dag.src[problem.dag.start[node] : problem.dag.start[node + 1]].tolist():
            if producer >= low:
                inputs[node - low].append(producer - low)
                outputs[producer - low].append(node - low)
    colour = problem.kernels[low:high].tolist()
    seen: object = ()
    for _ in range(ROUNDS):
        shapes = [
            (
                colour[node],
                tuple(sorted(colour[i] for i in inputs[node])),
                tuple(sorted(colour[o] for o in outputs[node])),
            )
            for node in range(count)
        ]
        names = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
        seen = (seen, tuple(sorted(names)))
        colour = [names[shape] for shape in shapes]
    order = sorted(range(count), key=lambda node: (colour[node], node))
    blocks = np.asarray(order, np.int32) + low
    return blocks, (count, seen, tuple(sorted(colour)))
