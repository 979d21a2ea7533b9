"""The load of the streams is out of balance.

Finds: The busiest stream has more than `max_imbalance` times the time that could be reached: an equal share for every stream in use, or the
critical path where that is longer, since no stream can make it shorter.

Why: The step takes at least as long as its busiest stream; the others are idle meanwhile.

Example: Four streams with 90, 10, 10 and 10 µs of independent work: 30 µs would do.

Mend: Move branches to other streams, or let the rules `embedding`, `branch` or `auto` pack them.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject


def find(subject: Subject) -> Iterator[Finding]:
    """One finding."""
    prediction = subject.prediction
    loads = {subject.used[lane]: time for lane, time in prediction.load_us().items()}
    longest_path = float(prediction.problem.rank.max(initial=0.0))
    best = max(sum(loads.values()) / len(loads), longest_path)
    busiest = max(loads, key=lambda stream: loads[stream])
    imbalance = loads[busiest] / best if best > 0 else 1.0
    limit = subject.settings.limits.max_imbalance
    if imbalance > limit:
        yield Finding(
            f"stream {busiest} has {loads[busiest]:,.0f} µs of work, {imbalance:.2f} times the {best:,.0f} µs that "
            f"{len(loads)} streams could come down to (limit: {limit:g})",
            "move branches to other streams, or let the rules `branch` or `auto` choose",
        )


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, limits=("max_imbalance",), depends="costs")
