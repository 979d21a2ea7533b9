"""Updates of many variables by one optimizer as one op, which is one kernel on a GPU.

A model has one for each of its hundreds of variables, most of them small: to launch it takes longer than to run it. Those of large
variables stay what they are: they would gain nothing, and wait for the last gradient of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from msplit.engines.cuda.ir.graph import Key, Merge, Op, OpGraph, attrs_key
from msplit.engines.cuda.ops.optimizers import OPTIMIZERS
from msplit.engines.cuda.ops.variables import TOGETHER
from msplit.engines.cuda.passes.pattern import FLOATS, value_key

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


def _whole(graph: OpGraph, op: Op) -> Update | None:
    shape = graph.shape(op.inputs[0]) if op.op in OPTIMIZERS else None
    if shape is None or math.prod(shape) > LARGEST:
        return None
    variables, numbers, gradient = OPTIMIZERS[op.op].parts(op.inputs)
    return Update(op, op.op, variables, numbers, [gradient], op.attrs)


def merge_assigns(graph: OpGraph) -> bool:
    """Joins what gives variables values, or adds or subtracts them, as optimizers do that are made of such ops."""
    return merge(graph, ASSIGNS, _assigned, read=True)


def _assigned(graph: OpGraph, op: Op) -> Update | None:
    if op.op not in TOGETHER:
        return None
    variable, value = op.inputs
    shape, dtype = graph.shape(variable), graph.dtypes.get(variable)
    if shape is None or shape != graph.shape(value) or math.prod(shape) > LARGEST or dtype not in FLOATS:
        return None
    return Update(op, op.op, [variable], [], [value], {}, dtype)


def merge(
    graph: OpGraph, joined: str, update_of: Callable[[OpGraph, Op], Update | None], *, read: bool = False
) -> bool:
    """Joins updates of one kind, with the same numbers.

    Args:
        joined: What they become: an op whose inputs are all first variables, all second ones, …, the numbers, and all that is given.
        read: Whether those are joined, too, whose results are read before the step is over: readers then wait for all of them.
    """
    readers = graph.consumers()
    kinds: dict[Hashable, list[int]] = {}
    for number, op in graph.ops.items():
        found = update_of(graph, op)
        if found is not None and (read or not any((number, port) in readers for port in range(len(found.variables)))):
            kinds.setdefault(found.kind(graph), []).append(number)
    changed = False
    for alike in kinds.values():
        for members in _side_by_side(graph, alike) if len(alike) > 1 else ():
            if len(members) > 1:
                updates = [update_of(graph, graph.ops[number]) for number in members]
                _merge(graph, [update for update in updates if update is not None], joined)
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
        for before, _ in op.inputs:
            if before in behind:
                behind[number] = max(behind[number], behind[before] + (before in inside))
        for before in hazards.get(number, ()):
            if before in behind:
                behind[number] = max(behind[number], behind[before] + (before in inside and number not in inside))
    parts: dict[int, list[int]] = {}
    for number in alike:
        parts.setdefault(behind[number], []).append(number)
    return list(parts.values())


def _merge(graph: OpGraph, members: Sequence[Update], joined: str) -> None:
    first, count = members[0], len(members)
    state = [key for slot in zip(*(update.variables for update in members), strict=True) for key in slot]
    given = [key for keys in zip(*(update.given for update in members), strict=True) for key in keys]
    attrs = {**first.attrs, "op": first.name, "count": count, "_mutates": tuple(range(len(state)))}
    number = graph.fresh()
    names: dict[Key, Key] = {}
    for place, update in enumerate(members):
        for slot, variable in enumerate(update.variables):
            old, new = (update.op.node, slot), (number, slot * count + place)
            names[old] = new
            shape = graph.shapes.pop(old, None) or graph.shape(variable)  # that of what changes it may depend on values
            if shape is not None:
                graph.shapes[new] = shape
            if old in graph.dtypes:
                graph.dtypes[new] = graph.dtypes.pop(old)
        del graph.ops[update.op.node]
    source_nodes = list(dict.fromkeys(node for update in members for node in update.op.source_nodes))
    graph.ops[number] = Op(number, first.op.name, joined, attrs, [*state, *first.numbers, *given], source_nodes, count)
    graph.rename(names)
    graph.merges.append(Merge(first.name, count, 0, launches=True))
