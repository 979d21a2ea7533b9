"""`msplit train`: what it prints, where it ends, and what is there when it is killed."""

from __future__ import annotations

import csv
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.errors import WriteError
from msplit.formats.bundle import Checkpoint
from msplit.training import checkpoint, loop
from msplit.training.trainer import Fetched
from tests.campaign import CAMPAIGN
from tests.cli.runner import fine, heard, msplit
from tests.report.test_schemas import validate
from tests.training import commands
from tests.training.models import arrays, regression

pytestmark = pytest.mark.tf

QUICK = ("--engine", "tensorflow", "--streams", "1")
KILLS = 20 if CAMPAIGN else 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data for it."""
    folder = tmp_path_factory.mktemp("train")
    regression(folder / "model.meta")
    np.savez(folder / "data.npz", **arrays())
    return folder


def command(folder: Path, *further: object) -> tuple[object, ...]:
    model, data = folder / "model.meta", folder / "data.npz"
    return ("train", model, "--fetch", "loss", "--data", data, "--batch", 8, *QUICK, *further)


def tensors(prefix: str | Path) -> dict[str, tuple[str, bytes]]:
    """All that a checkpoint holds, note and steps included."""
    import tensorflow as tf

    found = tf.train.load_checkpoint(str(prefix))
    values = {name: np.asarray(found.get_tensor(name)) for name in found.get_variable_to_shape_map()}
    return {name: (str(value.dtype), repr(value.tolist()).encode()) for name, value in values.items()}


def test_an_epoch_and_what_is_told(folder: Path, tmp_path: Path) -> None:
    done = fine(*command(folder, "--fetch-every", 5, "--save", tmp_path / "to" / "here"), columns=160)
    assert "train_op" in done.out
    assert "samples/s" in done.out
    assert [line.split()[0] for line in done.out.splitlines() if line.strip()[:2].strip().isdigit()] == [
        "5",
        "10",
        "12",
    ]
    assert checkpoint.listed(tmp_path / "to" / "here").latest == tmp_path / "to" / "here" / "model-12"
    told = fine(*command(folder, "--epochs", 2, "--shuffle", "--format", "json")).json
    validate("train", told)
    assert (told["steps"], told["batch"], told["targets"], told["checkpoint"]) == (24, 8, ["train_op"], None)
    assert [one["step"] for one in told["fetched"]] == [24]


def test_resuming_goes_on_with_the_data_where_they_were(folder: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    how = ("--shuffle", "--input", "seed=4")
    fine(*command(folder, *how, "--steps", 20, "--save", whole))
    fine(*command(folder, *how, "--steps", 7, "--save", parts, "--save", "every=3", "--resume"))
    told = fine(*command(folder, *how, "--steps", 20, "--save", parts, "--resume", "--format", "json")).json
    assert (told["steps_before"], told["steps"]) == (7, 20)
    assert tensors(whole / "model-20") == tensors(parts / "model-20")
    refused = msplit(*command(folder, "--steps", 30, "--save", parts))
    assert (refused.code, refused.out) == (2, "")
    assert "there are checkpoints already, the last of step 20" in refused.err
    refused = msplit(*command(folder, "--steps", 30, "--save", parts, "--resume"))
    assert refused.code == 2
    assert "while other data came: seed 4, now None; shuffle True, now False" in refused.err
    begun = fine(*command(folder, "--steps", 2, "--restore", parts / "model-20", "--format", "json")).json
    assert (begun["steps_before"], begun["steps"]) == (0, 2)
    assert (
        fine(*command(folder, *how, "--steps", 20, "--save", parts, "--resume", "--format", "json")).json["fetched"]
        == []
    )


def test_a_loss_that_is_no_number_ends_it(folder: Path, tmp_path: Path) -> None:
    data = arrays()
    data["label"][60] = np.nan
    np.savez(tmp_path / "bad.npz", **data)
    shown = ("--data", tmp_path / "bad.npz", "--save", tmp_path / "kept", "--save", "every=3", "--epochs", 1)
    done = msplit("train", folder / "model.meta", "--fetch", "loss", "--batch", 8, *QUICK, *shown, columns=200)
    assert done.code == 1
    assert "Training ended: loss is NaN at step 8." in done.out
    assert "The last checkpoint was written before that" in done.out
    last = checkpoint.listed(tmp_path / "kept").latest
    assert last == tmp_path / "kept" / "model-6"
    assert np.isfinite(Checkpoint(last).tensor("model/weights")).all()


def test_variables_that_are_no_numbers_are_not_saved(folder: Path, tmp_path: Path) -> None:
    data = arrays()
    data["label"][15] = 1e30  # the loss of this step is finite, its square in a slot is not
    np.savez(tmp_path / "bad.npz", **data)
    shown = ("--data", tmp_path / "bad.npz", "--save", tmp_path / "kept", "--save", "every=1", "--steps", 4)
    done = msplit("train", folder / "model.meta", "--fetch", "global_step", "--batch", 8, *QUICK, *shown, columns=200)
    assert done.code == 1
    assert "is not finite after step 2" in done.out
    assert checkpoint.listed(tmp_path / "kept").latest == tmp_path / "kept" / "model-1"


def test_what_is_asked_wrong(folder: Path, tmp_path: Path) -> None:
    for further, said in (
        (("--target", "nothing"), "--target names 'nothing'"),
        (("--fetch", "los"), "--fetch names 'los'"),
        (("--resume",), "to resume takes the folder of the checkpoints"),
        (("--restore", tmp_path / "none"), "there is no checkpoint"),
        (("--resume", "--restore", tmp_path), "leave one of the two out"),
        (("--save", folder / "data.npz"), "data.npz"),
    ):
        done = msplit(*command(folder, *further))
        assert done.code == 2
        assert said in done.err.replace("\n", " ")
        assert "Traceback" not in done.err


def test_a_full_disk_ends_it_and_the_last_checkpoint_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = checkpoint.save_bundle, 0

    def full(prefix: Path, values: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        real(prefix, values)

    monkeypatch.setattr(checkpoint, "save_bundle", full)
    done = msplit(*command(folder, "--save", tmp_path / "kept", "--save", "every=2"))
    assert done.code == 2
    assert "model-6: the disk is full" in done.err
    assert checkpoint.listed(tmp_path / "kept").latest == tmp_path / "kept" / "model-4"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_after_the_step_with_a_checkpoint(
    number: int, code: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop._Training._tell

    def tell(self: Any, last: Any) -> None:
        real(self, last)
        if last.step == 4:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop._Training, "_tell", tell)
    with heard():  # where the tests run in a script's background, too
        done = msplit(*command(folder, "--save", tmp_path / "kept", "--steps", 1000), columns=160)
    assert done.code == code
    assert "Training ended: interrupted after step 4." in done.out
    assert checkpoint.listed(tmp_path / "kept").latest == tmp_path / "kept" / "model-4"


# --- Kills


@pytest.mark.timeout(1200 if CAMPAIGN else 120)
def test_killed_at_any_time_it_goes_on_bit_equal(folder: Path, tmp_path: Path) -> None:
    """SIGKILL at random times in a training that does little but write checkpoints."""
    lot, kept = random.Random(20), tmp_path / "kept"
    how = ("--shuffle", "--save", kept, "--resume", "--save", "keep=2")
    steps = 0
    for _ in range(KILLS):
        child = commands.start(command(folder, *how, "--save", "every=1", "--steps", 10**6))
        deadline = time.monotonic() + 60
        while _last(kept) in (None, steps) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(lot.random() * 0.2)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        found = _last(kept)
        assert found is not None
        assert found > steps  # it went on
        for one in checkpoint.listed(kept).all:
            tensors(one)  # whole
        steps = found
    assert commands.run(command(folder, *how, "--save", f"every={10**6}", "--steps", steps + 3)) == 0
    assert commands.run(command(folder, "--shuffle", "--save", tmp_path / "whole", "--steps", steps + 3)) == 0
    assert tensors(kept / f"model-{steps + 3}") == tensors(tmp_path / "whole" / f"model-{steps + 3}")
    assert [name for name in os.listdir(kept) if name.startswith(".")] == []
    # One that was whole and not yet listed when the process was killed stays: others leave such ones on purpose.
    assert len(os.listdir(kept)) in (5, 7)


def _last(folder: Path) -> int | None:
    last = checkpoint.listed(folder).latest
    return None if last is None else int(last.name.rpartition("-")[2])


def test_a_log_of_steps_is_gone_on_with(folder: Path, tmp_path: Path) -> None:
    log, saves = tmp_path / "log.csv", ("--save", tmp_path / "saves", "--fetch-every", 4)
    fine(*command(folder, "--steps", 6, *saves, "--log-csv", log))
    first = log.read_text()
    refused = msplit(*command(folder, "--steps", 9, "--save", tmp_path / "others", "--log-csv", log))
    assert (refused.code, "log.csv: is there already" in refused.err) == (2, True)
    assert log.read_text() == first
    log.write_text(first + "7,0.1")  # a row that was cut off
    told = fine(*command(folder, "--steps", 9, *saves, "--log-csv", log, "--resume", "--format", "json")).json
    rows = list(csv.reader(log.read_text().splitlines()))
    assert rows[0] == ["step", "seconds", "loss"]
    assert [row[0] for row in rows[1:]] == ["4", "6", "7", "8", "9"]
    assert log.read_text().startswith(first)
    assert [float(row[2]) for row in rows[4:]] == [pytest.approx(one["values"]["loss"]) for one in told["fetched"]]
    assert all(float(row[1]) >= 0 for row in rows[1:3] + rows[4:])
    log.write_text("step,seconds,accuracy\n")
    refused = msplit(*command(folder, "--steps", 12, *saves, "--log-csv", log, "--resume"))
    assert (refused.code, "its columns are step, seconds, accuracy, and what is fetched now gives" in refused.err) == (
        2,
        True,
    )
    assert log.read_text() == "step,seconds,accuracy\n"


@pytest.mark.parametrize(
    ("name", "why"), [("no/log.csv", "make the folder first"), (".", "folder"), ("/dev/null", "device")]
)
def test_a_log_that_can_not_be_written_is_refused_before_anything_runs(
    name: str, why: str, folder: Path, tmp_path: Path
) -> None:
    done = msplit(*command(folder, "--log-csv", tmp_path / name, "--resume", "--save", tmp_path / "saves"))
    assert (done.code, done.out, why in done.err) == (2, "", True), done.err
    assert not (tmp_path / "saves").exists()


def test_rows_of_a_log_are_one_line_whatever_is_fetched(tmp_path: Path) -> None:
    log = loop.StepLog(tmp_path / "log.csv")
    values = {
        "a\nb,c": np.float32(0.1),
        "big": np.int64(1 << 60),
        "many": np.zeros(3),
        "text": np.array("x"),
        "nan": np.float32("nan"),
    }
    for step in (1, 2):
        log.add(Fetched(step, values), 0.5)
        assert (tmp_path / "log.csv").read_text().count("\n") == step + 1  # a row is there at once
    rows = list(csv.reader((tmp_path / "log.csv").read_text().splitlines()))
    assert rows == [
        ["step", "seconds", "a\\nb,c", "big", "nan"],
        ["1", "0.500", "0.1", "1152921504606846976", "nan"],
        ["2", "0.500", "0.1", "1152921504606846976", "nan"],
    ]
    with pytest.raises(WriteError, match="its columns are step"):
        loop.StepLog(tmp_path / "log.csv").add(Fetched(3, {"other": np.float32(1)}), 1.0)
