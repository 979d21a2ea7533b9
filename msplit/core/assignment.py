"""Node -> stream id, with the rule that decided each. Immutable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from msplit.core.graph import Ints

UNASSIGNED = -1


@dataclass(frozen=True, eq=False)
class Assignment:
    """Stream ids of the nodes of one flat graph.

    Attributes:
        ids: Per node its stream id, or UNASSIGNED.
        reason: Per node an index into `reasons`, or -1 where no rule claimed it.
        reasons: (rule key, why in words), such as ``("embedding", "lookup of table 'user/emb' (2.4 MB)")``.
    """

    ids: Ints
    reason: Ints
    reasons: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def empty(count: int) -> Assignment:
        """No node is assigned."""
        return Assignment(np.full(count, UNASSIGNED, np.int32), np.full(count, -1, np.int32))

    def claim(self, nodes: Ints, ids: Ints | int, rule: str, why: str, *, override: bool = False) -> Assignment:
        """A copy in which `nodes` have `ids`. Nodes that are claimed already keep theirs, unless `override`."""
        nodes = np.asarray(nodes, dtype=np.int32)
        wanted = np.broadcast_to(np.asarray(ids, dtype=np.int32), nodes.shape)
        if not override:
            free = self.ids[nodes] == UNASSIGNED
            nodes, wanted = nodes[free], wanted[free]
        if len(nodes) == 0:
            return self
        new_ids, new_reason = self.ids.copy(), self.reason.copy()
        new_ids[nodes] = wanted
        new_reason[nodes] = len(self.reasons)
        return Assignment(new_ids, new_reason, (*self.reasons, (rule, why)))

    def claim_many(self, claims: list[tuple[Ints, int, str]], rule: str) -> Assignment:
        """Like `claim` for many groups (nodes, id, why) at once: one copy instead of one per group. Earlier groups win."""
        new_ids, new_reason, reasons = self.ids.copy(), self.reason.copy(), list(self.reasons)
        for nodes, stream, why in claims:
            free = nodes[new_ids[nodes] == UNASSIGNED]
            if len(free):
                new_ids[free] = stream
                new_reason[free] = len(reasons)
                reasons.append((rule, why))
        return Assignment(new_ids, new_reason, tuple(reasons))

    def why(self, node: int) -> tuple[str, str] | None:
        """The rule that decided a node's stream and its reason, or None where no rule did."""
        reason = int(self.reason[node])
        return self.reasons[reason] if reason >= 0 else None

    def filled(self, default: int = 0) -> Ints:
        """The ids with unassigned nodes on the default stream."""
        return np.where(self.ids == UNASSIGNED, np.int32(default), self.ids).astype(np.int32)
