"""Functions of a model's library as the ops that they run, and what some values need of a graph.

Calls lowerings: one op on values that are known, and a program step by step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.engines.cuda.device.device import out_of_memory
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.graph import Key, Op, reached
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.program import KernelCall, Program, StateMemory, parts_of
from msplit.errors import EngineError, InvalidInput, MsplitError
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


LARGEST_FOLDED = 1 << 28
"""Bytes: a constant expression that would grow beyond this (a Fill, a Tile) is computed in the run instead."""


def evaluate(op: Op, inputs: list[NDArray[Any]]) -> list[NDArray[Any]] | None:
    """Runs one op on the CPU, on values that are known; None if its results are too large to keep on the host."""
    lowering = table()[op.op]
    static = static_slots(op)
    arguments = [value if slot in static else to_torch(value) for slot, value in enumerate(inputs)]
    with torch.no_grad():
        results = as_tuple(call(lowering, op, arguments))
    size = sum(result.numel() * result.element_size() for result in results)
    if size > LARGEST_FOLDED > sum(value.nbytes for value in inputs):
        return None
    # A copy of what is broadcast: a view of stride zero is no array that can be laid side by side with others.
    return [to_numpy(result.contiguous()) for result in results]


def call(
    lowering: Lowering,
    op: Op,
    arguments: list[Any],
    *,
    nchw: bool = False,
    room: Mapping[int, torch.Tensor] | None = None,
) -> Any:
    """Calls a lowering and turns what it refuses into an error that names the node."""
    where = f"node {op.name}"
    try:
        return lowering.function(Node(op.name, op.op, op.attrs, nchw, room or {}), *arguments)
    except Unsupported as problem:
        raise EngineError(f"{op.op}: {problem}", where=where, fix="use --engine tensorflow for this model") from problem
    except KeyError as problem:
        what = f"{op.op}: the attribute {problem} is missing"
        raise EngineError(what, where=where, fix="export the model again") from problem
    except torch.OutOfMemoryError as problem:
        raise out_of_memory(problem, op.op, where=where) from problem
    except (RuntimeError, ValueError, IndexError, TypeError) as problem:
        of_values = isinstance(problem, IndexError) or "out of bounds" in str(problem)
        raise (InvalidInput if of_values else EngineError)(
            f"{op.op} failed: {next(iter(str(problem).splitlines()), type(problem).__name__)}",
            where=where,
            fix="check the shapes of the inputs (--shape, --batch); if TensorFlow runs it with the same inputs, report a bug in msplit",
        ) from problem


@dataclass(frozen=True, eq=False)
class LoweringCall:
    """A lowering as a program calls it: with the tensors of the other inputs, those that are known in place.

    Attributes:
        bound: Input slot -> value, of the inputs that are known.
        unknown: Slots of inputs that the lowering wants on the host, but that only the run knows: they are read back.
        nchw: See `Node`.
        mixed: Whether its tensors lie on several devices. Shapes that only the run knows are on the CPU, what they are joined with, a
            constant perhaps, on the GPU: then that is the place.
    """

    lowering: Lowering
    op: Op
    bound: Mapping[int, NDArray[Any]]
    unknown: tuple[int, ...] = ()
    nchw: bool = False
    mixed: bool = False

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The op's results."""
        rest = iter(tensors)
        arguments = [
            self.bound[slot] if slot in self.bound else to_numpy(next(rest)) if slot in self.unknown else next(rest)
            for slot in range(len(self.op.inputs))
        ]
        if self.mixed:
            arguments = _on_the_gpu(arguments)
        parts = parts_of(self.op)
        if not parts:
            return as_tuple(call(self.lowering, self.op, arguments, nchw=self.nchw))
        buffer = arguments.pop()
        room = {part.port: part.of(buffer) for part in parts}
        results = as_tuple(call(self.lowering, self.op, arguments, nchw=self.nchw, room=room))
        for port, place in room.items():
            if results[port] is not place:
                place.copy_(results[port])
        return tuple(room.get(port, result) for port, result in enumerate(results))


def _on_the_gpu(arguments: list[Any]) -> list[Any]:
    place = next(value.device for value in arguments if isinstance(value, torch.Tensor) and value.device.type != "cpu")
    return [value.to(place) if isinstance(value, torch.Tensor) else value for value in arguments]


def run_step(program: Program, number: int, values: dict[Key, torch.Tensor]) -> None:
    """Calls one step and files its results under their keys."""
    step = program.steps[number]
    for port, result in enumerate(step.call(*_arguments(program, step, values))):
        values[step.op.node, port] = result


def walk(
    program: Program, feeds: Mapping[str, NDArray[Any]], device: torch.device
) -> Iterator[tuple[KernelCall, list[torch.Tensor], Callable[[], tuple[Any, ...]]]]:
    """Runs a program step by step. Before each step runs, it is given out with its inputs and the call that will run."""
    values = {key: to_torch(feeds[name], device) for name, key in program.feeds.items()}
    values |= StateMemory(program.state, device).values()
    last = {key: number for number, step in enumerate(program.steps) for key in step.inputs}
    with torch.no_grad():
        for number, step in enumerate(program.steps):
            arguments = _arguments(program, step, values)
            call = functools.partial(step.call, *arguments)
            yield step, arguments, call
            for port, result in enumerate(call()):
                if (step.op.node, port) in last:
                    values[step.op.node, port] = result
            for key in step.inputs:
                if last[key] == number:
                    values.pop(key, None)


def _arguments(program: Program, step: KernelCall, values: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
    return [values[key] if key in values else program.constants[key] for key in step.inputs]


def static_slots(op: Op) -> frozenset[int]:
    """The inputs of an op that its lowering wants on the host, negative ones resolved."""
    return _resolved(table()[op.op].static, len(op.inputs))


@functools.lru_cache(maxsize=4096)
def _resolved(slots: tuple[int, ...], count: int) -> frozenset[int]:
    return frozenset(slot % count for slot in slots if -count <= slot < count)


def depends_on_values(op: Op, known: Container[Key]) -> bool:
    """Tell whether an op can not be captured: only the run knows the shape of its output, or it reads a value on the host.

    `known` are the values that are the same in every run. An op that looks at a shape alone is not left where that is known.
    """
    lowering = table()[op.op]
    asks = any(op.inputs[slot] not in known for slot in static_slots(op))
    return lowering.dynamic_with(op.attrs) or lowering.shape_only or asks


def device_inputs(op: Op) -> list[Key]:
    """All other inputs."""
    static = static_slots(op)
    return [key for slot, key in enumerate(op.inputs) if slot not in static]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """A lowering's result as a tuple."""
    return tuple(result) if isinstance(result, tuple | list) else (result,)
