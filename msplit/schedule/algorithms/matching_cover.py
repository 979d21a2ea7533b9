"""Minimum path cover by maximum matching, paths merged afterwards."""

from __future__ import annotations

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.base import Skipped
from msplit.schedule.algorithms.matching import maximum_matching
from msplit.schedule.closure import LARGEST, ancestors, transitive_reduction
from msplit.schedule.problem import Problem


def matching_cover(problem: Problem, streams: int) -> Ints:
    """Covers the transitive reduction with the fewest vertex-disjoint paths, then merges paths of which one ends before the other begins.

    The first matching gives the most concurrency with the fewest waits; the second, on the closure, the fewest streams with the same
    concurrency. Both by Hopcroft and Karp. Knows no costs; among equal matchings the one found prefers the consumer with the longest
    path to the end. Quadratic: skipped above `closure.LARGEST` blocks.

    Source: Kwon, Yu, Jeong and Chun, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", NeurIPS 2020
    (https://arxiv.org/abs/2012.02732), and the second pass of its code (https://github.com/snuspl/nimble). DeepRec plans the same rule
    for whole graphs (https://github.com/DeepRec-AI/DeepRec/pull/550).
    """
    count = len(problem)
    if count > LARGEST:
        raise Skipped(f"the transitive reduction is made for up to {LARGEST:,} blocks, there are {count:,}")
    above = ancestors(problem.dag)
    reduced = transitive_reduction(problem.dag, above)
    urgency = np.argsort(
        np.argsort(-problem.rank, kind="stable"), kind="stable"
    ).tolist()  # 0 has the longest path to the end
    by_urgency = np.argsort(urgency).tolist()
    rows = [0] * count
    for producer, consumer in zip(reduced.src.tolist(), reduced.dst().tolist(), strict=True):
        rows[producer] |= 1 << urgency[consumer]
    match = [by_urgency[other] if other >= 0 else -1 for other in maximum_matching(rows, count)]
    path, heads, tails = _paths(match)
    merged, _, _ = _paths(maximum_matching(_successions(heads, tails, above, count), len(heads)))
    return np.asarray([merged[number] for number in path], np.int32)


def _paths(match: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Path of each node, and the first and the last node of each path, paths numbered by their first nodes."""
    matched = set(match)
    path = [-1] * len(match)
    heads: list[int] = []
    tails: list[int] = []
    for node in range(len(match)):
        if node in matched:
            continue
        last = step = node
        while step >= 0:
            path[step] = len(heads)
            last, step = step, match[step]
        heads.append(node)
        tails.append(last)
    return path, heads, tails


def _successions(heads: list[int], tails: list[int], above: list[int], count: int) -> list[int]:
    """Per path those that can follow it on its stream, as a bit set: their first node comes after its last."""
    paths, width = len(heads), (count + 7) // 8
    follows = np.zeros(
        ((paths + 7) // 8, paths), np.uint8
    )  # bit (later path, earlier path), eight later ones to a byte
    for low in range(0, paths, 1024):
        block = b"".join(above[head].to_bytes(width, "little") for head in heads[low : low + 1024])
        before = np.frombuffer(block, np.uint8).reshape(-1, width)
        bits = before[:, np.asarray(tails) // 8] >> (np.asarray(tails) % 8).astype(np.uint8) & 1
        packed = np.packbits(bits, axis=0, bitorder="little")
        follows[low // 8 : low // 8 + len(packed)] = packed
    return [int.from_bytes(column.tobytes(), "little") for column in follows.T]
