"""Calls lowerings: one op on values that are known, and a program step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import out_of_memory
from msplit.engines.cuda.ir.dtypes import dtype_name, to_numpy, to_torch
from msplit.engines.cuda.ir.graph import Key, Op
from msplit.engines.cuda.ir.lowering import Lowering, table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.program import KernelCall, Program, StateMemory, parts_of
from msplit.errors import EngineError, InvalidInput
from msplit.formats.tensors import stacked

LARGEST_FOLDED = 1 << 28
"""Bytes: a constant expression that would grow beyond this (a Fill, a Tile) is computed in the run instead."""


def evaluate(op: Op, inputs: list[NDArray[Any]]) -> list[NDArray[Any]] | None:
    """Runs one op on the CPU, on values that are known; None if its results are too large to keep on the host."""
    if op.op == "ConcatV2" and not inputs[-1].any() and (whole := stacked(inputs[:-1])) is not None:
        return [whole]  # a view of what is mapped, if that can be
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
    node: Node | None = None,
) -> Any:
    """Calls a lowering and turns what it refuses into an error that names the node, which is made where it is not given."""
    where = f"node {op.name}"
    try:
        return lowering.function(node or Node(op.name, op.op, op.attrs, nchw, room or {}), *arguments)
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

    @functools.cached_property
    def _node(self) -> Node | None:
        """The op as its lowering gets it in every step; None if it writes into a buffer, which each step has anew."""
        return None if parts_of(self.op) else Node(self.op.name, self.op.op, self.op.attrs, self.nchw)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The op's results."""
        rest = iter(tensors)
        arguments = [
            self.bound[slot] if slot in self.bound else to_numpy(next(rest)) if slot in self.unknown else next(rest)
            for slot in range(len(self.op.inputs))
        ]
        if self.mixed:
            arguments = _on_the_gpu(arguments)
        if self._node is not None:
            return as_tuple(call(self.lowering, self.op, arguments, node=self._node))
        buffer = arguments.pop()
        room = {part.port: part.of(buffer) for part in parts_of(self.op)}
        results = as_tuple(call(self.lowering, self.op, arguments, nchw=self.nchw, room=room))
        for port, place in room.items():
            if results[port] is not place:
                place.copy_(results[port])
        return tuple(room.get(port, result) for port, result in enumerate(results))


def _on_the_gpu(arguments: list[Any]) -> list[Any]:
    found = (value.device for value in arguments if isinstance(value, torch.Tensor) and value.device.type != "cpu")
    place = next(found, torch.device("cpu"))  # a damaged build may say so of a step that has nothing on one
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


def walk_given(
    program: Program,
    feeds: Mapping[str, NDArray[Any]],
    state: Mapping[str, NDArray[Any]],
    given: Mapping[Key, NDArray[Any]],
    device: torch.device,
) -> Iterator[tuple[KernelCall, Key, NDArray[Any]]]:
    """Runs a program step by step, and gives out what each step makes in place of a value that is given; what follows reads the given one,
    which may be another by then.

    A value of another shape or type than the given one is left as it is, and not given out.
    """
    memory = StateMemory(program.state, device)
    memory.load(state)
    values = {key: to_torch(feeds[name], device) for name, key in program.feeds.items()} | memory.values()
    last = {key: number for number, step in enumerate(program.steps) for key in step.inputs}
    with torch.no_grad():
        for number, step in enumerate(program.steps):
            for port, result in enumerate(step.call(*_arguments(program, step, values))):
                key = step.op.node, port
                like = tuple(result.shape), dtype_name(result.dtype)
                if key in given and like == (given[key].shape, given[key].dtype.name):
                    yield step, key, to_numpy(result)
                    result = _laid_like(result, given[key]) if key in last else result
                if key in last:
                    values[key] = result
            for key in step.inputs:
                if last[key] == number:
                    values.pop(key, None)


def _laid_like(result: torch.Tensor, value: NDArray[Any]) -> torch.Tensor:
    """A value where it lies in memory as a result does, which kernels know of what they read; as it is where elements share theirs."""
    if 0 in result.stride():
        return to_torch(value, result.device)
    laid = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
    return laid.copy_(to_torch(value))


def _arguments(program: Program, step: KernelCall, values: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
    return [values[key] if key in values else program.value(key, values, f"node {step.op.name}") for key in step.inputs]


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
