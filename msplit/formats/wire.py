"""Just enough of protobuf's wire format to tell files apart and to say where one was cut off."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

Buffer = bytes | memoryview | mmap.mmap


class NotWireFormat(ValueError):
    """The bytes are not a protobuf message."""


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


def varint(data: Buffer, position: int, end: int) -> tuple[int, int]:
    """A varint and the position behind it.

    Raises:
        NotWireFormat: It is longer than ten bytes.
        IndexError: It runs past `end`.
    """
    value = shift = 0
    while True:
        if position >= end:
            raise IndexError("varint runs past the end")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise NotWireFormat("varint longer than ten bytes")


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
    """How many bytes a message that was cut off must have at least; None where it was not, or is no message at all."""
    try:
        for field in fields(data):
            if field.end > len(data):
                return field.end
    except NotWireFormat:
        pass
    return None
