"""Updates of many variables, or of rows of many tables, by one optimizer as one op, which is one kernel on a GPU.

A model has one for each of its hundreds of variables, most of them small: to launch it takes longer than to run it. Those of large
variables stay what they are: they would gain nothing, and wait for the last gradient of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, attrs_key, known, proved, require
from msplit.engines.cuda.kernels.optimizer_formulas import OPTIMIZERS, ROW_OPTIMIZERS
from msplit.engines.cuda.ops.variables import TOGETHER
from msplit.engines.cuda.passes.pattern import FLOATS, offered, value_key
from msplit.opset.traits import SPARSE_SEGMENTS

LARGEST = 1 << 20
"""Elements of a variable whose update is joined with others. Adam moves 28 MB for so many, which takes an H200 three launches' time."""

FLAT, ASSIGNS = "_ApplyFlat", "_AssignAll"


@dataclass(frozen=True)
class Update:
    """An update that may be joined with others.

    Attributes:
        name: The optimizer's op.
        variables, numbers, given: Its inputs: what it changes, the learning rate and what else is shared, and what it changes it by.
        attrs: What the joined op takes over.
        types: What must be equal beside name, numbers and attributes.
    """

    op: Op
    name: str
    variables: Sequence[Key]
    numbers: Sequence[Key]
    given: Sequence[Key]
    attrs: dict[str, Any]
    types: Hashable = ()

    def kind(self, graph: OpGraph) -> Hashable:
        """Equal for updates that are the same but for what they change and what by."""
        shared = tuple(value_key(graph.constants[key]) if key in graph.constants else key for key in self.numbers)
        return self.op.op, attrs_key(self.attrs), self.types, shared


def merge_updates(graph: OpGraph) -> bool:
    """Joins updates of whole variables."""
    return merge(graph, FLAT, _whole)


def _whole(graph: OpGraph, op: Op) -> Update:
    if op.op == FLAT and op.attrs["count"] == 1:
        name, count, ranks = op.attrs["op"], OPTIMIZERS[op.attrs["op"]].variables, op.attrs["ranks"]
        variables, numbers, gradients = op.inputs[:count], op.inputs[count:-ranks], op.inputs[-ranks:]
    else:
        name = op.op
        variables, numbers, *gradients = known(OPTIMIZERS.get(name)).parts(op.inputs)
    require(math.prod(known(graph.shape(variables[0]))) <= LARGEST)
    return Update(op, name, variables, numbers, gradients, op.attrs)


def average_gradients(op: Op, gradients: Sequence[Key]) -> None:
    """Lets an update of a whole variable take its gradient of each of several ranks, of which it makes the mean."""
    variables, numbers, _ = OPTIMIZERS[op.op].parts(op.inputs)
    own = {"op": op.op, "count": 1, "ranks": len(gradients), "_mutates": tuple(range(len(variables)))}
    op.op, op.attrs, op.inputs = FLAT, {**op.attrs, **own}, [*variables, *numbers, *gradients]


def merge_assigns(graph: OpGraph) -> bool:
    """Joins what gives variables values, or adds or subtracts them, as optimizers do that are made of such ops."""
    return merge(graph, ASSIGNS, _assigned, read=True)


def _assigned(graph: OpGraph, op: Op) -> Update:
    require(op.op in TOGETHER)
    variable, value = op.inputs
    shape, dtype = known(graph.shape(variable)), graph.dtypes.get(variable)
    require(shape == graph.shape(value) and math.prod(shape) <= LARGEST and dtype in FLOATS)
    return Update(op, op.op, [variable], [], [value], {}, dtype)


def merge(graph: OpGraph, joined: str, update_of: Callable[[OpGraph, Op], Update], *, read: bool = False) -> bool:
    """Joins updates of one kind, with the same numbers.

    Args:
        joined: What they become: an op whose inputs are all first variables, all second ones, …, the numbers, and all that is given.
        read: Whether those are joined, too, whose results are read before the step is over: readers then wait for all of them.
    """
    readers = graph.consumers()
    kinds: dict[Hashable, list[int]] = {}
    for number, op in graph.ops.items():
        found = proved(update_of, graph, op)
        if found is not None and (read or not any((number, port) in readers for port in range(len(found.variables)))):
            kinds.setdefault(found.kind(graph), []).append(number)
    changed = False
    for alike in kinds.values():
        for members in _side_by_side(graph, alike) if len(alike) > 1 else ():
            if len(members) > 1:
                _merge(graph, [update_of(graph, graph.ops[number]) for number in members], joined)
                graph.sort()
                changed = True
    return changed


