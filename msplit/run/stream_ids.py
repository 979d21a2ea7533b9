"""Stream ids for each number of streams that a bench asks for: by rules, or those of the graph, folded where they are too many."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msplit import formats, rules
from msplit.assignment.assignment import assign, present_ids
from msplit.assignment.defaults import anew
from msplit.assignment.plans import with_kernels
from msplit.core.graph import Ints
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.rules.auto import PLAIN
from msplit.run.request import RunRequest
from msplit.run.setup import StreamIds, plural
from msplit.shapes import Shapes


def assignments_for(
    flat: FlatGraph, sizes: Shapes, costs: Costs, request: RunRequest
) -> tuple[list[StreamIds], list[str]]:
    """Ids for each number of streams asked for, 1 left out, and what to tell the user."""
    wanted = sorted({streams for streams in request.streams if streams > 1})
    notes: list[str] = []
    found: list[StreamIds] = []
    annotated = bool(flat.graph.nodes_with(formats.STREAM_ID))
    if request.ruleset is None and annotated:
        ids = present_ids(flat)
        highest = int(ids.max(initial=0)) + 1
        used = plural(len(np.unique(ids)), "stream")
        notes.append(f"the graph runs as it is annotated, on {used}; --rules assigns anew")
        for streams in sorted({min(streams, highest) for streams in wanted} or {highest}):
            folded = fold_ids(ids, costs.time_us, streams)
            if folded.note:
                notes.append(folded.note)
            found.append(StreamIds(folded.streams, folded.ids))
        return found, notes
    name = request.ruleset or rules.STANDARD
    for streams in wanted:
        ruleset = with_kernels(rules.load(name, streams=streams), PLAIN)
        if annotated:
            ruleset = anew(ruleset, flat)
        assigned = assign(flat, ruleset, streams=streams, priced=(sizes, costs))
        found.append(StreamIds(streams, assigned.ids, assigned.outcome.assignment))
    in_place = ", in place of the ids in the file" if annotated else ""
    notes.append(f"streams are assigned by the rule set {name}{in_place}")
    return found, notes


@dataclass(frozen=True, eq=False)
class Folded:
    """Stream id per node, on at most as many streams as were asked for. `note` says what was done, "" where nothing was."""

    ids: Ints
    streams: int
    note: str = ""


def fold_ids(ids: Ints, costs_time: NDArray[np.float64], streams: int) -> Folded:
    """Packs ids onto fewer streams so that their loads are even: the most loaded id first, each to the least loaded stream.

    Longest processing time first (Graham 1969), by the time of each node in any unit. Id 0 stays on stream 0. An assignment with few
    enough ids stays as it is.

    Raises:
        ValueError: `streams` is not positive.
    """
    if streams < 1:
        raise ValueError(f"streams must be at least 1, not {streams}")
    used = np.unique(ids)
    highest = int(used[-1]) + 1 if len(used) else 1
    if highest <= streams:
        return Folded(ids, highest)
    number = np.searchsorted(used, ids)
    # Nodes that cost nothing still count a little, so that ids of an unknown graph spread.
    load = np.bincount(number, weights=np.maximum(costs_time, 0.0), minlength=len(used))
    nodes = np.bincount(number, minlength=len(used))
    order = sorted(range(len(used)), key=lambda i: (-load[i], -nodes[i], int(used[i])))
    total = np.zeros(streams)
    count = np.zeros(streams, dtype=np.int64)
    target = np.zeros(len(used), dtype=np.int32)
    for i in order:
        stream = min(range(streams), key=lambda s: (total[s], count[s], s))
        target[i] = stream
        total[stream] += load[i]
        count[stream] += nodes[i]
    if used[0] == 0 and target[0] != 0:
        home = int(target[0])
        target = np.where(target == home, 0, np.where(target == 0, home, target)).astype(np.int32)
    note = f"the graph uses {len(used)} stream ids up to {highest - 1}; they are folded onto {streams} by load"
    return Folded(target[number].astype(np.int32), int(target.max()) + 1, note)
