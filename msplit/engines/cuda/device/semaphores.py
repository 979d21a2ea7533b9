"""Counters by which the blocks of a split-K kernel find out which of them is done last.

Each launch has counters of its own, since any two of them may run at once. They begin at zero, and the last block puts them back. A
launch in a captured graph runs again and again on the same counters, and nothing tells when its graph is gone: they are handed out once and
for all, from a supply that lasts for thousands of graphs. Those of graphs that are only timed are taken back (`lent`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SUPPLY = 1 << 22
"""Counters of a device: 16 MiB."""

_ALIGNED = 4
"""Counters in 16 bytes: a kernel is compiled anew for a pointer that is not a multiple of them."""


class Semaphores:
    """The counters of one device.

    Attributes:
        supply: All of them, made before the first capture that may need some.
        taken: How many are handed out.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self.supply: torch.Tensor | None = None
        self.taken = 0

    def take(self, count: int) -> torch.Tensor | None:
        """Counters at zero for one launch on the current stream, captured or not; None where there are no more.

        Outside of captures they are made for the launch, which takes a kernel more: that is what runs step by step, to look for faults.
        """
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            if self._place.type == "cuda" and self.supply is None:
                self.supply = torch.zeros(SUPPLY, dtype=torch.int32, device=self._place)
                torch.cuda.synchronize(self._place)
            return torch.zeros(count, dtype=torch.int32, device=self._place)
        count += -count % _ALIGNED
        if self.supply is None or self.taken + count > SUPPLY:
            return None
        self.taken += count
        return self.supply[self.taken - count : self.taken]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """What is taken inside is free again afterwards: for graphs that do not outlive this, and of which one runs at a time."""
        before = self.taken
        try:
            yield
        finally:
            self.taken = before
