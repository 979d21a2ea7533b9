"""Bonds between plans, nodes, steps and GPUs: what a plan may say, and how it is read as steps.

Between the nodes of a flat graph and the steps of a program: ids of nodes, ties of steps, and plans that can be stored.

Nodes are what files name and what has stream ids. Steps are what runs. A step does the work of one or several nodes, and a node may
need several steps, so a stored plan says which node's how-manieth step comes when, and where.

Rules of a plan over several GPUs beside its order, simulated GPUs that keep them, and requests to real ones.

A step is captured as one CUDA graph over all GPUs: it begins and ends on the first, and events lead to the others and back. PyTorch gives a
graph memory of its own on one GPU alone, so that the others get a pool each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from msplit.core.dag import DisjointSets
from msplit.core.graph import Ints
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.graph import FUSED, PEER_COPY, Key, Op
from msplit.engines.cuda.ir.interpret import run_step
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.options import SharedKernel, StoredPlan
from msplit.engines.cuda.runtime.stream_program import StreamProgram
from msplit.errors import EngineError
from msplit.schedule.plan import Plan, make_plan, topological


def named_steps(program: Program) -> list[tuple[int, int]]:
    """Per step the flat node that it belongs to, and which of that node's launching steps it is; -1 for a step that launches nothing."""
    seen: dict[int, int] = {}
    found = []
    for step in program.steps:
        node = step.op.source_nodes[0]
        found.append((node, seen.get(node, 0) if step.launches else -1))
        if step.launches:
            seen[node] = seen.get(node, 0) + 1
    return found


def store(program: Program, plan: Plan) -> StoredPlan:
    """A plan of the program's steps, to be kept."""
    names = named_steps(program)
    kernels = tuple((*names[step], int(plan.stream[step])) for step in plan.order.tolist())
    return StoredPlan(kernels, groups_of(program, plan))


def groups_of(program: Program, plan: Plan) -> tuple[SharedKernel, ...]:
    """Nodes that share a kernel, in record order, each set of them once (they may need several kernels)."""
    groups: dict[SharedKernel, None] = {}
    for step in plan.order.tolist():
        op = program.steps[step].op
        nodes = tuple(dict.fromkeys(op.source_nodes))
        if len(nodes) > 1:
            groups[SharedKernel(_kind(op), nodes, int(plan.stream[step]))] = None
    return tuple(groups)


def _kind(op: Op) -> str:
    if op.op == "_Columns":
        return "columns"
    if op.batch > 1:
        return "fused and grouped" if op.op == FUSED else "grouped"
    return "fused" if op.op == FUSED else "library"


def restore(program: Program, stored: StoredPlan) -> Plan | None:
    """The stored plan of a program, the same to the last wait; None where the program has other steps than those it names."""
    steps = {name: number for number, name in enumerate(named_steps(program)) if name[1] >= 0}
    if {(node, index) for node, index, _ in stored.kernels} != set(steps) or len(stored.kernels) != len(steps):
        return None
    lanes = np.full(len(program.steps), -1, np.int32)
    key = np.full(len(program.steps), np.inf)  # what launches nothing comes as early as it can
    for place, (node, index, lane) in enumerate(stored.kernels):
        lanes[steps[node, index]] = lane
        key[steps[node, index]] = -place
    used = np.unique(lanes[lanes >= 0])
    lanes = np.where(lanes >= 0, np.searchsorted(used, lanes), -1).astype(np.int32)
    return make_plan(program.dag, lanes, topological(program.dag, key))


def ids_of(program: Program, lanes: Ints, nodes: int) -> Ints:
    """Stream per flat node, -1 for nodes that no launching step covers.

    Args:
        lanes: Per step its stream, -1 for a step that launches nothing.
        nodes: How many nodes the flat graph has.
    """
    ids = np.full(nodes, -1, np.int32)
    launching = [(step, int(lane)) for step, lane in zip(program.steps, lanes.tolist(), strict=True) if lane >= 0]
    for step, lane in launching:
        ids[[node for node in step.op.source_nodes if node < nodes]] = lane
    for step, lane in launching:  # what decides where the step runs, whatever else covers that node too
        ids[step.op.source_nodes[0]] = lane
    return ids


def ties(program: Program, groups: Ints) -> Ints:
    """Per step a group that must share a stream, or -1: steps that work for one node, and for nodes that are tied.

    So every node has one stream, and all nodes that share a kernel have the same.

    Args:
        groups: Per flat node its group, -1 for a node on its own.
    """
    count = int(groups.max(initial=-1)) + 1

    def keys(node: int) -> list[int]:
        group = int(groups[node]) if node < len(groups) else -1
        return [count + node] if group < 0 else [group, count + node]

    tied = DisjointSets(len(program.steps))
    first: dict[int, int] = {}  # group, or count of groups + node -> a launching step that works for it
    for number, step in enumerate(program.steps):
        for key in [key for node in step.op.source_nodes for key in keys(node)] if step.launches else ():
            tied.join(first.setdefault(key, number), number)
    launching = np.asarray([step.launches for step in program.steps], np.bool_)
    found = np.asarray([tied.find(number) for number in range(len(program.steps))], np.int32)
    for number in np.flatnonzero(~launching).tolist():  # what launches nothing goes with the rest of its node
        beside = [first[key] for key in keys(program.steps[number].op.source_nodes[0]) if key in first]
        found[number] = found[beside[0]] if beside else number
    alone = np.bincount(found[launching], minlength=len(program.steps))[found] < 2
    tie = np.unique(np.where(alone, -1, found), return_inverse=True)[1] - int(alone.any())
    return np.asarray(tie, np.int32)


