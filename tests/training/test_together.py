"""`msplit train` in several processes: the same as in one, and one end for all when one of them ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from msplit.training import checkpoint
from msplit.training.launch import _free_port
from tests.campaign import CAMPAIGN
from tests.training.models import arrays, regression
from tests.training.zygote import Zygote

pytestmark = pytest.mark.tf

STEPS = 100
WITHIN = 30.0
"""Seconds in which the others end."""

ON_CPU = ("--device", "cpu", "--effort", "fast", "--precision", "ieee", "--streams", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data for it."""
    folder = tmp_path_factory.mktemp("together")
    regression(folder / "model.meta")
    np.savez(folder / "data.npz", **arrays())
    return folder


def command(folder: Path, *further: object) -> tuple[object, ...]:
    model, data = folder / "model.meta", folder / "data.npz"
    how = ("--fetch", "loss,global_step", "--data", data, "--batch", 8, "--shuffle", "--format", "json")
    return ("train", model, *how, *ON_CPU, *further)


class Together:
    """Several ranks of one command, by address alone, as torchrun starts them."""

    def __init__(self, zygote: Zygote, says: Path, size: int = 2) -> None:
        self.zygote, self.says, self.size = zygote, says, size
        self.shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self.children: list[int] = []

    def start(self, arguments: tuple[object, ...], environment: Mapping[str, str] | None = None) -> None:
        for rank in range(self.size):
            told = {**self.shared, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.children.append(self.zygote.start(arguments, told, self.says / f"rank{rank}"))

    def codes(self) -> list[int]:
        return [self.zygote.wait(child) for child in self.children]

    def said(self, rank: int) -> str:
        return (self.says / f"rank{rank}").read_text()


def values(prefix: Path) -> dict[str, np.ndarray]:
    import tensorflow as tf

    found = tf.train.load_checkpoint(str(prefix))
    return {
        name: np.asarray(found.get_tensor(name)) for name in found.get_variable_to_shape_map() if "note" not in name
    }


def wait_for(folder: Path, step: int) -> None:
    until = time.monotonic() + 60
    while (last := checkpoint.listed(folder).latest) is None or int(last.name.rpartition("-")[2]) < step:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.timeout(300)
def test_two_train_as_one_and_one_that_is_killed_ends_the_other(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    """A hundred steps in one process; the same in two, of which one is killed on the way and goes on from the last checkpoint."""
    alone, kept = tmp_path / "alone", tmp_path / "kept"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    one = zygote.start(command(folder, "--steps", STEPS, "--save", alone), says=tmp_path / "alone.json")

    killed = Together(zygote, tmp_path / "first")
    killed.start(command(folder, "--steps", 10**6, "--save", kept, "--every", 10, "--keep", 1000))
    wait_for(kept, 20)
    os.kill(killed.children[1], signal.SIGKILL)
    began = time.monotonic()
    assert killed.codes() == [2, -signal.SIGKILL]
    assert time.monotonic() - began < WITHIN
    assert "error: " in killed.said(0)
    assert "fix: the last checkpoint is whole: go on with --resume" in killed.said(0)
    assert "Traceback" not in killed.said(0)

    last = int(checkpoint.listed(kept).latest.name.rpartition("-")[2])  # type: ignore[union-attr]
    steps = max(STEPS, last + 5)
    again = Together(zygote, tmp_path / "second")
    again.start(command(folder, "--steps", steps, "--save", kept, "--every", 10, "--keep", 1000, "--resume"))
    assert again.codes() == [0, 0]
    assert again.said(1) == ""
    told = json.loads(again.said(0))
    assert (told["steps_before"], told["steps"], told["batch"]) == (last, steps, 8)

    assert zygote.wait(one) == 0
    expected, found = values(alone / f"model-{STEPS}"), values(kept / f"model-{STEPS}")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    if last < STEPS:
        at = json.loads((tmp_path / "alone.json").read_text())["fetched"][-1]["values"]["loss"]
        loss = next(one["values"]["loss"] for one in told["fetched"] if one["step"] == STEPS)
        np.testing.assert_allclose(loss, at, rtol=1e-4)


@pytest.mark.timeout(120)
def test_an_error_of_one_is_what_the_other_tells(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", **{name: value[:12] for name, value in arrays().items()})
    both = Together(zygote, tmp_path)
    both.start(
        ("train", folder / "model.meta", "--fetch", "loss", "--data", tmp_path / "odd.npz", "--batch", 3, *ON_CPU)
    )
    assert both.codes() == [2, 2]
    assert "batch 0 has 3 rows, which 2 processes can not share" in both.said(0)
    assert "fix: --batch 4" in both.said(0)


@pytest.mark.skipif(not CAMPAIGN, reason="a campaign: MSPLIT_CAMPAIGN=1")
@pytest.mark.timeout(300)
def test_a_signal_to_one_ends_both_after_the_same_step(zygote: Zygote, folder: Path, tmp_path: Path) -> None:
    both = Together(zygote, tmp_path)
    both.start(command(folder, "--steps", 10**6, "--save", tmp_path / "kept", "--every", 10))
    wait_for(tmp_path / "kept", 10)
    os.kill(both.children[1], signal.SIGTERM)
    assert both.codes() == [0, 143]
    told = json.loads(both.said(0))
    assert told["interrupted"]
    assert told["checkpoint"] == str(tmp_path / "kept" / f"model-{told['steps']}")
