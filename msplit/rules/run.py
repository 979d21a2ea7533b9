"""Applies a rule set to a graph, and checks every rule's work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import MAX_STREAMS, whole
from msplit.core.assignment import UNASSIGNED, Assignment
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.errors import AssignError
from msplit.flatten.flat import FlatGraph
from msplit.flatten.origin import Conflict, to_ids
from msplit.progress import phase
from msplit.rules.base import ChoosesKernels, Context, Remark, Rule, in_range
from msplit.rules.ruleset import RuleSet


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a rule set makes of a graph.

    Attributes:
        remarks: What the user should know, in the order of the rules.
        streams: Ids are 0..streams-1.
        ids: Per node its stream id: the assignment's, and the default where no rule decided; 0 for host nodes without an id of their own.
            A node of a function's body has the same at all places that call the function, since the file has room for one.
        conflicts: Such nodes for which the rules wanted different ids.
    """

    assignment: Assignment
    remarks: tuple[Remark, ...]
    streams: int
    ids: Ints
    conflicts: tuple[Conflict, ...] = ()


def assign(
    flat: FlatGraph,
    costs: Costs,
    ruleset: RuleSet,
    *,
    streams: int | None = None,
    wrap: bool = False,
    kernels: ChoosesKernels | None = None,
    by_hand: NDArray[np.bool_] | None = None,
) -> Outcome:
    """Apply the rules in order, the constraints among them once more at the end.

    Args:
        streams: Number of streams, instead of what the rule set says.
        wrap: Take ids modulo `streams`, as the forks do, instead of refusing those out of range, also where the rule set does not say so.
        kernels: Chooses larger kernels for the rule `auto`; None: it does without.
        by_hand: The nodes whose ids on the graph were set by hand and are kept by the rule `manual`; None: all that have one.

    Raises:
        AssignError: The rules contradict each other on this graph.
    """
    constraints = [rule for rule in ruleset.rules if _is_constraint(rule)]
    handles = any(getattr(rule, "handles", False) for rule in constraints)
    if streams is not None:
        streams = whole("the number of streams", streams, 1, MAX_STREAMS)
    context = Context(
        flat,
        costs,
        ruleset.streams if streams is None else streams,
        wrap=wrap or ruleset.wrap,
        kernels=kernels,
        handles=handles,
        by_hand=by_hand,
    )
    default = in_range(ruleset.default, context, "the default of the rule set", ruleset.source)
    assignment = Assignment.empty(len(flat))
    remarks: list[Remark] = []
    # A rule behind a constraint may break it, so constraints have the last word; and what is to choose by cost must know where they leave
    # what is placed already, or they would undo its choice.
    sequence: list[Rule] = []
    for rule in ruleset.rules:
        sequence += [*constraints, rule] if getattr(rule, "settles", False) else [rule]
    for rule in (*sequence, *constraints):
        before = assignment
        with phase(f"rule {rule.key}"):
            assignment, said = rule.apply(context, before)
            verify(before, assignment, rule, context)
        remarks.extend(remark for remark in said if remark not in remarks)
    ids = assignment.filled(default)
    ids[flat.host & (assignment.ids == UNASSIGNED)] = 0
    _, conflicts = to_ids(flat, np.where(flat.host, -1, ids).tolist(), costs.time_us.tolist())
    new_ids, new_reason = assignment.ids.copy(), assignment.reason.copy()
    for conflict in conflicts:
        (first, *_), *others = ([flat.graph.index[name] for name in names] for names in conflict.wanted.values())
        for per_node in (ids, new_ids, new_reason):
            per_node[[node for nodes in others for node in nodes]] = per_node[first]
    assignment = replace(assignment, ids=new_ids, reason=new_reason)
    return Outcome(assignment, tuple(remarks), context.streams, ids, conflicts)


def verify(before: Assignment, after: Assignment, rule: Rule, context: Context) -> None:
    """Checks what every rule promises: ids in range, a reason for each, claimed nodes untouched, host nodes left alone.

    A constraint may move claimed nodes.

    Raises:
        AssignError: The rule broke a promise, which is a bug in the rule.
    """
    count = len(context.flat)
    if after.ids.shape != (count,) or after.reason.shape != (count,):
        raise _broken(rule, f"it gave {len(after.ids)} ids for {count} nodes", None, context)
    claimed = after.ids != UNASSIGNED
    checks = [
        ("it gave an id out of range", claimed & ((after.ids < 0) | (after.ids >= context.streams))),
        ("it gave an id without a reason", claimed != (after.reason >= 0)),
        ("it gave a reason that is not there", after.reason >= len(after.reasons)),
    ]
    if not _is_constraint(rule):
        checks.append(("it moved a claimed node", (before.ids != UNASSIGNED) & (before.ids != after.ids)))
    if rule.key != "manual":
        checks.append(("it gave an id to a host node", context.flat.host & (before.ids != after.ids)))
    for what, wrong in checks:
        if wrong.any():
            raise _broken(rule, what, int(np.flatnonzero(wrong)[0]), context)


def _is_constraint(rule: Rule) -> bool:
    return bool(getattr(rule, "constraint", False))


def _broken(rule: Rule, what: str, node: int | None, context: Context) -> AssignError:
    where = None if node is None else f"node '{context.flat.graph.names[node]}'"
    return AssignError(
        f"rule '{rule.key}' is wrong: {what}", where=where, fix="please report this; leave the rule out meanwhile"
    )
