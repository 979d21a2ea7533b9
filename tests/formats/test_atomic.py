import ctypes
import errno
import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msplit.errors import WriteError
from msplit.formats import atomic
from msplit.formats.atomic import write_bytes_atomic, write_folder_atomic
from tests import forked

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("MSPLIT_TEST_KILLS", "4"))
"""How many times each kill test kills; a long run sets it higher."""


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(params=["renameat2", "no renameat2"])
def rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with and without the system call that exchanges names."""
    if request.param == "no renameat2":
        monkeypatch.setattr(atomic, "_renameat2", lambda *args: False)
    return str(request.param)


@pytest.fixture
def failing_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the second write of a process fail with an error number, after some bytes."""

    def fail(code: int) -> None:
        real, calls = os.write, iter(range(100))

        def write(descriptor: int, data: Any) -> int:
            if next(calls):
                raise OSError(code, os.strerror(code))
            return real(descriptor, data[:10])

        monkeypatch.setattr(os, "write", write)

    return fail


# ---- files --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rename")
def test_new_file_gets_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes_atomic(tmp_path / "out", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "out").read_bytes() == b"new"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    assert entries(tmp_path) == ["out"]


@pytest.mark.usefixtures("rename")
def test_existing_file_is_replaced_only_by_force_and_keeps_its_permissions(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    out.chmod(0o604)
    with pytest.raises(WriteError, match=r"is there already(.|\n)*--force"):
        write_bytes_atomic(out, b"new")
    assert out.read_bytes() == b"old"
    write_bytes_atomic(str(out), b"new", force=True)
    assert out.read_bytes() == b"new"
    assert out.stat().st_mode & 0o777 == 0o604
    assert entries(tmp_path) == ["out"]


@pytest.mark.usefixtures("rename")
def test_file_that_comes_up_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = atomic.write_pieces

    def write(path: Path, *args: Any) -> None:
        real(path, *args)
        (tmp_path / "out").write_bytes(b"theirs")

    monkeypatch.setattr(atomic, "write_pieces", write)
    with pytest.raises(WriteError, match="is there already"):
        write_bytes_atomic(tmp_path / "out", b"ours")
    assert (tmp_path / "out").read_bytes() == b"theirs"
    assert entries(tmp_path) == ["out"]


def test_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*args: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(atomic, "_renameat2", lambda *args: False)
    monkeypatch.setattr(os, "link", link)
    write_bytes_atomic(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    (tmp_path / "temporary").touch()
    with pytest.raises(FileExistsError):
        atomic._rename_to_free_place(tmp_path / "temporary", tmp_path / "out")


@pytest.mark.usefixtures("rename")
def test_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("far/target")
    write_bytes_atomic(tmp_path / "link", b"new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "target").read_bytes() == b"new"
    (tmp_path / "dangling").symlink_to("far/other")
    write_bytes_atomic(tmp_path / "dangling", b"new")
    assert (tmp_path / "far" / "other").read_bytes() == b"new"
    assert entries(tmp_path / "far") == ["other", "target"]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "can not be written: Input/output error"),
        (errno.EROFS, "read-only"),
    ],
)
def test_failing_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failing_write: Callable[[int], None], code: int, what: str
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    failing_write(code)
    with pytest.raises(WriteError, match=what):
        write_bytes_atomic(out, b"n" * 100, force=True)
    assert out.read_bytes() == b"old"
    assert entries(tmp_path) == ["out"]


