"""The rule `propagate`: unclaimed nodes follow their producers or consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from msplit.analysis.branches import finish_times
from msplit.core.graph import CONTROL, UNASSIGNED, Assignment, Graph
from msplit.rules.base import Remark, RuleContext, RuleOptions


@dataclass(frozen=True)
class Propagate:
    """NVIDIA's forward propagation made deterministic. It has no options.

    A node without an id takes the stream of the input that finishes last, data inputs before control inputs and lower slots first where
    several finish together. Where no input has an id, but all consumers have the same one, it takes theirs. Host nodes have no part in it.
    """

    key: ClassVar[str] = "propagate"

    @classmethod
    def from_options(cls, options: RuleOptions) -> Propagate:
        """Read the options of the rule from YAML."""
        return cls()

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim what has a claimed neighbour."""
        graph, host = context.flat.graph, context.flat.host
        seen = np.where(host, UNASSIGNED, assignment.ids)
        if not np.any(seen != UNASSIGNED):
            return assignment, ()
        ids: list[int] = seen.tolist()
        order = graph.topological
        finish = finish_times(graph, context.costs.time_us).tolist()
        waiting = order[((seen == UNASSIGNED) & ~host)[order]].tolist()
        by_inputs = _forward(graph, waiting, ids, finish)
        rest = [node for node in reversed(waiting) if ids[node] == UNASSIGNED]
        # What this settles has settled consumers only, so that another pass forward would find nothing.
        by_consumers = _backward(graph, rest, ids, host.tolist())
        final = np.asarray(ids, np.int32)
        for nodes, why in (
            (by_inputs, "follows the input that finishes last"),
            (by_consumers, "all its consumers are on this stream"),
        ):
            claimed = np.asarray(sorted(nodes), np.int32)
            assignment = assignment.claim(claimed, final[claimed], self.key, why)
        return assignment, ()


def _forward(graph: Graph, waiting: list[int], ids: list[int], finish: list[float]) -> list[int]:
    starts, sources, slots = graph.in_start.tolist(), graph.edges.src.tolist(), graph.edges.slot.tolist()
    done = []
    for node in waiting:
        best, by_control = -1.0, False
        for edge in range(starts[node], starts[node + 1]):
            stream = ids[sources[edge]]
            if stream == UNASSIGNED:
                continue
            end = finish[sources[edge]]
            # Control inputs have no order of their own, so that the lowest stream decides between them.
            if end > best or (end == best and slots[edge] == CONTROL and by_control and stream < ids[node]):
                best, by_control = end, slots[edge] == CONTROL
                ids[node] = stream
        if best >= 0.0:
            done.append(node)
    return done


def _backward(graph: Graph, waiting: list[int], ids: list[int], host: list[bool]) -> list[int]:
    starts, targets = graph.out_start.tolist(), graph.out_dst.tolist()
    done = []
    for node in waiting:
        streams = {ids[target] for target in targets[starts[node] : starts[node + 1]] if not host[target]}
        if len(streams) == 1 and UNASSIGNED not in streams:
            ids[node] = streams.pop()
            done.append(node)
    return done
