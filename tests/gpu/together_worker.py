"""One rank of `test_together`: python -m tests.gpu.together_worker MODEL OPTIMIZER FOLDER STEPS [two-shot | read]"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.device import ranks
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import KernelMode, Shards
from msplit.engines.cuda.passes.distributed import allreduce
from msplit.training.hosts import rank_of
from msplit.training.rendezvous import joined
from tests.engines.cuda.cases import options_of, scattered, step_then
from tests.engines.cuda.together import part
from tests.training_graphs import BATCH, stored

_BUSY_CYCLES = 500_000_000
"""Cycles, a quarter of a second, for which the default stream is busy when ranks join."""


def main(name: str, optimizer: str, folder: str, steps: str, way: str = "") -> None:
    if way:
        os.environ[ranks.SYMMETRIC] = "1"
        allreduce.READERS = 2 if way == "read" else 0
        usual, count = ranks._time, iter(range(100, 0, -1))
        ranks._time = lambda issue, flat: next(count) + 0 * usual(issue, flat)  # the last way wins
    flat, training = stored(name, optimizer, "resource")
    rank = rank_of(os.environ)
    assert rank is not None
    with joined(rank, on_gpu=True, tell=print) as world:
        if world.size == 1:  # NCCL with itself: what is captured is the same
            torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
        batches = [training.feeds(BATCH * world.size, step) for step in range(int(steps))]
        shards = Shards(world.size, tuple(batches[0]), is_open=False)
        own = [part(feeds, shards, world.rank) for feeds in batches]
        options = replace(options_of("cuda"), mode=KernelMode.FUSED_AND_GROUPED, shards=shards)
        job = Job(
            flat, scattered(flat, 4), 4, own[0], precision=Precision.IEEE, options=options, state=training.state()
        )
        executable = ENGINE.build(job)
        executable.load_state({key: value if world.rank == 0 else value * 0 for key, value in training.state().items()})
        torch.cuda._sleep(_BUSY_CYCLES)  # as where another process has the GPU: values of the first rank arrive late
        executable.join()
        rooms = Device.of(torch.device("cuda")).owned(ranks.Symmetric).rooms
        assert bool(rooms) == bool(way), rooms
        assert None not in rooms.values(), "no symmetric memory"
        assert any(room.by_rank for room in rooms.values() if room is not None) == (way == "read")
        following = [*own[1:], own[0]]
        losses = [float(step_then(executable, feeds, then)["loss"]) for feeds, then in zip(own, following, strict=True)]
        state = executable.save_state()
        executable.close()
        np.savez(Path(folder) / f"rank{world.rank}.npz", **state, **{"(losses)": np.array(losses)})


if __name__ == "__main__":
    main(*sys.argv[1:])