def test_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """A real failure in the middle of a real write, by the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(WriteError, match="larger than the system allows"):
            write_bytes_atomic(tmp_path / "out", b"n" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert entries(tmp_path) == []


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting needs more rights than this process has")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_really_full_disk_leaves_the_old_file(full_disk: Path) -> None:
    out = full_disk / "out"
    write_bytes_atomic(out, b"o" * 30_000)
    with pytest.raises(WriteError, match="the disk is full"):
        write_bytes_atomic(out, b"n" * 60_000, force=True)
    assert out.read_bytes() == b"o" * 30_000
    with pytest.raises(WriteError, match="the disk is full"):
        write_folder_atomic(full_disk / "folder", lambda folder: (folder / "big").write_bytes(b"n" * 60_000) and None)
    assert entries(full_disk) == ["out"]


def test_interrupt_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes_atomic(tmp_path / "out", b"new")
    with pytest.raises(KeyboardInterrupt):
        write_folder_atomic(tmp_path / "folder", lambda folder: (folder / "a").touch())
    assert entries(tmp_path) == []


def test_places_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WriteError, match="does not exist"):
        write_bytes_atomic(tmp_path / "gone" / "out", b"")
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="not a folder"):
        write_bytes_atomic(tmp_path / "file" / "out", b"")
    with pytest.raises(WriteError, match="is a folder"):
        write_bytes_atomic(tmp_path, b"", force=True)
    with pytest.raises(WriteError, match="too long"):
        write_bytes_atomic(tmp_path / ("n" * 300), b"")
    with pytest.raises(WriteError, match="can not be written"):
        write_bytes_atomic("a\0b", b"")
    # Root may write anywhere, so the kernel's answer is stood in for.

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WriteError, match="no permission"):
        write_bytes_atomic(tmp_path / "out", b"")


def test_long_names_leave_room_for_the_temporary_one(tmp_path: Path) -> None:
    write_bytes_atomic(tmp_path / ("n" * 255), b"new")
    assert entries(tmp_path) == ["n" * 255]


# ---- folders ------------------------------------------------------------------------------------------------------------


def fill_with(text: str, files: int = 3) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "sub").mkdir()
        for number in range(files):
            (folder / "sub" / f"{number}").write_text(text)

    return fill


def texts(folder: Path) -> set[str]:
    return {path.read_text() for path in (folder / "sub").iterdir()}


@pytest.mark.usefixtures("rename")
def test_folder_comes_whole_and_replaces_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder_atomic(out, fill_with("old"))
    with pytest.raises(WriteError, match="is there already"):
        write_folder_atomic(out, fill_with("new"))
    assert texts(out) == {"old"}
    out.chmod(0o750)
    write_folder_atomic(out, fill_with("new"), force=True)
    assert texts(out) == {"new"}
    assert out.stat().st_mode & 0o777 == 0o750
    (tmp_path / "link").symlink_to("out")
    write_folder_atomic(tmp_path / "link", fill_with("newer"), force=True)
    assert (tmp_path / "link").is_symlink()
    assert texts(out) == {"newer"}
    assert entries(tmp_path) == ["link", "out"]


def test_what_a_killed_writer_has_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    left = tmp_path / ".other.0123456789ab.tmp"
    alike = [tmp_path / ".other.tmp", tmp_path / "other.0123456789ab.tmp", tmp_path / ".file.0123456789ab.tmp"]
    for folder in (left, *alike[:2]):
        folder.mkdir()
        fill_with("half")(folder)
    alike[2].write_text("a file")
    seen = []

    def fill(folder: Path) -> None:
        fill_with("first")(folder)
        write_folder_atomic(tmp_path / "second", fill_with("second"))  # as another process would, meanwhile
        seen.append(texts(folder))

    write_folder_atomic(tmp_path / "first", fill)
    assert (seen, texts(tmp_path / "first"), texts(tmp_path / "second")) == ([{"first"}], {"first"}, {"second"})
    assert entries(tmp_path) == sorted(["first", "second", *(path.name for path in alike)])


def test_a_file_system_without_locks_is_written_to_and_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".out.0123456789ab.tmp").mkdir()

    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_folder_atomic(tmp_path / "out", fill_with("new"))
    assert entries(tmp_path) == [".out.0123456789ab.tmp", "out"]


@pytest.mark.usefixtures("rename")
def test_folder_that_comes_up_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        fill_with("theirs")(folder)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(WriteError, match="is there already"):
        write_folder_atomic(tmp_path / "out", fill)
    assert entries(tmp_path) == ["out"]
    assert entries(tmp_path / "out") == ["theirs"]


@pytest.mark.usefixtures("rename")
def test_failure_while_filling_leaves_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_folder_atomic(out, fill_with("old"))

    def fill(folder: Path) -> None:
        fill_with("new")(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteError, match="the disk is full"):
        write_folder_atomic(out, fill, force=True)
    assert texts(out) == {"old"}
    assert entries(tmp_path) == ["out"]


def test_without_exchange_a_failing_rename_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_folder_atomic(out, fill_with("old"))
    monkeypatch.setattr(atomic, "_renameat2", lambda *args: False)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(WriteError, match="Input/output"):
        write_folder_atomic(out, fill_with("new"), force=True)
    assert texts(out) == {"old"}
    assert entries(tmp_path) == ["out"]


def test_system_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert not atomic._renameat2(tmp_path / "a", tmp_path / "b", 1)
    for code, known in ((errno.EINVAL, False), (errno.ENOSYS, False), (errno.EIO, True)):
        monkeypatch.setattr(ctypes, "get_errno", lambda code=code: code)
        monkeypatch.setattr(Library, "renameat2", lambda *args: -1, raising=False)
        if known:
            with pytest.raises(OSError, match="Input/output"):
                atomic._renameat2(tmp_path / "a", tmp_path / "b", 1)
        else:
            assert not atomic._renameat2(tmp_path / "a", tmp_path / "b", 1)


def test_folders_that_can_not_be_synced_are_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_bytes_atomic(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"


# ---- kill -9 ------------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from msplit.formats.atomic import write_bytes_atomic, write_folder_atomic
out, kind = Path(sys.argv[1]), sys.argv[2]
def fill(text):
    def inner(folder):
        for number in range(20):
            (folder / str(number)).write_text(text * 2000)
    return inner
turn = 0
while True:
    turn += 1
    if turn == 2:
        print("ready", flush=True)
    text = "ab"[turn % 2]
    if kind == "file":
        write_bytes_atomic(out, (text * 400_000).encode(), force=True)
    else:
        write_folder_atomic(out, fill(text), force=True)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_at_any_moment_there_is_the_old_or_the_new(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    for _ in range(KILLS):
        writer = forked.Popen(
            [sys.executable, "-c", WRITER, str(out), kind], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        writer.stdout.readline()
        # It has written once and goes on writing: the moment is anywhere in one of the next writes.
        time.sleep(random.uniform(0, 0.2))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        if kind == "file":
            content = out.read_text()
            assert len(content) == 400_000
            assert set(content) in ({"a"}, {"b"})
        else:
            contents = [(out / str(number)).read_text() for number in range(20)]
            assert len(list(out.iterdir())) == 20
            assert set(contents) in ({"a" * 2000}, {"b" * 2000})
    assert out.exists()
    if kind == "folder":  # each write has removed what the kill before it has left: the old, or half of the new
        assert len(entries(tmp_path)) <= 2
    # What a kill leaves behind is known by its name.
    assert all(name == "out" or (name.startswith(".out.") and name.endswith(".tmp")) for name in entries(tmp_path))


def test_what_is_added_comes_behind_what_is_there_and_over_nothing_special(tmp_path):
    path = tmp_path / "lines"
    atomic.append_bytes(path, b"one\n")
    atomic.append_bytes(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WriteError, match="is a pipe"):
        atomic.append_bytes(tmp_path / "pipe", b"one\n")
    with pytest.raises(OSError, match="directory"):
        atomic.append_bytes(tmp_path, b"one\n")
