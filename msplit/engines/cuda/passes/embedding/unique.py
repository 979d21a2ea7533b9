"""A lookup of distinct ids, whose rows are then put where the ids were, is a lookup of the ids.

`embedding_lookup_sparse` looks each distinct id up once: ``ids, places = Unique(x)``, and reads ``Gather(table, ids)`` only at ``places``.
Row ``places[i]`` of that is row ``x[i]`` of the table, whatever x is, so that the number of distinct ids, which no capture can
know, plays no part.
"""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.passes.pattern import Readers
from msplit.opset.traits import GATHERS, SPARSE_SEGMENTS, ops_with

_UNIQUES = ops_with("unique")
_BY_PLACES = GATHERS | SPARSE_SEGMENTS | {f"{op}WithNumSegments" for op in SPARSE_SEGMENTS}


def eliminate_unique(graph: OpGraph) -> bool:
    """Lets what reads looked-up distinct ids read the table itself. Whether there was anything."""
    readers = Readers(graph)
    found = False
    for lookup in list(graph.ops.values()):
        if lookup.op not in GATHERS or not _takes_rows(graph, lookup):
            continue
        unique = graph.ops.get(lookup.inputs[1][0])
        if unique is None or unique.op not in _UNIQUES or lookup.inputs[1][1] != 0:
            continue
        for number in readers.of.get((lookup.node, 0), []):
            user = graph.ops[number]
            by_places = user.op in _BY_PLACES and _takes_rows(graph, user)
            if by_places and user.inputs[:2] == [(lookup.node, 0), (unique.node, 1)]:
                user.inputs[:2] = [lookup.inputs[0], unique.inputs[0]]
                user.source_nodes = list(
                    dict.fromkeys([*lookup.source_nodes, *user.source_nodes, *unique.source_nodes])
                )
                found = True
    return found


def _takes_rows(graph: OpGraph, op: Op) -> bool:
    """Whether a gather takes whole rows; the other ops here do so always."""
    if op.op not in GATHERS:
        return True
    axis = graph.constants.get(op.inputs[2]) if op.op == "GatherV2" else np.int32(0)
    return axis is not None and int(axis) == 0 and not op.attrs.get("batch_dims", 0)
