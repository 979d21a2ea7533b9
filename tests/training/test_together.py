"""`msplit train` in several processes: the same as in one, and one end for all when one of them ends."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from msplit.training import checkpoint
from tests import forked
from tests.campaign import CAMPAIGN, campaign
from tests.engines.tensorflow.clusters import free_ports
from tests.report.test_schemas import validate
from tests.training import commands
from tests.training.models import arrays, regression

pytestmark = pytest.mark.tf

STEPS = 100 if CAMPAIGN else 50
WITHIN = 30.0
"""Seconds in which the others end."""

ON_CPU = ("--device", "cpu", "--cuda", "effort=fast", "--precision", "ieee", "--streams", "2")


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

    def __init__(self, says: Path, size: int = 2) -> None:
        self.says, self.size = says, size
        self.shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        self.children: list[forked.Popen] = []

    def start(self, arguments: tuple[object, ...], environment: Mapping[str, str] | None = None) -> None:
        for rank in range(self.size):
            told = {**self.shared, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.children.append(commands.start(arguments, told, self.says / f"rank{rank}"))

    def codes(self) -> list[int]:
        return [child.wait() for child in self.children]

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
def test_two_train_as_one_and_one_that_is_killed_ends_the_other(folder: Path, tmp_path: Path) -> None:
    """Many steps in one process, and in two, of which one is killed afterwards; the last checkpoint goes on in one, and then in two."""
    alone, kept = tmp_path / "alone", tmp_path / "kept"
    one = commands.start(command(folder, "--steps", STEPS, "--save", alone), says=tmp_path / "alone.json")
    both = Together(tmp_path)
    both.start(command(folder, "--steps", 10**6, "--save", kept, "--save", "every=25", "--save", "keep=1000"))
    assert one.wait() == 0
    wait_for(kept, STEPS)
    both.children[1].kill()
    began = time.monotonic()
    assert both.codes() == [2, -signal.SIGKILL]
    assert time.monotonic() - began < WITHIN
    assert "error: " in both.said(0)
    assert "fix: the last checkpoint is whole: go on with --resume" in both.said(0)
    assert "Traceback" not in both.said(0)

    expected, found = values(alone / f"model-{STEPS}"), values(kept / f"model-{STEPS}")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

    last = int(checkpoint.listed(kept).latest.name.rpartition("-")[2])  # type: ignore[union-attr]
    again = commands.start(
        command(folder, "--steps", last + 2, "--save", kept, "--resume"), says=tmp_path / "again.json"
    )
    assert again.wait() == 0
    told = json.loads((tmp_path / "again.json").read_text())
    assert (told["steps_before"], told["steps"], told["processes"]) == (last, last + 2, 1)
    (tmp_path / "more").mkdir()
    more = Together(tmp_path / "more")
    more.start(command(folder, "--steps", last + 4, "--save", kept, "--resume"))
    assert more.codes() == [0, 0]
    told = json.loads(more.said(0))
    assert (told["steps_before"], told["steps"], told["processes"]) == (last + 2, last + 4, 2)


@campaign
@pytest.mark.timeout(120)
def test_both_tell_the_same_loss_as_one(folder: Path, tmp_path: Path) -> None:
    """What is fetched is of the whole batch, and only the first process tells it."""
    one = commands.start(command(folder, "--steps", 3, "--fetch-every", 1), says=tmp_path / "alone.json")
    both = Together(tmp_path)
    both.start(command(folder, "--steps", 3, "--fetch-every", 1))
    assert [*both.codes(), one.wait()] == [0, 0, 0]
    assert both.said(1) == ""
    told, alone = json.loads(both.said(0)), json.loads((tmp_path / "alone.json").read_text())
    validate("train", told)
    assert (told["processes"], told["batch"], told["steps"]) == (2, 8, 3)
    for mine, other in zip(told["fetched"], alone["fetched"], strict=True):
        np.testing.assert_allclose(mine["values"]["loss"], other["values"]["loss"], rtol=1e-5)
        assert mine["values"]["global_step"] == other["values"]["global_step"]


@pytest.mark.timeout(120)
def test_an_error_of_one_is_what_the_other_tells(folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", **{name: value[:12] for name, value in arrays().items()})
    both = Together(tmp_path)
    both.start(
        ("train", folder / "model.meta", "--fetch", "loss", "--data", tmp_path / "odd.npz", "--batch", 3, *ON_CPU)
    )
    assert both.codes() == [2, 2]
    assert "batch 0 has 3 rows, which 2 processes can not share" in both.said(0)
    assert "fix: --batch 4" in both.said(0)


@campaign
@pytest.mark.timeout(300)
def test_a_signal_to_one_ends_both_after_the_same_step(folder: Path, tmp_path: Path) -> None:
    both = Together(tmp_path)
    both.start(command(folder, "--steps", 10**6, "--save", tmp_path / "kept", "--save", "every=10"))
    wait_for(tmp_path / "kept", 10)
    both.children[1].terminate()
    assert both.codes() == [0, 143]
    told = json.loads(both.said(0))
    assert told["interrupted"]
    assert told["checkpoint"] == str(tmp_path / "kept" / f"model-{told['steps']}")
