"""The link between a process that speaks gRPC and the one that runs the models: requests one way, answers the other, over a socket."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable
from typing import cast

_HEAD = struct.Struct("<IIHd")
"""Bytes that follow, number of the request, what it is (the place of a method in `PATHS`, or a status), seconds that are left."""

_JOINED = 1 << 16
"""Bytes below which to copy them takes less time than to write twice."""

READY, CANCEL, STOP, END = 0xFFFC, 0xFFFD, 0xFFFE, 0xFFFF
"""In place of a method or a status: the front end listens; nobody waits for that request any more; health is to say that it stops; it is to
end within the seconds said."""


class Link(asyncio.Protocol):
    """One end.

    Args:
        heard: Called with the number, the kind, the seconds and the bytes of whatever comes.
        lost: Called when the other end is gone.
    """

    def __init__(self, heard: Callable[[int, int, float | None, bytes], None], lost: Callable[[], None]) -> None:
        self._heard, self._lost = heard, lost
        self._left = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport; called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Passes on each message that is complete; called by the event loop."""
        left = self._left
        left += data
        start, size = 0, len(left)
        with memoryview(left) as view:
            while size - start >= _HEAD.size:
                length, number, kind, seconds = _HEAD.unpack_from(view, start)
                begin = start + _HEAD.size
                if size - begin < length:
                    break
                start = begin + length
                self._heard(number, kind, None if math.isnan(seconds) else seconds, bytes(view[begin:start]))
        del left[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells that the connection has ended; called by the event loop."""
        del exc
        self._transport = None
        self._lost()

    def say(self, number: int, kind: int, data: bytes = b"", seconds: float | None = None) -> None:
        """Sends something. What nobody is there to hear is lost."""
        if self._transport is not None:
            head = _HEAD.pack(len(data), number, kind, math.nan if seconds is None else seconds)
            for part in (head + data,) if len(data) < _JOINED else (head, data):
                self._transport.write(part)
