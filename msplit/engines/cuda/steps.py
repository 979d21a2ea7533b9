"""Between the nodes of a flat graph and the steps of a program: ids of nodes, ties of steps, and plans that can be stored.

Nodes are what files name and what has stream ids. Steps are what runs. A step does the work of one or several nodes, and a node may
need several steps, so a stored plan says which node's how-manieth step comes when, and where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from msplit.engines.cuda.program import Program
from msplit.graph import Ints
from msplit.schedule.order import topological
from msplit.schedule.plan import Plan, make_plan


@dataclass(frozen=True)
class StoredPlan:
    """A plan of a program, in terms of the flat graph that it was made from.

    Attributes:
        kernels: In record order: (flat node, which of that node's steps, stream). A step belongs to the first node that it covers.
    """

    kernels: tuple[tuple[int, int, int], ...]


def named_steps(program: Program) -> list[tuple[int, int]]:
    """Per step the flat node that it belongs to, and which of that node's launching steps it is; -1 for a step that launches nothing."""
    seen: dict[int, int] = {}
    found = []
    for step in program.steps:
        node = step.op.covers[0]
        found.append((node, seen.get(node, 0) if step.launches else -1))
        if step.launches:
            seen[node] = seen.get(node, 0) + 1
    return found


def store(program: Program, plan: Plan) -> StoredPlan:
    """A plan of the program's steps, to be kept."""
    names = named_steps(program)
    return StoredPlan(tuple((*names[step], int(plan.stream[step])) for step in plan.order.tolist()))


def restore(program: Program, stored: StoredPlan) -> Plan | None:
    """The stored plan of a program, the same to the last wait; None where the program has other steps than those it names."""
    steps = {name: number for number, name in enumerate(named_steps(program)) if name[1] >= 0}
    if {(node, index) for node, index, _ in stored.kernels} != set(steps) or len(stored.kernels) != len(steps):
        return None
    lanes = np.full(len(program.steps), -1, np.int32)
    key = np.full(len(program.steps), np.inf)  # what launches nothing comes as early as it can
    for place, (node, index, lane) in enumerate(stored.kernels):
        lanes[steps[node, index]] = lane
        key[steps[node, index]] = -place
    used = np.unique(lanes[lanes >= 0])
    lanes = np.where(lanes >= 0, np.searchsorted(used, lanes), -1).astype(np.int32)
    return make_plan(program.dag, lanes, topological(program.dag, key))


def ids_of(program: Program, lanes: Ints, nodes: int) -> Ints:
    """Stream per flat node, -1 for nodes that no launching step covers.

    Args:
        program: The steps.
        lanes: Per step its stream, -1 for a step that launches nothing.
        nodes: How many nodes the flat graph has.
    """
    ids = np.full(nodes, -1, np.int32)
    launching = [(step, int(lane)) for step, lane in zip(program.steps, lanes.tolist(), strict=True) if lane >= 0]
    for step, lane in launching:
        ids[[node for node in step.op.covers if node < nodes]] = lane
    for step, lane in launching:  # what decides where the step runs, whatever else covers that node too
        ids[step.op.covers[0]] = lane
    return ids


def ties(program: Program, groups: Ints) -> Ints:
    """Per step a group that must share a stream, or -1: steps of one node, and of nodes that are tied.

    Args:
        program: The steps.
        groups: Per flat node its group, -1 for a node on its own.
    """
    first = [step.op.covers[0] for step in program.steps]
    count = int(groups.max(initial=-1)) + 1
    several = {
        node for node, _ in _repeated(node for node, step in zip(first, program.steps, strict=True) if step.launches)
    }
    return np.asarray(
        [int(groups[node]) if groups[node] >= 0 else count + node if node in several else -1 for node in first],
        np.int32,
    )


def _repeated(items: Iterable[int]) -> list[tuple[int, int]]:
    counts: dict[int, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return [(item, count) for item, count in counts.items() if count > 1]
