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
from msplit.engines.cuda.passes.pattern import value_key

LARGEST = 1 << 20
"""Elements of a variable whose update is joined with others. Adam moves 28 MB for so many, which takes an H200 three launches' time."""

FLAT = "_ApplyFlat"


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


def merge(graph: OpGraph, joined: str, update_of: Callable[[OpGraph, Op], Update | None]) -> bool:
    """Joins updates of one kind, with the same numbers, whose results nobody reads before the step is over.

    Args:
        joined: What they become: an op whose inputs are all first variables, all second ones, …, the numbers, and all that is given.
    """
    read = {key[0] for op in graph.ops.values() for key in op.inputs}
    kinds: dict[Hashable, list[Update]] = {}
    for number, op in graph.ops.items():
        found = update_of(graph, op) if number not in read else None
        if found is not None:
            kinds.setdefault(found.kind(graph), []).append(found)
    changed = False
    for alike in kinds.values():
        for members in _side_by_side(graph, alike) if len(alike) > 1 else ():
            if len(members) > 1:
                _merge(graph, members, joined)
                graph.sort()
                changed = True
    return changed


def _side_by_side(graph: OpGraph, alike: Sequence[Update]) -> list[list[Update]]:
    """Splits updates so that those of a part can be one: no op outside comes behind one of them and before another.

    Nobody reads what they make, but they may read what is overwritten behind them.
    """
    inside = {update.op.node for update in alike}
    hazards = graph.hazards()
    behind = dict.fromkeys(graph.ops, 0)  # on the longest way to an op, how often it leaves the ops inside
    for number, op in graph.ops.items():
        for before in (*(key[0] for key in op.inputs), *hazards.get(number, ())):
            if before in behind:
                behind[number] = max(behind[number], behind[before] + (before in inside and number not in inside))
    parts: dict[int, list[Update]] = {}
    for update in alike:
        parts.setdefault(behind[update.op.node], []).append(update)
    return list(parts.values())


def _merge(graph: OpGraph, members: Sequence[Update], joined: str) -> None:
    first, count = members[0], len(members)
    state = [key for slot in zip(*(update.variables for update in members), strict=True) for key in slot]
    given = [key for keys in zip(*(update.given for update in members), strict=True) for key in keys]
    attrs = {**first.attrs, "op": first.name, "count": count, "_mutates": tuple(range(len(state)))}
    number = graph.fresh()
    names: dict[Key, Key] = {}
    for place, update in enumerate(members):
        for slot in range(len(update.variables)):
            old, new = (update.op.node, slot), (number, slot * count + place)
            names[old] = new
            graph.shapes[new] = graph.shapes.pop(old)
            if old in graph.dtypes:
                graph.dtypes[new] = graph.dtypes.pop(old)
        del graph.ops[update.op.node]
    source_nodes = list(dict.fromkeys(node for update in members for node in update.op.source_nodes))
    graph.ops[number] = Op(number, first.op.name, joined, attrs, [*state, *first.numbers, *given], source_nodes, count)
    graph.rename(names)
    graph.merges.append(Merge(first.name, count, 0, launches=True))
