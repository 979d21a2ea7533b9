"""Instructions of each stream, and the times at which a run came to them.

A plan as what each stream does, one instruction after the other: wait, run, record, free.

Memory is correct under concurrency by construction. PyTorch's allocator gives a freed block only to later work of the stream that
it was allocated on. So a value is let go at the first point of its own stream at which everything that reads it, on any
stream, is known to be over: from then on whatever that stream writes there comes after every reader.

When each step of a run was on the device, by events around it: real start and end, on the stream that the plan gave it.

A captured run is captured once more with timing events in it (event record nodes: `cudaEventRecordExternal`) and replayed, so what is
timed is the CUDA graph and not the launches. The events take their time, too, about a microsecond per step, and the clock ticks in
half a microsecond or so: the text that goes with a timeline says how long the step took with them and without.
"""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from msplit.engines.base import Span, Timeline
from msplit.engines.cuda.ir.graph import Key
from msplit.engines.cuda.ir.interpret import run_step
from msplit.engines.cuda.ir.program import REPORT, Program
from msplit.errors import EngineError
from msplit.schedule.plan import Plan


@dataclass(frozen=True)
class Instruction:
    """One step of one stream, with what surrounds it.

    Attributes:
        lane: Its stream.
        waits: Steps on other streams whose events it waits for first.
        records: True if somebody waits for its event.
        frees: Values whose memory is let go after it.
        views: Steps that launch nothing and whose inputs are there after it, in order.
    """

    step: int
    lane: int
    waits: tuple[int, ...]
    records: bool
    frees: tuple[Key, ...]
    views: tuple[int, ...]


@dataclass(frozen=True)
class StreamProgram:
    """Everything an executor does for one run.

    Attributes:
        instructions: In record order.
        first_views: Views of constants and inputs: made before the first instruction.
        fork: Steps that wait for the start of the origin stream.
        join: Steps whose events the origin stream waits for at the end.
        peak_bytes: Memory for values at its highest: per stream, since a stream reuses only its own, added up.
    """

    instructions: tuple[Instruction, ...]
    first_views: tuple[int, ...]
    fork: frozenset[int]
    join: tuple[int, ...]
    count: int
    peak_bytes: int


def arrange(program: Program, plan: Plan, *, keep: bool = False) -> StreamProgram:
    """Turns a plan into instructions, which let go of no memory where they are to `keep` it. Near-linear: O(steps + reads × log waits +
    waits × streams)."""
    waits: dict[int, list[int]] = {}
    for node, on in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        waits.setdefault(node, []).append(on)
    recorded = set(plan.wait_on.tolist()) | set(plan.join.tolist())
    first_views, views = place_views(program, plan)
    frees, peak = _frees(program, plan, waits, views)
    instructions = tuple(
        Instruction(
            step,
            int(plan.stream[step]),
            tuple(waits.get(step, ())),
            step in recorded,
            tuple(() if keep else frees.get(step, ())),
            tuple(views.get(step, ())),
        )
        for step in plan.order.tolist()
    )
    return StreamProgram(
        instructions, tuple(first_views), frozenset(plan.fork.tolist()), tuple(plan.join.tolist()), plan.streams, peak
    )


def place_views(program: Program, plan: Plan) -> tuple[list[int], dict[int, list[int]]]:
    """Each view right after the last of the steps that its inputs come from."""
    made_by = program.producers()
    rank = {step: number for number, step in enumerate(plan.order.tolist())}
    after: dict[int, int] = {}  # view -> step it comes after, -1 at the start
    first: list[int] = []
    views: dict[int, list[int]] = {}
    for number, step in enumerate(program.steps):
        if step.launches:
            continue
        latest = -1
        for key in step.inputs:
            producer = made_by.get(key, -1)
            if producer >= 0 and not program.steps[producer].launches:
                producer = after[producer]
            if producer >= 0 and (latest < 0 or rank[producer] > rank[latest]):
                latest = producer
        after[number] = latest
        (first if latest < 0 else views.setdefault(latest, [])).append(number)
    return first, views


def _frees(
    program: Program, plan: Plan, waits: Mapping[int, list[int]], views: Mapping[int, list[int]]
) -> tuple[dict[int, list[Key]], int]:
    """After which step of its own stream each value is let go, and the memory needed at the highest."""
    groups, readers = lifetimes(program, views)
    known = _Knowledge(plan, waits)
    taken_after = {view: step for step, placed in views.items() for view in placed}
    frees: dict[int, list[Key]] = {}
    freed: dict[int, int] = {}  # bytes let go after each step
    for owner, keys in groups.items():
        at = (
            owner if program.steps[owner].launches else taken_after.get(owner)
        )  # a buffer lies where the step is that it is taken after
        last = None if at is None else known.after_all(at, readers[owner])
        if last is not None:
            frees.setdefault(last, []).extend(keys)
            freed[last] = freed.get(last, 0) + program.steps[owner].bytes
    taken = _taken(program, taken_after)
    peak = taken.get(-1, 0)
    for members in known.members:
        live = highest = 0
        for step in members:
            live += program.steps[step].bytes + taken.get(step, 0)
            highest = max(highest, live)
            live -= freed.get(step, 0)
        peak += highest
    return frees, peak


def _taken(program: Program, taken_after: Mapping[int, int]) -> dict[int, int]:
    """Bytes of the buffers that are taken after each step, by -1 of those that are taken at the start."""
    taken: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        if not step.launches and step.bytes:
            after = taken_after.get(number, -1)
            taken[after] = taken.get(after, 0) + step.bytes
    return taken


