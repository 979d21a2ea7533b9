"""Training on several GPUs: NCCL in the captured graph gives what threads on the CPU do, and the same on each GPU to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.options import Shards
from msplit.training.hosts import Hosts, launch
from tests.engines.cuda.cases import options_of, scattered
from tests.engines.cuda.together import together
from tests.training_graphs import BATCH, apart, stored

pytestmark = pytest.mark.gpu

STEPS = 5
WITHIN = 1e-4


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "size", [1, *(pytest.param(count, marks=pytest.mark.needs_gpus(count)) for count in (2, 4, 8))]
)
@pytest.mark.parametrize(("name", "optimizer"), [("mmoe", "Adam"), ("deepfm", "Adagrad"), ("deepfm", "Adam")])
def test_gpus_train_as_threads_on_the_cpu(size: int, name: str, optimizer: str, tmp_path: Path) -> None:
    train(size, name, optimizer, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [pytest.param(count, marks=pytest.mark.needs_gpus(count)) for count in (2, 4)])
@pytest.mark.parametrize("name", ["mmoe", "deepfm"])
def test_symmetric_memory_gives_what_nccl_gives(size: int, name: str, tmp_path: Path) -> None:
    """By means, and of two by updates that read the gradients of both where they lie."""
    ways = {}
    for way in ("", "two-shot", "read")[: 3 if size == 2 else 2]:
        folder = tmp_path / (way or "nccl")
        folder.mkdir()
        train(size, name, "Adam", folder, *filter(None, [way]))
        ways[way] = dict(np.load(folder / "rank0.npz"))
    for found in ways.values():
        assert not [key for key, away in apart(found, ways[""]).items() if away > WITHIN]


def train(size: int, name: str, optimizer: str, tmp_path: Path, *way: str) -> None:
    """Trains on GPUs, which give what threads on the CPU give, and the same on all."""
    command = [sys.executable, "-m", "tests.gpu.together_worker", name, optimizer, str(tmp_path), str(STEPS), *way]
    assert launch(command, Hosts(), [str(one) for one in range(size)]) == 0
    flat, training = stored(name, optimizer, "resource")
    batches = [training.feeds(BATCH * size, step) for step in range(STEPS)]

    def job_of(feeds: dict[str, np.ndarray]) -> Job:
        return Job(
            flat,
            scattered(flat, 4),
            4,
            feeds,
            precision=Precision.IEEE,
            options=options_of("cpu"),
            state=training.state(),
        )

    every, variables = together(job_of, batches, Shards(size, tuple(batches[0]), is_open=False), training.state())
    found = [dict(np.load(tmp_path / f"rank{rank}.npz")) for rank in range(size)]
    losses = [one.pop("(losses)") for one in found]
    np.testing.assert_allclose(losses[0], [one["loss"] for one in every[0]], rtol=WITHIN)
    assert not [key for key, away in apart(found[0], variables[0]).items() if away > WITHIN]
    for one in found[1:]:
        assert {key: value.tobytes() for key, value in one.items()} == {
            key: value.tobytes() for key, value in found[0].items()
        }