_FIX = "please report this; run on one GPU meanwhile"


def gpu_of_streams(program: Program, plan: Plan) -> tuple[int, ...]:
    """Per stream of a plan its GPU; that of one on which nothing runs is the first.

    Raises:
        EngineError: A stream has steps of two GPUs, or a step reads what lies on another, which is a bug in msplit.
    """
    gpus = program.gpus
    assert gpus is not None
    found: dict[int, int] = {}
    for gpu, stream in zip(gpus.steps, plan.stream.tolist(), strict=True):
        if stream >= 0 and found.setdefault(stream, gpu) != gpu:
            raise EngineError(f"internal error: stream {stream} is on GPU {found[stream]} and {gpu}", fix=_FIX)
    made = program.producers()
    fed = set(program.feeds.values())
    for number, step in enumerate(program.steps):
        for key in step.inputs if step.op.op != PEER_COPY else ():
            where = gpus.steps[made[key]] if key in made else 0 if key in fed else gpus.constants.get(key, 0)
            if where != gpus.steps[number]:
                raise EngineError(
                    f"internal error: {step.op.name} reads a value of GPU {where} on {gpus.steps[number]}", fix=_FIX
                )
    return tuple(found.get(stream, 0) for stream in range(plan.streams))


def lease(program: Program, stream_program: StreamProgram) -> list[torch.cuda.Stream]:
    """A stream that nobody else holds for each of a program's, on its GPU."""
    gpus = program.gpus
    assert gpus is not None
    of = {instruction.lane: gpus.steps[instruction.step] for instruction in stream_program.instructions}
    places = [gpus.places[of.get(lane, 0)] for lane in range(max(stream_program.count, 1))]
    return [Device.of(place).streams.lease(1)[0] for place in places]


def give_back(streams: Sequence[torch.cuda.Stream]) -> None:
    """Returns streams with no work in flight, each to its GPU."""
    for stream in streams:
        Device.of(stream.device).streams.give_back([stream])


class CaptureMemory:
    """Memory of another GPU that graphs captured from one use: its pool, and counters of split-K kernels.

    The pool counts its captures. As a `torch.cuda.MemPool` it would be the current GPU's, so that its memory here could be freed between
    two captures, and its end amid a capture, whenever Python collects garbage, would end the process.
    """

    def __init__(self, place: torch.device) -> None:
        self._device, self._pool, self._captures = Device.of(place), torch.cuda.graph_pool_handle(), 0
        self._counters: list[torch.Tensor] = []

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Block in which this thread allocates from this memory on the GPU."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device.place.index, self._pool)
        self._captures += 1
        try:
            with self._device.semaphores.noted(self._counters):
                yield
        finally:
            torch._C._cuda_endAllocateToPool(self._device.place.index, self._pool)

    def give_back(self) -> None:
        """The graphs are gone."""
        for _ in range(self._captures):
            torch._C._cuda_releasePool(self._device.place.index, self._pool)
        self._device.semaphores.give_back(self._counters)
        self._captures, self._counters = 0, []


class SeparateMemory:
    """Simulated GPUs, each with a memory of its own: every tensor's memory belongs to the GPU of the step that made it, and a step that is
    handed one of another GPU's fails as it would there. It goes by addresses, and knows nothing of what `gpu_of_streams` checks."""

    def __init__(self, program: Program) -> None:
        assert program.gpus is not None
        self._program, self._gpus = program, program.gpus
        self._owner: dict[int, int] = {}
        for key, tensor in program.constants.items():
            self._own(tensor, program.gpus.constants.get(key, 0))

    def _own(self, tensor: torch.Tensor, gpu: int) -> None:
        if tensor.numel():
            self._owner[tensor.untyped_storage().data_ptr()] = gpu

    def fed(self, values: dict[Key, torch.Tensor]) -> None:
        """The inputs of a step are on the first GPU."""
        for tensor in values.values():
            self._own(tensor, 0)

    def run(self, program: Program, number: int, values: dict[Key, torch.Tensor]) -> None:
        """Runs a step.

        Raises:
            EngineError: It reads memory of another GPU.
        """
        step, gpu = program.steps[number], self._gpus.steps[number]
        for key in step.inputs if step.op.op != PEER_COPY else ():
            tensor = program.value(key, values, f"node {step.op.name}")
            owner = self._owner.get(tensor.untyped_storage().data_ptr(), gpu) if tensor.numel() else gpu
            if owner != gpu:
                raise EngineError(
                    f"{step.op.name} ({step.op.op}) runs on GPU {gpu} and reads memory of GPU {owner} without a copy",
                    fix=_FIX,
                )
        run_step(program, number, values)
        if step.op.op == PEER_COPY:
            source, made = values.get(step.inputs[0]), values[step.op.node, 0]
            if source is not None and made.numel() and made.data_ptr() == source.data_ptr():
                raise EngineError(f"the copy of {step.op.name} to GPU {gpu} is in the memory that it copies", fix=_FIX)
        for port in range(step.outputs):
            self._own(values[step.op.node, port], gpu)
