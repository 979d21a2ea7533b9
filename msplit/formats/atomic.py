"""Files and folders written whole or not at all, and locks on them.

Puts files and folders in place all at once: whoever looks sees the old one or the new one, never a part.

What is new is written beside its place under a temporary name (a dot, the name, and a random part), forced to disk, and renamed.
Killed at any moment, the process may leave that temporary file behind, and nothing else. Temporary folders are locked while their writer
lives: the next one that writes a folder beside them removes those that are not.

A folder can be renamed over another only with Linux's `renameat2(RENAME_EXCHANGE)`. Where the system or the file system does not have
it, the old folder is renamed away just before the new one is renamed into place: killed between these two calls, the process
leaves the old folder as ``.NAME.RANDOM.old`` beside the free place.

Locks of files and folders, which the system gives back when the process that holds them ends, however it does.

They tell what a living process writes from what a killed one has left, and keep two processes out of one folder of checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from msplit import progress
from msplit.errors import WriteError
from msplit.formats.files import descriptor_of, refuse_target

NAME = ".msplit.lock"
"""The file that is locked in a folder of checkpoints while a process writes there; it says which one does."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Errors of a file system that has no such locks."""

_TRIES, _PAUSE = 20, 0.05  # seconds: the other one may be about to write its name, or to go


def lock(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Locks what is at a path: a descriptor that holds the lock until it is closed; None where another holds it, or it is gone.

    Raises:
        OSError: The file system knows no such locks, or the path can not be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # and not one that was removed meanwhile
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


class FolderLock:
    """The lock of a folder, held until this object is gone."""

    def __init__(self, place: Path, descriptor: int) -> None:
        self._place, self._descriptor, self._owner = place, descriptor, os.getpid()

    def __del__(self) -> None:
        if self._owner == os.getpid():  # not in a child, which has a copy of it
            with contextlib.suppress(OSError):
                self._place.unlink()
        os.close(self._descriptor)


_held: WeakValueDictionary[Path, FolderLock] = WeakValueDictionary()
_guard = Lock()


def hold(folder: Path) -> FolderLock | None:
    """Keeps other processes from writing checkpoints into a folder; in this process it may be held several times.

    Returns:
        The lock, to be kept as long as is written there; None where the file system has none.

    Raises:
        WriteError: Another process holds it; the message names it. Or it can not be opened, as that of another user.
        FileNotFoundError: There is no such folder.
    """
    place = Path(os.path.realpath(folder)) / NAME
    said = ""
    with _guard:
        for _ in range(_TRIES):
            if (held := _held.get(place)) is not None:
                return held
            try:
                descriptor = lock(place, os.O_RDWR | os.O_CREAT)
                if descriptor is not None:
                    _held[place] = held = FolderLock(place, descriptor)
                    with contextlib.suppress(OSError):  # of a full disk: then it does not say by whom
                        os.ftruncate(descriptor, 0)
                        os.write(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode())
                    return held
                said = place.read_text(errors="replace")[:200].strip()
            except FileNotFoundError:
                if not place.parent.is_dir():
                    raise
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return None
                raise WriteError(
                    f"its lock can not be opened, so that another training may write here: {error.strerror}",
                    where=str(place),
                    fix="give each training a folder of its own, or remove this file if no other one writes here",
                ) from None
            time.sleep(_PAUSE)
    raise WriteError(
        f"another training writes its checkpoints here: {said or 'another process'}",
        where=str(folder),
        fix="give each training a folder of its own, or end the other one first",
    )


_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2

_FULL = {
    errno.ENOSPC: ("the disk is full", "free some space; what was there before is unharmed"),
    errno.EDQUOT: ("the disk quota is used up", "free some space; what was there before is unharmed"),
    errno.EFBIG: ("the file is larger than the system allows", "raise the limit (ulimit -f) or write elsewhere"),
    errno.EROFS: ("the file system is read-only", "write elsewhere"),
    errno.EACCES: ("no permission to write there", "check the permissions of the folder, or write elsewhere"),
    errno.EPERM: ("no permission to write there", "check the permissions of the folder, or write elsewhere"),
    errno.ENOENT: ("the folder it goes into does not exist", "make the folder first"),
    errno.ENOTDIR: ("the path goes through something that is not a folder", "check the path"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}


@contextmanager
def reported(where: Path) -> Iterator[None]:
    """Turns an OSError into a WriteError that says what happened and how to mend it."""
    try:
        yield
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None)
        what, fix = _FULL.get(code or 0, (f"can not be written: {getattr(error, 'strerror', None) or error}", None))
        raise WriteError(what, where=str(where), fix=fix) from None


def write_bytes_atomic(path: str | Path, data: bytes | memoryview, *, force: bool = False) -> None:
    """Writes a file all at once.

    A symbolic link is followed: what it points to is replaced and the link stays. Only `force` replaces a file that is there; its
    permissions are kept.

    Raises:
        WriteError: The file is there already, or can not be written. What was there before is unharmed.
    """
    with _replacing(Path(path), force=force) as (target, temporary):
        if target.is_dir():
            raise WriteError("is a folder", where=str(path), fix="give the name of a file")
        write_pieces(temporary, [data], stat.S_IMODE(target.stat().st_mode) if target.exists() else None)


def write_folder_atomic(path: str | Path, fill: Callable[[Path], None], *, force: bool = False) -> None:
    """Makes a folder all at once.

    `fill` is given a new, empty one. A symbolic link is followed. Only `force` replaces a folder that is there.

    Raises:
        WriteError: Something is there already, or the folder can not be written. What was there before is unharmed.
    """
    with ExitStack() as until_it_is_in_place, _replacing(Path(path), force=force) as (target, temporary):
        _sweep(target.parent)
        if (descriptor := _made(temporary)) is not None:
            until_it_is_in_place.callback(os.close, descriptor)
        fill(temporary)
        _sync_tree(temporary)
        if target.is_dir():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))


