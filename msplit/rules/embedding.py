"""The rule `embedding`: lookups of embedding tables spread over streams."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast, get_args

import numpy as np

from msplit.analysis.embeddings import Column, columns, default_ops
from msplit.core.arguments import MAX_STREAMS
from msplit.core.graph import UNASSIGNED, Assignment
from msplit.rules.base import Remark, RuleContext, RuleOptions

Balance = Literal["bytes", "cost", "count"]

_DIGITS = 9
"""Weights are compared to this many digits, so that the order of a sum does not decide."""


@dataclass(frozen=True)
class Embedding:
    """Packs embedding columns (see `analysis.embeddings`) on streams, the largest first, each on the stream with the least so far.

    DeepRec's rule deals columns out in turn; the classic list scheduling by longest processing time (Graham, 1969) is at most a third
    worse than the best packing.

    Attributes:
        balance: What is made equal: "bytes" (memory traffic of a column's kernels), "cost" (their time) or "count" (columns).
        streams: How many streams to use; 0 for all.
        include_zero: Whether stream 0 is one of them.
        min_cost_us: Time that a stream's columns must take to be worth a stream, µs.
        ops: More gather-like ops, with the slot of their table.
    """

    key: ClassVar[str] = "embedding"
    balance: Balance = "bytes"
    streams: int = 0
    include_zero: bool = True
    min_cost_us: float = 5.0
    ops: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def from_options(cls, options: RuleOptions) -> Embedding:
        """Read the options of the rule from YAML."""
        extra = options.mapping("ops")
        return cls(
            balance=cast(Balance, options.choice("balance", cls.balance, get_args(Balance))),
            streams=options.integer("streams", cls.streams, 0, MAX_STREAMS),
            include_zero=options.flag("include_zero", cls.include_zero),
            min_cost_us=options.number("min_cost_us", cls.min_cost_us, 0.0),
            ops={str(op): extra.integer(op, 0, 0, 1000) for op in extra.names()} if extra else {},
        )

    def apply(self, context: RuleContext, assignment: Assignment) -> tuple[Assignment, tuple[Remark, ...]]:
        """Claim the nodes of the columns."""
        flat = context.flat
        found = columns(flat, context.costs, default_ops().extended(self.ops), side_us=self.min_cost_us)
        if not found:
            return assignment, (Remark(self.key, "no-match", "no lookup of an embedding table was found"),)
        remarks = tuple(_left_out(column) for column in found if column.dominant)
        targets = self._targets(context.streams, sum(column.time_us for column in found))
        if len(found) < 2 or len(targets) < 2:
            reason = "the columns take less time than a wait"
            if len(found) < 2:
                reason = "there is only one embedding column"
            elif context.streams < 2 or targets:
                reason = "there is only one stream to use"
            return assignment, (*remarks, Remark(self.key, "no-gain", f"{reason}: nothing to spread"))
        streams = self._pack(found, targets, context, assignment)
        claims = [
            (column.nodes[~flat.host[column.nodes]], stream, _why(column))
            for column, stream in zip(found, streams, strict=True)
        ]
        return assignment.claim_many(claims, self.key), remarks

    def _targets(self, streams: int, time_us: float) -> list[int]:
        """The streams to fill: no more than the columns are worth."""
        targets = list(range(0 if self.include_zero else 1, streams))
        if self.streams:
            targets = targets[: self.streams]
        if self.min_cost_us > 0:
            targets = targets[: int(time_us // self.min_cost_us)]
        return targets

    def _pack(
        self, found: tuple[Column, ...], targets: list[int], context: RuleContext, assignment: Assignment
    ) -> list[int]:
        place = np.empty(len(context.flat), np.int64)
        place[context.order_after(assignment)] = np.arange(len(context.flat))
        weights = [float(f"{self._weight(column):.{_DIGITS}g}") for column in found]
        # A column that an earlier rule placed, by one of its lookups, stays together there.
        streams = [
            next(
                (s for s in assignment.ids[[lookup.node for lookup in column.lookups]].tolist() if s != UNASSIGNED),
                UNASSIGNED,
            )
            for column in found
        ]
        load = dict.fromkeys(targets, 0.0)
        for weight, stream in zip(weights, streams, strict=True):
            if stream in load:
                load[stream] += weight
        least = [(total, stream) for stream, total in load.items()]
        heapq.heapify(least)
        free = [number for number, stream in enumerate(streams) if stream == UNASSIGNED]
        for number in sorted(free, key=lambda number: (-weights[number], place[found[number].lookups[0].node])):
            total, streams[number] = least[0]
            heapq.heapreplace(least, (total + weights[number], streams[number]))
        return streams

    def _weight(self, column: Column) -> float:
        return {"bytes": column.bytes, "cost": column.time_us, "count": 1.0}[self.balance]


def _why(column: Column) -> str:
    tables = list(dict.fromkeys(lookup.table for lookup in column.lookups))
    size = sum(table.bytes for table in tables)
    shown = f" ({size / 1e6:.1f} MB)" if size >= 1e6 else f" ({size / 1e3:.1f} kB)" if size else ""
    if len(tables) == 1:
        return f"lookup of table '{tables[0].name}'{shown}"
    return f"lookups of {len(tables)} tables{shown}, '{tables[0].name}' first"


def _left_out(column: Column) -> Remark:
    name = column.lookups[0].table.name
    text = f"what follows the lookup of table '{name}' is more than half of the model's work and is left to other rules"
    return Remark(Embedding.key, "dominant", text, f"table '{name}'")
