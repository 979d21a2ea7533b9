"""An event loop that works for a pool: it starts steps, looks whether they are over, and hands out answers.

Between two looks it serves what else there is, so requests that come meanwhile are read, and share the next step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter

from msplit.serving.pool.pool import Pool

PATIENCE = 0.02
"""Seconds after the last request for which a loop looks again and again; then it takes naps."""
NAP = 1e-3


@dataclass(slots=True)
class Driver:
    """Sets the running event loop working for a pool, until nothing is left to do."""

    pool: Pool
    _working: bool = False
    _since: float = 0.0

    def start(self) -> None:
        """There is something to do. Nothing happens where threads of the pool's own run its steps."""
        self._since = perf_counter()
        if not self._working and self.pool.polls:
            self._working = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._working = False  # should it fail, the next request tries again
        self._working = self.pool.drive()
        if not self._working:
            return
        loop = asyncio.get_running_loop()
        if perf_counter() - self._since < PATIENCE:
            loop.call_soon(self._turn)
        else:
            loop.call_later(NAP, self._turn)
