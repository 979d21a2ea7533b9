"""Front ends, as the process that runs the models sees them: it starts them, answers them, and ends them.

The link between a process that speaks gRPC and the one that runs the models: requests one way, answers the other, over a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

from msplit.errors import MsplitError
from msplit.serving.server import rpc
from msplit.serving.server.service import Service, answer
from msplit.serving.server.tensors import StatusCode

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


_PATIENCE = 30.0
"""Seconds that a front end may take to listen."""
_PAUSE = 1.0
"""Seconds before one that has ended is replaced."""


class Front:
    """A front end that is being started, or runs."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.ready, self.gone = asyncio.Event(), asyncio.Event()

    async def start(self, host: str, port: int, most: int) -> None:
        """Starts the process, and waits until it listens.

        Raises:
            MsplitError: It does not.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            _, self._link = await asyncio.get_running_loop().create_unix_connection(
                lambda: Link(self._heard, self._lost), sock=ours
            )
            arguments = map(str, (host, port, most, theirs.fileno()))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "msplit.serving.server.front", *arguments, pass_fds=[theirs.fileno()]
            )
        waits = [asyncio.create_task(event.wait()) for event in (self.ready, self.gone)]
        await asyncio.wait(waits, timeout=_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self.ready.is_set():
            self.kill()
            fix = "choose another with --port, or leave --front-ends out"
            raise MsplitError(f"a front end can not listen on port {port} of {host}", fix=fix)

    def stop(self) -> None:
        """Has health say that the server stops."""
        if self._link is not None:
            self._link.say(0, STOP)

    async def end(self, grace: float) -> None:
        """Has it finish what it has, and waits until it is gone."""
        assert self._link is not None
        assert self._process is not None
        self._link.say(0, END, seconds=grace)
        try:
            await asyncio.wait_for(self._process.wait(), grace + _PAUSE)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it was quicker
                self._process.kill()

    def _heard(self, number: int, kind: int, seconds: float | None, data: bytes) -> None:
        if kind == READY:
            self.ready.set()
        elif kind == CANCEL:
            if number in self._tasks:
                self._tasks.pop(number).cancel()
        elif kind < len(rpc.PATHS):
            task = asyncio.create_task(self._answer(number, rpc.PATHS[kind], data, seconds))
            self._tasks[number] = task
            task.add_done_callback(partial(self._done, number))

    async def _answer(self, number: int, path: str, data: bytes, left: float | None) -> None:
        assert self._link is not None
        try:
            self._link.say(number, *await answer(self._service, path, data, left))
        except asyncio.CancelledError:
            self._link.say(number, StatusCode.CANCELLED.grpc, b"the request was cancelled")

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]

    def _lost(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.gone.set()


async def keep(front: Front, service: Service, where: tuple[str, int, int], running: list[Front]) -> None:
    """Replaces a front end that ends by itself, as long as the server runs."""
    while True:
        await front.gone.wait()
        if service.stopping.is_set():
            return
        service.log("a front end has ended; another one is started")
        running.remove(front)
        await asyncio.sleep(_PAUSE)
        front = Front(service)
        running.append(front)
        try:
            await front.start(*where)
        except MsplitError as problem:
            service.log(str(problem))
