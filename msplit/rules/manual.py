"""The rule `manual`: ids that are on the graph already stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from msplit.core.graph import Assignment
from msplit.errors import AssignError
from msplit.formats.model import STREAM_ID
from msplit.rules.base import Remark, RuleContext, RuleOptions, in_range


@dataclass(frozen=True)
class Manual:
    """Keeps the ids that `msplit.stream`, `tf.stream` or `tf.cuda.stream_scope` put on nodes. It has no options.

    Ids that msplit's own rules have put there earlier are not set by hand; `RuleContext.by_hand` tells them apart.
    """

    key: ClassVar[str] = "manual"

    @classmethod
    def from_options(cls, options: RuleOptions) -> Manual:
        """Read the options of the rule from YAML."""
        return cls()

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim the nodes that have an id, as far as it was set by hand.

        A host node keeps its id too, and a remark says that it has no effect.

        Raises:
            AssignError: An id is out of range, or is not an integer.
        """
        graph = context.flat.graph
        names = graph.names
        groups: dict[int, list[int]] = {}
        for node in graph.nodes_with(STREAM_ID):
            if context.by_hand is not None and not context.by_hand[node]:
                continue
            value = graph.attrs[node].get(STREAM_ID)
            if not isinstance(value, int) or isinstance(value, bool):
                raise AssignError(
                    f"its `{STREAM_ID}` is not an integer",
                    where=f"node '{names[node]}'",
                    fix=f"set `{STREAM_ID}` with type `i`, or remove it",
                )
            groups.setdefault(value, []).append(node)
        remarks = []
        claims = []
        for value, members in sorted(groups.items()):
            stream = in_range(value, context, f"node '{names[members[0]]}'{_more(members)}")
            why = f"`{STREAM_ID}` is {value} on the graph"
            if stream != value:
                why = f"{why}, which is {stream} modulo {context.streams}"
                remarks.append(Remark(self.key, "wrapped", f"id {value} was taken as {stream}", _where(names, members)))
            claims.append((np.asarray(members, np.int32), stream, why))
        hosts = [node for members in groups.values() for node in members if context.flat.host[node]]
        if hosts:
            text = f"{len(hosts)} host node{'s have ids' if len(hosts) > 1 else ' has an id'}, which has no effect: they run on the CPU"
            remarks.append(Remark(self.key, "host", text, _where(names, [min(hosts)])))
        return assignment.claim_many(claims, self.key), tuple(remarks)


def _more(members: list[int]) -> str:
    return f" (and {len(members) - 1} more)" if len(members) > 1 else ""


def _where(names: Sequence[str], members: list[int]) -> str:
    return f"node '{names[members[0]]}'{_more(members)}"
