"""How many processes on a GPU `workers="auto"` and `groups="auto"` choose, beside what each number answers when it is given.

PYTHONPATH=. python benchmarks/notes/probes/processes_auto.py [cpu]

The model is that of `registered.py`. It ends with exit code 1 where an answer is wrong, or a number that was tried answers more within the
bound than what was chosen. Forty seconds on a GPU; without NVIDIA's MPS one process is all that is tried, and the note says so.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import registered

import msplit
from msplit.errors import MsplitError

ROWS = 64


def main() -> int:
    how: dict[str, Any] = {"engine": "cuda", "device": "cpu" if "cpu" in sys.argv[1:] else "cuda", "streams": 4}
    how |= {"effort": "fast", "latency_us": 20_000.0}
    folder = Path(tempfile.mkdtemp())
    path = registered.model(folder / "experts.pb")
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.standard_normal((ROWS, registered.WIDTH)).astype(np.float32)} for _ in range(8)]
    with msplit.pool(path, **how, groups=2, batches=[ROWS]) as pool:
        expected = [pool.step(one) for one in feeds]
    wrong, rates = 0, dict[Any, float]()
    for workers in (1, 2, "auto"):
        try:
            with msplit.pool(path, **how, groups="auto", batches=[ROWS], workers=workers) as pool:
                groups, count = int(pool.settings.groups), len(pool.processes())
                times = list[float]()
                for _ in range(5):
                    found, bad = registered.flood(pool, feeds, expected, groups * count, 0.3)
                    times += found
                    wrong += bad
                rates[workers] = 1 / float(np.median(times))
                print(
                    f"workers={workers}: {count} of {groups} slots, {rates[workers]:,.0f}/s, wrong {wrong}", flush=True
                )
                for note in pool.about.notes:
                    print(f"  {note}")
        except MsplitError as problem:
            print(f"workers={workers}: {problem}")
    most = max(rate for workers, rate in rates.items() if workers != "auto")
    if rates["auto"] < 0.8 * most:  # two runs of the same differ by a tenth
        print(f"chosen was what answers {rates['auto']:,.0f}/s, where {most:,.0f} are to be had")
        wrong += 1
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
