"""A plan as what each stream does, one action after the other: wait, run, record, release.

Memory is correct under concurrency by construction. PyTorch's allocator gives a freed block only to later work of the stream that
it was allocated on. So a value is let go at the first point of its own stream at which everything that reads it, on any
stream, is known to be over: from then on whatever that stream writes there comes after every reader.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from msplit.engines.cuda.program import Key, Program
from msplit.schedule.plan import Plan


@dataclass(frozen=True)
class Action:
    """One step of one stream, with what surrounds it.

    Attributes:
        step: Step to run.
        lane: Its stream.
        waits: Steps on other streams whose events it waits for first.
        records: Whether somebody waits for its event.
        releases: Values whose memory is let go after it.
        views: Steps that launch nothing and whose inputs are there after it, in order.
    """

    step: int
    lane: int
    waits: tuple[int, ...]
    records: bool
    releases: tuple[Key, ...]
    views: tuple[int, ...]


@dataclass(frozen=True)
class Lanes:
    """Everything an executor does for one run.

    Attributes:
        actions: In record order.
        first_views: Views of constants and inputs: made before the first action.
        fork: Steps that wait for the start of the origin stream.
        join: Steps whose events the origin stream waits for at the end.
        count: Number of streams.
        peak_bytes: Memory for values at its highest: per stream, since a stream reuses only its own, added up.
    """

    actions: tuple[Action, ...]
    first_views: tuple[int, ...]
    fork: frozenset[int]
    join: tuple[int, ...]
    count: int
    peak_bytes: int


def arrange(program: Program, plan: Plan) -> Lanes:
    """Turns a plan into actions."""
    waits: dict[int, list[int]] = {}
    for node, on in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        waits.setdefault(node, []).append(on)
    recorded = set(plan.wait_on.tolist()) | set(plan.join.tolist())
    first_views, views = _place_views(program, plan)
    releases, peak = _releases(program, plan, waits)
    actions = tuple(
        Action(
            step,
            int(plan.stream[step]),
            tuple(waits.get(step, ())),
            step in recorded,
            tuple(releases.get(step, ())),
            tuple(views.get(step, ())),
        )
        for step in plan.order.tolist()
    )
    return Lanes(
        actions, tuple(first_views), frozenset(plan.fork.tolist()), tuple(plan.join.tolist()), plan.streams, peak
    )


def _place_views(program: Program, plan: Plan) -> tuple[list[int], dict[int, list[int]]]:
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


def _releases(program: Program, plan: Plan, waits: Mapping[int, list[int]]) -> tuple[dict[int, list[Key]], int]:
    """Step of the owner's stream after which each value may be let go, and the memory needed at the highest."""
    base = {(step.op.node, port): where for step in program.steps for port, where in enumerate(step.bases)}
    groups: dict[int, list[Key]] = {}
    for key, owner in base.items():
        if owner >= 0:
            groups.setdefault(owner, []).append(key)
    readers: dict[int, set[int]] = {owner: set() for owner in groups}
    for number, step in enumerate(program.steps):
        for key in step.inputs:
            owner = base.get(key, -1)
            if owner >= 0 and step.launches:
                readers[owner].add(number)
    kept = {base[key] for key in program.fetches.values() if key in base}

    stream = plan.stream.tolist()
    place: dict[int, int] = {}
    pending: list[dict[int, set[int]]] = [
        {} for _ in range(plan.streams)
    ]  # per lane: owner -> readers not known to be over
    clocks = [[-1] * plan.streams for _ in range(plan.streams)]
    seen: dict[int, list[int]] = {}
    length = [0] * plan.streams
    live = [0] * plan.streams
    peak = [0] * plan.streams
    releases: dict[int, list[Key]] = {}
    for step in plan.order.tolist():
        lane = stream[step]
        clock = clocks[lane]
        if waits.get(step):
            clock = list(clock)
            for on in waits[step]:
                clock = [max(mine, theirs) for mine, theirs in zip(clock, seen[on], strict=True)]
                clock[stream[on]] = max(clock[stream[on]], place[on])
            clocks[lane] = clock
        place[step] = length[lane]
        length[lane] += 1
        seen[step] = clock
        if program.steps[step].bytes:
            live[lane] += program.steps[step].bytes
            peak[lane] = max(peak[lane], live[lane])
        if step in groups and step not in kept:
            pending[lane][step] = set(readers[step])
        # A value nobody reads, or whose readers this stream knows to be over, goes now.
        done = []
        for owner, left in pending[lane].items():
            left -= {reader for reader in left if reader in place and _over(reader, lane, stream, place, clock)}
            if not left:
                done.append(owner)
        for owner in done:
            del pending[lane][owner]
            live[lane] -= program.steps[owner].bytes
            releases.setdefault(step, []).extend(groups[owner])
    return releases, sum(peak)


def _over(reader: int, lane: int, stream: list[int], place: dict[int, int], clock: list[int]) -> bool:
    return stream[reader] == lane or place[reader] <= clock[stream[reader]]


def simulate(
    program: Program,
    lanes: Lanes,
    values: dict[Key, torch.Tensor],
    *,
    seed: int | None = None,
    poison: bool = False,
) -> None:
    """Runs the actions on the CPU, streams interleaved at random as the waits allow.

    It stands in for a GPU in tests: any order that the events permit may happen, so a missing wait shows as a missing value, and
    with `poison` memory let go too early shows as a wrong one.

    Args:
        program: The steps.
        lanes: The actions.
        values: Inputs, filled with every value still alive at the end.
        seed: Of the interleaving; None takes the record order.
        poison: Overwrite memory with NaN bytes when it is let go.
    """
    queues: list[list[Action]] = [[] for _ in range(lanes.count)]
    for action in reversed(lanes.actions):
        queues[action.lane].append(action)
    chance = random.Random(seed)
    finished: set[int] = set()
    postponed = _run_views(program, lanes.first_views, values)
    order = iter(lanes.actions)
    while any(queues):
        if seed is None:
            action = next(order)
            queues[action.lane].pop()
        else:
            ready = [queue for queue in queues if queue and finished.issuperset(queue[-1].waits)]
            if not ready:
                raise RuntimeError("streams wait for each other in a circle")
            action = chance.choice(ready).pop()
        run_step(program, action.step, values)
        finished.add(action.step)
        postponed = _run_views(program, (*postponed, *action.views), values)
        for key in action.releases:
            value = values.pop(key, None)
            if poison and value is not None and value.numel():
                poison_memory(value)


def _run_views(program: Program, views: tuple[int, ...], values: dict[Key, torch.Tensor]) -> tuple[int, ...]:
    """Makes the views whose inputs are there; returns the others (a view of several values, not all of them made yet)."""
    postponed = []
    for view in views:
        if all(key in values or key in program.constants for key in program.steps[view].inputs):
            run_step(program, view, values)
        else:
            postponed.append(view)
    return tuple(postponed)


def run_step(program: Program, number: int, values: dict[Key, torch.Tensor]) -> None:
    """Calls one step and files its results under their keys."""
    step = program.steps[number]
    constants = program.constants
    results = step.call(*[values[key] if key in values else constants[key] for key in step.inputs])
    for port, result in enumerate(results):
        values[step.op.node, port] = result


def poison_memory(value: torch.Tensor) -> None:
    """Fills the whole storage behind a tensor with 0xFF bytes: NaN as floats, -1 as integers."""
    storage = value.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage).fill_(255)
