"""Text and JSON that a stranger may have written: of a bounded length, read by type, every mistake with its place.

Devices, pipes and sockets: the one place that keeps them from being written over, and from being read without an end.

Whether what is in a folder can be run as code: only where nobody but this user and root could have put it there.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from msplit.errors import MsplitError, WriteError

PATIENCE = 5.0
"""Seconds of silence after which a pipe is given up."""

_AT_ONCE = 1 << 20


def name_of(mode: int) -> str:
    """The kind of a file of this mode, as in ``"a device"``; "" for regular files and folders."""
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


Read = TypeVar("Read")


def read_text(path: Path, most: int) -> str:
    """The text of a file of at most so many bytes, or of a pipe that somebody writes to; see `files.read_bytes`.

    Raises:
        OSError: It can not be read.
        EOFError: It has more bytes.
        ValueError: It is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_file(path: str | os.PathLike[str], most: int, *, what: str, fix: str) -> str:
    """The text of a file of msplit's own, of at most so many bytes.

    Messages say what it should be, such as ``"plan"``, and how to come by a good one.

    Raises:
        MsplitError: It can not be read, is too long, or is no text.
    """
    where = os.fspath(path)
    try:
        return read_text(Path(path), most)
    except EOFError:
        raise MsplitError(f"the {what} is longer than {most >> 20} MiB", where=where, fix=fix) from None
    except OSError as error:
        raise MsplitError(f"the {what} can not be read: {error.strerror}", where=where, fix="check the path") from None
    except ValueError:
        raise MsplitError(f"the {what} is not UTF-8 text", where=where, fix=fix) from None


@dataclass(frozen=True)
class JsonValue:
    """A value of a JSON file with its place, for messages. Each method raises a MsplitError where the value is something else.

    Attributes:
        value: As the JSON parser gave it.
        what: What the file should be, such as ``"profile"``.
        source: The file.
        fix: How to come by a good one.
        place: Keys that lead to the value, "" for the whole file.
    """

    value: Any
    what: str
    source: str
    fix: str
    place: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str], most: int, *, what: str, fix: str) -> JsonValue:
        """Read a JSON file; see `read_file` and `parse`."""
        return cls.parse(read_file(path, most, what=what, fix=fix), os.fspath(path), what=what, fix=fix)

    @classmethod
    def parse(cls, text: str, source: str, *, what: str, fix: str) -> JsonValue:
        """Parse a JSON text.

        Raises:
            MsplitError: It is no JSON; the message says where.
        """
        try:
            return cls(json.loads(text), what, source, fix)
        except RecursionError:
            raise MsplitError(f"the {what} is nested too deep", where=source, fix=fix) from None
        except ValueError as error:
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise MsplitError(f"the {what} is not valid JSON: {reason}", where=f"{source}{line}", fix=fix) from None

    def wrong(self, what: str) -> MsplitError:
        """The error that this value is."""
        text = f"`{self.place}` {what}" if self.place else f"the {self.what} {what}"
        return MsplitError(text, where=self.source, fix=self.fix)

    def mapping(self) -> Mapping[str, Any]:
        """An object, as it is."""
        if not isinstance(self.value, dict):
            raise self.wrong("is not an object")
        return self.value

    def of_version(self, kind: str, version: int) -> JsonValue:
        """Sees to it that this is an object which says that it is of this kind and schema version."""
        said = self.mapping().get("schema_version")
        if self.mapping().get("kind") != kind or said != version or isinstance(said, bool):
            raise self.wrong(f"is not one of version {version}")
        return self

    def object(self, keys: tuple[str, ...], optional: tuple[str, ...] = ()) -> JsonValue:
        """Sees to it that these keys are there, but for the optional ones, and no others."""
        mapping = self.mapping()
        for key in mapping:
            if key not in keys:
                raise self.wrong(f"has no key {key!r}")
        for key in keys:
            if key not in mapping and key not in optional:
                raise self.wrong(f"lacks the key {key!r}")
        return self

    def at(self, key: str) -> JsonValue:
        """The value of a key that is there."""
        return self._inside(f"{self.place}.{key}" if self.place else key, self.mapping()[key])

    def entries(self) -> list[tuple[str, JsonValue]]:
        """Keys and values of an object."""
        return [(key, self.at(key)) for key in self.mapping()]

    def items(self, count: int | None = None) -> list[JsonValue]:
        """The values of a list, of so many where that is given."""
        if not isinstance(self.value, list):
            raise self.wrong("is not a list")
        if count not in (None, len(self.value)):
            raise self.wrong(f"is not a list of {count}")
        return [self._inside(f"{self.place}[{place}]", item) for place, item in enumerate(self.value)]

    def text(self) -> str:
        """Text."""
        if not isinstance(self.value, str):
            raise self.wrong("is not text")
        return self.value

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("is neither true nor false")
        return self.value

    def sha256(self) -> str:
        """A hash in hexadecimal digits."""
        if not re.fullmatch("[0-9a-f]{64}", self.text()):
            raise self.wrong("is not a SHA-256 in hexadecimal digits")
        return self.text()

    def one_of(self, choices: tuple[str, ...]) -> str:
        """One of some words."""
        if self.value not in choices:
            raise self.wrong(f"is {self.value!r}, not one of {', '.join(choices)}")
        return str(self.value)

    def number(self, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number within bounds."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise self.wrong("is not a number")
        if isinstance(self.value, int) and abs(self.value) >= 1 << 1000:
            raise self.wrong(f"is not between {low:g} and {high:g}")  # no float holds it
        if not math.isfinite(self.value):
            raise self.wrong("is not a number")
        if not low <= self.value <= high:
            raise self.wrong(f"is {self.value:g}, not between {low:g} and {high:g}")
        return float(self.value)

    def whole(self, low: int = 0, high: int = (1 << 62) - 1) -> int:
        """A whole number within bounds."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not low <= self.value <= high:
            above = "" if high == (1 << 62) - 1 else f" and at most {high}"
            raise self.wrong(f"is not a whole number of {low} or more{above}")
        return self.value

    def or_none(self, read: Callable[[JsonValue], Read]) -> Read | None:
        """None for null."""
        return None if self.value is None else read(self)

    def _inside(self, place: str, value: Any) -> JsonValue:
        return JsonValue(value, self.what, self.source, self.fix, place)


def writers(path: Path) -> str | None:
    """Others than this user and root who could put a file into a folder, or another folder in its place, in words; None where nobody could.

    What is not there yet will be made by this user. A folder in which nobody may remove what is another's (``/tmp``) is no danger to what
    is inside of it.
    """
    if os.name != "posix":
        return None
    place = path.absolute()
    held = place.resolve()
    for one in dict.fromkeys((held, *held.parents, place, *place.parents)):
        try:
            found = one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if found.st_uid not in (0, os.getuid()):
            return f"{one} belongs to another user"
        if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and one not in (held, place)):
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"anybody may write to {one}"
        if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
            return f"a group may write to {one}"
    return None


def _is_own_group(group: int) -> bool:
    """True if it has no member but this user, as some systems give one to everybody, or is root's."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == 0 or (
        group == user.pw_gid and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
    )
