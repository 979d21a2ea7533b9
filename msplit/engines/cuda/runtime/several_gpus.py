"""Rules of a plan over several GPUs beside its order, simulated GPUs that keep them, and requests to real ones.

A step is captured as one CUDA graph over all GPUs: it begins and ends on the first, and events lead to the others and back. PyTorch gives a
graph memory of its own on one GPU alone, so that the others get a pool each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.gpus import PEER_COPY
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.ir.interpret import run_step
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.runtime.stream_program import StreamProgram
from msplit.errors import EngineError
from msplit.schedule.plan import Plan

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


def reach(places: Sequence[torch.device]) -> None:
    """Lets each GPU copy straight from the others, where the machine can: PyTorch sees to that at its first copy between two."""
    for source in places:
        for to in places:
            if source != to:
                torch.zeros(1, device=source).to(to)


class CaptureMemory:
    """Memory of another GPU that graphs captured from one use: its pool, as long as this lives, and counters of split-K kernels."""

    def __init__(self, place: torch.device) -> None:
        self._device, self._pool = Device.of(place), torch.cuda.MemPool()
        self._counters: list[torch.Tensor] = []

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Block in which this thread allocates from this memory on the GPU."""
        with (
            torch.cuda.use_mem_pool(self._pool, device=self._device.place),
            self._device.semaphores.noted(self._counters),
        ):
            yield

    def give_back(self) -> None:
        """The graphs are gone."""
        self._device.semaphores.give_back(self._counters)
        self._counters = []


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
            tensor = values[key] if key in values else program.constants[key]
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
