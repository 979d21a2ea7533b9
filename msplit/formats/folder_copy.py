"""Copies what lies beside the main file of a SavedModel: regular files, each as large as it was when it was looked at."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from msplit.errors import WriteError
from msplit.formats.file_kinds import name_of, open_regular

_AT_ONCE = 1 << 20
_BLOCK = 512  # what st_blocks counts


@dataclass(frozen=True)
class Item:
    """A file or folder to copy.

    Attributes:
        place: Where it goes, from the top of the new folder.
        info: What the system said of it, links followed.
    """

    source: str
    place: str
    info: os.stat_result

    @property
    def taken(self) -> int:
        """Bytes that it takes on disk: holes take none."""
        return 0 if stat.S_ISDIR(self.info.st_mode) else min(self.info.st_size, self.info.st_blocks * _BLOCK)


def listed(source: Path, left_out: Container[str]) -> list[Item]:
    """What there is to copy, folders before what is in them.

    A link to a file becomes a copy of that file. A link to a folder likewise, once: twice the same folder may be a loop, or
    folders that double at each level. `left_out` are paths from `source` of what is not copied.

    Raises:
        WriteError: Something is no file and no folder, or can not be asked; says which.
    """
    found: list[Item] = []
    top = os.stat(source)
    entered = {(top.st_dev, top.st_ino)}
    todo = [(os.fspath(source), "")]
    while todo:
        folder, place = todo.pop()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise _refused(folder, str(error.strerror)) from None
        for name in names:
            if os.path.join(place, name) in left_out:
                continue
            item = _item(os.path.join(folder, name), os.path.join(place, name))
            found.append(item)
            if stat.S_ISDIR(item.info.st_mode):
                key = (item.info.st_dev, item.info.st_ino)
                if key in entered:
                    raise _refused(
                        item.source, f"the link leads to a folder that is copied already{_leads(item.source)}"
                    )
                entered.add(key)
                todo.append((item.source, item.place))
    return found


def _item(source: str, place: str) -> Item:
    try:
        info = os.stat(source)
    except OSError as error:
        raise _refused(source, f"{error.strerror}{_leads(source)}") from None
    special = name_of(info.st_mode)
    if special:
        raise _refused(source, f"it is {special}, not a file{_leads(source)}")
    return Item(source, place, info)


def _leads(path: str) -> str:
    return f" (a link to {os.path.realpath(path)})" if os.path.islink(path) else ""


def _refused(source: str, why: str) -> WriteError:
    return WriteError(f"{source} can not be copied: {why}", fix="remove it from the model, or export the model again")


def copy(items: list[Item], folder: Path) -> None:
    """Copies files and folders into a new folder. The process's umask applies, holes stay holes.

    Raises:
        WriteError: There is not enough room for all of them, or one can not be read.
        OSError: Writing fails.
    """
    needed, free = sum(item.taken for item in items), shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"the model's files take {needed:,} bytes, and {free:,} are free there",
            fix="free some space, or write elsewhere",
        )
    for item in items:
        target = folder / item.place
        if stat.S_ISDIR(item.info.st_mode):
            target.mkdir(stat.S_IMODE(item.info.st_mode) & 0o777 | 0o700)  # files shall go into it
        else:
            _copy_file(item, target)


def _copy_file(item: Item, target: Path) -> None:
    mode = stat.S_IMODE(item.info.st_mode) & 0o777
    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            file = open_regular(item.source)
        except OSError as error:
            raise _refused(item.source, str(error.strerror)) from None
        with file:
            _copy_bytes(file.fileno(), out, item.info.st_size)
        os.utime(out, ns=(item.info.st_atime_ns, item.info.st_mtime_ns))
    finally:
        os.close(out)


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Copies the first `size` bytes; a file that grows meanwhile is cut there."""
    os.ftruncate(target, size)
    position = 0
    while position < size:
        position, end = _data(source, position, size)
        while position < end:
            part = os.pread(source, min(_AT_ONCE, end - position), position)
            if not part:  # it has become shorter
                return os.ftruncate(target, position)
            position += os.pwrite(target, part, position)
    return None


def _data(source: int, position: int, size: int) -> tuple[int, int]:
    """The next stretch of a file that is no hole; (size, size) where nothing but a hole follows."""
    try:
        start = os.lseek(source, position, os.SEEK_DATA)
        return start, min(os.lseek(source, start, os.SEEK_HOLE), size)
    except OSError as error:
        # The end, or a file system that knows no holes.
        return (size, size) if error.errno == errno.ENXIO else (position, size)
