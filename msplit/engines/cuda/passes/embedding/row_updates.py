"""Updates of rows of many tables as one op, which finds distinct ids and sums their rows up itself: one kernel on a GPU.

A model with fifty embedding columns has fifty tables, each with a Unique, a sum by segment and an update of a few rows, which take longer
to be launched than to run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, attrs_key
from msplit.engines.cuda.ops.sparse_optimizers import ROW_OPTIMIZERS
from msplit.engines.cuda.passes.pattern import value_key

LARGEST = 1 << 20
"""Elements of a gradient whose update is joined with others."""

ROWS = "_ApplyRows"


def sum_in_updates(graph: OpGraph) -> bool:
    """Lets updates by the sums of rows of distinct ids take the rows and the ids as they are. Whether there was one."""
    changed = False
    for op in graph.ops.values():
        if op.op not in ROW_OPTIMIZERS:
            continue
        variables, numbers, rows, ids = ROW_OPTIMIZERS[op.op].parts(op.inputs)
        total, unique = graph.ops.get(rows[0]), graph.ops.get(ids[0])
        if total is None or unique is None or unique.op != "_UniquePadded" or total.op != "UnsortedSegmentSum":
            continue
        count, given = graph.constants.get(total.inputs[2]), graph.shape(unique.inputs[0])
        if ids[1] or total.inputs[1] != (unique.node, 1) or count is None or given != (int(count),):
            continue
        source_nodes = [*op.source_nodes, *total.source_nodes, *unique.source_nodes]
        _become_rows(op, [*variables, *numbers, total.inputs[0], unique.inputs[0]], summed=True)
        op.source_nodes = list(dict.fromkeys(source_nodes))
        changed = True
    return changed


def _become_rows(op: Op, inputs: list[Key], *, summed: bool) -> None:
    variables = ROW_OPTIMIZERS[op.op].variables
    op.attrs = {**op.attrs, "op": op.op, "count": 1, "summed": summed, "_mutates": tuple(range(variables))}
    op.op, op.inputs = ROWS, inputs


def merge_row_updates(graph: OpGraph) -> bool:
    """Joins updates of rows of one kind, with the same numbers, whose results nobody reads before the step is over."""
    read = {key[0] for op in graph.ops.values() for key in op.inputs}
    kinds: dict[Hashable, list[Op]] = {}
    for number, op in graph.ops.items():
        kind = _kind(graph, op) if number not in read else None
        if kind is not None:
            kinds.setdefault(kind, []).append(op)
    changed = False
    for alike in kinds.values():
        for members in _side_by_side(graph, alike) if len(alike) > 1 else ():
            if len(members) > 1:
                _merge(graph, members)
                graph.sort()
                changed = True
    return changed


def _parts(op: Op) -> tuple[list[Key], list[Key], Key, Key]:
    """Variables, numbers, gradient and indices of an update of rows of one variable."""
    if op.op == ROWS:
        count = ROW_OPTIMIZERS[op.attrs["op"]].variables
        return op.inputs[:count], op.inputs[count:-2], op.inputs[-2], op.inputs[-1]
    variables, numbers, rows, ids = ROW_OPTIMIZERS[op.op].parts(op.inputs)
    return list(variables), numbers, rows, ids


def _kind(graph: OpGraph, op: Op) -> Hashable:
    """Equal for updates that are the same but for their variables, gradients and ids; None for what is no such update."""
    if op.op not in ROW_OPTIMIZERS and (op.op != ROWS or op.attrs["count"] > 1):
        return None
    variables, numbers, rows, ids = _parts(op)
    shape, table, given = graph.shape(rows), graph.shape(variables[0]), graph.shape(ids)
    if shape is None or table is None or given is None or len(given) != 1 or shape != (*given, *table[1:]):
        return None
    if math.prod(shape) > LARGEST:
        return None
    types = tuple(_type(graph, key) for key in (variables[0], rows, ids))
    shared = tuple(value_key(graph.constants[key]) if key in graph.constants else key for key in numbers)
    return op.op, attrs_key(op.attrs), types, shared


def _type(graph: OpGraph, key: Key) -> str | None:
    return graph.constants[key].dtype.name if key in graph.constants else graph.dtypes.get(key)


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
    first, parts = members[0], [_parts(op) for op in members]
    state = [key for slot in zip(*(variables for variables, _, _, _ in parts), strict=True) for key in slot]
    gradients, ids = [rows for _, _, rows, _ in parts], [key for _, _, _, key in parts]
    name = first.attrs.get("op", first.op)
    attrs = {"summed": False, **first.attrs, "op": name, "count": len(members), "_mutates": tuple(range(len(state)))}
    number = graph.fresh()
    names: dict[Key, Key] = {}
    for place, op in enumerate(members):
        for slot in range(ROW_OPTIMIZERS[name].variables):
            old, new = (op.node, slot), (number, slot * len(members) + place)
            names[old] = new
            graph.shapes[new] = graph.shapes.pop(old)
            if old in graph.dtypes:
                graph.dtypes[new] = graph.dtypes.pop(old)
        del graph.ops[op.node]
    source_nodes = list(dict.fromkeys(node for op in members for node in op.source_nodes))
    inputs = [*state, *parts[0][1], *gradients, *ids]
    graph.ops[number] = Op(number, first.name, ROWS, attrs, inputs, source_nodes, len(members))
    graph.rename(names)
    graph.merges.append(Merge(name, len(members), 0, launches=True))
