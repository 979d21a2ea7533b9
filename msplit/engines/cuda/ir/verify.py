"""Rules that a graph keeps at each stage. A pass that leaves anything else is wrong, whatever its result happens to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from msplit.core.graph import FunctionRef
from msplit.engines.cuda.ir.functions import FUNCTIONAL
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, mutated
from msplit.engines.cuda.ir.interpret import static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.opset import schema

_OF_LISTS = ("EmptyTensorList", "Optional", "Stack", "TensorArray", "TensorList")
"""Beginnings of the names of ops of lists."""


class Stage(IntEnum):
    """Stage that a graph has reached on its way."""

    IMPORTED = 0
    """As the frontend makes it: loops, conds and lists are ops, and no shape is known."""

    SPECIALIZED = 1
    """For inputs of certain shapes: what loops and conds run, and every shape that is the same in every run."""

    TYPED = 2
    """With the types that it is computed in, where these are to be others than the model's."""

    LAID_OUT = 3
    """For one memory layout of convolutions."""

    FUSED = 4
    """Pointwise groups are one op each."""


class IllegalGraph(Exception):
    """A bug in a pass; the message names it."""


Rule = Callable[[OpGraph, Stage, int], Iterator[str]]


def verify(graph: OpGraph, stage: Stage, nodes: int, *, after: str, unchanged: tuple[Any, ...] | None = None) -> None:
    """Looks at a graph.

    Args:
        graph: What the pass `after` left.
        nodes: How many nodes the flat graph has.
        after: Name of the pass.
        unchanged: Its fingerprint before the pass, where that says it changed nothing.

    Raises:
        IllegalGraph: It is not legal.
    """
    if unchanged is not None and fingerprint(graph) != unchanged:
        raise IllegalGraph(f"internal error after the pass {after}: it changed the graph and says that it did not")
    for rule in RULES:
        for problem in rule(graph, stage, nodes):
            raise IllegalGraph(f"internal error after the pass {after}: {problem}")


def fingerprint(graph: OpGraph) -> tuple[Any, ...]:
    """Equal for graphs that run the same ops on the same values in the same order."""
    ops = tuple(
        (number, op.op, tuple(op.inputs), tuple(op.source_nodes), op.batch, tuple(sorted(op.attrs)))
        for number, op in graph.ops.items()
    )
    ends = (graph.fetches, graph.feeds, graph.state, graph.final)
    return ops, *(tuple(sorted(end.items())) for end in ends)


def snapshot(graph: OpGraph) -> tuple[Any, ...]:
    """All that `RULES` read of a graph. Two that are equal are both legal or both not, on one side of specialization."""
    ops = [
        (number, op.node, op.op, op.batch, dict(op.attrs), [*op.inputs], [*op.source_nodes, None, *op.replaces])
        for number, op in graph.ops.items()
    ]
    ends = (graph.fetches, graph.feeds, graph.state, graph.final, graph.stacks, graph.shapes)
    constants = [(key, value.shape) for key, value in graph.constants.items()]
    return ops, constants, graph.numbers, *(dict(each) for each in ends)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Compare two snapshots. Arrays in attributes are the same where they are one."""
    try:
        return one == other
    except ValueError:  # arrays that are two
        return False


def _numbered(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """An op stands under its own number, and numbers that are handed out next are free."""
    for number, op in graph.ops.items():
        if op.node != number:
            yield f"{_said(op)} has number {op.node} and stands under {number}"
        if number >= graph.numbers:
            yield f"{_said(op)} has number {number}, which is not taken"


def _one_maker(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """A value is fed, known or made, and two inputs are two values."""
    for what, given in (("input", graph.feeds), ("variable", graph.state)):
        for name, key in given.items():
            if key in graph.constants or key[0] in graph.ops:
                yield f"{what} {name} is fed, and known or made as well"
    if len({*graph.feeds.values(), *graph.state.values()}) != len(graph.feeds) + len(graph.state):
        yield "two inputs are one value"


def _made_before_read(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Every value that is read is fed, known, or made by an op in front that has such an output."""
    known = {*graph.feeds.values(), *graph.state.values(), *graph.stacks, *graph.constants}
    made: dict[int, float] = {}
    for number, op in graph.ops.items():
        for slot, key in enumerate(op.inputs):
            if key not in known and not 0 <= key[1] < made.get(key[0], 0):
                yield f"input {slot} of {_said(op)}, {key}, is not there when it is read"
        made[number] = _outputs(op)
    for name, key in (*graph.fetches.items(), *graph.final.items()):
        if key not in known and not 0 <= key[1] < made.get(key[0], 0):
            yield f"output {name} is {key}, which nothing makes"


