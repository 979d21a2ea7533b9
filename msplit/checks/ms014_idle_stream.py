"""A stream never overlaps another.

Finds: In the simulated run, no kernel of the stream runs while a kernel of another stream does.

Why: It costs waits and gains nothing: the same work on the stream before it would be as fast.

Example: A chain of layers cut in two halves, one on each of two streams.

Mend: Give its nodes the id of the stream that they wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject, listed
from msplit.core.graph import Floats, Ints

_TINY_US = 1e-6
"""Overlap that rounding may make."""


def find(subject: Subject) -> Iterator[Finding]:
    """One finding for all such streams."""
    prediction = subject.prediction
    plan, simulation = prediction.plan, prediction.simulation
    overlap = overlaps(
        plan.stream[plan.order], simulation.start_us[plan.order], simulation.end_us[plan.order], len(subject.used)
    )
    alone = [subject.used[lane] for lane in np.flatnonzero(overlap <= _TINY_US).tolist()]
    if alone:
        yield Finding(
            f"stream{'s' * (len(alone) > 1)} {listed(alone)} never {'run' if len(alone) > 1 else 'runs'} at the "
            "same time as another stream in the simulation",
            "give its nodes the id of the stream that they wait for",
        )


def overlaps(stream: Ints, start: Floats, end: Floats, streams: int) -> Floats:
    """Per stream the time during which it and another one run. Blocks of one stream do not overlap. O(n log n)."""
    count = len(stream)
    times = np.concatenate([end, start])
    # At one time, ends come before starts: what only touches does not overlap.
    order = np.lexsort((np.arange(2 * count) >= count, times)).tolist()
    times_list, lanes = times.tolist(), stream.tolist()
    running: dict[int, None] = {}
    total = [0.0] * streams
    before = 0.0
    for event in order:
        now = times_list[event]
        if len(running) > 1 and now > before:
            for lane in running:
                total[lane] += now - before
        before = now
        if event < count:
            running.pop(lanes[event], None)
        elif end[event - count] > now:
            running[lanes[event - count]] = None
    return np.asarray(total)


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, depends="costs")
