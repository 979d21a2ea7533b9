"""Between the nodes of a flat graph and the steps of a program: ids of nodes, ties of steps, and plans that can be stored.

Nodes are what files name and what has stream ids. Steps are what runs. A step does the work of one or several nodes, and a node may
need several steps, so a stored plan says which node's how-manieth step comes when, and where.
"""

from __future__ import annotations

import numpy as np

from msplit.core.dag import DisjointSets
from msplit.core.graph import Ints
from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.program import Program
from msplit.engines.cuda.options import SharedKernel, StoredPlan
from msplit.engines.cuda.passes.pointwise_fusion.body import FUSED
from msplit.schedule.plan import Plan, make_plan, topological


def named_steps(program: Program) -> list[tuple[int, int]]:
    """Per step the flat node that it belongs to, and which of that node's launching steps it is; -1 for a step that launches nothing."""
    seen: dict[int, int] = {}
    found = []
    for step in program.steps:
        node = step.op.source_nodes[0]
        found.append((node, seen.get(node, 0) if step.launches else -1))
        if step.launches:
            seen[node] = seen.get(node, 0) + 1
    return found


def store(program: Program, plan: Plan) -> StoredPlan:
    """A plan of the program's steps, to be kept."""
    names = named_steps(program)
    kernels = tuple((*names[step], int(plan.stream[step])) for step in plan.order.tolist())
    return StoredPlan(kernels, groups_of(program, plan))


def groups_of(program: Program, plan: Plan) -> tuple[SharedKernel, ...]:
    """Nodes that share a kernel, in record order, each set of them once (they may need several kernels)."""
    groups: dict[SharedKernel, None] = {}
    for step in plan.order.tolist():
        op = program.steps[step].op
        nodes = tuple(dict.fromkeys(op.source_nodes))
        if len(nodes) > 1:
            groups[SharedKernel(_kind(op), nodes, int(plan.stream[step]))] = None
    return tuple(groups)


def _kind(op: Op) -> str:
    if op.op == "_Columns":
        return "columns"
    if op.batch > 1:
        return "fused and grouped" if op.op == FUSED else "grouped"
    return "fused" if op.op == FUSED else "library"


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
        lanes: Per step its stream, -1 for a step that launches nothing.
        nodes: How many nodes the flat graph has.
    """
    ids = np.full(nodes, -1, np.int32)
    launching = [(step, int(lane)) for step, lane in zip(program.steps, lanes.tolist(), strict=True) if lane >= 0]
    for step, lane in launching:
        ids[[node for node in step.op.source_nodes if node < nodes]] = lane
    for step, lane in launching:  # what decides where the step runs, whatever else covers that node too
        ids[step.op.source_nodes[0]] = lane
    return ids


def ties(program: Program, groups: Ints) -> Ints:
    """Per step a group that must share a stream, or -1: steps that work for one node, and for nodes that are tied.

    So every node has one stream, and all nodes that share a kernel have the same.

    Args:
        groups: Per flat node its group, -1 for a node on its own.
    """
    count = int(groups.max(initial=-1)) + 1

    def keys(node: int) -> list[int]:
        group = int(groups[node]) if node < len(groups) else -1
        return [count + node] if group < 0 else [group, count + node]

    tied = DisjointSets(len(program.steps))
    first: dict[int, int] = {}  # group, or count of groups + node -> a launching step that works for it
    for number, step in enumerate(program.steps):
        for key in [key for node in step.op.source_nodes for key in keys(node)] if step.launches else ():
            tied.join(first.setdefault(key, number), number)
    launching = np.asarray([step.launches for step in program.steps], np.bool_)
    found = np.asarray([tied.find(number) for number in range(len(program.steps))], np.int32)
    for number in np.flatnonzero(~launching).tolist():  # what launches nothing goes with the rest of its node
        beside = [first[key] for key in keys(program.steps[number].op.source_nodes[0]) if key in first]
        found[number] = found[beside[0]] if beside else number
    alone = np.bincount(found[launching], minlength=len(program.steps))[found] < 2
    tie = np.unique(np.where(alone, -1, found), return_inverse=True)[1] - int(alone.any())
    return np.asarray(tie, np.int32)
