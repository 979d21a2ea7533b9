"""Maximum matching in a bipartite graph whose adjacency is given as bit sets."""

from __future__ import annotations

from collections.abc import Sequence


def maximum_matching(rows: Sequence[int], right: int) -> list[int]:
    """Matches as many left nodes as possible. O(√n) phases, each with one bit-set operation per node; no recursion.

    Source: Hopcroft and Karp, "An n^(5/2) algorithm for maximum matchings in bipartite graphs", SIAM J. Comput. 1973.

    Args:
        rows: Per left node a bit set of the right nodes that it may be matched with. The lowest are preferred.
        right: Number of right nodes.

    Returns:
        Per left node its right node, or -1.
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


def members(bits: int) -> list[int]:
    """The numbers in a bit set, ascending."""
    # Byte by byte: taking the lowest bit of a large integer costs its whole length.
    found = []
    for index, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        while byte:
            lowest = byte & -byte
            found.append(index * 8 + lowest.bit_length() - 1)
            byte ^= lowest
    return found
