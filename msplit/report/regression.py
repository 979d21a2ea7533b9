"""A measurement beside its baseline, as a part of the report of `bench`."""

from __future__ import annotations

from typing import Any

from msplit.benchmark.baseline import BaselineComparison, Change, Timed
from msplit.report.document import Table
from msplit.report.jsonio import picked
from msplit.report.text import micros, plural


def table(found: BaselineComparison) -> Table:
    """Each variant then and now."""
    rows = [
        (
            _name(one.now),
            micros(one.then.median_us),
            micros(one.now.median_us),
            _percent(one.slower),
            f"± {100 * one.noise:.1f} %",
            _verdict(one, found.limit),
        )
        for one in found.changes
    ]
    note = "change: of the median, by the device's clock where there is one; noise: a difference below it says nothing"
    return Table(f"Beside {found.baseline.path}", ("", ">then", ">now", ">change", ">noise", ""), rows, note)


def _name(one: Timed) -> str:
    return one.label if one.batch is None else f"{one.label}, batch {one.batch}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _verdict(one: Change, limit: float | None) -> str:
    if limit is not None and one.fails(limit):
        return "slower"
    if abs(one.slower) <= one.noise:
        return "no difference"
    if one.slower <= 0:
        return "faster"
    return "slower" if limit is None else "slower, within the limit"


_MEASURE_LONGER = "measure longer, or on a machine with nothing else to do"


def warnings(found: BaselineComparison) -> list[str]:
    """Warnings about circumstances that make the comparison doubtful."""
    said = [f"{found.baseline.path} was measured with {difference}" for difference in found.differs]
    if found.missing:
        said.append(f"in the baseline only, so not compared: {'; '.join(map(_name, found.missing))}")
    if found.new:
        said.append(f"not in the baseline, so not compared: {'; '.join(map(_name, found.new))}")
    vague = [one for one in found.changes if found.limit is not None and one.noise > found.limit]
    if vague:
        vary = f"{plural(len(vague), 'variant varies', 'variants vary')} by more than the limit of {100 * (found.limit or 0):g} %"
        said.append(f"{vary}, so that much slower would not be noticed: {_MEASURE_LONGER}")
    if not found.changes:
        said.append("nothing could be compared with the baseline")
    return said


def failures(found: BaselineComparison) -> list[str]:
    """A sentence for each variant that is slower than it may be."""
    return [
        f"{_name(one.now)} is {_percent(one.slower).removeprefix('+')} slower than in {found.baseline.path}: "
        f"{micros(one.then.median_us)} then, {micros(one.now.median_us)} now (noise {100 * one.noise:.1f} %)"
        for one in found.failing
    ]


def payload(found: BaselineComparison) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "path": found.baseline.path,
        "failed": bool(found.failing),
        "limit_percent": None if found.limit is None else 100 * found.limit,
        "differs": found.differs,
        "changes": [
            {
                **picked(one, "batch=now.batch variant=now.label then_variant=then.label clock=now.clock"),
                **picked(one, "then_us=then.median_us now_us=now.median_us"),
                "slower_percent": 100 * one.slower,
                "noise_percent": 100 * one.noise,
                "failed": found.limit is not None and one.fails(found.limit),
            }
            for one in found.changes
        ],
        "missing": [_name(one) for one in found.missing],
        "new": [_name(one) for one in found.new],
    }
