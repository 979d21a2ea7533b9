"""Locks of folders, and files that are written as a group."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from msplit.errors import WriteError
from msplit.formats import atomic


def test_a_folder_is_held_until_the_last_one_lets_go(tmp_path: Path) -> None:
    held, again = atomic.hold(tmp_path), atomic.hold(tmp_path)
    assert held is again is not None
    assert f"process {os.getpid()} on" in (tmp_path / atomic.NAME).read_text()
    del held
    assert os.listdir(tmp_path) == [atomic.NAME]
    del again
    assert os.listdir(tmp_path) == []


def test_who_holds_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_PAUSE", 0.0)
    place = tmp_path / atomic.NAME
    place.write_text("process 1 on there")
    other = atomic.lock(place)  # another description of the file, as another process has it
    assert other is not None
    with pytest.raises(WriteError, match="another training writes its checkpoints here: process 1 on there"):
        atomic.hold(tmp_path)
    os.close(other)
    assert atomic.hold(tmp_path) is not None


def test_what_can_not_be_locked_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.hold(tmp_path / "no folder")
    assert atomic.lock(tmp_path / "no file") is None
    (tmp_path / atomic.NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WriteError, match="its lock can not be opened"):
        atomic.hold(tmp_path)
    (tmp_path / atomic.NAME).unlink()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    assert atomic.hold(tmp_path) is None


def test_a_group_of_files_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def fill(temporary: Path) -> None:
        for ending in (".index", ".data"):
            Path(f"{temporary}{ending}").write_text(ending)

    atomic.write_group_atomic(tmp_path / "model", (".data", ".index"), fill, force=False)
    assert sorted(os.listdir(tmp_path)) == ["model.data", "model.index"]
    with pytest.raises(WriteError, match="is there already"):
        atomic.write_group_atomic(tmp_path / "model", (".data", ".index"), fill, force=False)

    def fail(temporary: Path) -> None:
        Path(f"{temporary}.data").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match="the disk is full"):
        atomic.write_group_atomic(tmp_path / "model", (".data", ".index"), fail, force=True)
    assert (tmp_path / "model.data").read_text() == ".data"
    assert sorted(os.listdir(tmp_path)) == ["model.data", "model.index"]
