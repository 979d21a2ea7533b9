"""Which shipped rule set fits a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from msplit.analysis.embedding_columns import Column
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.opset.traits import VARIABLES, ops_with

_SHARE = 0.25
_MOST = 0.5
_VISION, _PRODUCTS = ops_with("vision"), ops_with("product")
_WEIGHTS = VARIABLES | {"Const"}
_READS = ops_with("reads weights")
_STEPS = 8


@dataclass(frozen=True)
class Suggestion:
    """The shipped rule set that fits a graph, and why. Whether streams help it at all is for `msplit.schedule.judge` to say."""

    rule_set: str
    why: str


def suggest(flat: FlatGraph, costs: Costs, columns: tuple[Column, ...]) -> Suggestion:
    """Chooses a rule set by what takes the time."""
    times = np.where(flat.host, 0.0, costs.time_us)
    work = float(times.sum())
    if work <= 0:
        return Suggestion("default", "No node launches a kernel.")
    lookups = sum(column.time_us for column in columns)
    if len(columns) > 1 and lookups >= _SHARE * work:
        return Suggestion("recsys", f"{len(columns)} embedding columns take {100 * lookups / work:.0f} % of the work.")
    ops = flat.graph.ops
    convolutions = sum(time for op, time in zip(ops, times.tolist(), strict=True) if op in _VISION)
    if convolutions >= _SHARE * work:
        return Suggestion("vision", f"Convolutions take {100 * convolutions / work:.0f} % of the work.")
    steps = _unrolled(flat)
    if steps:
        why = f"Most products share their weights with others, up to {steps} times: a recurrent network unrolled over time."
        return Suggestion("rnn", why)
    return Suggestion("default", "No kind of model stands out; the default rule set spreads all branches.")


def _unrolled(flat: FlatGraph) -> int:
    """How many products use one weight at most, if most products share theirs with at least `_STEPS`; otherwise 0."""
    graph = flat.graph
    weight_of: dict[int, int] = {}
    users: Counter[int] = Counter()
    products = 0
    for node in graph.topological.tolist():
        op = graph.ops[node]
        if op in _WEIGHTS:
            weight_of[node] = node
        elif op in _READS:
            producer = next(iter(graph.inputs(node)), (-1, 0))[0]
            if producer in weight_of:
                weight_of[node] = weight_of[producer]
        elif op in _PRODUCTS:
            products += 1
            for producer, _ in graph.inputs(node)[1:2]:
                if producer in weight_of:
                    users[weight_of[producer]] += 1
    often = [count for count in users.values() if count >= _STEPS]
    return max(often) if products and sum(often) >= _MOST * products else 0
