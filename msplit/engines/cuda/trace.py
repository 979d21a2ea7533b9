"""Runs a graph once on the device to learn what cannot be known otherwise: shapes, which steps launch kernels, who shares memory.

It is partial evaluation: what depends only on constants and shapes is evaluated on the CPU and never again. The run
doubles as the warm-up that a capture needs (library handles, algorithm choice).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.dag import Dag
from msplit.engines.cuda.build import as_tuple, call, evaluate, positions
from msplit.engines.cuda.ops.conv import prepare_filter
from msplit.engines.cuda.program import Key, Op, Program, Source, Step
from msplit.engines.cuda.registry import Lowering, table
from msplit.engines.cuda.tensors import to_numpy, to_torch
from msplit.errors import EngineError

FILTER_OPS = ("Conv2D", "_FusedConv2D", "DepthwiseConv2dNative", "_FusedDepthwiseConv2dNative")


class _Tracer:
    """The state of one trace."""

    def __init__(self, source: Source, device: torch.device, nchw: bool) -> None:
        self.source, self.device, self.nchw = source, device, nchw
        self.values: dict[Key, torch.Tensor] = {}
        self.static: dict[Key, NDArray[Any]] = dict(source.constants)
        self.constants: dict[Key, torch.Tensor] = {}
        self.varying: set[Key] = set()  # values whose shape changes from run to run
        self.base: dict[Key, int] = {}  # step in whose memory a value lies, -1 for constants and inputs
        self.steps: list[Step] = []
        self.made_by: dict[Key, int] = {}
        self.dynamic: list[int] = []

    def constant(self, key: Key, op: Op, slot: int) -> torch.Tensor:
        """A known value on the device; filters of convolutions laid out as the convolution wants them."""
        tensor = self.constants.get(key)
        if tensor is None:
            tensor = to_torch(np.ascontiguousarray(self.static[key]), self.device)
            if slot == 1 and op.op in FILTER_OPS:
                tensor = prepare_filter(tensor, not self.nchw)
            self.constants[key] = tensor
            self.base[key] = -1
        return tensor

    def run(self, op: Op) -> None:
        """Evaluates an op now if it can be known, otherwise runs it and keeps a step."""
        lowering = table()[op.op]
        varying = any(key in self.varying for key in op.inputs)
        if lowering.shape_only and not varying:
            shapes = [self.values[key] if key in self.values else self.static[key] for key in op.inputs]
            tensors = [
                torch.empty(tuple(value.shape), dtype=torch.bool) if isinstance(value, np.ndarray) else value
                for value in shapes
            ]
            sizes = as_tuple(call(lowering, op, tensors))
            self.static |= {(op.node, port): to_numpy(size) for port, size in enumerate(sizes)}
            return
        if op.inputs and all(key in self.static for key in op.inputs) and not lowering.dynamic:
            results = evaluate(lowering, op, [self.static[key] for key in op.inputs])
            self.static |= {(op.node, port): result for port, result in enumerate(results)}
            return
        self._step(lowering, op, varying)

    def _step(self, lowering: Lowering, op: Op, varying: bool) -> None:
        static = positions(lowering, len(op.inputs))
        unknown = [slot for slot in sorted(static) if op.inputs[slot] not in self.static]
        bound: dict[int, Any] = {}
        keys: list[Key] = []
        for slot, key in enumerate(op.inputs):
            if slot in static and slot not in unknown:
                bound[slot] = self.static[key]
            elif key in self.static:
                self.constant(key, op, slot)
                keys.append(key)
            else:
                keys.append(key)
        function = functools.partial(_invoke, lowering, op, bound, tuple(unknown), len(op.inputs), self.nchw)
        arguments = [self.values[key] if key in self.values else self.constants[key] for key in keys]
        results = function(*arguments)
        number = len(self.steps)
        if lowering.dynamic or unknown or (varying and lowering.shape_only):
            self.dynamic.append(number)
        if lowering.dynamic or unknown or varying:
            self.varying |= {(op.node, port) for port in range(len(results))}
        memory = {
            argument.untyped_storage().data_ptr(): self.base[key] for argument, key in zip(arguments, keys, strict=True)
        }
        fresh: dict[int, int] = {}
        bases = []
        for result in results:
            storage = result.untyped_storage()
            if result.device.type != self.device.type or result.numel() == 0:
                bases.append(-1)
            elif storage.data_ptr() in memory:
                bases.append(memory[storage.data_ptr()])
            else:
                fresh[storage.data_ptr()] = storage.nbytes()
                bases.append(number)
        self.steps.append(Step(op, function, tuple(keys), len(results), bool(fresh), sum(fresh.values()), tuple(bases)))
        for port, result in enumerate(results):
            self.values[op.node, port] = result
            self.base[op.node, port] = bases[port]
            self.made_by[op.node, port] = number


def _invoke(
    lowering: Lowering,
    op: Op,
    bound: Mapping[int, Any],
    unknown: tuple[int, ...],
    count: int,
    nchw: bool,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Calls a lowering with its bound inputs in place; inputs that it wants on the host but that only the run knows are read back."""
    rest = iter(tensors)
    arguments = [
        bound[slot] if slot in bound else to_numpy(next(rest)) if slot in unknown else next(rest)
        for slot in range(count)
    ]
    return as_tuple(call(lowering, op, arguments, nchw=nchw))


def trace(
    source: Source,
    feeds: Mapping[str, NDArray[Any]],
    device: torch.device,
    *,
    nchw: bool = False,
    observe: Callable[[Step, list[torch.Tensor]], None] | None = None,
) -> Program:
    """Runs the graph once on example inputs.

    Args:
        source: The ops. Not changed.
        feeds: An array per input; they fix every shape.
        device: Where to run.
        nchw: Memory layout of convolutions.
        observe: Called with each step and its inputs right after it ran, for profiling.

    Raises:
        EngineError: An op failed on these shapes; the message names the node.
    """
    tracer = _Tracer(source, device, nchw)
    for name, key in source.feeds.items():
        if name not in feeds:
            raise EngineError(f"no value for input {name}", fix="give one with --input, or let msplit make it")
        tracer.values[key] = to_torch(np.ascontiguousarray(feeds[name]), device)
        tracer.base[key] = -1
    last_use = _last_uses(source)
    with torch.no_grad():
        for op in source.ops.values():
            tracer.run(op)
            if observe and tracer.steps and tracer.steps[-1].op is op:
                step = tracer.steps[-1]
                observe(
                    step, [tracer.values[key] if key in tracer.values else tracer.constants[key] for key in step.inputs]
                )
            for key in op.inputs:
                if last_use.get(key) == op.node:
                    tracer.values.pop(key, None)
    return _finish(tracer)


def _last_uses(source: Source) -> dict[Key, int]:
    last: dict[Key, int] = {}
    for number, op in source.ops.items():
        for key in op.inputs:
            last[key] = number
    for key in source.fetches.values():
        last.pop(key, None)
    return last


def _finish(tracer: _Tracer) -> Program:
    src, dst = [], []
    for number, step in enumerate(tracer.steps):
        for key in step.inputs:
            if key in tracer.made_by:
                src.append(tracer.made_by[key])
                dst.append(number)
    fetches = {name: key for name, key in tracer.source.fetches.items() if key not in tracer.static}
    known = {name: tracer.static[key] for name, key in tracer.source.fetches.items() if key in tracer.static}
    return Program(
        tuple(tracer.steps),
        tracer.constants,
        tracer.source.feeds,
        fetches,
        known,
        Dag.of(len(tracer.steps), src, dst),
        tuple(tracer.dynamic),
    )
