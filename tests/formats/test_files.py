"""Devices, pipes and sockets: never written over, never waited for, never read without an end."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from msplit import formats
from msplit.errors import LoadError, MsplitError, WriteError
from msplit.formats import atomic, files
from msplit.formats import writer as folder_copy
from msplit.formats.bundle import Checkpoint
from msplit.formats.files import read_file
from msplit.inputs.make import load_input
from msplit.inputs.reference import Reference, load_reference, save_reference
from tests.cli.runner import SAMPLES, msplit

MODEL = SAMPLES / "mmoe_small.pb"
SAVED = SAMPLES / "two_signatures"
KINDS = ("pipe", "socket", "device", "link to a pipe")


def special_file(kind: str, folder: Path) -> Path:
    """A file of a kind that no program may write over. The device is a null device of its own, not the machine's."""
    path = folder / "there"
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            before = os.getcwd()
            os.chdir(folder)  # names of sockets are short
            try:
                made.bind("there")
            finally:
                os.chdir(before)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making a device needs more rights than this process has")
    else:
        os.mkfifo(path)
    if kind.startswith("link"):
        (folder / "link").symlink_to(path)
        return folder / "link"
    return path


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A special file that must be what it is afterwards, with nothing beside it."""
    path = special_file(request.param, tmp_path)
    before = sorted(tmp_path.iterdir()), path.stat()
    yield path
    after = sorted(tmp_path.iterdir()), path.stat()
    assert after[0] == before[0]
    assert (after[1].st_mode, after[1].st_ino) == (before[1].st_mode, before[1].st_ino)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.05)


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_written_over(place: Path, force: bool) -> None:
    for write in (
        lambda: atomic.write_bytes_atomic(place, b"new", force=force),
        lambda: atomic.write_folder_atomic(place, lambda folder: None, force=force),
        lambda: formats.write(formats.read(MODEL), {}, place, force=force),
        lambda: formats.write(formats.read(SAVED), {}, place, force=force),
        lambda: save_reference(place, Reference({}, {}, ""), force=force),
        lambda: atomic.check_target(place, force=force),
    ):
        with pytest.raises(WriteError, match=r"is a (pipe|socket|device); only files(.|\n)*fix: "):
            write()


WRITING = {
    "assign": ["assign", MODEL, "-o"],
    **{f"assign --emit {kind}": ["assign", MODEL, "--emit", kind] for kind in ("stream-file", "plan", "json")},
    "assign --trace": ["assign", MODEL, "--trace"],
    "assign of a SavedModel": ["assign", SAVED, "-o"],
    "bench --trace": ["bench", MODEL, "--trace"],
    "tune --output": ["tune", MODEL, "--output"],
    "tune --plan-out": ["tune", MODEL, "--plan-out"],
    "bench save-reference": ["bench", MODEL, "--measure", "save-reference={}"],
    "profile": ["profile", MODEL, "-o"],
    "report": ["report", MODEL, "-o"],
    "sample": ["sample", "towers", "-o"],
}


@pytest.mark.parametrize("what", WRITING)
def test_every_option_that_writes_refuses_before_any_work(what: str, tmp_path: Path) -> None:
    path = special_file("pipe", tmp_path)
    *begin, last = WRITING[what]
    written = [last.format(path)] if "{}" in last else [last, path]
    done = msplit(*begin, *written, "--force")
    assert (done.code, done.out) == (2, "")
    assert f"error: {path}: is a pipe; only files" in done.err
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["there"]


WRITERS = {"formats/atomic.py", "formats/writer.py"}
OF_THEIR_OWN = {
    "samples/": "files of the repository, written by its developers",
    "engines/onnxruntime.py": "a temporary folder",
    "engines/tensorflow/": "temporary folders",
    "formats/atomic.py": "the lock of a folder, which has no content",
    "cli/output.py": "the null device, for streams that the caller has closed",
}


def test_nothing_else_in_msplit_writes_files() -> None:
    """Whatever opens a file for writing or renames one goes through `formats.atomic`, and so through the guard."""
    writing = re.compile(
        r"\.write_(text|bytes)\(|os\.(replace|rename|link|truncate)\(|shutil\.(copy\w*|move)\(|NamedTemporaryFile|mkstemp"
        r"|open\([^)\n]*[\"'][wax]b?\+?[\"']|np\.save\w*\((?!_compressed\(packed)|O_CREAT"
    )
    root = Path(formats.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in WRITERS and not name.startswith(tuple(OF_THEIR_OWN)):
            found = [line for line in path.read_text("utf-8").splitlines() if writing.search(line)]
            assert [line for line in found if "savez_compressed(packed" not in line] == [], name


RULES = "version: 1\nstreams: 2\nrules:\n  - regex: {file: there}\n"
READING = {
    "rules": ["assign", MODEL, "--dry-run", "--rules", "there"],
    "stream file": ["assign", MODEL, "--dry-run", "--rules", "rules.yaml"],
    "plan": ["check", MODEL, "--plan", "there"],
    "settings": ["check", MODEL, "--config", "there"],
    "profile": ["analyze", MODEL, "--costs", "profile=there"],
    "model": ["analyze", "there"],
    "other model": ["diff", MODEL, "there"],
    "model to compare with": ["check", MODEL, "--against", "there"],
    "reference": ["bench", MODEL, "--reference", "there"],
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", READING)
@pytest.mark.parametrize("kind", KINDS)
def test_every_option_that_reads_answers_at_once(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "link to a pipe":
        (tmp_path / "far").mkdir()
        (tmp_path / "there").symlink_to(special_file("pipe", tmp_path / "far"))
    else:
        special_file(kind, tmp_path)
    (tmp_path / "rules.yaml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    done = msplit(*READING[what])
    if kind == "device":  # a null device is an empty file where a file of msplit's own is read
        assert done.code == (0 if what == "stream file" else 2)
        assert ("empty" in done.err) == (what in ("rules", "settings")), done.err
        return
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert "it is a " in done.err or "is not a regular file" in done.err
    assert "internal error" not in done.err


def test_settings_that_are_only_looked_for_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "msplit.yaml")
    os.mkfifo(tmp_path / "pyproject.toml")
    monkeypatch.chdir(tmp_path)
    assert msplit("check", MODEL).code in (0, 1)


def test_a_pipe_that_somebody_writes_to_is_read(tmp_path: Path) -> None:
    pipe = special_file("pipe", tmp_path)

    def write() -> None:
        with pipe.open("w") as file:
            for _ in range(3):
                file.write("a" * 100_000)
                file.flush()
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert files.read_bytes(pipe, 1 << 20) == b"a" * 300_000
    writer.join()


@pytest.mark.usefixtures("impatient")
def test_pipes_and_devices_that_have_no_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"some, and then nothing")
        with pytest.raises(OSError, match="nobody has written to it"):
            files.read_bytes(f"/dev/fd/{reading}", 100)
        os.write(writing, b"a" * 1000)
        with pytest.raises(EOFError):
            files.read_bytes(f"/dev/fd/{reading}", 100)
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(OSError, match="it is a device, not a file"):
        files.read_bytes("/dev/zero", 100)
    assert files.read_bytes(os.devnull, 100) == b""
    with pytest.raises(MsplitError, match="Is a directory"):
        read_file(tmp_path, 100, what="plan", fix="")


@pytest.mark.parametrize("kind", ["pipe", "socket", "link to a pipe"])
def test_arrays_and_checkpoints_are_files(kind: str, tmp_path: Path) -> None:
    place = special_file(kind, tmp_path)
    with pytest.raises(LoadError, match=r"it is a (pipe|socket), not a file"):
        load_reference(place)
    with pytest.raises(LoadError, match=r"it is a (pipe|socket), not a file"):
        load_input("x", place, "float32", None)
    shutil.copytree(SAMPLES / "keras_lookup" / "variables", tmp_path / "variables")
    prefix = tmp_path / "variables" / "variables"
    shard = next(prefix.parent.glob("*.data-*"))
    shard.unlink()
    shard.symlink_to(place)
    checkpoint = Checkpoint(prefix)
    assert checkpoint._entries is not None
    with pytest.raises(LoadError, match=r"it is a (pipe|socket), not a file"):
        checkpoint.tensor(next(iter(checkpoint._entries)))
    index = Path(f"{prefix}.index")
    index.unlink()
    index.symlink_to("/dev/zero")
    with pytest.raises(LoadError, match="it is a device, not a file"):
        Checkpoint(prefix)


# ---- what lies beside a SavedModel's main file ----------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    shutil.copytree(SAVED, tmp_path / "model")
    (tmp_path / "model" / "assets").mkdir(exist_ok=True)
    return tmp_path / "model"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folder", ["assets", "variables", "."])
def test_a_special_file_in_a_saved_model_is_refused(kind: str, folder: str, saved: Path) -> None:
    (saved / folder).mkdir(exist_ok=True)
    path = special_file(kind, saved / folder)
    model = formats.read(saved)
    with pytest.raises(
        WriteError, match=r"(there|link) can not be copied: it is a (pipe|socket|device), not a file"
    ) as told:
        formats.write(model, {}, saved.parent / "out")
    assert str(path.parent) in str(told.value)
    assert os.listdir(saved.parent) == ["model"]


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/random", "/dev/tty"])
def test_a_link_to_a_device_in_a_saved_model_is_refused(target: str, saved: Path) -> None:
    (saved / "assets" / "words.txt").symlink_to(target)
    with pytest.raises(WriteError, match=rf"it is a device, not a file \(a link to {target}\)"):
        formats.write(formats.read(saved), {}, saved.parent / "out")


def test_links_to_folders_are_followed_once(saved: Path) -> None:
    other = saved.parent / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "words.txt").write_text("vocabulary")
    (saved / "assets.extra").symlink_to(other)
    formats.write(formats.read(saved), {}, saved.parent / "out")
    assert (saved.parent / "out" / "assets.extra" / "deep" / "words.txt").read_text() == "vocabulary"
    assert not (saved.parent / "out" / "assets.extra").is_symlink()
    for loop in (other / "up", other / "deep" / "up"):  # a loop, and folders that double
        loop.symlink_to(other)
        with pytest.raises(WriteError, match="leads to a folder that is copied already"):
            formats.write(formats.read(saved), {}, saved.parent / "out", force=True)
        loop.unlink()
    assert (saved.parent / "out" / "assets.extra" / "deep" / "words.txt").exists()


def test_a_file_that_grows_is_cut_where_it_ended(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "assets" / "log").write_text("a" * 100)
    real = folder_copy.listed

    def listed(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        with (saved / "assets" / "log").open("a") as file:
            file.write("b" * 5_000_000)
        return found

    monkeypatch.setattr("msplit.formats.writer.listed", listed)
    formats.write(formats.read(saved), {}, saved.parent / "out")
    assert (saved.parent / "out" / "assets" / "log").read_text() == "a" * 100


def test_holes_stay_holes_and_content_stays(saved: Path) -> None:
    with (saved / "assets" / "sparse").open("wb") as file:
        file.seek(5_000_000)
        file.write(b"middle")
        file.truncate(1 << 40)
    random = np.random.default_rng(0).bytes(3_000_001)
    (saved / "assets" / "dense").write_bytes(random)
    formats.write(formats.read(saved), {}, saved.parent / "out")
    copied = saved.parent / "out" / "assets" / "sparse"
    assert copied.stat().st_size == 1 << 40
    assert copied.stat().st_blocks * 512 < 10_000_000
    with copied.open("rb") as file:
        assert file.read(5_000_006) == bytes(5_000_000) + b"middle"
    assert (copied.parent / "dense").read_bytes() == random
    assert (copied.parent / "dense").stat().st_mtime_ns == (saved / "assets" / "dense").stat().st_mtime_ns


def test_many_links_to_a_large_file_do_not_fill_the_disk(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "assets" / "large").write_bytes(bytes(range(256)) * 400)
    for number in range(20):
        (saved / "assets" / f"link{number}").symlink_to("large")
    usage = shutil.disk_usage(saved)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WriteError, match=r"files take 2,\d{3},\d{3} bytes, and 1,000,000 are free"):
        formats.write(formats.read(saved), {}, saved.parent / "out")
    assert os.listdir(saved.parent) == ["model"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_the_umask_is_followed_and_no_right_is_added(umask: int, saved: Path) -> None:
    (saved / "assets" / "all").write_text("x")
    (saved / "assets" / "all").chmod(0o666)
    (saved / "assets" / "mine").write_text("x")
    (saved / "assets" / "mine").chmod(0o600)
    (saved / "assets").chmod(0o555)
    saved.chmod(0o777)
    (saved / "saved_model.pb").chmod(0o666)
    model = formats.read(saved)
    before = os.umask(umask)
    try:
        formats.write(model, {}, saved.parent / "out")
    finally:
        os.umask(before)
        (saved / "assets").chmod(0o755)
    out = saved.parent / "out"
    modes = {str(path.relative_to(out)): stat.S_IMODE(path.stat().st_mode) for path in (out, *out.rglob("*"))}
    assert modes["."] == 0o777 & ~umask
    assert modes["saved_model.pb"] == modes["assets/all"] == 0o666 & ~umask
    assert modes["assets/mine"] == 0o600
    assert modes["assets"] == 0o755 & ~umask  # the owner may write: a folder is made to be filled, and to be replaced


def test_a_folder_with_a_pipe_of_that_name_is_no_saved_model(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    os.mkfifo(tmp_path / "home" / "saved_model.pb")
    with pytest.raises(WriteError, match="not a SavedModel"):
        formats.write(formats.read(SAVED), {}, tmp_path / "home", force=True)
    assert os.listdir(tmp_path / "home") == ["saved_model.pb"]
