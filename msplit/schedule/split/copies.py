"""What crosses between GPUs, as blocks and streams of their own: a plan over all GPUs is then a plan like any other.

A block's results are copied once to each GPU that reads them, on the link between the two, one copy after the other. The inputs of the
model are on the first GPU, and its outputs are wanted there. Joints hand on no data: what waits through one waits for events alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from msplit.core.dag import Dag
from msplit.core.graph import Floats, Ints
from msplit.schedule.plan.plan import Plan, make_plan, record_order
from msplit.schedule.problem import Problem
from msplit.schedule.split.problem import SplitProblem

INPUTS = -1
"""Stands for the inputs of the model where a copy says whose results it moves."""

Copies = dict[tuple[int, int], float]
"""(block, or `INPUTS`; GPU that it goes to) -> bytes."""


def copies_of(split: SplitProblem, gpu: Ints) -> Copies:
    """What has to be copied.

    Args:
        gpu: Per block its GPU.
    """
    problem = split.blocks
    src, dst = problem.dag.src, problem.dag.dst()
    crossing = (gpu[src] != gpu[dst]) & ~problem.joints[src] & ~problem.joints[dst]
    found: Copies = {}
    for block, to in sorted(set(zip(src[crossing].tolist(), gpu[dst[crossing]].tolist(), strict=True))):
        found[block, to] = float(split.sent[block])
    for block in np.flatnonzero((split.fetched > 0) & (gpu != 0)).tolist():
        found.setdefault((block, 0), float(split.fetched[block]))
    for one in split.inputs:
        for to in {int(gpu[block]) for block in one.blocks} - {0}:
            found[INPUTS, to] = found.get((INPUTS, to), 0.0) + one.bytes
    return found


@dataclass(frozen=True, eq=False)
class Joined:
    """A split as one problem and one plan over all GPUs, copies included.

    Attributes:
        problem: Blocks and copies.
        plan: Over them.
        device: Per stream of the plan where it is: a GPU, or, from the number of GPUs on, a link.
        work_us: Per block and copy.
        earliest_us: When each may start at the earliest.
        copies: What is copied.
    """

    problem: Problem
    plan: Plan
    device: tuple[int, ...]
    work_us: Floats
    earliest_us: Floats
    copies: Copies


def join(split: SplitProblem, lane: Ints, streams: int) -> Joined:
    """Puts in the copies and plans.

    Args:
        lane: Per block its stream; GPU g has those from ``g * streams`` on.
        streams: How many each GPU has.
    """
    problem = split.blocks
    gpu: Ints = np.where(problem.joints, 0, lane // streams).astype(np.int32)
    copies = copies_of(split, gpu)
    whole = _with_copies(split, gpu, copies)
    ways = [(0 if block == INPUTS else int(gpu[block]), to) for block, to in copies]
    link = {way: place for place, way in enumerate(sorted(set(ways)))}
    own = [split.gpus * streams + link[way] for way in ways]
    lanes = np.concatenate([np.where(problem.joints, -1, lane), np.asarray(own, np.int32)]).astype(np.int32)
    device = [place // streams for place in range(split.gpus * streams)] + [
        split.gpus + place for place in range(len(link))
    ]
    used = np.unique(lanes[lanes >= 0])
    lanes[lanes >= 0] = np.searchsorted(used, lanes[lanes >= 0])
    work = np.concatenate([problem.work_us, [split.link.takes_us(bytes) for bytes in copies.values()]])
    starts = np.concatenate([gpu * split.link.launch_us, np.zeros(len(copies))])
    plan = make_plan(whole.dag, lanes, record_order(whole.dag, work))
    return Joined(whole, plan, tuple(device[one] for one in used.tolist()), work, starts, copies)


def _with_copies(split: SplitProblem, gpu: Ints, copies: Copies) -> Problem:
    """Blocks and, behind them, copies. Unlike those of other problems they are not numbered topologically."""
    problem, count = split.blocks, len(split.blocks)
    number = {copy: count + place for place, copy in enumerate(copies)}
    src, dst = problem.dag.src.tolist(), problem.dag.dst().tolist()
    to = gpu.tolist()
    edges = {
        (number.get((block, to[user]), block) if to[block] != to[user] else block, user)
        for block, user in zip(src, dst, strict=True)
    }
    edges |= {(block, place) for (block, _), place in number.items() if block != INPUTS}
    edges |= {(number[INPUTS, to[user]], user) for one in split.inputs for user in one.blocks if to[user]}
    more = len(copies)
    return replace(
        problem,
        dag=Dag.of(count + more, [first for first, _ in sorted(edges)], [second for _, second in sorted(edges)]),
        time_us=np.append(problem.time_us, np.ones(more)),
        share=np.append(problem.share, np.full(more, 1e-6)),
        bytes=np.append(problem.bytes, np.zeros(more)),
        kernels=np.append(problem.kernels, np.ones(more, np.int32)),
        tie=np.append(problem.tie, np.full(more, -1, np.int32)),
        pin=np.append(problem.pin, np.full(more, -1, np.int32)),
    )
