"""When each step of a run was on the device, by events around it: real start and end, on the stream that the plan gave it.

A captured run is captured once more with timing events in it (event record nodes: `cudaEventRecordExternal`) and replayed, so what is
timed is the CUDA graph and not the launches. The events take their time, too, about a microsecond per step, and the clock ticks in
half a microsecond or so: the text that goes with a timeline says how long the step took with them and without.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from msplit.engines.base import Span, Timeline
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.runtime.stream_program import Instruction, StreamProgram


class EventTap:
    """Puts a timing event behind each step, and one before it where the stream may have stood idle.

    Between two steps of a stream without a wait one event is the end of the first and the start of the second.

    Args:
        captured: True if the run is being captured.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream], *, captured: bool) -> None:
        self._streams, self._captured = streams, captured
        self._last: dict[int, torch.cuda.Event] = {}
        self._ends: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._base = self._mark(0)

    def _mark(self, lane: int) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=self._captured)
        event.record(self._streams[lane])
        return event

    def before(self, instruction: Instruction) -> None:
        """Notes the start of an instruction."""
        if instruction.waits or instruction.lane not in self._last:
            self._last[instruction.lane] = self._mark(instruction.lane)

    def after(self, instruction: Instruction) -> None:
        """Notes the end of an instruction."""
        start = self._last[instruction.lane]
        end = self._last[instruction.lane] = self._mark(instruction.lane)
        self._ends[instruction.step] = (start, end)

    def times_us(self) -> dict[int, tuple[float, float]]:
        """Step -> start and end, µs after the run began. The device must be done with it."""
        return {
            step: (self._base.elapsed_time(start) * 1e3, self._base.elapsed_time(end) * 1e3)
            for step, (start, end) in self._ends.items()
        }


class HostTap:
    """Times steps by the host's clock, for the engine that simulates streams on the CPU."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float]] = {}
        self._begin = self._start = time.perf_counter()

    def before(self, instruction: Instruction) -> None:
        """Notes the start of an instruction."""
        self._start = time.perf_counter()

    def after(self, instruction: Instruction) -> None:
        """Notes the end of an instruction."""
        self._times[instruction.step] = (self._start, time.perf_counter())

    def times_us(self) -> dict[int, tuple[float, float]]:
        """Step -> start and end, µs after the run began."""
        return {
            step: ((start - self._begin) * 1e6, (end - self._begin) * 1e6) for step, (start, end) in self._times.items()
        }


def timeline(
    program: Program, stream_program: StreamProgram, times_us: Mapping[int, tuple[float, float]], clock: str
) -> Timeline:
    """The timeline of a run, given start and end of each step."""
    spans = []
    place = {instruction.step: number for number, instruction in enumerate(stream_program.instructions)}
    for instruction in stream_program.instructions:
        op = program.steps[instruction.step].op
        start, end = times_us[instruction.step]
        spans.append(Span(op.name, tuple(op.source_nodes), instruction.lane, start, max(start, end), (op.op,)))
    waits = [(place[on], place[one.step]) for one in stream_program.instructions for on in one.waits]
    return Timeline(tuple(spans), tuple(waits), clock)
