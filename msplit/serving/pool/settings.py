"""Settings of a pool, and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msplit.core.arguments import listed, number, whole
from msplit.errors import MsplitError

AUTO = "auto"

MAX_GROUPS = 64
"""Most slots on a GPU: with more than 32, an H200 answers fewer requests than with 8."""

WORTH = 1.05
"""Least factor in requests per second for which more slots are taken."""

MAX_STEPS = 256
"""Default of the most steps that a request is run in."""


@dataclass(frozen=True)
class PoolSettings:
    """Settings of a pool: how many steps run at once, and how requests are joined to steps.

    Attributes:
        groups: Slots on each GPU, that is, the most steps that run there at once; ``auto`` chooses by measuring, with requests of the
            smallest batch.
        max_batch: Most rows of a step. Requests that wait are joined up to it, where rows are independent. 1: none are joined. None: the
            largest batch of a build; for a model, 64 where its rows are shown to be independent.
        batches: Buckets: numbers of rows to capture graphs for. A step is padded to the next larger one. None: 1, 4, 16, 64 … up to
            `max_batch`; for a build, those that it has.
        max_delay_us: Time that a step which is not full waits for more rows, in µs, as in Triton.
        priorities: Number of priority levels; 0 is the most urgent one. Each has slots of its own.
        max_queue: Most requests that may wait; further ones are refused (`errors.Busy`). 0: no limit.
        max_memory: Most bytes on each GPU for weights and all slots, of all processes together; None: as many as are free there.
        host_threads: Threads that run the host part of a model (strings, tables, parsing), and TensorFlow's sessions; None: one per slot,
            but none where the host part of the largest step takes less than 1 ms: the thread that starts a step runs it.
        workers: Processes on each GPU, each with slots of its own, and of a model with weights of its own; ``auto`` chooses by
            measuring, as of `groups`. None: one on each where there are several GPUs, else none, and steps run in the caller's process.
        retries: How often a request is run again whose process has ended; 0: it fails (`errors.ProcessLost`).
        max_rows: Most rows of a request. One of more rows than a step has is run in several steps. None: `MAX_STEPS` steps of the largest
            batch.
        lengths: Lengths of rows to capture graphs for, each for each of the buckets, of a model whose inputs leave their second dimension
            open: see `msplit.prepare`. A step has the next larger one. None: it has one length; a build has those that it has.
        latency_us: Most time that 99 of 100 requests may take, in µs, for what is ``auto``; None: three times that of a step.
    """

    groups: int | str = 4
    max_batch: int | None = None
    batches: Sequence[int] | None = None
    max_delay_us: float = 0.0
    priorities: int = 1
    max_queue: int = 0
    max_memory: int | None = None
    host_threads: int | None = None
    workers: int | str | None = None
    retries: int = 1
    max_rows: int | None = None
    latency_us: float | None = None
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.groups, str) and self.groups == AUTO):
            if isinstance(self.groups, str):
                raise MsplitError(f"there are no {self.groups!r} groups", fix="give a number of slots, or auto")
            whole("the number of groups", self.groups, 1, MAX_GROUPS)
        batches = () if self.batches is None else listed("batches", self.batches)
        lengths = () if self.lengths is None else listed("lengths", self.lengths)
        object.__setattr__(self, "batches", batches or None)
        object.__setattr__(self, "lengths", lengths or None)
        least = {"max_batch": 1, "priorities": 1, "max_queue": 0, "max_memory": 1, "host_threads": 1}
        least |= {"retries": 0, "max_rows": 1}
        if self.workers not in (None, AUTO):
            whole("the number of workers", self.workers, 1, MAX_GROUPS)
        for name, low in least.items():
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), low)
        for batch in batches:
            whole("a batch", batch, 1)
        for length in lengths:
            whole("a length", length, 1)
        for name in ("max_delay_us", "latency_us"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))

    def level_of(self, number: int, count: int) -> int:
        """Priority level of one of so many slots: the later ones are for less urgent requests."""
        return number * self.priorities // count


@dataclass(frozen=True)
class Stats:
    """Counts of a pool since it was opened.

    Attributes:
        requests: Requests that it took. One that is run in several steps counts once for each of them, here and below.
        answered: Requests that got outputs.
        failed: Requests that got an error of the engine, or none since the pool was closed.
        timed_out: Requests that waited too long, and were not run.
        cancelled: Requests that were cancelled while they waited.
        refused: Requests that it did not take, since too many waited.
        rows: Rows of all steps.
        filled: Rows of padding among them.
        steps: Steps that ran.
        table_rows_looked_up: Rows that were looked up in tables which stay in the host's memory. This and the next three are those of the
            tables since they were brought there, and up to the last time that rows came into the cache, up to 15 steps ago.
        table_rows_found: Those of them that the cache on the GPU had.
        table_rows_admitted: Rows that came into the cache.
        table_bus_bytes: Bytes of rows that came over the bus, those that came into the cache among them.
        table_cache_bytes: Memory of the GPU that the cache takes.
        host_table_bytes: Memory of the host that the tables take.
        mapped_table_bytes: As much of it is files, of which the processes of a host have one copy.
        waiting: Requests that wait now.
        in_flight: Steps that run now.
    """

    requests: int = 0
    answered: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    refused: int = 0
    rows: int = 0
    filled: int = 0
    steps: int = 0
    table_rows_looked_up: int = 0
    table_rows_found: int = 0
    table_rows_admitted: int = 0
    table_bus_bytes: int = 0
    table_cache_bytes: int = 0
    host_table_bytes: int = 0
    mapped_table_bytes: int = 0
    waiting: int = 0
    in_flight: int = 0

    @property
    def table_hit_rate(self) -> float | None:
        """Share of the rows looked up that the cache had; None where none were."""
        return self.table_rows_found / self.table_rows_looked_up if self.table_rows_looked_up else None


@dataclass(frozen=True)
class Tried:
    """A measurement of settings that were tried.

    Attributes:
        rate: Requests, or rows, per second.
        p99_us: 99th percentile of latency, µs.
        cost: What the settings take, such as the number of slots; less is better.
        settings: Settings.
    """

    rate: float
    p99_us: float
    cost: tuple[float, ...]
    settings: Any


def choose(tried: Sequence[Tried], bound: float | None) -> Tried | None:
    """Chooses, of the trials within a bound on latency (None: of all), the one that takes least for nearly the highest rate; None where
    none is within."""
    within = [one for one in tried if bound is None or one.p99_us <= bound]
    most = max((one.rate for one in within), default=0.0)
    return min((one for one in within if one.rate * WORTH >= most), key=lambda one: one.cost, default=None)
