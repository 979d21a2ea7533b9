"""Which GPU each op of a split graph runs on.

It follows from the graph: inputs of the model are on the first GPU, a copy says where it goes, and everything else runs where what it
reads is. So no pass has to keep it, as long as none puts together what lies apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from msplit.engines.cuda.ir.graph import Key, OpGraph

PEER_COPY = "_PeerCopy"

UNKNOWN = -1


@dataclass(frozen=True)
class Gpus:
    """Where everything of a split program is. GPUs are numbered as in `places`.

    Attributes:
        places: The GPUs, the one that takes inputs and gives outputs first.
        steps: Per step of the program where it runs; a copy where it goes.
        constants: Where each constant is.
    """

    places: tuple[torch.device, ...]
    steps: tuple[int, ...]
    constants: Mapping[Key, int]


def gpus_of(graph: OpGraph) -> dict[int, int]:
    """Per op its GPU; nothing for a graph that is not split."""
    if all(op.op != PEER_COPY for op in graph.ops.values()):
        return {}
    found: dict[int, int] = {}
    fed = set(graph.feeds.values())
    for number, op in graph.ops.items():
        if op.op == PEER_COPY:
            found[number] = int(op.attrs["gpu"])
            continue
        near = (0 if key in fed else found.get(key[0], UNKNOWN) for key in op.inputs if key not in graph.constants)
        found[number] = next((gpu for gpu in near if gpu != UNKNOWN), UNKNOWN)
    # What reads nothing but constants runs where it is read.
    for number, op in reversed(graph.ops.items()):
        if op.op == PEER_COPY:
            continue
        gpu = found[number] = max(found[number], 0) if found[number] != UNKNOWN else UNKNOWN
        for key in op.inputs:
            if gpu != UNKNOWN and found.get(key[0], 0) == UNKNOWN:
                found[key[0]] = gpu
    return {number: max(gpu, 0) for number, gpu in found.items()}


def apart(graph: OpGraph, gpus: Mapping[int, int]) -> str | None:
    """What reads a value of another GPU, in words; None where nothing does."""
    fed = set(graph.feeds.values())
    for number, op in graph.ops.items() if gpus else ():
        for key in op.inputs:
            if op.op == PEER_COPY or key in graph.constants:
                continue
            where = 0 if key in fed else gpus.get(key[0], gpus[number])
            if where != gpus[number]:
                return f"{op.name} ({op.op}) on GPU {gpus[number]} reads {key}, which is on GPU {where}"
    return None
