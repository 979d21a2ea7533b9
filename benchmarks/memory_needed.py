"""The memory that a plan itself asks for, whatever the allocator: values that nothing keeps from being alive at once. Needs SciPy.

One value is over before another begins if every step that reads it happens before the step that makes the other, by the order
of streams and the waits. That is a partial order, and the heaviest antichain in it is what can be alive at once. By Dilworth's
theorem with weights it is the sum of all weights less a maximum flow from values to those that begin after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.runtime.stream_program import lifetimes, place_views
from msplit.schedule.plan import Plan

_LARGEST = 1 << 30
"""Flows are counted with 32 bits."""


_MOST_VALUES = 2000
"""The flow has up to half as many edges as the square of this."""


@dataclass(frozen=True, eq=False)
class Value:
    """Memory of one step's results.

    Attributes:
        owner: The step.
        bytes: Its size.
        readers: Steps that must be over before it is let go; None: it is never let go.
    """

    owner: int
    bytes: int
    readers: tuple[int, ...] | None


def values_of(program: Program, plan: Plan) -> list[Value]:
    """What lies in memory during a run, by the steps that it is made by."""
    groups, readers = lifetimes(program, place_views(program, plan)[1])
    return [
        Value(number, step.bytes, tuple(readers[number]) if number in groups else None)
        for number, step in enumerate(program.steps)
        if step.launches and step.bytes
    ]


def needed_bytes(program: Program, plan: Plan) -> int | None:
    """Bytes, from 1 GB on rounded up by less than a billionth for each value; None for too many values."""
    values = values_of(program, plan)
    if len(values) > _MOST_VALUES:
        return None
    grain = 1 + sum(value.bytes for value in values) // _LARGEST
    weights = [-(-value.bytes // grain) for value in values]
    known, place = _clocks(plan)
    stream = plan.stream
    count = len(values)
    first, second = [], []
    for number, value in enumerate(values):
        if value.readers is None:
            continue
        over = np.ones(count, bool)
        for step in {value.owner, *value.readers}:
            over &= known[[other.owner for other in values], stream[step]] >= place[step]
        after = np.flatnonzero(over)
        first += [number] * len(after)
        second += after.tolist()
    source, sink, total = 2 * count, 2 * count + 1, sum(weights)
    rows = [*[source] * count, *first, *(count + number for number in range(count))]
    columns = [*range(count), *(count + number for number in second), *[sink] * count]
    capacities = [*weights, *[total] * len(first), *weights]
    network = csr_array((np.asarray(capacities, np.int32), (rows, columns)), shape=(2 * count + 2, 2 * count + 2))
    return (total - int(maximum_flow(network, source, sink).flow_value)) * grain


def _clocks(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Per step and stream the last place of that stream that is over before the step begins, -1 if none; per step its own place."""
    waits: dict[int, list[int]] = {}
    for step, on in zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True):
        waits.setdefault(step, []).append(on)
    known = np.full((len(plan.stream), plan.streams), -1)
    place = np.full(len(plan.stream), -1)
    last: dict[int, int] = {}
    length = [0] * plan.streams
    for step in plan.order.tolist():
        lane = int(plan.stream[step])
        for before in [*waits.get(step, ()), *([last[lane]] if lane in last else [])]:
            known[step] = np.maximum(known[step], known[before])
            other = int(plan.stream[before])
            known[step, other] = max(known[step, other], place[before])
        place[step] = length[lane]
        length[lane] += 1
        last[lane] = step
    return known, place
