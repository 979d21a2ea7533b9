"""Threads that train together, as the processes of several GPUs do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from msplit.engines.base import Job
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.device.ranks import Ranks, uses_symmetric_memory
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import Shards

Feeds = Mapping[str, np.ndarray]
PATIENCE = 60.0


class Thread:
    """One of several threads: see `device.ranks.ProcessGroup`. What it says comes behind what it said, or the others wait in vain."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._said, self._barrier = rank, said, barrier

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._said[self.rank] = tensor.clone()
        self._barrier.wait(PATIENCE)
        every = list(self._said)
        self._barrier.wait(PATIENCE)
        assert len({(one.shape, one.dtype) for one in every}) == 1
        return every

    def room(self, like: torch.Tensor, size: int, message: int, *, by_rank: bool = False) -> torch.Tensor:
        return like.new_empty(size)

    def read(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        return [one.clone() for one in self._all(flat)] if uses_symmetric_memory() else None

    def wait(self, place: torch.device) -> None:
        self._barrier.wait(PATIENCE)

    def average(self, flat: torch.Tensor) -> None:
        flat.copy_(torch.stack(self._all(flat)).mean(0))

    def gather(self, every: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        for to, one in zip(every, own, strict=True):
            to.copy_(torch.cat(self._all(one)))

    def spread(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._all(tensor)[0])


def part(feeds: Feeds, shards: Shards, rank: int) -> dict[str, np.ndarray]:
    """The rows of one of them."""
    return {
        name: np.array_split(value, shards.count)[rank] if name in shards.inputs else value
        for name, value in feeds.items()
    }


def together(
    job_of: Callable[[Feeds], Job], batches: Sequence[Feeds], shards: Shards, state: Feeds
) -> tuple[list[list[dict[str, np.ndarray]]], list[Feeds]]:
    """What the steps of each of several threads give, and its variables afterwards. The values of the first one's hold to begin with."""
    barrier, said = threading.Barrier(shards.count), [None] * shards.count
    talking = Device.of(torch.device("cpu")).owned(Ranks).talking

    def train(rank: int) -> tuple[list[dict[str, np.ndarray]], Feeds]:
        job = job_of(part(batches[0], shards, rank))
        executable = ENGINE.build(replace(job, options=replace(job.options, shards=shards)))
        executable.load_state({name: value if rank == 0 else value * 0 for name, value in state.items()})
        try:
            with talking(Thread(rank, said, barrier)):
                executable.join()
                return [executable.step(part(feeds, shards, rank)) for feeds in batches], executable.save_state()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(shards.count) as pool:
        found = list(pool.map(train, range(shards.count)))
    return [outputs for outputs, _ in found], [after for _, after in found]