def _side_by_side(graph: OpGraph, alike: Sequence[int]) -> list[list[int]]:
    """Splits ops so that those of a part can be one: none reads what another makes, and no op outside comes behind one of them and before
    another. They may read what another overwrites behind them.
    """
    inside = set(alike)
    hazards = graph.hazards()
    behind = dict.fromkeys(graph.ops, 0)  # on the longest way to an op, how often it comes from the ops inside
    for number, op in graph.ops.items():
        read = ((before, before in inside) for before, _ in op.inputs)
        overwritten = ((before, before in inside and number not in inside) for before in hazards.get(number, ()))
        ways = (behind[before] + counts for before, counts in (*read, *overwritten) if before in behind)
        behind[number] = max(ways, default=0)
    parts: dict[int, list[int]] = {}
    for number in alike:
        parts.setdefault(behind[number], []).append(number)
    return list(parts.values())


def _merge(graph: OpGraph, members: Sequence[Update], joined: str) -> None:
    first, count = members[0], len(members)
    state = [key for slot in zip(*(update.variables for update in members), strict=True) for key in slot]
    given = [key for keys in zip(*(update.given for update in members), strict=True) for key in keys]
    attrs = {**first.attrs, "op": first.name, "count": count, "_mutates": tuple(range(len(state)))}
    made = graph.add(joined, first.op, attrs, [*state, *first.numbers, *given])
    made.source_nodes = list(dict.fromkeys(node for update in members for node in update.op.source_nodes))
    made.batch = count
    names: dict[Key, Key] = {}
    for place, update in enumerate(members):
        for slot, variable in enumerate(update.variables):
            old = update.op.node, slot
            names[old] = made.node, slot * count + place
            shape = graph.shapes.pop(old, None) or graph.shape(variable)  # that of what changes it may depend on values
            graph.describe(names[old], shape, graph.dtypes.pop(old, None))
    graph.drop(update.op for update in members)
    graph.rename(names)
    graph.merges.append(Merge(first.name, count, 0, launches=True))


# Rows of tables: a model with fifty embedding columns has fifty tables, each with a Unique, a sum by segment and an update of a few rows,
# which take longer to be launched than to run. One op finds distinct ids and sums their rows up itself.

ROWS, DISTINCT = "_ApplyRows", "_UniquePadded"

_COMBINERS = {f"{op}Grad": op.removeprefix("SparseSegment").lower() for op in SPARSE_SEGMENTS}
"""Gradients of rows put together by segment, and how these were put together."""


def sum_in_updates(graph: OpGraph) -> bool:
    """Lets updates by the sums of rows of distinct ids take the rows and the ids as they are. Whether there was one."""
    changed = offered(graph, lambda op: _sum_single_rows(graph, op))
    changed |= keep_distinct(graph)
    return offered(graph, lambda op: _sum_in_update(graph, op)) or changed


def _sum_in_update(graph: OpGraph, op: Op) -> bool:
    """Lets one update by the sums of rows of distinct ids take these as they are."""
    variables, numbers, rows, ids = known(ROW_OPTIMIZERS.get(op.op)).parts(op.inputs)
    made, unique = known(graph.ops.get(rows[0])), known(graph.ops.get(ids[0]))
    require(unique.op == DISTINCT and not ids[1])
    if _sums(graph, made, (unique.node, 1), graph.shape(ids)):
        rows, ids = made.inputs[0], unique.inputs[0]
    else:
        require(made.op in _COMBINERS and made.inputs[1] == (unique.node, 1))
    op.source_nodes = list(dict.fromkeys([*op.source_nodes, *made.source_nodes, *unique.source_nodes]))
    op.attrs = {**op.attrs, "op": op.op, "count": 1, "summed": True, "_mutates": tuple(range(len(variables)))}
    op.op, op.inputs = ROWS, [*variables, *numbers, rows, ids]
    proved(_take_segments, graph, op)
    return True


