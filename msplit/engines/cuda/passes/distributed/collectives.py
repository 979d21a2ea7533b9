"""Collectives of a step: what processes exchange, side by side in as few messages as can be, in an order that all of them share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from msplit.engines.cuda.ir.graph import Key, OpGraph, Shape

BUCKET = 8 << 20
"""Bytes after which an all-reduce takes no more along: it begins while the rest is computed. Two H200 take 34 µs for 4 MB, 76 for 16."""


@dataclass(frozen=True)
class Said:
    """A value that is exchanged.

    Attributes:
        wave: How many exchanges what it is made of has behind it.
        place: Where it is made in the graph.
        gathered: Its rows are gathered; otherwise it is averaged.
        scaled: See `collectives.all_gather`.
    """

    key: Key
    wave: int
    place: int
    gathered: bool = False
    scaled: bool = False


def insert(
    graph: OpGraph, every: Sequence[Said], reads: dict[tuple[int, int], tuple[Key, bool]], ranks: int
) -> dict[tuple[Key, bool], Key]:
    """Adds the collectives, each behind the one before.

    Args:
        every: What is exchanged.
        reads: By op and slot what it reads instead: a value, and whether its rows are gathered.
        ranks: How many there are.

    Returns:
        What stands for each value, averaged or gathered.
    """
    made: dict[tuple[Key, bool], Key] = {}
    token: list[Key] = []
    readers = {what: number for (number, _), what in reversed(reads.items())}
    for bucket in _buckets(graph, every):
        first = bucket[0]
        near = graph.ops[first.key[0] if first.key[0] in graph.ops else readers[first.key, first.gathered]]
        attrs: dict[str, Any] = {"count": len(bucket)}
        if first.gathered:
            attrs |= {"ranks": ranks, "scaled": tuple(one.scaled for one in bucket)}
        name = "_AllGather" if first.gathered else "_AllReduce"
        number = graph.add(name, near, attrs, [*(one.key for one in bucket), *token]).node
        for port, one in enumerate(bucket):
            made[one.key, one.gathered] = number, port
            shape = _shape(graph, one.key)
            gathered = (shape[0] * ranks, *shape[1:]) if one.gathered else shape
            graph.describe((number, port), gathered, graph.dtype(one.key))
        token = [(number, len(bucket))]
        graph.describe(token[0], (0,), "uint8")
    return made


def _buckets(graph: OpGraph, every: Iterable[Said]) -> list[list[Said]]:
    """Buckets that go into one collective each, in the order in which they can run."""
    found: list[list[Said]] = []
    for _, wave in groupby(sorted(every, key=lambda one: (one.wave, one.place, one.key)), lambda one: one.wave):
        open_: dict[tuple[bool, str], list[Said]] = {}
        sizes: Counter[tuple[bool, str]] = Counter()
        for one in wave:
            kind = one.gathered, "" if one.gathered else str(graph.dtype(one.key))
            open_.setdefault(kind, []).append(one)
            sizes[kind] += math.prod(_shape(graph, one.key)) * (2 if "16" in str(graph.dtype(one.key)) else 4)
            if sizes[kind] >= BUCKET:
                found.append(open_.pop(kind))
                del sizes[kind]
        found += open_.values()
    return found


def _shape(graph: OpGraph, key: Key) -> Shape:
    shape = graph.shape(key)
    assert shape is not None  # what is exchanged is a number of the model's, or rows of it
    return shape
