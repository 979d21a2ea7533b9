"""How a pool answers requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msplit.core.arguments import listed, number, whole
from msplit.errors import MsplitError

AUTO = "auto"

MAX_GROUPS = 64
"""Arenas: beyond 32 in flight, an H200 answers fewer requests than with 8."""


@dataclass(frozen=True)
class PoolSettings:
    """How a pool answers requests.

    Attributes:
        groups: Arenas on each GPU: how many steps are in flight there at once; ``auto`` measures, with
            requests of the smallest batch.
        max_batch: Most rows of a step. Requests that wait are joined up to it, where rows are independent. 1 joins none. None: the
            largest batch of a build, and 64 for a model, where its rows are shown to be independent.
        batches: Numbers of rows to capture graphs for, filled up to the next larger one; None: 1, 4, 16, 64 … up to `max_batch`; of a
            build, those that it has.
        max_delay_us: How long a step that is not full waits for more rows, in µs, as in Triton.
        priorities: Levels of priority: 0 is the most urgent. Each has arenas of its own.
        max_queue: Most requests that may wait; further ones are refused (`errors.Busy`). 0: no limit.
        max_memory: Most bytes on each GPU for weights and all arenas; None: what is free there.
        host_threads: Threads that run the host part of a model (strings, tables, parsing), and TensorFlow's sessions; None: one per arena.
        latency_us: Of ``groups="auto"``: the most that 99 of 100 requests may take, in µs; None: three times a step.
    """

    groups: int | str = 4
    max_batch: int | None = None
    batches: Sequence[int] | None = None
    max_delay_us: float = 0.0
    priorities: int = 1
    max_queue: int = 0
    max_memory: int | None = None
    host_threads: int | None = None
    latency_us: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.groups, str) and self.groups == AUTO):
            if isinstance(self.groups, str):
                raise MsplitError(f"there are no {self.groups!r} groups", fix="give a number of arenas, or auto")
            whole("the number of groups", self.groups, 1, MAX_GROUPS)
        batches = () if self.batches is None else listed("batches", self.batches)
        object.__setattr__(self, "batches", batches or None)
        for name, value, low in (
            ("max_batch", self.max_batch, 1),
            ("priorities", self.priorities, 1),
            ("max_queue", self.max_queue, 0),
            ("max_memory", self.max_memory, 1),
            ("host_threads", self.host_threads, 1),
            *(("a batch", batch, 1) for batch in batches),
        ):
            if value is not None:
                whole(name, value, low)
        for name, time in (("max_delay_us", self.max_delay_us), ("latency_us", self.latency_us)):
            if time is not None:
                number(name, time)
