"""The rule `colocation`: nodes that belong together end on one stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from msplit.core.graph import UNASSIGNED, Assignment, Ints
from msplit.errors import AssignError
from msplit.rules.base import Remark, RuleContext, RuleOptions


@dataclass(frozen=True)
class Colocation:
    """Puts each group of nodes that must share a stream on the stream of the member that the earliest rule claimed, of several the first
    in the canonical order.

    Groups are colocation classes (``_class: loc:@x``), regions (v1 loops and conds, the users of a ref variable), variable handles with
    their users, what writes a variable, table or array with those of its users that no path orders, and nodes that TensorFlow's
    optimizer makes one of where their ids are equal, too: same op, attributes and inputs, no effect. A group of which nobody is claimed
    stays free.

    This rule is a constraint: it may move nodes that other rules claimed, and it is applied once more after the last rule.

    Attributes:
        handles: Whether a variable's handle and its readers and writers are a group. TensorFlow's logical devices need that; whoever puts
            two readers of one variable on two streams by hand turns it off.
    """

    key: ClassVar[str] = "colocation"
    constraint: ClassVar[bool] = True
    handles: bool = True

    @classmethod
    def from_options(cls, options: RuleOptions) -> Colocation:
        """Read the options of the rule from YAML."""
        return cls(options.flag("handles", cls.handles))

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Move the members of each group to one stream.

        Raises:
            AssignError: Two members of a group have different ids on the graph.
        """
        of = context.tied if self.handles == context.handles else context.together(self.handles)
        members = np.flatnonzero((of >= 0) & ~context.flat.host)
        claimed = members[assignment.ids[members] != UNASSIGNED]
        if len(claimed) == 0:
            return assignment, ()
        # The place of a node's rule in the order of the rules.
        number: dict[str, int] = {}
        of_reason = np.asarray([number.setdefault(rule, len(number)) for rule, _ in assignment.reasons], np.int32)
        rank = of_reason[assignment.reason[claimed]]
        place = np.empty(len(context.flat), np.int32)
        place[context.order_after(assignment)] = np.arange(len(context.flat), dtype=np.int32)
        claimed = claimed[np.lexsort((place[claimed], rank, of[claimed]))]
        self._refuse_two_manual_ids(claimed, of, assignment, context)
        winning_groups, first = np.unique(of[claimed], return_index=True)
        winner = np.full(int(of.max()) + 1, -1, np.int32)
        winner[winning_groups] = claimed[first]
        following = members[winner[of[members]] >= 0].astype(np.int32)
        leaders = winner[of[following]]
        moved = assignment.ids[following] != assignment.ids[leaders]
        return _follow(assignment, following[moved], leaders[moved], context)

    def _refuse_two_manual_ids(self, claimed: Ints, of: Ints, assignment: Assignment, context: RuleContext) -> None:
        manual = np.asarray([rule == "manual" for rule, _ in assignment.reasons], bool)
        fixed = claimed[manual[assignment.reason[claimed]]]
        same_group = of[fixed[1:]] == of[fixed[:-1]]
        clash = np.flatnonzero(same_group & (assignment.ids[fixed[1:]] != assignment.ids[fixed[:-1]]))
        if len(clash) == 0:
            return
        one, other = int(fixed[clash[0]]), int(fixed[clash[0] + 1])
        names, ids = context.flat.graph.names, assignment.ids
        raise AssignError(
            f"nodes '{names[one]}' (stream {ids[one]}) and '{names[other]}' (stream {ids[other]}) must share a stream, "
            "but have different ids on the graph: they are tied by a colocation class, a loop or cond, a variable, or state "
            "that both use and nothing orders",
            where=f"node '{names[other]}'",
            fix="give both the same id; for two readers of one variable, `colocation: {handles: false}` allows two ids",
        )


def _follow(
    assignment: Assignment, nodes: Ints, leaders: Ints, context: RuleContext
) -> tuple[Assignment, tuple[Remark, ...]]:
    if len(nodes) == 0:
        return assignment, ()
    names = context.flat.graph.names
    ids, reason, reasons = assignment.ids.copy(), assignment.reason.copy(), list(assignment.reasons)
    numbers: dict[int, int] = {}
    for leader in leaders.tolist():
        if leader not in numbers:
            numbers[leader] = len(reasons)
            rule = assignment.reasons[assignment.reason[leader]][0]
            reasons.append(("colocation", f"must share a stream with '{names[leader]}', which {rule} put on this one"))
    ids[nodes] = ids[leaders]
    reason[nodes] = [numbers[leader] for leader in leaders.tolist()]
    # What merely followed its neighbours may follow its group without a word.
    decided = [node for node in nodes.tolist() if (why := assignment.why(node)) and why[0] != "propagate"]
    remarks = []
    if decided:
        node = decided[0]
        text = (
            f"{len(decided)} node{'s' * (len(decided) != 1)} moved to the stream of the nodes they belong to, such as '{names[node]}' "
            f"from stream {assignment.ids[node]} to {ids[node]}"
        )
        remarks.append(Remark("colocation", "moved", text, f"node '{names[node]}'"))
    return Assignment(ids, reason, tuple(reasons)), tuple(remarks)