def write_group_atomic(
    path: str | Path, endings: Sequence[str], fill: Callable[[Path], None], *, force: bool = False
) -> None:
    """Makes files whose names begin alike, such as the data and the index of a checkpoint: the last one tells that all are there.

    `fill` is given the beginning of other names, and writes a file for each ending. They are renamed one after the other. Only `force`
    replaces what is there: then the last file goes first, so that for a moment there are no such files, and never some of two kinds.

    Raises:
        WriteError: Files are there already, or can not be written. What was there before is unharmed.
    """
    path = Path(path)
    with reported(path):
        target = Path(os.path.realpath(path.parent)) / path.name
        temporary = _temporary(target)
        places = [(Path(f"{temporary}{ending}"), Path(f"{target}{ending}")) for ending in endings]
        for _, place in places:
            refuse_existing(place, place, force=force)
        try:
            fill(temporary)
            for made, _ in places:
                _sync_file(made)
            places[-1][1].unlink(missing_ok=True)
            for made, place in places:
                os.replace(made, place)
        finally:
            for made in target.parent.glob(f"{glob.escape(temporary.name)}*"):
                made.unlink(missing_ok=True)
        _sync_folder(target.parent)


def leftovers(folder: Path, beginnings: Sequence[str]) -> list[Path]:
    """Temporary files that processes which were killed have left in a folder, for places whose names begin so."""
    names = "|".join(map(re.escape, beginnings))
    ours = re.compile(rf"\.(?:{names}).*\.[0-9a-f]{{12}}\.tmp.*", re.DOTALL)
    return sorted(path for path in folder.iterdir() if ours.fullmatch(path.name))


