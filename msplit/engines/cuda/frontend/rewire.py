"""A flat graph in which some nodes do something else. Nodes keep their numbers, so that stream ids stay theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from msplit.core.graph import CONTROL, Edges, Graph
from msplit.engines.cuda.ir.graph import Key, final
from msplit.flatten.control_flow import PickedAttrs
from msplit.flatten.flat import FlatGraph, Tensor


@dataclass
class Changes:
    """Changes of some nodes.

    Attributes:
        attrs: Node -> its new attributes.
        inputs: Node -> its new data inputs; it has no other inputs then.
        stands_for: Value -> what is read in its place.
        stateful: Node -> whether it has effects now, where that changes.
    """

    ops: dict[int, str] = field(default_factory=dict)
    attrs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    inputs: dict[int, Sequence[Key]] = field(default_factory=dict)
    stands_for: dict[Key, Key] = field(default_factory=dict)
    stateful: dict[int, bool] = field(default_factory=dict)

    def final(self, key: Key) -> Key:
        """The value that is read in the end in a value's place."""
        return final(self.stands_for, key)


def rewired(flat: FlatGraph, changes: Changes) -> FlatGraph:
    """The graph with the changes made. What nothing reads any more is still there, and not needed."""
    if not changes.ops and not changes.stands_for:
        return flat
    graph, edges = flat.graph, flat.graph.edges
    rows: list[tuple[int, int, int, int]] = []
    columns = (column.tolist() for column in (edges.src, edges.port, edges.dst, edges.slot))
    for source, port, target, slot in zip(*columns, strict=True):
        if target not in changes.inputs:
            read = (source, port) if port == CONTROL else changes.final((source, port))
            rows.append((*read, target, slot))
    for target, keys in changes.inputs.items():
        rows += [(*changes.final(key), target, slot) for slot, key in enumerate(keys)]
    host = flat.host.copy()
    host[list(changes.ops)] = False
    stateful = flat.stateful.copy()
    stateful[list(changes.stateful)] = list(changes.stateful.values())
    changed = Graph(
        graph.names,
        [changes.ops.get(node, op) for node, op in enumerate(graph.ops)],
        graph.devices,
        _patched(graph.attrs, changes.attrs),
        Edges.of(*zip(*rows, strict=True)) if rows else edges,
        graph.functions,
    )
    outputs = tuple(Tensor(out.name, *changes.final((out.node, out.port))) for out in flat.outputs)
    return replace(flat, graph=changed, host=host, stateful=stateful, outputs=outputs)


def _patched(attrs: Sequence[Mapping[str, Any]], others: Mapping[int, Mapping[str, Any]]) -> PickedAttrs:
    """Attributes of nodes of which some have others."""
    which, index = np.zeros(len(attrs), np.int32), np.arange(len(attrs), dtype=np.int32)
    nodes = list(others)
    which[nodes], index[nodes] = 1, np.arange(len(nodes))
    return PickedAttrs([attrs, list(others.values())], which, index)
