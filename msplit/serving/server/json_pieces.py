"""JSON of any length, read piece by piece: all of it at once would be twenty times as large, and would keep every other thread waiting.

A list whose text is long stays text until somebody asks for its pieces, and only as many become numbers as the model takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.inputs.files import json_array, loads
from msplit.serving.pool.ports import Port
from msplit.serving.server.decode import MOST_FIELDS
from msplit.serving.server.refusal import Refusal, invalid

PIECE = 1 << 16
"""Bytes that are read at once, which takes some ms."""
_DEEPEST = 64
"""Lists and objects within each other, in a text that is longer than a piece."""
_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.){0,4096}")\s*:')
_BLANK = b" \t\r\n"
_NET = np.zeros(256, np.int8)
_NET[[*b"[{"]], _NET[[*b"]}"]] = 1, -1
"""Change of the nesting depth by each byte."""


def malformed(said: object = "") -> Refusal:
    """The text is no JSON."""
    return invalid(f"JSON Parse error: {said or 'it is damaged'}")


@dataclass(frozen=True)
class Long:
    """A list that is too long to be read at once: its text between the brackets."""

    data: bytes | bytearray
    start: int
    end: int

    def pieces(self) -> Iterator[list[Any]]:
        """Elements, some at a time; one that is long itself comes alone.

        Raises:
            Refusal: It is no JSON.
        """
        start = self.start
        for commas in _commas(self.data, self.start, self.end):
            if not len(commas):
                continue
            first, last = int(commas[0]), int(commas[-1])
            if last - start > 2 * PIECE:
                yield [read(self.data, start, first)]
                start = first + 1
            if last > first or start <= first:
                yield _elements(self.data[start:last])
            start = last + 1
        long = self.end - start > 2 * PIECE
        yield [read(self.data, start, self.end)] if long else _elements(self.data[start : self.end])


def read(data: bytes | bytearray, start: int = 0, end: int | None = None) -> Any:
    """Read JSON text, with `Long` in place of lists that are long.

    Raises:
        Refusal: It is no JSON, or an object has a key twice.
    """
    end = len(data) if end is None else end
    if end - start <= PIECE:
        return _loaded(data[start:end])
    while start < end and data[start] in _BLANK:
        start += 1
    while start < end and data[end - 1] in _BLANK:
        end -= 1
    ends = data[start : start + 1] + data[end - 1 : end]
    if ends in (b"[]", b"{}") and not any(
        data[at : min(at + PIECE, end - 1)].strip(_BLANK) for at in range(start + 1, end - 1, PIECE)
    ):
        return _loaded(ends)
    if ends == b"[]":
        return Long(data, start + 1, end - 1)
    if ends == b"{}":
        return _members(data, start + 1, end - 1)
    if ends != b'""' or data.find(b"\\", start, end) >= 0 or data.find(b'"', start + 1, end - 1) >= 0:
        if end - start > PIECE and ends != b'""':
            raise malformed()
        return _loaded(data[start:end])
    if (np.frombuffer(data, np.uint8, end - start, start) < ord(" ")).any():
        raise malformed("a control character in a text")
    try:
        return data[start + 1 : end - 1].decode()
    except UnicodeDecodeError as problem:
        raise malformed(problem) from None


def _members(data: bytes | bytearray, start: int, end: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for last in chain((int(comma) for commas in _commas(data, start, end) for comma in commas), (end,)):
        key = _KEY.match(data, start, last)
        if key is None:
            raise malformed("an object has no key, or none that is short")
        name = _loaded(key[1])
        if name in found or len(found) == MOST_FIELDS:
            raise malformed(f"key {name!r} is there twice" if name in found else "an object has too many keys")
        found[name] = read(data, key.end(), last)
        start = last + 1
    return found


def _elements(text: bytes | bytearray) -> list[Any]:
    if not text.strip(_BLANK):
        raise malformed("a list has an element too few")
    found: list[Any] = _loaded(b"[" + text + b"]")
    return found


def _loaded(text: bytes | bytearray) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as problem:
        raise malformed(problem or "nested too deeply") from None


def _commas(data: bytes | bytearray, start: int, end: int) -> Iterator[NDArray[np.int64]]:
    """Ends of the elements of a list, or of an object, but for the last one: for each piece of its text those that are in it."""
    depth = quoted = escaped = 0
    for begin in range(start, end, PIECE):
        text = data[begin : min(begin + PIECE, end)]
        if escaped or b"\\" in text:
            text = b"_" * escaped + text[escaped:].replace(rb"\\", b"__").replace(rb"\"", b"__")
            escaped = int(text.endswith(b"\\"))
        signs = np.frombuffer(text, np.uint8)
        commas, net = signs == ord(","), _NET[signs]
        if quoted or b'"' in text:
            within = (np.cumsum(signs == ord('"'), dtype=np.int32) + quoted) & 1
            quoted = int(within[-1])
            commas &= within == 0
            net *= within == 0
        depths = np.cumsum(net, dtype=np.int32) + depth
        if depths.min() < 0 or depths.max() > _DEEPEST:
            raise malformed("brackets do not match, or are nested too deeply")
        depth = int(depths[-1])
        yield np.flatnonzero(commas & (depths == 0)) + begin
    if depth or quoted:
        raise malformed("brackets do not match")


class Gathered:
    """Values of an input, which come in pieces of a list.

    Args:
        name: Name of the input.
        port: Type and shape that the model takes.
        room: Most values that there can be in the request.
    """

    def __init__(self, name: str, port: Port, room: int) -> None:
        self._name, self._port, self._most = name, port, max(port.most, 1)
        self._dtype = "string" if port.dtype == "object" else port.dtype
        self._room, self._used = min(room, port.most), 0
        self._values: NDArray[Any] | None = None
        self._shape: tuple[int, ...] | None = None

    def add(self, piece: list[Any]) -> None:
        """Takes further elements of the list.

        Raises:
            Refusal: They are none that the model takes, or too many.
        """
        self._shape = self._joined(self._shape, piece)

    def array(self) -> NDArray[Any]:
        """All of them."""
        assert self._values is not None
        assert self._shape is not None
        return self._values[: self._used].reshape(self._shape)

    def _joined(self, shape: tuple[int, ...] | None, piece: list[Any]) -> tuple[int, ...]:
        """The shape of a list with so many more elements."""
        if len(piece) == 1 and isinstance(piece[0], Long):
            inner: tuple[int, ...] | None = None
            for one in piece[0].pieces():
                inner = self._joined(inner, one)
            assert inner is not None
            added = (1, *inner)
        else:
            added = self._put(one_array(piece, self._name, self._dtype))
        if shape is not None and shape[1:] != added[1:]:
            raise invalid(f"input {self._name!r} has rows of different lengths")
        whole = (added[0] + (0 if shape is None else shape[0]), *added[1:])
        if max(whole[0], math.prod(whole)) > self._most:
            raise invalid(f"input {self._name!r} has more values than the largest batch of {self._port.said} has")
        return whole

    def _put(self, array: NDArray[Any]) -> tuple[int, ...]:
        if self._values is None:
            self._values = np.empty(self._room, array.dtype)  # memory is taken when it is written
        end = self._used + array.size
        if end <= len(self._values):
            self._values[self._used : end] = array.ravel()
            self._used = end
        elif array.size:
            raise invalid(f"input {self._name!r} has more values than the largest batch has")
        return array.shape


def one_array(value: Any, name: str, dtype: str) -> NDArray[Any]:
    """Values that were read at once, as an array.

    Raises:
        Refusal: They are none of that type, or have rows of different lengths.
    """
    try:
        return json_array(value, dtype, name, source="the request")
    except LoadError as problem:
        raise invalid(problem.what) from None


def array(value: Any, name: str, port: Port) -> NDArray[Any]:
    """Values of an input, whether they were read at once or not.

    Raises:
        Refusal: They are none that the model takes.
    """
    if not isinstance(value, Long):
        return one_array(value, name, "string" if port.dtype == "object" else port.dtype)
    gathered = Gathered(name, port, value.end - value.start)
    for piece in value.pieces():
        gathered.add(piece)
    return gathered.array()
