"""Folders of models: what is in them, what is told of all, and that one that fails stops no other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from msplit.cli import many
from msplit.errors import LoadError
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, fine, msplit, unchanged
from tests.report.test_schemas import validate

_forked = forked.always(forked.instead, forked.COMMANDS)
"""Processes that look at models are forked. Those of a command that is a process itself are new ones."""


HOSTILE = "ev\x1b[31mil\n::error::name.pb"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A folder with five models, of which two can not be read, and with what is none."""
    folder = tmp_path / "zoo"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    shutil.copy(SAMPLES / "towers_small.pb", folder / "deep" / "er" / HOSTILE)
    shutil.copy(SAMPLES / "cond_v1.pb", folder / ".hidden")
    shutil.copy(SAMPLES / "annotated.pb", folder)
    shutil.copytree(SAMPLES / "two_signatures", folder / "saved")
    (folder / "deep" / "broken.pb").write_text("no model")
    (folder / "deep" / "cut.pb").write_bytes((SAMPLES / "mmoe_small.pb").read_bytes()[:999])
    (folder / "deep" / "README.md").write_text("no model either")
    return folder


NAMES = ["annotated.pb", "deep/broken.pb", "deep/cut.pb", f"deep/er/{HOSTILE}", "saved"]


def test_models_of_a_folder_in_the_order_of_their_names(zoo: Path) -> None:
    (zoo / "build").mkdir()
    (zoo / "build" / "manifest.json").write_text("{}")
    (zoo / "build" / "host-0.pb").write_text("a part of a build")
    (zoo / "loop").symlink_to(zoo)
    (zoo / "latest").symlink_to(zoo / "saved")
    found = many.models_in([zoo])
    assert [str(path.relative_to(zoo)) for path in found] == sorted([*NAMES, "latest"])
    assert many.models_in([zoo / "saved", zoo / "none.pb"]) == (zoo / "saved", zoo / "none.pb")
    (zoo / "empty").mkdir()
    assert many.models_in([zoo / "empty"]) == (zoo / "empty",)  # an error says what is in it


@pytest.mark.parametrize("jobs", [1, 2])
def test_one_summary_of_all_and_a_broken_model_stops_none(zoo: Path, jobs: int) -> None:
    with unchanged(zoo):
        done = msplit("analyze", zoo, "--jobs", jobs, columns=120)
        found = msplit("analyze", zoo, "--jobs", jobs, "--format", "json")
        checked = msplit("check", zoo, "--jobs", jobs, "--format", "json")
    assert (done.code, found.code, checked.code) == (2, 2, 2)
    assert "3 models: streams help 3." in done.out
    assert "2 models could not be analyzed." in done.out
    assert done.err.count("error: ") == checked.err.count("error: ") == 2
    for text in (done.out, done.err, found.out, found.err, checked.out, checked.err):
        assert "\x1b" not in text
        assert "\n::error::" not in text
    validate("analyze", found.json)
    validate("check", checked.json)
    read, unread = [[str(zoo / NAMES[at]) for at in places] for places in ((0, 3, 4), (1, 2))]
    assert [one["model"]["path"] for one in found.json["models"]] == read
    assert [one["model"] for one in checked.json["reports"]] == read
    assert [one["model"] for one in found.json["errors"]] == [one["model"] for one in checked.json["errors"]] == unread
    assert found.json["summary"] == {"count": 3, "failed": 2, "helps": 3}
    alone = fine("analyze", zoo / "saved", "--format", "json").json
    assert found.json["models"][2] == alone


def test_a_folder_of_one_model_is_this_model(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "towers_small.pb", tmp_path)
    assert fine("analyze", tmp_path).out == fine("analyze", tmp_path / "towers_small.pb").out
    one = fine("check", tmp_path, "--format", "json").json
    assert one["model"] == str(tmp_path / "towers_small.pb")


def test_what_can_not_be_checked_is_an_error_in_every_format(zoo: Path) -> None:
    arguments = ("check", zoo / "deep", "--jobs", 1)
    assert 'errors="2"' in msplit(*arguments, "--format", "junit").out
    log = msplit(*arguments, "--format", "sarif").json["runs"][0]["invocations"][0]
    assert not log["executionSuccessful"]
    assert [one["level"] for one in log["toolExecutionNotifications"]][-2:] == ["error", "error"]
    nothing = msplit("check", zoo / "deep" / "broken.pb", zoo / "deep" / "cut.pb", "--format", "json")
    assert (nothing.code, nothing.json["reports"], len(nothing.json["errors"])) == (2, [], 2)
    assert "2 models could not be checked." in msplit(*arguments).out


def test_of_many_models_those_with_findings_are_shown(tmp_path: Path) -> None:
    for number in range(9):
        shutil.copy(SAMPLES / "towers_small.pb", tmp_path / f"{number}.pb")
    quiet = msplit("check", tmp_path, "--select", "MS001", "--jobs", 1)
    assert (quiet.code, quiet.out) == (0, "msplit check: all together\n\n9 models: 9 without findings.\n")
    assert "0.pb" in msplit("check", tmp_path, "--select", "MS001", "--jobs", 1, "--verbose").out
    assert "1 without" not in msplit("check", tmp_path, "--select", "MS020", "--jobs", 1).out


