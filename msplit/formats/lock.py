"""Locks of files and folders, which the system gives back when the process that holds them ends, however it does.

They tell what a living process writes from what a killed one has left, and keep two processes out of one folder of checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from msplit.errors import WriteError

NAME = ".msplit.lock"
"""The file that is locked in a folder of checkpoints while a process writes there; it says which one does."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""What a file system says that has no such locks."""

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


class Held:
    """The lock of a folder, held until this object is gone."""

    def __init__(self, place: Path, descriptor: int) -> None:
        self._place, self._descriptor, self._owner = place, descriptor, os.getpid()

    def __del__(self) -> None:
        if self._owner == os.getpid():  # not in a child, which has a copy of it
            with contextlib.suppress(OSError):
                self._place.unlink()
        os.close(self._descriptor)


_held: WeakValueDictionary[Path, Held] = WeakValueDictionary()
_guard = Lock()


def hold(folder: Path) -> Held | None:
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
                    _held[place] = held = Held(place, descriptor)
                    with contextlib.suppress(OSError):  # of a full disk: then it does not say by whom
                        os.ftruncate(descriptor, 0)
                        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
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
