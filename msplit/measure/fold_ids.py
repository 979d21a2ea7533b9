"""Folds an assignment onto fewer streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import Ints


@dataclass(frozen=True, eq=False)
class Folded:
    """An assignment on at most as many streams as were asked for.

    Attributes:
        ids: Stream id per node.
        streams: How many streams it uses.
        moved: Stream by former id, empty where nothing was folded.
        note: What was done, in words; "" where nothing was.
    """

    ids: Ints
    streams: int
    moved: Mapping[int, int] = field(default_factory=dict)
    note: str = ""


def fold_ids(ids: Ints, costs_time: NDArray[np.float64], streams: int) -> Folded:
    """Packs ids onto fewer streams so that their loads are even: the most loaded id first, each to the least loaded stream.

    Longest processing time first (Graham 1969). Id 0 stays on stream 0. An assignment with few enough ids stays as it is.

    Args:
        ids: Stream id per node.
        costs_time: Time per node, any unit.
        streams: How many streams there may be.

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
    moved = {int(old): int(new) for old, new in zip(used, target, strict=True)}
    note = f"the graph uses {len(used)} stream ids up to {highest - 1}; they are folded onto {streams} by load"
    return Folded(target[number].astype(np.int32), int(target.max()) + 1, moved, note)
