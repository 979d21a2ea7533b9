"""Streams as paths that cover the graph: greedily, and the fewest by maximum matching."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msplit.core.graph import Ints
from msplit.schedule.algorithms.list_schedule import Skipped, continued
from msplit.schedule.plan import places
from msplit.schedule.problem import LARGEST, Problem, ancestors, members, transitive_reduction


def greedy_cover(problem: Problem, streams: int) -> Ints:
    """Each block continues the stream of its first producer that no other block continues; where there is none it opens a stream.

    O(n + m), knows no costs, and opens as many streams as the greedy path cover has paths.

    Source: Chen, Wei, Hong, Xu and Liu, "Opara: Exploiting Operator Parallelism for Expediting DNN Inference on GPUs", IEEE
    Transactions on Computers 2025, algorithm 1 (https://arxiv.org/abs/2312.10351).
    """
    free = set(range(len(problem)))

    def take(producer: int) -> bool:
        there = producer in free
        free.discard(producer)
        return there

    return continued(problem, take, max(len(problem), 1))


def matching_cover(problem: Problem, streams: int) -> Ints:
    """Covers the transitive reduction with the fewest vertex-disjoint paths, then merges paths of which one ends before the other begins.

    The first matching gives the most concurrency with the fewest waits; the second, on the closure, the fewest streams with the same
    concurrency. Both by Hopcroft and Karp. Knows no costs; among equal matchings the one found prefers the consumer with the longest
    path to the end. Quadratic: skipped above `problem.LARGEST` blocks.

    Source: Kwon, Yu, Jeong and Chun, "Nimble: Lightweight and Parallel GPU Task Scheduling for Deep Learning", NeurIPS 2020
    (https://arxiv.org/abs/2012.02732), and the second pass of its code (https://github.com/snuspl/nimble). DeepRec plans the same rule
    for whole graphs (https://github.com/DeepRec-AI/DeepRec/pull/550).
    """
    count = len(problem)
    if count > LARGEST:
        raise Skipped(f"the transitive reduction is made for up to {LARGEST:,} blocks, there are {count:,}")
    above = ancestors(problem.dag)
    reduced = transitive_reduction(problem.dag, above)
    urgency, by_urgency = places(problem.rank)  # 0 has the longest path to the end
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
    # Bit (later path, earlier path), eight later ones to a byte.
    follows = np.zeros(((paths + 7) // 8, paths), np.uint8)
    for low in range(0, paths, 1024):
        block = b"".join(above[head].to_bytes(width, "little") for head in heads[low : low + 1024])
        before = np.frombuffer(block, np.uint8).reshape(-1, width)
        bits = before[:, np.asarray(tails) // 8] >> (np.asarray(tails) % 8).astype(np.uint8) & 1
        packed = np.packbits(bits, axis=0, bitorder="little")
        follows[low // 8 : low // 8 + len(packed)] = packed
    return [int.from_bytes(column.tobytes(), "little") for column in follows.T]


def maximum_matching(rows: Sequence[int], right: int) -> list[int]:
    """Matches as many left nodes as possible: per left node its right node, or -1.

    `rows` are per left node a bit set of those of the `right` nodes that it may be matched with; the lowest are preferred. O(√n) phases,
    each with one bit-set operation per node; no recursion.

    Source: Hopcroft and Karp, "An n^(5/2) algorithm for maximum matchings in bipartite graphs", SIAM J. Comput. 1973.
    """
    match = [-1] * len(rows)
    owner = [-1] * right
    free = (1 << right) - 1
    for node, row in enumerate(rows):
        if options := row & free:
            other = _lowest(options)
            match[node], owner[other] = other, node
            free ^= 1 << other
    while layers := _layers(rows, match, owner, free):
        for node in range(len(rows)):
            if match[node] < 0 and (end := _augment(node, rows, match, owner, free, layers)) >= 0:
                free ^= 1 << end
    return match


def _layers(rows: Sequence[int], match: list[int], owner: list[int], free: int) -> list[int]:
    """Right nodes by their distance from the free left nodes, up to the nearest free ones; empty if there are none to reach."""
    frontier = [node for node, other in enumerate(match) if other < 0 and rows[node]]
    unseen = (1 << len(owner)) - 1
    layers = []
    while frontier:
        reached = 0
        for node in frontier:
            reached |= rows[node] & unseen
        if not reached:
            return []
        unseen &= ~reached
        layers.append(reached)
        if reached & free:
            layers[-1] = reached & free
            return layers
        frontier = [owner[other] for other in members(reached)]
    return []


def _augment(root: int, rows: Sequence[int], match: list[int], owner: list[int], free: int, layers: list[int]) -> int:
    """Depth-first for one augmenting path. Each right node is tried once per phase: it leaves its layer. Returns its end, or -1."""
    path: list[int] = []
    taken: list[int] = []
    node = root
    while True:
        depth = len(path)
        options = rows[node] & layers[depth] if depth < len(layers) else 0
        if options:
            other = _lowest(options)
            layers[depth] ^= 1 << other
            path.append(node)
            taken.append(other)
            if free >> other & 1:
                for step, end in zip(path, taken, strict=True):
                    match[step], owner[end] = end, step
                return other
            node = owner[other]
        elif path:
            node = path.pop()
            taken.pop()
        else:
            return -1


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
