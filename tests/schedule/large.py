"""A large flat graph, and the processor time that the rule `auto` takes for it in a process of its own.

python -m tests.schedule.large REFINING NODES...
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from msplit.core.graph import Assignment, Edges
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.rules.auto import Auto
from msplit.rules.base import RuleContext
from msplit.rules.ruleset import verify
from msplit.schedule.choose import REFINING, choose
from tests.campaign import CAMPAIGN
from tests.graphs import build

ROOT = Path(__file__).parents[2]


def large(count: int) -> tuple[FlatGraph, Costs]:
    """Kernels and views in 200 interwoven strands."""
    random = np.random.default_rng(0)
    width = 200
    node = np.arange(width, count)
    first = node - random.integers(1, 2 * width, len(node))
    second = node - random.integers(1, 2 * width, len(node))
    use = [first >= 0, (second >= 0) & (random.random(len(node)) < 0.4)]
    src = np.concatenate([first[use[0]], second[use[1]]])
    dst = np.concatenate([node[use[0]], node[use[1]]])
    slot = np.concatenate([np.zeros(use[0].sum()), np.ones(use[1].sum())])
    time_us = np.where(random.random(count) < 0.5, random.gamma(2, 2, count) + 1, 0.0)
    names = [f"n{number}" for number in range(count)]
    return build(names, ["MatMul"] * count, Edges.of(src, np.zeros(len(src)), dst, slot), time_us)


def seconds(*counts: int) -> list[float]:
    """Processor times of the rule in a fresh process: no coverage counts lines there, and no memory of other tests is looked through.

    What refining takes does not grow with the number of nodes: only a campaign refines for as long as users do.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "COVERAGE_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.schedule.large", str(REFINING if CAMPAIGN else 0), *map(str, counts)],
        cwd=ROOT,
        env=clean,
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(line) for line in done.stdout.split()]


def main(refining: int, counts: Sequence[int]) -> None:
    choose.__kwdefaults__["refining"] = refining
    for count in counts:
        flat, costs = large(count)
        context, start = RuleContext(flat, costs, 8), Assignment.empty(len(flat))
        begin = time.process_time()
        found, _ = Auto().apply(context, start)
        spent = time.process_time() - begin
        verify(start, found, Auto(), context)
        assert len(np.unique(found.ids)) == 8
        sys.stdout.write(f"{spent}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), list(map(int, sys.argv[2:])))
