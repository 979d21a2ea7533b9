"""GPUs that the ops of a split graph run on.

It follows from the graph: inputs of the model are on the first GPU, a copy says where it goes, and everything else runs where what it
reads, or what reads it, is. So no pass has to keep it, as long as none puts together what lies apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from msplit.core.dag import DisjointSets
from msplit.engines.cuda.ir.graph import Key, OpGraph

PEER_COPY = "_PeerCopy"


@dataclass(frozen=True)
class Gpus:
    """Places of everything in a split program. GPUs are numbered as in `places`.

    Attributes:
        places: The GPUs, the one that takes inputs and gives outputs first.
        steps: Per step of the program where it runs; a copy where it goes.
        constants: Where each constant is.
    """

    places: tuple[torch.device, ...]
    steps: tuple[int, ...]
    constants: Mapping[Key, int]


def gpus_of(graph: OpGraph) -> dict[int, int]:
    """Per op its GPU; nothing for a graph that is not split.

    Ops between which values go without a copy are on one GPU: the first, where one of them reads an input of the model, or that of a copy
    whose result one of them reads. Ops that read constants alone and are read by copies alone may be anywhere: they are on the first.
    """
    copies = {number: int(op.attrs["gpu"]) for number, op in graph.ops.items() if op.op == PEER_COPY}
    if not copies:
        return {}
    fed, row = set(graph.feeds.values()), {number: index for index, number in enumerate(graph.ops)}
    together, known = DisjointSets(len(row)), list(copies.items())
    for number, op in graph.ops.items():
        for key in op.inputs if number not in copies else ():
            if key in fed:
                known.append((number, 0))
            elif key[0] in row:
                together.join(row[number], row[key[0]])
    found: dict[int, int] = {}
    for number, gpu in known:
        found.setdefault(together.find(row[number]), gpu)
    return {number: copies.get(number, found.get(together.find(index), 0)) for number, index in row.items()}


def apart(graph: OpGraph, gpus: Mapping[int, int]) -> str | None:
    """An op that reads a value of another GPU, in words; None where none does."""
    fed = set(graph.feeds.values())
    for number, op in graph.ops.items() if gpus else ():
        for key in op.inputs:
            if op.op == PEER_COPY or key in graph.constants:
                continue
            where = 0 if key in fed else gpus.get(key[0], gpus[number])
            if where != gpus[number]:
                return f"{op.name} ({op.op}) on GPU {gpus[number]} reads {key}, which is on GPU {where}"
    return None