def _made(folder: Path) -> int | None:
    """Makes a folder, and locks it: a descriptor; None where the file system has no locks."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            descriptor = lock(folder)
        except OSError:
            return None
        if descriptor is not None:
            return descriptor  # otherwise another took it for one that was left, before it was locked


def _sweep(folder: Path) -> None:
    """Removes temporary folders of this user that killed processes have left in a folder. What can not be removed stays."""
    for left in leftovers(folder, ("",)):
        with contextlib.suppress(OSError):
            found = left.lstat()
            ours = left.name.endswith(".tmp") and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if not ours or (descriptor := lock(left)) is None:
                continue
            shutil.rmtree(left, ignore_errors=True)
            os.close(descriptor)


@contextmanager
def _replacing(path: Path, *, force: bool) -> Iterator[tuple[Path, Path]]:
    """The place that a path leads to, and a free one beside it: what the block writes there is then put in its place."""
    with reported(path):
        target = Path(os.path.realpath(path))
        refuse_existing(path, target, force=force)
        temporary = _temporary(target)
        try:
            yield target, temporary
            _put(temporary, target, force=force)
        except FileExistsError:
            refuse_existing(path, target, force=force)
            raise
        finally:
            # After an exchange the old folder stands here.
            if os.path.isdir(temporary):
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)
    progress.wrote(path)


def refuse_existing(path: Path, target: Path, *, force: bool) -> None:
    """Raises a WriteError where something is at the place already and must not be replaced: a device never."""
    refuse_target(path)
    if target.exists() and not force:
        raise WriteError("is there already", where=str(path), fix="choose another name, or replace it with --force")


def check_target(path: Path, *, force: bool) -> None:
    """Refuses a place that could not be written to, before any work is done for it.

    Raises:
        WriteError: It is no file or folder, or is there already, or there is no folder that can be written to.
    """
    with reported(path):
        target = Path(os.path.realpath(path))
        refuse_existing(path, target, force=force)
        if not target.parent.is_dir():
            raise WriteError("the folder it goes into does not exist", where=str(path), fix="make the folder first")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            what, fix = _FULL[errno.EACCES]
            raise WriteError(what, where=str(path), fix=fix)


def _temporary(target: Path, ending: str = "tmp") -> Path:
    # Long names leave no room for the additions.
    return target.with_name(f".{target.name[:200]}.{os.urandom(6).hex()}.{ending}")


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], mode: int | None = None, made_with: int = 0o666
) -> None:
    """Writes a file that nobody else sees yet, in pieces.

    Args:
        path: Where; nothing is there.
        pieces: Its bytes.
        mode: Its permissions; None for what the process's umask leaves of `made_with`.
        made_with: Permissions that it is made with.
    """
    with descriptor_of(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, made_with) as descriptor:
        for piece in pieces:
            with memoryview(piece) as view:
                written = 0
                while written < len(view):
                    written += os.write(descriptor, view[written : written + (1 << 30)])
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)


def append_bytes(path: str | Path, data: bytes) -> None:
    """Adds to the end of a file of this user's own, in one piece: processes that add to one file at once do not mix what they write.

    Raises:
        OSError: It can not be written.
        WriteError: What is there is a device, a pipe or a socket.
    """
    refuse_target(path)
    with descriptor_of(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) as file:
        os.write(file, data)


def _put(temporary: Path, target: Path, *, force: bool) -> None:
    """Renames into place; raises FileExistsError where something is there and must stay."""
    if not force:
        if not _renameat2(temporary, target, _NOREPLACE):
            _rename_to_free_place(temporary, target)
    elif target.is_dir():
        if not _renameat2(temporary, target, _EXCHANGE):
            _rename_over_folder(temporary, target)
    else:
        os.replace(temporary, target)


def _rename_to_free_place(temporary: Path, target: Path) -> None:
    """For systems without renameat2: a link never replaces; a folder is checked for just before."""
    if temporary.is_dir():
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(temporary, target)
        return
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links.
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.replace(temporary, target)


def _rename_over_folder(temporary: Path, target: Path) -> None:
    """For systems without renameat2: between the two renames nothing stands at the place."""
    old = _temporary(target, "old")
    os.rename(target, old)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """Linux's renameat2. False where the system or the file system does not have it; OSError on any other failure."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flag)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def _sync_folder(folder: Path) -> None:
    # Some file systems can not sync a folder; the rename itself is done.
    with descriptor_of(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor, contextlib.suppress(OSError):
        os.fsync(descriptor)


def _sync_file(path: str | Path) -> None:
    with descriptor_of(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in sorted(files):
            _sync_file(os.path.join(folder, name))
        _sync_folder(Path(folder))