def _sum_single_rows(graph: OpGraph, op: Op) -> bool:
    """Makes a gradient of segments of one row each the sum of the segments' own, however the rows were put together."""
    require(op.op in _COMBINERS)
    grad, places, segments, count = op.inputs
    require(np.array_equal(known(graph.constants.get(segments)), np.arange(known(graph.shape(grad))[0])))
    attrs = {"T": op.attrs["T"], "Tindices": op.attrs.get("Tidx", "int32"), "Tnumsegments": "int32"}
    op.op, op.inputs, op.attrs = "UnsortedSegmentSum", [grad, places, count], attrs
    return True


def keep_distinct(graph: OpGraph) -> bool:
    """Takes ids that are distinct already for what they are, and their rows for their sums."""
    names: dict[Key, Key] = {}
    readers = graph.consumers()
    for number, op in graph.ops.items():
        before = graph.ops.get(op.inputs[0][0]) if op.op == DISTINCT else None
        if before is None or before.op != DISTINCT or op.inputs[0][1] or (number, 1) in graph.kept():
            continue
        users = [graph.ops[reader] for reader in readers.get((number, 1), ())]
        count = graph.shape(op.inputs[0])
        if all(_sums(graph, user, (number, 1), count) for user in users):
            names[number, 0] = op.inputs[0]
            names |= {(user.node, 0): user.inputs[0] for user in users}
    graph.rename(names)
    return bool(names)


def _sums(graph: OpGraph, op: Op, places: Key, count: tuple[int, ...] | None) -> bool:
    """Returns whether an op sums up rows by places, of which there are so many."""
    given = graph.constants.get(op.inputs[-1])
    return op.op == "UnsortedSegmentSum" and op.inputs[1] == places and given is not None and (int(given),) == count


def _take_segments(graph: OpGraph, op: Op) -> None:
    """Lets an update whose rows are a gradient of segments, for the distinct ids, take that gradient, all ids and their segments."""
    *before, rows, ids = op.inputs
    grad, unique = known(graph.ops.get(rows[0])), known(graph.ops.get(ids[0]))
    require(grad.op in _COMBINERS and unique.op == DISTINCT)
    given, places, segments, _ = grad.inputs
    types = {graph.dtype(key) for key in (unique.inputs[0], segments)}
    require(not ids[1] and places == (unique.node, 1) and len(types) == 1)
    require(graph.shape(segments) == graph.shape(ids))
    op.inputs = [*before, given, unique.inputs[0], segments]
    op.attrs["combiner"] = _COMBINERS[grad.op]
    op.source_nodes = list(dict.fromkeys([*op.source_nodes, *grad.source_nodes, *unique.source_nodes]))


def merge_row_updates(graph: OpGraph) -> bool:
    """Joins updates of rows of one kind: see `merge_updates.merge`."""
    return merge(graph, ROWS, _of_rows, read=True)


def _of_rows(graph: OpGraph, op: Op) -> Update:
    if op.op == ROWS and op.attrs["count"] == 1:
        name, own = op.attrs["op"], 3 if op.attrs.get("combiner") else 2
        count = ROW_OPTIMIZERS[name].variables
        given = op.inputs[-own:]
        variables: Sequence[Key] = op.inputs[:count]
        numbers = op.inputs[count:-own]
    else:
        name = op.op
        variables, numbers, *given = known(ROW_OPTIMIZERS.get(name)).parts(op.inputs)
    rows, table, ids = (known(graph.shape(key)) for key in (given[0], variables[0], given[1]))
    require(len(ids) == 1 and rows[1:] == table[1:] and math.prod((*ids, *table[1:])) <= LARGEST)
    require(len(given) != 2 or rows[:1] == ids)
    types = tuple(graph.dtype(key) for key in (variables[0], *given))
    return Update(op, name, variables, numbers, given, {"summed": False, **op.attrs}, types)
