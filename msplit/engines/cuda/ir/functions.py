"""Functions of a model's library as the ops that they run, and what some values need of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.core.dag import reached
from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.engines.cuda.ir.graph import Key
from msplit.errors import MsplitError
from msplit.flatten.build import body as flat_body
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import Model
from msplit.opset.traits import CALLS, CASE, CONDS, IF, LOOPS

FRAME = "_frame"
"""The attribute of a `While` that has the name of the frame of TensorFlow 1 that it was."""

FUNCTIONAL = LOOPS | CONDS | CALLS
"""Ops that run functions of the library. Of calls only those come here that XLA compiles: all others are inlined in the flat graph."""


@dataclass(frozen=True)
class BodyOp:
    """A node of a body.

    Attributes:
        node: Its number in the body.
        attrs: Plain attributes; of a functional op with the functions that it names.
        inputs: Values of the body.
    """

    node: int
    name: str
    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[Key, ...]


@dataclass(frozen=True, eq=False)
class Body:
    """Ops and constants that a function's results need.

    Attributes:
        parameters: Its arguments, as values of the body.
        ops: In topological order, constants left out.
        every_op: Op and name of every node of the function, those included that run only for their effect.
        aside: Functions that such nodes run.
    """

    parameters: Sequence[Key]
    ops: Sequence[BodyOp]
    constants: Mapping[Key, NDArray[Any]]
    results: Sequence[Key]
    every_op: Sequence[tuple[str, str]]
    aside: Sequence[str] = ()


class Bodies:
    """The functions of a model, read when somebody asks.

    Args:
        more: Functions that are not in its library.
    """

    def __init__(self, model: Model, more: Mapping[str, Body] | None = None) -> None:
        self._model = model
        self._known: dict[str, Body | None] = dict(more or {})

    def of(self, name: str) -> Body | None:
        """A function's body; None where the library has none of that name, or where it can not be looked into."""
        if name not in self._known:
            self._known[name] = self._read(name)
        return self._known[name]

    def _read(self, name: str) -> Body | None:
        if name not in self._model.graph.functions:
            return None
        try:
            flat = flat_body(self._model, name)
            parameters = [(tensor.node, tensor.port) for tensor in flat.inputs]
            results = [(tensor.node, tensor.port) for tensor in flat.outputs]
            return body_of(flat, parameters, results, range(len(flat)))
        except MsplitError:
            return None


def reachable(graph: Graph, wanted: Iterable[Key], given: Set[Key]) -> list[int]:
    """Nodes that values need through data edges, in topological order; the walk stops at values that are given.

    Control edges order effects. Nothing that the engine runs has an effect, so a node needed only for control is left out.
    """

    src, ports = graph.edges.src, graph.edges.port

    def before(node: int) -> list[int]:
        edges = slice(int(graph.in_start[node]), int(graph.in_start[node + 1]))
        read = zip(src[edges].tolist(), ports[edges].tolist(), strict=True)
        return [producer for producer, port in read if port != CONTROL and (producer, port) not in given]

    return in_order(graph, reached([key[0] for key in wanted if key not in given], before))


def in_order(graph: Graph, nodes: Iterable[int]) -> list[int]:
    """Some nodes in topological order; those on or behind a cycle left out."""
    chosen = np.zeros(len(graph), np.bool_)
    chosen[list(nodes)] = True
    found: list[int] = graph.topological[chosen[graph.topological]].tolist()
    return found


def body_of(
    flat: FlatGraph,
    parameters: Sequence[Key],
    results: Sequence[Key],
    members: Sequence[int] | None = None,
    effects: Sequence[int] = (),
) -> Body:
    """The part of a graph that some results need, down to values that are given, the parameters.

    `members` are the nodes that belong to the body whether the results need them or not; those that they need if None. `effects`
    are nodes that run although no result needs them.

    Raises:
        LoadError: A constant can not be read.
    """
    ops: list[BodyOp] = []
    constants: dict[Key, NDArray[Any]] = {}
    nodes = reachable(flat.graph, [*results, *((node, 0) for node in effects)], set(parameters))
    for node in nodes:
        op, attrs = flat.graph.ops[node], flat.graph.attrs[node]
        value = attrs.get("value")
        if op == "Const" and isinstance(value, TensorValue) and value.dtype != "string":
            constants[node, 0] = value.load()
        else:
            kept = plain(attrs, functions=op in FUNCTIONAL)
            ops.append(BodyOp(node, flat.graph.names[node], op, kept, tuple(flat.graph.inputs(node))))
    every = nodes if members is None else members
    run = {node: flat.graph.ops[node] for node in every}
    called = [functions_of(op, flat.graph.attrs[node]) for node, op in run.items() if op in FUNCTIONAL]
    every_op = [(op, flat.graph.names[node]) for node, op in run.items()]
    return Body(parameters, ops, constants, results, every_op, [ref.name for refs in called for ref in refs])


def plain(attrs: Mapping[str, Any], *, functions: bool = False) -> dict[str, Any]:
    """Attributes of a flat node as lowerings take them; those that name functions are kept if `functions`. Names that begin with ``_`` are
    the engine's own: a model's say nothing of what a node computes, and a node of a model may have any."""
    return {
        key: value
        for key, value in attrs.items()
        if not isinstance(value, TensorValue)
        and (functions or not isinstance(value, FunctionRef))
        and (key == FRAME or not key.startswith("_"))
    }


def functions_of(op: str, attrs: Mapping[str, Any]) -> list[FunctionRef]:
    """The functions that a functional op runs.

    Cond and body of a loop; the branches of a cond by number, of an `If` the else branch first; what is called.
    """
    if op in LOOPS:
        found = [attrs.get("cond"), attrs.get("body")]
    elif op in IF:
        found = [attrs.get("else_branch"), attrs.get("then_branch")]
    elif op in CONDS:
        branches = attrs.get("branches")
        found = list(branches) if isinstance(branches, list | tuple) else []  # a damaged graph may hold anything
    else:
        found = [attrs.get("f")]
    return [one for one in found if isinstance(one, FunctionRef)]


def names_all(op: str, functions: Sequence[FunctionRef]) -> bool:
    """Checks that these are all functions that a functional op needs: a damaged one may lack some."""
    return len(functions) == 2 if op in LOOPS | IF else bool(functions)


def taken(op: str, predicate: NDArray[Any], branches: int) -> int:
    """Index of the branch that a cond takes.

    An `If` takes its second where the predicate is a scalar that is not zero, or a tensor that is not empty. A `Case` takes the last
    one for a number that no branch has.
    """
    if op in CASE:
        number = int(predicate) if predicate.ndim == 0 and predicate.dtype.kind in "iu" else -1
        return number if 0 <= number < branches else branches - 1
    return int(bool(predicate) if predicate.ndim == 0 else predicate.size > 0)
