"""Sets of numbers that are joined step by step: union-find."""

from __future__ import annotations


class DisjointSets:
    """Each of 0..count-1 in a set of its own at first. The smallest number of a set stands for it.

    Near-linear in what is asked: paths are halved on the way (Tarjan and van Leeuwen, 1984).
    """

    __slots__ = ("_leader",)

    def __init__(self, count: int) -> None:
        self._leader = list(range(count))

    def find(self, number: int) -> int:
        """The smallest number of the set that a number is in."""
        leader = self._leader
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    def join(self, one: int, other: int) -> None:
        """Makes the sets of two numbers one."""
        first, second = self.find(one), self.find(other)
        self._leader[max(first, second)] = min(first, second)
