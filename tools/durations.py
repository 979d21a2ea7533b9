"""Writes `tests/slow.toml`, the limits of the slowest tests, and prints what all tests take.

    MSPLIT_DURATIONS=/tmp/durations scripts/test        on a machine that does nothing else
    python tools/durations.py /tmp/durations            prints processor time per file; writes the limits of the slowest twenty

A limit is twice what the test took. It is compared with processor time, and where the machine is busy it is not compared at all.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

TABLE = Path(__file__).parents[1] / "tests" / "slow.toml"
COUNT = 20
HEAD = """# Seconds of processor time that a test may take: twice what the slowest took on an idle machine (`tools/durations.py`). A test
# above it fails, unless the machine is busy. Make the test quicker, or raise the limit here, with the reason in the commit.
"""


def limits(rows: list[tuple[str, float, float]]) -> str:
    """The table of the slowest tests, by the names of file and test; the one behind them gives the limit of all others."""
    slowest = sorted(((seconds, name.rpartition("/")[2]) for name, seconds, _ in rows), reverse=True)
    lines = [f"{json.dumps(name)} = {round(2 * seconds, 1)}" for seconds, name in slowest[:COUNT]]
    longest = round(2 * slowest[COUNT][0], 1) if len(slowest) > COUNT else 1.0
    return f"{HEAD}\nlongest = {longest}\n\n[tests]\n" + "\n".join(lines) + "\n"


def by_file(rows: list[tuple[str, float, float]]) -> list[tuple[float, int, str]]:
    """Processor time and number of tests per file, the slowest first."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, seconds, _ in rows:
        found[name.partition("::")[0]].append(seconds)
    return sorted(((sum(times), len(times), name) for name, times in found.items()), reverse=True)


def main() -> None:
    """See the module."""
    rows = [tuple(json.loads(line)) for line in Path(sys.argv[1]).read_text().splitlines()]
    for seconds, count, name in by_file(rows):
        print(f"{seconds:8.1f} s {count:5} {name}")
    print(
        f"{sum(row[1] for row in rows):8.1f} s of a processor and {sum(row[2] for row in rows):.1f} s of {len(rows)} tests in all"
    )
    TABLE.write_text(limits(rows))


if __name__ == "__main__":
    main()