def lifetimes(program: Program, views: Mapping[int, list[int]]) -> tuple[dict[int, list[Key]], dict[int, list[int]]]:
    """Per step whose memory is let go at some time: the values that lie in it, and the steps that must be over by then."""
    base = {(step.op.node, port): where for step in program.steps for port, where in enumerate(step.bases)}
    made_after = {view: step for step, placed in views.items() for view in placed}
    kept = {base[key] for key in program.fetches.values() if key in base}
    groups: dict[int, list[Key]] = {}
    for key, owner in base.items():
        if owner >= 0:
            groups.setdefault(owner, []).append(key)
    readers: dict[int, list[int]] = {owner: [] for owner in groups}
    for number, step in enumerate(program.steps):
        # A view is made on the host when the step that it is placed after has been issued.
        reader = number if step.launches else made_after.get(number)
        for key in step.inputs:
            owner = base.get(key, -1)
            if owner < 0:
                continue
            if reader is not None:
                readers[owner].append(reader)
            if step.varying:
                kept.add(owner)  # what shares memory with what may differ from run to run
        if step.varying:
            kept.add(number)
    for owner in kept:
        groups.pop(owner, None)
    return groups, readers


class _Knowledge:
    """Steps that each stream knows to be over, as it goes on.

    Every stream has a clock per other stream: how far that one is known to have come. It only moves at a wait, and only forward, so
    the moves are kept and searched.
    """

    def __init__(self, plan: Plan, waits: Mapping[int, list[int]]) -> None:
        self.stream: list[int] = plan.stream.tolist()
        self.members: list[list[int]] = [[] for _ in range(plan.streams)]
        self.place: dict[int, int] = {}
        # (stream, other) -> (places of the other that became known, ascending; places in the stream from which on they were)
        self.moves: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        clocks = [[-1] * plan.streams for _ in range(plan.streams)]
        seen: dict[int, list[int]] = {}
        for step in plan.order.tolist():
            lane = self.stream[step]
            place = self.place[step] = len(self.members[lane])
            self.members[lane].append(step)
            if step in waits:
                before, clock = clocks[lane], list(clocks[lane])
                for on in waits[step]:
                    clock = [max(mine, theirs) for mine, theirs in zip(clock, seen[on], strict=True)]
                    clock[self.stream[on]] = max(clock[self.stream[on]], self.place[on])
                for other, now in enumerate(clock):
                    if now > before[other] and other != lane:
                        reached, since = self.moves.setdefault((lane, other), ([], []))
                        reached.append(now)
                        since.append(place)
                clocks[lane] = clock
            seen[step] = clocks[lane]

    def after_all(self, owner: int, readers: list[int]) -> int | None:
        """The first step of the owner's stream from whose start on all readers, and the owner itself, are known to be over.

        Readers on that stream are over at their own place. None: the stream ends without knowing.
        """
        lane = self.stream[owner]
        latest = self.place[owner]
        for reader in readers:
            if self.stream[reader] == lane:
                latest = max(latest, self.place[reader])
                continue
            reached, since = self.moves.get((lane, self.stream[reader]), ([], []))
            move = bisect.bisect_left(reached, self.place[reader])
            if move == len(reached):
                return None
            latest = max(latest, since[move])
        return self.members[lane][latest]


class Tap(Protocol):
    """Wants to know when each instruction of a run is issued."""

    def before(self, instruction: Instruction) -> None:
        """The instruction's waits are issued; its step comes next."""

    def after(self, instruction: Instruction) -> None:
        """Its step is issued."""


Run = Callable[[Program, int, dict[Key, torch.Tensor]], None]
"""Runs a step of a program on the values that there are, to which it adds its own."""


def simulate(
    program: Program,
    stream_program: StreamProgram,
    values: dict[Key, torch.Tensor],
    seed: int,
    tap: Tap | None,
    run: Run = run_step,
) -> None:
    """Runs the instructions on the CPU, streams interleaved at random as the waits allow.

    It stands in for a GPU in tests: any order that the events permit may happen, so a missing wait shows as a missing value. Memory is
    overwritten with NaN bytes when it is let go, so that what was let go too early shows as a wrong value.

    Args:
        values: Inputs, filled with every value still alive at the end.
        run: Runs a step.
    """
    queues: list[list[Instruction]] = [[] for _ in range(stream_program.count)]
    for instruction in reversed(stream_program.instructions):
        queues[instruction.lane].append(instruction)
    chance = random.Random(seed)
    finished: set[int] = set()
    postponed = _run_views(program, stream_program.first_views, values, run)
    while any(queues):
        ready = [queue for queue in queues if queue and finished.issuperset(queue[-1].waits)]
        if not ready:
            left = program.steps[next(queue for queue in queues if queue)[-1].step].op.name
            raise EngineError(
                "internal error: streams wait for each other in a circle", where=f"node {left}", fix=REPORT
            )
        instruction = chance.choice(ready).pop()
        if tap is not None:
            tap.before(instruction)
        run(program, instruction.step, values)
        if tap is not None:
            tap.after(instruction)
        finished.add(instruction.step)
        postponed = _run_views(program, (*postponed, *instruction.views), values, run)
        for key in instruction.frees:
            value = values.pop(key, None)
            if value is not None and value.numel():
                poison_memory(value)


def _run_views(program: Program, views: tuple[int, ...], values: dict[Key, torch.Tensor], run: Run) -> tuple[int, ...]:
    """Makes the views whose inputs are there; returns the others (a view of several values, not all of them made yet)."""
    postponed = []
    for view in views:
        if all(key in values or key in program.constants for key in program.steps[view].inputs):
            run(program, view, values)
        else:
            postponed.append(view)
    return tuple(postponed)


def poison_memory(value: torch.Tensor) -> None:
    """Fills the whole storage behind a tensor with 0xFF bytes: NaN as floats, -1 as integers."""
    value.untyped_storage().fill_(255)


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
