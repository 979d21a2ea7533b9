"""Which integers an input may hold: they must stay inside the tables that they index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.cost.shapes.registry import plain_shape
from msplit.flatten.flat import FlatGraph
from msplit.graph import CONTROL, TensorValue

_GATHERS = {
    "Gather": (0, 1),
    "GatherV2": (0, 1),
    "ResourceGather": (0, 1),
    "SparseSegmentSum": (0, 1),
    "SparseSegmentMean": (0, 1),
    "SparseSegmentSqrtN": (0, 1),
    "SparseSegmentSumWithNumSegments": (0, 1),
    "SparseSegmentMeanWithNumSegments": (0, 1),
    "SparseSegmentSqrtNWithNumSegments": (0, 1),
    "GatherNd": (0, 1),
    "ResourceGatherNd": (0, 1),
}
"""Slot of the table and slot of the ids, by op."""

_SEGMENTS = {
    **dict.fromkeys((name for name in _GATHERS if name.startswith("SparseSegment")), 2),
    **dict.fromkeys(("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"), 1),
}
"""Slot of segment ids, which must not decrease."""

_SIZED = {"OneHot": (0, 1), "UnsortedSegmentSum": (1, 2), "UnsortedSegmentMax": (1, 2), "UnsortedSegmentMin": (1, 2)}
"""Slot of the ids and slot of the constant that bounds them."""

_PASSING = frozenset(
    {
        *("Identity", "Cast", "Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Slice", "Split", "SplitV", "Unpack"),
        *(
            "Pack",
            "ConcatV2",
            "Transpose",
            "Tile",
            "Unique",
            "UniqueV2",
            "StopGradient",
            "Snapshot",
            "ReverseV2",
            "BroadcastTo",
        ),
        *(
            "PlaceholderWithDefault",
            "Maximum",
            "Relu",
            "Enter",
            "Round",
            "Rint",
            "Floor",
            "PreventGradient",
            "IdentityN",
        ),
        *("EnsureShape", "Bitcast", "GatherNd", "SparseFillEmptyRows", "Select", "SelectV2"),
    }
)
"""Ops whose first output holds values of their input."""

_DATA_SLOTS = {"Split": 1, "GatherV2": 0, "Gather": 0, "SparseFillEmptyRows": 1}
"""Where the values come in, for passing ops where that is not every slot or the first."""

_TO_TABLE = frozenset({"Identity", "ReadVariableOp", "Cast", "Enter", "StopGradient", "Snapshot"})
"""Ops between a table and the lookup in it."""


@dataclass(frozen=True)
class Use:
    """What becomes of an input's values.

    Attributes:
        rows: Rows of the smallest table that they index, less the largest constant added on the way; None where they index none.
        unknown: Whether they index something whose size is not known.
        segments: Whether they are segment ids, which must not decrease.
        ops: Ops that they reach, strings too.
    """

    rows: int | None = None
    unknown: bool = False
    segments: bool = False
    ops: frozenset[str] = frozenset()


def use_of(flat: FlatGraph, node: int, port: int) -> Use:
    """Follows a tensor forward through ops that hand its values on.

    Args:
        flat: The graph.
        node: The node that makes it.
        port: Its output port.
    """
    graph = flat.graph
    rows: list[int] = []
    unknown = segments = False
    ops: set[str] = set()
    seen: dict[int, int] = {node: 0}
    waiting = [(node, port, 0)]
    while waiting:
        source, at, offset = waiting.pop()
        for e in graph.out_edges(source).tolist():
            if int(graph.edges.port[e]) != at or int(graph.edges.slot[e]) == CONTROL:
                continue
            user, slot = int(graph.edges.dst[e]), int(graph.edges.slot[e])
            op = graph.ops[user]
            ops.add(op)
            if op in _GATHERS and slot == _GATHERS[op][1]:
                size = _rows(flat, user, _GATHERS[op][0])
                if size is None:
                    unknown = True
                else:
                    rows.append(size - offset)
            elif op in _SIZED and slot == _SIZED[op][0]:
                bound = _constant(flat, user, _SIZED[op][1])
                if bound is None:
                    unknown = True
                else:
                    rows.append(int(bound.max(initial=1)) - offset)
            if _SEGMENTS.get(op) == slot:
                segments = True
            further = _handed_on(flat, user, slot, offset)
            if further is None or seen.get(user, -1) >= further:
                continue
            seen[user] = further
            waiting += [(user, p, further) for p in _ports(flat, user)]
    return Use(max(1, min(rows)) if rows else None, unknown, segments, frozenset(ops))


def _handed_on(flat: FlatGraph, node: int, slot: int, offset: int) -> int | None:
    """The largest constant added so far if the node hands its input on, else None."""
    op = flat.graph.ops[node]
    if op in ("Add", "AddV2"):
        added = _constant(flat, node, 1 - slot)
        return None if added is None or added.dtype.kind not in "iu" else offset + max(0, int(added.max(initial=0)))
    if op in ("GatherV2", "Gather"):
        return offset if slot == 0 else None
    if op not in _PASSING:
        return None
    if op in ("ConcatV2", "Pack", "Maximum", "IdentityN"):
        return offset
    if op in ("Select", "SelectV2"):
        return offset if slot else None
    return offset if slot == _DATA_SLOTS.get(op, 0) else None


def _ports(flat: FlatGraph, node: int) -> range:
    """Outputs that hold the values that a node hands on."""
    op = flat.graph.ops[node]
    if op in ("Split", "SplitV", "Unpack"):
        return range(_port_count(flat, node))
    return range(1, 2) if op == "SparseFillEmptyRows" else range(1)


def _port_count(flat: FlatGraph, node: int) -> int:
    ports = flat.graph.edges.port[flat.graph.out_edges(node)]
    return int(ports.max(initial=0)) + 1


def _source(flat: FlatGraph, node: int, slot: int) -> int | None:
    """The node behind an input, through ops that only hand a tensor or a handle on."""
    graph = flat.graph
    inputs = graph.inputs(node)
    if slot >= len(inputs):
        return None
    source = inputs[slot][0]
    while graph.ops[source] in _TO_TABLE:
        before = graph.inputs(source)
        if not before:
            return None
        source = before[0][0]
    return source


def _rows(flat: FlatGraph, gather: int, slot: int) -> int | None:
    """Size of the axis that a gather indexes, None where the table's shape is not known."""
    table = _source(flat, gather, slot)
    if table is None:
        return None
    attrs = flat.graph.attrs[table]
    value = attrs.get("value")
    shape = value.shape if isinstance(value, TensorValue) else plain_shape(attrs.get("shape"))
    if not shape:
        return None
    if flat.graph.ops[gather] in ("GatherNd", "ResourceGatherNd"):
        sizes = [size for size in shape if size is not None]
        return min(sizes) if len(sizes) == len(shape) else None
    axis = _constant(flat, gather, 2) if flat.graph.ops[gather] == "GatherV2" else None
    place = int(axis.reshape(-1)[0]) if axis is not None and axis.size == 1 else 0
    return shape[place] if -len(shape) <= place < len(shape) else None


def _constant(flat: FlatGraph, node: int, slot: int) -> np.ndarray[Any, Any] | None:
    source = _source(flat, node, slot)
    if source is None or flat.graph.ops[source] != "Const":
        return None
    array: np.ndarray[Any, Any] = np.asarray(flat.graph.attrs[source]["value"].load())
    return array
