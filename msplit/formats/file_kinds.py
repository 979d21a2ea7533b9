"""Devices, pipes and sockets: the one place that keeps them from being written over, and from being read without an end."""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path
from typing import BinaryIO

from msplit.errors import WriteError

PATIENCE = 5.0
"""Seconds of silence after which a pipe is given up."""

_AT_ONCE = 1 << 20


def name_of(mode: int) -> str:
    """What a file of this mode is, as in ``"a device"``; "" for regular files and folders."""
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return "a device"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "no regular file"


def refuse_target(path: str | os.PathLike[str]) -> None:
    """Refuses a path that is, or leads to, something that is neither a file nor a folder.

    A rename would put a file in its place: `/dev/null` would be gone for everybody.

    Raises:
        WriteError: It is a device, a pipe or a socket.
        OSError: It can not be asked.
    """
    try:
        found = name_of(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if found:
        raise WriteError(
            f"is {found}; only files and the folders of SavedModels are written over",
            where=os.fspath(path),
            fix="give the name of a file",
        )


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; never waits for a writer, never opens a device.

    Raises:
        OSError: It can not be opened, or is something else.
    """
    # Asked before opening: to open some devices is to set them going. Not blocking: it may have become a pipe since.
    _refuse_source(os.stat(path).st_mode)
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    try:
        _refuse_source(os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def _refuse_source(mode: int) -> None:
    found = name_of(mode)
    if found:
        raise OSError(errno.EINVAL, f"it is {found}, not a file")
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a file, of a pipe that somebody writes to (as in ``<(command)``), or of the null device; of `most` bytes at most.

    Raises:
        OSError: It can not be read, is another device or a socket, or nobody has written to the pipe for `PATIENCE` seconds.
        EOFError: It has more bytes.
    """
    info = os.stat(path)
    if stat.S_ISCHR(info.st_mode) and info.st_rdev == os.stat(os.devnull).st_rdev:
        return b""
    if stat.S_ISFIFO(info.st_mode):
        data = _from_pipe(path, most + 1)
    else:
        with open_regular(path) as file:
            data = file.read(most + 1)
    if len(data) > most:
        raise EOFError(f"{Path(path)} has more than {most:,} bytes")
    return data


def _from_pipe(path: str | os.PathLike[str], most: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        data = bytearray()
        while len(data) < most:
            if not poll.poll(PATIENCE * 1000):
                raise OSError(errno.ETIMEDOUT, f"it is a pipe, and nobody has written to it for {PATIENCE:g} s")
            part = os.read(descriptor, min(_AT_ONCE, most - len(data)))
            if not part:
                break
            data += part
        return bytes(data)
    finally:
        os.close(descriptor)