def size(model: Path, *, ends: str = "", lost: str = "") -> int:
    """Looks at a model: the process that looks at one of these names ends."""
    if model.name == ends:
        os.kill(os.getpid(), signal.SIGKILL)
    if model.name == lost:
        raise LoadError("is lost", where=str(model))
    return len(model.name)


def test_a_process_that_ends_takes_one_model_with_it() -> None:
    models = [Path(f"{'x' * number}.pb") for number in range(1, 9)]
    look = partial(size, ends="xxx.pb", lost="xxxxx.pb")
    found = many.each("analyze", look, models, 2)
    assert [value for value, _ in found] == [4, 5, None, 7, None, 9, 10, 11]
    assert "xxx.pb: the process of this model was ended by signal 9" in found[2][1]
    assert found[4][1] == "xxxxx.pb: is lost"
    assert not any(why for place, (_, why) in enumerate(found) if place not in (2, 4))


def fails(model: Path) -> int:
    """Fails in ways that are no errors of msplit's."""
    raise {"a": MemoryError, "b": ZeroDivisionError}[model.name]("so")


def test_a_mistake_about_one_model_is_told_as_such() -> None:
    (_, memory), (_, mistake) = many.each("analyze", fails, [Path("a"), Path("b")], 1)
    assert memory.startswith("a: out of memory\n  fix: ")
    assert mistake.startswith("b: internal error: ZeroDivisionError: so\n  fix: this is a bug")


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    for number in range(40):
        shutil.copy(SAMPLES / "inception_v3_stripped.pb", tmp_path / f"{number}.pb")
    command = [sys.executable, "-m", "msplit", "analyze", str(tmp_path), "--jobs", "2", "-v"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import signal, os, sys; signal.signal(2, signal.default_int_handler); os.execv({sys.executable!r}, sys.argv[1:])"
    running = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "of 40 models" in line:
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    until = time.monotonic() + 60
    while _of(running.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _of(running.pid)


def _of(parent: int) -> list[str]:
    """Processes that look at models for a command, which is told to them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"msplit.cli.many" in words and str(parent).encode() in words:
            found.append(str(place))
    return found


def test_progress_says_how_many(zoo: Path) -> None:
    done = msplit("analyze", zoo, "--jobs", 2, "--verbose")
    assert "5 of 5 models" in done.err


def test_a_plan_belongs_to_one_model(zoo: Path) -> None:
    done = msplit("check", zoo, "--against", SAMPLES / "towers_small.pb")
    assert (done.code, "belongs to one model, and 5 were given" in done.err) == (2, True)
    assert json.loads(fine("check", zoo / "saved", "--format", "json").out)["command"] == "check"


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_folders_are_compared_model_by_model(zoo: Path, tmp_path: Path, jobs: int) -> None:
    new = tmp_path / "new"
    shutil.copytree(zoo, new)
    (new / "annotated.pb").rename(new / "renamed.pb")
    place = new / "deep" / "er" / HOSTILE
    fine("assign", zoo / "deep" / "er" / HOSTILE, "--streams", 2, "-o", place, "--force")
    with unchanged(zoo, new):
        done = msplit("diff", zoo, new, "--jobs", jobs)
        found = msplit("diff", zoo, new, "--jobs", jobs, "--format", "json")
    assert (done.code, found.code) == (2, 2)
    assert "2 models compared: 1 changed, 1 the same." in done.out
    assert "1 only in OLD, 1 only in NEW." in done.out
    assert "2 models could not be compared." in done.out
    assert "\x1b" not in done.out + done.err + found.out + found.err
    validate("diff_folders", found.json)
    told = found.json
    assert [(one["model"], one["same"]) for one in told["models"]] == [(NAMES[3], False), ("saved", True)]
    assert (told["only_in_old"], told["only_in_new"]) == (["annotated.pb"], ["renamed.pb"])
    assert [one["model"] for one in told["errors"]] == NAMES[1:3]
    alone = fine("diff", zoo / "deep" / "er" / HOSTILE, place, "--format", "json").json
    assert told["models"][0]["diff"] == alone
    validate("diff", alone)


def test_what_folders_have_in_common_decides_the_exit_code(tmp_path: Path) -> None:
    for side in ("old", "new"):
        (tmp_path / side).mkdir()
        for number in range(2):
            shutil.copy(SAMPLES / "towers_small.pb", tmp_path / side / f"{number}.pb")
    sides = (tmp_path / "old", tmp_path / "new")
    assert fine("diff", *sides, "--exit-code", "--jobs", 1).code == 0
    (tmp_path / "new" / "1.pb").unlink()
    assert fine("diff", *sides, "--jobs", 1).code == 0
    assert msplit("diff", *sides, "--exit-code", "--jobs", 1).code == 1
    mixed = msplit("diff", tmp_path / "old", tmp_path / "new" / "0.pb")
    assert (mixed.code, "give two models, or two such folders" in mixed.err) == (2, True)
    assert msplit("diff", tmp_path / "old", tmp_path / "none").code == 2
