"""Updates of many variables by one optimizer as one op, which is one kernel on a GPU.

A model has one for each of its hundreds of variables, most of them small: to launch it takes longer than to run it. Those of large
variables stay what they are: they would gain nothing, and wait for the last gradient of all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, attrs_key
from msplit.engines.cuda.ops.optimizers import OPTIMIZERS
from msplit.engines.cuda.passes.pattern import value_key

LARGEST = 1 << 20
"""Elements of a variable whose update is joined with others. On an H200 Adam takes 9 µs for so many, and 2 to be launched."""

FLAT = "_ApplyFlat"


def merge_updates(graph: OpGraph) -> bool:
    """Joins updates of one kind, with the same numbers, whose results nobody reads before the step is over."""
    read = {key[0] for op in graph.ops.values() for key in op.inputs}
    kinds: dict[Hashable, list[Op]] = {}
    for number, op in graph.ops.items():
        shape = graph.shape(op.inputs[0]) if op.op in OPTIMIZERS else None
        if shape is not None and number not in read and math.prod(shape) <= LARGEST:
            kinds.setdefault(_kind(graph, op), []).append(op)
    changed = False
    for alike in kinds.values():
        for members in _side_by_side(graph, alike) if len(alike) > 1 else ():
            if len(members) > 1:
                _merge(graph, members)
                graph.sort()
                changed = True
    return changed


def _kind(graph: OpGraph, op: Op) -> Hashable:
    """Equal for updates that are the same but for their variables and gradients."""
    _, numbers, _ = OPTIMIZERS[op.op].parts(op.inputs)
    shared = tuple(value_key(graph.constants[key]) if key in graph.constants else key for key in numbers)
    return op.op, attrs_key(op.attrs), shared


def _side_by_side(graph: OpGraph, alike: Sequence[Op]) -> list[list[Op]]:
    """Splits ops so that those of a part can be one: no op outside comes behind one of them and before another.

    Nobody reads what they make, but they may read what is overwritten behind them.
    """
    inside = {op.node for op in alike}
    hazards = graph.hazards()
    behind = dict.fromkeys(graph.ops, 0)  # on the longest way to an op, how often it leaves the ops inside
    for number, op in graph.ops.items():
        for before in (*(key[0] for key in op.inputs), *hazards.get(number, ())):
            if before in behind:
                behind[number] = max(behind[number], behind[before] + (before in inside and number not in inside))
    parts: dict[int, list[Op]] = {}
    for op in alike:
        parts.setdefault(behind[op.node], []).append(op)
    return list(parts.values())


def _merge(graph: OpGraph, members: Sequence[Op]) -> None:
    first, optimizer = members[0], OPTIMIZERS[members[0].op]
    parts = [optimizer.parts(op.inputs) for op in members]
    state = [key for slot in zip(*(variables for variables, _, _ in parts), strict=True) for key in slot]
    inputs = [*state, *parts[0][1], *(gradient for _, _, gradient in parts)]
    attrs: dict[str, Any] = {**first.attrs, "op": first.op, "count": len(members), "_mutates": tuple(range(len(state)))}
    number = graph.fresh()
    names: dict[Key, Key] = {}
    for place, op in enumerate(members):
        for slot in range(optimizer.variables):
            old, new = (op.node, slot), (number, slot * len(members) + place)
            names[old] = new
            graph.shapes[new] = graph.shapes.pop(old)
            if old in graph.dtypes:
                graph.dtypes[new] = graph.dtypes.pop(old)
        del graph.ops[op.node]
    source_nodes = [node for op in members for node in op.source_nodes]
    graph.ops[number] = Op(number, first.name, FLAT, attrs, inputs, source_nodes, len(members))
    graph.rename(names)
    graph.merges.append(Merge(first.op, len(members), 0, launches=True))
