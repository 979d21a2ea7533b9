"""Protobuf's bytes: files opened, messages parsed, and enough of the wire format to tell files apart and to say where one was cut off.

Every failure becomes one clear LoadError.
"""

from __future__ import annotations

import mmap
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msplit.errors import LoadError
from msplit.formats.tensors import NotWireFormat, varint
from msplit.progress import LOG

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

FileBytes = bytes | mmap.mmap
Buffer = FileBytes | memoryview


@dataclass(frozen=True)
class Field:
    """A field of a message.

    Attributes:
        kind: Its wire type.
        start: Where its payload begins.
        end: Where its payload ends; past the end of the buffer where the message was cut off.
    """

    number: int
    kind: int
    start: int
    end: int


def fields(data: Buffer, start: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of a message, without going into them. The last one may end past `end`: then the message was cut off.

    Raises:
        NotWireFormat: A field has a number or a wire type that does not exist.
    """
    end = len(data) if end is None else end
    position = start
    while position < end:
        try:
            tag, position = varint(data, position, end)
            number, kind = tag >> 3, tag & 7
            if not 0 < number < 2**29:
                raise NotWireFormat(f"field number {number}")
            payload = position
            if kind == VARINT:
                _, position = varint(data, position, end)
            elif kind == FIXED64:
                position += 8
            elif kind == FIXED32:
                position += 4
            elif kind == LENGTH:
                length, payload = varint(data, position, end)
                position = payload + length
            else:
                raise NotWireFormat(f"wire type {kind}")
        except IndexError:
            # The end came inside a tag or a number.
            yield Field(0, -1, position, end + 1)
            return
        yield Field(number, kind, payload, position)


def cut_off_at(data: Buffer) -> int | None:
    """Least size in bytes of a message that was cut off; None where it was not, or is no message at all."""
    try:
        for field in fields(data):
            if field.end > len(data):
                return field.end
    except NotWireFormat:
        pass
    return None


MAX_BYTES = 2**31 - 1
"""Protobuf's limit: TensorFlow reads no message larger than this."""

_SLOW_TEXT_BYTES = 20_000_000

_COMMENT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\'[^\'\\]*+(?:\\.[^\'\\]*+)*+\'|(#)', re.DOTALL)
"""A `#` outside of what is quoted is in the group."""


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turns an OSError into a LoadError that says what happened and how to mend it."""
    where = str(path)
    try:
        yield
    except FileNotFoundError:
        raise LoadError("there is no such file or folder", where=where, fix="check the path") from None
    except PermissionError:
        raise LoadError("no permission to read it", where=where, fix="check its permissions") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"can not be read: {getattr(error, 'strerror', None) or error}", where=where) from None


@contextmanager
def opened(path: Path) -> Iterator[FileBytes]:
    """The bytes of a file, mapped and not read.

    Raises:
        LoadError: It is not there, is no file, can not be read, or is larger than a message can be.
    """
    where = str(path)
    with ExitStack() as stack:
        with reported(path):
            # Asked before opening: opening a pipe would wait for its writer.
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise LoadError("is not a regular file", where=where, fix="give a file or a SavedModel folder")
            if info.st_size > MAX_BYTES:
                raise LoadError(
                    f"has {info.st_size:,} bytes; TensorFlow and protobuf read no message over 2 GiB ({MAX_BYTES:,} bytes)",
                    where=where,
                    fix="export a SavedModel: it keeps the weights in files of their own",
                )
            file = stack.enter_context(path.open("rb"))
            data: FileBytes = b""
            if info.st_size:
                data = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        yield data


def parse_binary(data: FileBytes, message: Any, where: str) -> Any:
    """Parses bytes into a message.

    Raises:
        LoadError: The bytes are cut off or damaged.
    """
    from google.protobuf.message import DecodeError

    try:
        # The parser wants bytes or a memoryview; a view spares copying the file.
        with memoryview(data) as view:
            message.ParseFromString(view)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        needed = cut_off_at(data)
        if needed is not None:
            raise LoadError(
                f"the file is cut off: it has {len(data):,} bytes and says that it has at least {needed:,}",
                where=where,
                fix="copy or export it again",
            ) from None
        raise LoadError(f"the file is damaged: {error}", where=where, fix="copy or export it again") from None
    return message


def parse_text(data: FileBytes, message: Any, where: str) -> Any:
    """Parses protobuf's text format into a message.

    Raises:
        LoadError: The text is not valid; says the line.
    """
    from google.protobuf import text_format

    if len(data) > _SLOW_TEXT_BYTES:
        LOG.warning(
            "%s: reading %d MB of text takes a while; the binary format is a hundred times faster",
            where,
            len(data) >> 20,
        )
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LoadError(f"the text is not UTF-8 at byte {error.start:,}", where=where) from None
    try:
        return text_format.Parse(text, message)
    except text_format.ParseError as error:
        line = error.GetLine()
        place = f"{where}:{line}" if line is not None else where
        cut = text.count("{") > text.count("}") and not text.rstrip().endswith("}")
        raise LoadError(
            "the text is cut off: a brace is never closed" if cut else f"the text is not valid: {error}",
            where=place,
            fix="copy or export it again" if cut else "mend this line or export the model again",
        ) from None
    except RecursionError:
        raise LoadError("the text is nested too deeply", where=where, fix="export the model again") from None


def has_comments(data: FileBytes) -> bool:
    """True if a text in protobuf's format has comments."""
    return data.find(b"#") >= 0 and any(found[1] for found in _COMMENT.finditer(data))
