"""Which variable is kept by which parameter server. Needs no TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import DisjointSets
from msplit.core.graph import Ints
from msplit.engines.tensorflow.placed import binding_edges
from msplit.engines.variables import storage
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import VARIABLES
from msplit.shapes.registry import itemsize

BYTES, ROUND_ROBIN = "bytes", "round-robin"
STRATEGIES = (BYTES, ROUND_ROBIN)
"""How variables are shared out: so that servers keep alike many bytes, the largest first; or one after the other in the graph's order."""


def kept_by(flat: FlatGraph, servers: int, strategy: str, state: Mapping[str, NDArray[Any]]) -> Ints:
    """The server, from 0, that keeps each variable, per node that refers to it or reads or changes it; -1 for all other nodes.

    An optimizer's slots are with the variable that they belong to, for one op changes them together. A variable that a loop or a cond
    reads inside is kept where that runs.

    Args:
        state: Values by variable, which say what it takes where the graph does not.
    """
    found = np.full(len(flat), -1, np.int32)
    bound = binding_edges(flat)
    handles = [v for v, op in enumerate(flat.graph.ops) if op in VARIABLES]
    together = DisjointSets(len(flat))
    for u, v in bound:
        together.join(u, v)
    first: dict[Any, int] = {}
    for v in handles:
        shared = storage(flat.graph.ops[v], flat.graph.names[v], flat.graph.attrs[v])
        if shared is not None:
            together.join(first.setdefault(shared, v), v)
    members: dict[int, list[int]] = {}
    for v in sorted({*handles, *(v for edge in bound for v in edge)}):
        members.setdefault(together.find(v), []).append(v)
    groups: dict[int, int] = {}  # the bytes of each, in the order of their first variables
    for v in handles:
        group = together.find(v)
        if not any(_in_flow(flat, one) for one in members[group]):
            own = first.get(storage(flat.graph.ops[v], flat.graph.names[v], flat.graph.attrs[v]), v) == v
            groups[group] = groups.get(group, 0) + own * _bytes(flat, v, state)
    for group, server in zip(groups, shared_out([*groups.values()], servers, strategy), strict=True):
        found[members[group]] = server
    return found


def _in_flow(flat: FlatGraph, node: int) -> bool:
    """Whether a node is inside of a loop or a cond of TensorFlow 1, which run in one place."""
    region = int(flat.region[node])
    return region >= 0 and flat.regions[region].kind != "variable"


def shared_out(sizes: Sequence[int], servers: int, strategy: str) -> list[int]:
    """The server of each. By bytes: longest processing time first (Graham 1969), at most a third above the best that could be."""
    if strategy == ROUND_ROBIN:
        return [number % servers for number in range(len(sizes))]
    loads = [(0, 0)] * servers
    found = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        server = min(range(servers), key=loads.__getitem__)
        kept, count = loads[server]
        loads[server] = (kept + sizes[number], count + 1)
        found[number] = server
    return found


def _bytes(flat: FlatGraph, node: int, state: Mapping[str, NDArray[Any]]) -> int:
    """What a variable takes, as far as anything says so."""
    value = state.get(flat.graph.names[node])
    if value is not None:
        return value.nbytes
    attrs = flat.graph.attrs[node]
    shape = attrs.get("shape")
    if not isinstance(shape, tuple) or None in shape:
        return 0
    return math.prod(shape) * itemsize(str(attrs.get("dtype")))
