"""gRPC by `pygrpc-native`, whose threads in Rust do the work of HTTP/2 without Python's lock: half of the processor time of a request.

It is young, has no TLS, and no bound on what it keeps of a request before it is whole; so it is an option (`--front native`), and `rpc` the
default. Used as `rpc.GrpcServer`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from msplit.errors import MsplitError
from msplit.serving.server.rpc import FLUSH, IDLE, LOOK, NOT_SERVING, PATHS, SPIN, UNKNOWN, WATCH, hang_up

_METHODS = [*((path, False) for path in PATHS), (WATCH, True)]
"""Path of each method, and True where its answer is a stream."""
_AT_ONCE = 64
_TOO_LARGE = 8
_LOG = logging.getLogger(__name__)


class NativeCall:
    """A request, to be answered once, by any thread; see `rpc.GrpcCall`."""

    __slots__ = ("_front", "_number", "_open", "cancel", "path")

    def __init__(self, front: Any, open_: dict[int, bool], number: int, path: str) -> None:
        self._front, self._open, self._number, self.path = front, open_, number, path
        self.cancel: Callable[[], object] | None = None

    def answer(self, data: bytes) -> None:
        """Sends the answer."""
        if self._open.pop(self._number, None) is not None:
            self._front.respond(self._number, data)

    def fail(self, status: int, message: str) -> None:
        """Sends a status of gRPC other than 0, and what it is about."""
        if self._open.pop(self._number, None) is not None:
            self._front.fail(self._number, status, message)


class NativeWatch(NativeCall):
    """A call that is told the health of the server, and again when it stops."""

    __slots__ = ("_known",)

    def answer(self, data: bytes) -> None:
        """Sends the health of now. The call stays open until the server stops."""
        self._known = data is not UNKNOWN
        self._front.stream_send(self._number, data)

    def fail(self, status: int, message: str) -> None:
        """Says that there is no such service."""
        del status, message
        self.answer(UNKNOWN)

    def stop(self) -> None:
        """Tells that the server stops, and ends the call."""
        if self._open.pop(self._number, None) is not None:
            if self._known:
                self._front.stream_send(self._number, NOT_SERVING)
            self._front.stream_end(self._number)


class NativeServer:
    """A server that listens nowhere yet; see `rpc.GrpcServer`.

    Attributes:
        open: Numbers of calls that are not answered, and True for those that came before the server was to stop.
        watchers: Calls that watch its health.
    """

    def __init__(
        self,
        take: Callable[[Any, bytes, float | None], object],
        stopping: threading.Event,
        most: int,
        drive: Callable[[], bool] = lambda: False,
    ) -> None:
        try:
            import pygrpc_native
        except ModuleNotFoundError:
            what = "the front native takes what is not installed here: pygrpc-native"
            raise MsplitError(what, fix="pip install pygrpc-native, or leave --front out") from None
        self._library, self._take, self._stopping, self._most, self._drive = pygrpc_native, take, stopping, most, drive
        self.open: dict[int, bool] = {}
        self._calls: dict[int, NativeCall] = {}
        self.watchers: dict[int, NativeWatch] = {}
        self._front: Any = None
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> bool:
        """Begins to listen. False if the port is taken."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._front = self._library.NativeGrpcFront(where, _METHODS, io_threads=1, call_details=True)
            self._front.start()
        except (OSError, RuntimeError):
            return False
        self._thread = threading.Thread(target=self._serve, name="msplit-grpc", daemon=True)
        self._thread.start()
        return True

    async def end(self, grace: float = 0.0) -> None:
        """Closes all connections once what was taken is answered, or so many seconds are over. Requests are refused up to then."""
        loop = asyncio.get_running_loop()
        over = loop.time() + grace
        while any([*self.open.values()]) and loop.time() < over:
            await asyncio.sleep(LOOK)
        if grace:
            await asyncio.sleep(FLUSH)
        if self._thread is None:
            return
        hang_up(self._front.bound_port)
        thread, self._thread = self._thread, None
        await loop.run_in_executor(None, self._front.close)
        await loop.run_in_executor(None, thread.join)
        self.open.clear()

    def _serve(self) -> None:
        """Body of the thread."""
        busy, last = False, 0.0
        while True:
            try:
                recent = time.perf_counter() - last < SPIN
                events = self._front.recv_batch_details(
                    _AT_ONCE, 0 if busy and recent else 1 if busy else int(IDLE * 1000)
                )
                if events is None:
                    return
                for event in events:
                    last = time.perf_counter()
                    self._heard(*event)
                busy = self._drive()
                if self.watchers and self._stopping.is_set():
                    for number in [*self.watchers]:
                        self.watchers.pop(number).stop()
            except Exception:  # noqa: BLE001  whatever it is, others get their answers
                _LOG.exception("gRPC")

    def _heard(self, kind: int, number: int, method: int, data: bytes, client: Any, details: Any) -> None:
        """Hands a request on, or tells that nobody waits for its answer any more."""
        del client
        if kind != self._library.EVENT_CALL:
            self.watchers.pop(number, None)
            if self.open.pop(number, None) is not None and (call := self._calls.pop(number, None)) and call.cancel:
                call.cancel()
            return
        path = _METHODS[method][0]
        call = (NativeWatch if path == WATCH else NativeCall)(self._front, self.open, number, path)
        self.open[number] = path != WATCH and not self._stopping.is_set()
        if isinstance(call, NativeWatch):
            self.watchers[number] = call
        if len(data) > self._most:
            call.fail(_TOO_LARGE, f"the request is larger than max: {len(data)} bytes of {self._most}")
            return
        self._take(call, data, details[2])
        if number in self.open:
            self._calls[number] = call
        if len(self._calls) > 2 * len(self.open) + _AT_ONCE:  # those that were answered meanwhile
            self._calls = {number: call for number, call in self._calls.items() if number in self.open}