def _written_once(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Values that are written in place are those of variables, as a step begins or as a write left them; each is overwritten once, and read
    before."""
    values = set(graph.state.values())
    place = {number: position for position, number in enumerate(graph.ops)}
    overwritten: set[Key] = set()
    for number, op in graph.ops.items():
        slots = mutated(op)
        for slot in slots:
            key = op.inputs[slot]
            if key not in values:
                yield f"input {slot} of {_said(op)}, {key}, is no variable that it could write"
            elif key in overwritten:
                yield f"{_said(op)} overwrites {key} a second time"
            overwritten.add(key)
        values |= {(number, port) for port in range(len(slots))}
    for name, key in graph.final.items():
        if name not in graph.state:
            yield f"the variable {name} is written and has no value before"
        elif key not in values or key in overwritten:
            yield f"the variable {name} becomes {key}, which does not stay in its memory"
    for writer, readers in graph.hazards().items():
        for reader in readers:
            if place[reader] > place[writer]:
                yield f"{_said(graph.ops[writer])} overwrites what {_said(graph.ops[reader])} reads behind it"


def _outputs(op: Op) -> float:
    """Count an op's outputs, those behind the variables that it writes included; infinity where that can not be told."""
    count = schema.output_count(op.op, op.attrs)
    return math.inf if count is None else count + len(mutated(op))


def _wanted(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Every op is needed by an output."""
    read = {key[0] for key in graph.read()}
    for number, op in graph.ops.items():
        if number not in read:
            yield f"nothing needs {_said(op)}"


def _from_the_model(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Every op does the work of nodes of the flat graph."""
    for op in graph.ops.values():
        if not op.source_nodes:
            yield f"{_said(op)} does the work of no node"
        sources = (*op.source_nodes, *op.replaces)
        if sources and not 0 <= min(sources) <= max(sources) < nodes:
            yield f"{_said(op)} does the work of a node that is not in the model"
        if op.batch < 1:
            yield f"{_said(op)} does {op.batch} ops side by side"


def _runs(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Every op has a lowering; before specialization also what becomes other ops."""
    lowerings = table()
    for op in graph.ops.values():
        becomes_others = op.op in FUNCTIONAL or op.op.startswith(_OF_LISTS)
        if op.op not in lowerings and not (stage is Stage.IMPORTED and becomes_others):
            yield f"{_said(op)} has no lowering"


def _plain(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Attributes are plain values; an op of the engine's own may have a description, a functional op names functions."""
    for op in graph.ops.values():
        for name, value in op.attrs.items():
            own = "_" in (op.op[:1], name[:1])
            if type(value) not in _PLAIN and not _is_plain(value, own=own, names=op.op in FUNCTIONAL):
                yield f"attribute {name} of {_said(op)} is a {type(value).__name__}"


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


def _is_plain(value: Any, *, own: bool, names: bool) -> bool:
    if type(value) in _PLAIN:
        return True
    if isinstance(value, list | tuple):
        return all(_is_plain(one, own=own, names=names) for one in value)
    if isinstance(value, dict):
        return own and all(_is_plain(one, own=own, names=names) for one in value.values())
    if isinstance(value, FunctionRef):
        return names
    if dataclasses.is_dataclass(value):
        return own
    return isinstance(value, bool | int | float | str | bytes)


def _shaped(graph: OpGraph, stage: Stage, nodes: int) -> Iterator[str]:
    """Once specialized, every shape is known that does not depend on values."""
    for key, value in graph.constants.items():
        if graph.shapes.get(key, value.shape) != value.shape:
            yield f"the constant {key} has the shape {value.shape} and not {graph.shapes[key]}"
    if stage is Stage.IMPORTED:
        return
    lowerings, fed = table(), {*graph.feeds.values(), *graph.state.values(), *graph.stacks}
    for key in fed:
        if key not in graph.shapes:
            yield f"an input, {key}, has no shape"
    for op in graph.ops.values():
        lowering = lowerings.get(op.op)
        if lowering is None or (op.node, 0) in graph.shapes:
            continue
        free = lowering.dynamic_with(op.attrs) or any(graph.shape(key) is None for key in op.inputs)
        asks = any(op.inputs[slot] not in graph.constants for slot in static_slots(op))
        if not free and not asks:
            yield f"{_said(op)} has no shape"


def _said(op: Op) -> str:
    return f"{op.op} ({op.name}, {op.node})"


RULES: tuple[Rule, ...] = (
    _numbered,
    _one_maker,
    _made_before_read,
    _written_once,
    _wanted,
    _from_the_model,
    _runs,
    _plain,
    _shaped,
)
"""Rules for every graph."""
