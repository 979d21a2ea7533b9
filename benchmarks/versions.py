"""Two checkouts of msplit on the same GPU, in turns: whether the newer one is slower anywhere.

    python benchmarks/versions.py GRAPHS OUT --old CHECKOUT [--models mmoe:128,bert:1] [--turns 3] [--seconds 500]

Each figure is the median of a process of its own, which builds the model anew, so that what differs from build to build (kernels that win
a contest by a hair) is in the spread. A row is slower where the fastest build of the newer version is slower than the slowest of the
older one.
Writes OUT/versions.json with every figure, and prints the table last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
QUICK = "mmoe:128,towers:128,deepfm:128,dlrm:128,bert:1,columns_50:256,squeezenet:1,googlenet:1,inception_v3:1"
"""Models that are built within half a minute."""

OPTIONS = ("--streams", "1,8", "--duration", "0.5", "--no-tensorflow", "--name", "suite")
CLOCKS = ("host", "device")

Figures = dict[tuple[str, str, str], dict[str, list[float]]]
"""By model and batch, variant and clock: per version the median of each process, s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--old", type=Path, required=True, help="the other checkout")
    parser.add_argument("--models", default=QUICK)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=500, help="begin no further process after this")
    arguments = parser.parse_args()
    checkouts = {"old": arguments.old.resolve(), "new": HERE.parent.resolve()}
    stop = time.monotonic() + arguments.seconds
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for model in arguments.models.split(","):
        for turn in range(arguments.turns):
            for version in list(checkouts)[:: 1 if turn % 2 == 0 else -1]:
                if time.monotonic() > stop:
                    print(f"{model}: {version}, turn {turn + 1}: left out, no time")
                    continue
                folder = arguments.out / f"{model.replace(':', '_')}-{version}-{turn}"
                for key, seconds in measured(checkouts[version], arguments.graphs.resolve(), folder, model):
                    figures[key][version].append(seconds)
    rows = [[*key, found["old"], found["new"]] for key, found in figures.items()]
    (arguments.out / "versions.json").write_text(json.dumps(rows))
    print(table(figures))


def measured(checkout: Path, graphs: Path, folder: Path, model: str) -> list[tuple[tuple[str, str, str], float]]:
    """What one process of a checkout measures of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    paths = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    command = [str(checkout / "benchmarks" / "gpu_suite.py"), str(graphs), "--out", str(folder), "--models", model]
    with (folder / "printed.txt").open("w") as printed:
        done = subprocess.run(
            [sys.executable, *command, *OPTIONS],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths, "MSPLIT_KEEP_CHOICES": "0"},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    print(f"{folder.name}: exit {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    results = folder / "suite.json"
    runs: list[Any] = json.loads(results.read_text())["runs"] if results.exists() else []
    return [
        ((model, variant["label"], clock), variant[clock]["median"])
        for run in runs
        for variant in run["result"]["variants"]
        for clock in CLOCKS
        if variant.get(clock)
    ]


def table(figures: Figures) -> str:
    """Medians over the processes, µs, with the least and the most."""
    lines = [
        "| model | variant | clock | old | new | new over old | |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for (model, variant, clock), found in figures.items():
        old, new = found["old"], found["new"]
        if not old or not new:
            continue
        ratio = statistics.median(new) / statistics.median(old)
        word = "slower" if min(new) > max(old) else "faster" if max(new) < min(old) else ""
        cells = [model, variant, clock, spread(old), spread(new), f"{ratio:.3f}", word]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(seconds: list[float]) -> str:
    """Median (least to most), µs."""
    least, middle, most = (1e6 * one for one in (min(seconds), statistics.median(seconds), max(seconds)))
    return f"{middle:.1f} ({least:.1f} to {most:.1f})"


if __name__ == "__main__":
    main()
