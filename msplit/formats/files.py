"""Files of strangers: text and JSON within bounds, targets that are no devices, folders whose code may be loaded.

Text and JSON that a stranger may have written: of a bounded length, read by type, every mistake with its place.

Keeps devices, pipes and sockets from being written over, and from being read without an end.

Allows code to be loaded only from folders that nobody but this user and root could have written to.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, BinaryIO, TypeVar, Union, get_args, get_origin, get_type_hints

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
            fix="give another name",
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


@contextmanager
def descriptor_of(path: str | os.PathLike[str], flags: int, made_with: int = 0o666) -> Iterator[int]:
    """The descriptor of a file, opened with `flags` and not handed on to other programs; closed afterwards."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, made_with)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _from_pipe(path: str | os.PathLike[str], most: int) -> bytes:
    with descriptor_of(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
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
        size = f"{most >> 20} MiB" if most >> 20 else f"{most:,} bytes"
        raise MsplitError(f"the {what} is longer than {size}", where=where, fix=fix) from None
    except OSError as error:
        raise MsplitError(f"the {what} can not be read: {error.strerror}", where=where, fix="check the path") from None
    except ValueError:
        raise MsplitError(f"the {what} is not UTF-8 text", where=where, fix=fix) from None


Read = TypeVar("Read")
_MOST = (1 << 62) - 1
Sha256 = Annotated[str, "[0-9a-f]{64}"]
"""A hash in hexadecimal digits."""


class _Unfit(Exception):
    """A value is not of the type that it is read as. The message says what it is not; `keys` lead to it, the last one first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.keys: list[str] = []


def _plain(kind: type, what: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise _Unfit(what)
    return value


def _word(value: Any, allowed: tuple[str, ...] | str) -> str:
    """One of some words, or a hash, whose pattern is the only one that there is."""
    if isinstance(allowed, tuple):
        return _one_of(allowed, value)
    if not re.fullmatch(allowed, _plain(str, "is not text", value)):
        raise _Unfit("is not a SHA-256 in hexadecimal digits")
    return str(value)


def _number(value: Any, low: float = 0.0, high: float = 1e12) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Unfit("is not a number")
    if isinstance(value, int) and abs(value) >= 1 << 1000:
        raise _Unfit(f"is not between {low:g} and {high:g}")  # no float holds it
    if not math.isfinite(value):
        raise _Unfit("is not a number")
    if not low <= value <= high:
        raise _Unfit(f"is {value:g}, not between {low:g} and {high:g}")
    return float(value)


def _whole(value: Any, low: int = 0, high: int = _MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        above = "" if high == _MOST else f" and at most {high}"
        raise _Unfit(f"is not a whole number of {low} or more{above}")
    return value


def _one_of(choices: tuple[str, ...], value: Any) -> str:
    if value not in choices:
        raise _Unfit(f"is {value!r}, not one of {', '.join(choices)}")
    return str(value)


def _object(keys: Sequence[str], optional: Container[str], value: Any) -> dict[str, Any]:
    """An object that has these keys, but for the optional ones, and no others."""
    found: dict[str, Any] = _plain(dict, "is not an object", value)
    for key in found:
        if key not in keys:
            near = get_close_matches(str(key), keys, 1)
            raise _Unfit(f"has no key {str(key)[:40]!r}{f' (did you mean {near[0]}?)' if near else ''}")
    for key in keys:
        if key not in found and key not in optional:
            raise _Unfit(f"lacks the key {key!r}")
    return found


def _each(pairs: Iterable[tuple[Any, Any]], reads: Callable[[Any], Callable[[Any], Any]], form: str) -> Iterator[Any]:
    """The values of a list or an object, each by its reader. What does not fit is told with its key."""
    for key, item in pairs:
        try:
            yield reads(key)(item)
        except _Unfit as problem:
            problem.keys.append(form.format(key))
            raise


def _list(read: Callable[[Any], Any], value: Any) -> tuple[Any, ...]:
    return tuple(_each(enumerate(_plain(list, "is not a list", value)), lambda _: read, "[{}]"))


def _row(reads: Sequence[Callable[[Any], Any]], value: Any) -> tuple[Any, ...]:
    if len(_plain(list, "is not a list", value)) != len(reads):
        raise _Unfit(f"is not a list of {len(reads)}")
    return tuple(_each(enumerate(value), reads.__getitem__, "[{}]"))


def _mapping(key_type: type, read: Callable[[Any], Any], value: Any) -> dict[Any, Any]:
    found = _plain(dict, "is not an object", value)
    if (
        key_type is int
        and (wrong := next((key for key in found if not re.fullmatch("[0-9]{1,6}", key)), None)) is not None
    ):
        raise _Unfit(f"has the key {wrong!r}, which is not a number of streams")
    return dict(zip(map(key_type, found), _each(found.items(), lambda _: read, ".{}"), strict=True))


def _record(
    kind: type, reads: Mapping[str, Callable[[Any], Any]], value: Any, optional: Container[str] = (), given: Any = None
) -> Any:
    """An object as a dataclass."""
    given = given or {}
    found = _object([name for name in reads if name not in given], optional, value)
    return kind(**dict(zip(found, _each(found.items(), reads.__getitem__, ".{}"), strict=True)), **given)


@cache
def _field_readers(kind: type) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: reader(hints[name]) for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]


_LEAVES: dict[Any, Callable[..., Any]] = {
    str: partial(_plain, str, "is not text"),
    bool: partial(_plain, bool, "is neither true nor false"),
    dict: partial(_plain, dict, "is not an object"),
    list: partial(_plain, list, "is not a list"),
    int: _whole,
    float: _number,
}


@cache
def reader(kind: Any) -> Callable[[Any], Any]:
    """The function that reads what a JSON parser gives as a type; see `JsonValue.to`. It raises `_Unfit`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        read = _word if arguments[0] is str else _LEAVES[arguments[0]]
        return lambda value: read(value, *arguments[1:])
    if kind in _LEAVES:
        return _LEAVES[kind]
    if origin in (Union, UnionType):
        read = reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if origin is Mapping:
        return _LEAVES[dict] if arguments[1] is Any else partial(_mapping, arguments[0], reader(arguments[1]))
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return partial(_list, reader(arguments[0]))
    if origin is tuple:
        return partial(_row, tuple(map(reader, arguments)))
    return partial(_record, kind, _field_readers(kind))


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
        return self.to(dict)

    def of_version(self, kind: str, version: int) -> JsonValue:
        """Sees to it that this is an object which says that it is of this kind and schema version, and gives it without that."""
        found = {**self.mapping()}
        said_kind, said = found.pop("kind", None), found.pop("schema_version", None)
        if said_kind != kind or said != version or isinstance(said, bool):
            other = f", but of {json.dumps(said):.20}" if said_kind == kind else ""
            raise self.wrong(f"is not one of version {version}{other}")
        return self._inside(self.place, found)

    def object(self, keys: tuple[str, ...], optional: Container[str] = ()) -> JsonValue:
        """Sees to it that these keys are there, but for the optional ones, and no others."""
        self.checked(partial(_object, keys, optional))
        return self

    def without(self, key: str) -> JsonValue:
        """This object without a key."""
        return self._inside(self.place, {name: item for name, item in self.mapping().items() if name != key})

    def at(self, key: str) -> JsonValue:
        """The value of a key."""
        if key not in self.mapping():
            raise self.wrong(f"lacks the key {key!r}")
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
        return self.to(str)

    def flag(self) -> bool:
        """True or false."""
        return self.to(bool)

    def one_of(self, choices: tuple[str, ...]) -> str:
        """One of some words."""
        return self.checked(partial(_one_of, choices))

    def number(self, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number within bounds."""
        return self.checked(partial(_number, low=low, high=high))

    def whole(self, low: int = 0, high: int = _MOST) -> int:
        """A whole number within bounds."""
        return self.checked(partial(_whole, low=low, high=high))

    def to(self, kind: type[Read], *, optional: Container[str] = (), **given: Any) -> Read:
        """The value as a type: text, a number of 0 or more, a truth value, a list, an object, a dataclass, or one of these or null.

        An object becomes a dataclass whose fields are its keys; ``tuple[int, ...]`` and ``tuple[str, int]`` are lists. Limits stand in
        the type: ``Annotated[float, 0.0, 1.0]``, ``Annotated[str, ("nhwc", "nchw")]``, `Sha256`.

        Args:
            kind: The type.
            optional: Fields of a dataclass that may be missing, and then have their default.
            given: Values of fields that are no keys.
        """
        known: Any = kind
        read: Callable[[Any], Read] = reader(known)
        if given or optional:
            read = partial(_record, known, _field_readers(known), optional=optional, given=given)
        return self.checked(read)

    def checked(self, read: Callable[[Any], Read]) -> Read:
        """The value as one of the functions below reads it."""
        try:
            return read(self.value)
        except _Unfit as problem:
            place = f"{self.place}{''.join(reversed(problem.keys))}".removeprefix(".")
            raise self._inside(place, None).wrong(str(problem)) from None

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
