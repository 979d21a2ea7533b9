"""gRPC in a thread of its own: takes calls from gRPC's completion queue, hands their bytes on, and drives the pools meanwhile.

The same thread reads a request, starts its step, ends it and sends the answer, so no request is handed over to another thread, and no
Python object is made for it beyond its bytes. ``grpc.aio`` needs seven times as much processor time for the same echo (see
`benchmarks/notes/front.md`). What is used of `grpcio` is the layer below ``grpc.server``, as `grpc/_server.py` uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpc._cython import cygrpc

from msplit.serving.server.logs import LOG, traced
from msplit.serving.server.messages import OPEN_METHODS

_PREDICTION = "/tensorflow.serving.PredictionService/"
_OPEN = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
WATCH = f"{_HEALTH}Watch"
"""Method that tells the health of the server or of a model, and again whenever that changes."""
PATHS = (
    *(f"{_PREDICTION}{name}" for name in ("Predict", "Classify", "Regress", "MultiInference", "GetModelMetadata")),
    "/tensorflow.serving.ModelService/GetModelStatus",
    "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
    *(f"{_OPEN}{name}" for name in OPEN_METHODS),
    f"{_HEALTH}Check",
)
"""Methods that have one answer."""
OPEN_TO_ALL = (f"{_HEALTH}Check", WATCH, f"{_OPEN}ServerLive", f"{_OPEN}ServerReady")
"""Methods that tell the health of a server: who asks needs no token."""
SERVICES = ("", *dict.fromkeys(path.split("/")[1] for path in PATHS))
"""Services whose health can be asked for."""

_KNOWN = {path.encode(): path for path in (*PATHS, WATCH)}
_INVALID_ARGUMENT, _UNIMPLEMENTED, _UNAUTHENTICATED = 3, 12, 16

_LIMITS = (
    ("grpc.server_handshake_timeout_ms", 10_000),  # who connects says what it speaks by then
    ("grpc.max_connection_idle_ms", 300_000),  # a client that asks again connects again, and loses nothing
    ("grpc.keepalive_time_ms", 60_000),  # a peer that is gone without a word is found out
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""Limits, in ms, on connections that are of no use."""
_LOOK = 0.01
_FLUSH = 0.05
"""Seconds that the last answers have to leave the process."""
_SO_ATTACH_FILTER = 26
"""Linux's; Python has no name for it."""

_AT_ONCE = 64
"""Most events of gRPC between two looks at the pools."""
_SPIN = 0.02
"""Seconds after the last event for which the thread polls gRPC and the pools without sleeping."""
_NAP, _IDLE = 1e-3, 0.1
"""Seconds for which it waits for gRPC after that, while there is something to look after, and while there is not."""
_PATIENCE = 1e-3
"""Seconds after which a call that is not answered yet is watched for being cancelled: one more event for gRPC, which few calls need."""

_CHANGES = 0.05
"""Seconds between two looks for changes of health."""

_NO_DEADLINE = 1e9
"""Seconds beyond which gRPC means that there is none."""


class GrpcCall:
    """A request over gRPC, to be answered once, by any thread.

    Attributes:
        path: Path of its method.
        headers: Headers of the request that its answer has, too.
        cancel: Called when nobody waits for the answer any more.
    """

    __slots__ = ("_call", "_server", "_since", "_watched", "cancel", "headers", "path")

    def __init__(self, server: GrpcServer, call: Any, path: str, headers: Mapping[str, str]) -> None:
        self._server, self._call, self.path, self.headers = server, call, path, headers
        self.cancel: Callable[[], object] | None = None
        self._since, self._watched = time.perf_counter(), False

    def answer(self, data: bytes) -> None:
        """Sends the answer."""
        self._finish(
            cygrpc.SendInitialMetadataOperation(tuple(self.headers.items()), 0),
            cygrpc.SendMessageOperation(data, 0),
            cygrpc.SendStatusFromServerOperation(None, 0, b"", 0),
        )

    def fail(self, status: int, message: str) -> None:
        """Sends a status of gRPC other than 0, and what it is about."""
        self._finish(
            cygrpc.SendInitialMetadataOperation(tuple(self.headers.items()), 0),
            cygrpc.SendStatusFromServerOperation(None, status, message.encode(), 0),
        )

    def receive(self, then: Callable[[Any], None]) -> None:
        """Asks gRPC for the bytes of the request."""
        self._send(then, cygrpc.ReceiveMessageOperation(0))

    def watch(self, now: float) -> bool:
        """Has gRPC tell if the call is cancelled, once it has waited for a while. False before that."""
        if now - self._since < _PATIENCE:
            return False
        with self._server.lock:
            if self in self._server.open and not self._watched:
                self._watched = True
                self._send(self._closed, cygrpc.ReceiveCloseOnServerOperation(0))
        return True

    def _closed(self, event: Any) -> None:
        if event.batch_operations[0].cancelled():
            self._server.open.pop(self, None)
            if self.cancel is not None:
                self.cancel()

    def _finish(self, *operations: Any) -> None:
        with self._server.lock:
            if self._server.open.pop(self, None) is None:
                return
            if not self._watched:
                operations = (*operations, cygrpc.ReceiveCloseOnServerOperation(0))
            self._send(_nothing, *operations)

    def _send(self, then: Callable[[Any], None], *operations: Any) -> None:
        with self._server.lock:
            if not self._server.over:  # gRPC would end the process
                self._call.start_server_batch(operations, then)


class HealthWatch(GrpcCall):
    """A call that is told the health of the server or of a model, and again when it changes, until the server stops."""

    __slots__ = ("_asked", "_sent")

    def begin(self, data: bytes) -> None:
        """Sends the health of now. The call stays open."""
        self._asked, self.cancel = data, self._gone
        self._sent = self._server.health(data)
        self._send(self._told, cygrpc.SendInitialMetadataOperation(None, 0), cygrpc.SendMessageOperation(self._sent, 0))

    def _told(self, event: Any) -> None:
        """Has it told changes, too. Before a message is sent gRPC takes no second one."""
        del event
        if self in self._server.open:
            self._server.watchers[self] = None

    def look(self, *, stops: bool) -> None:
        """Tells the health if it has changed, and ends the call when the server stops."""
        health = self._server.health(self._asked)
        changed = () if health == self._sent else (cygrpc.SendMessageOperation(health, 0),)
        if changed or stops:
            del self._server.watchers[self]
            self._sent = health
        if stops:
            self._finish(*changed, cygrpc.SendStatusFromServerOperation(None, 0, b"", 0))
        elif changed:
            self._send(self._told, *changed)

    def _gone(self) -> None:
        self._server.watchers.pop(self, None)


def _nothing(event: Any) -> None:
    """Takes an event that tells nothing."""


class GrpcServer:
    """A server that listens nowhere yet.

    Args:
        take: Called with each request: the call, its bytes, and the seconds that are left, if it says so. It may answer later.
        stopping: Set when no more requests are taken.
        most: Bytes of the largest request.
        drive: Does what is to be done for requests that are not answered yet. True while there is any.
        health: Answers a HealthCheckRequest for `WATCH`, in bytes.
        allow: True where a call may come in, given its path and its headers as pairs; its bytes are not read before. None: all may.
        options: Further settings of gRPC, by name.
        shares: True where other processes of the same server listen on its port.

    Attributes:
        open: Calls that are not answered, and True for those that came before the server was to stop.
        watchers: Calls that watch its health.
        lock: Held while something is sent.
        over: True when nothing can be sent any more.
    """

    def __init__(
        self,
        take: Callable[[GrpcCall, bytes, float | None], object],
        stopping: threading.Event,
        most: int,
        drive: Callable[[], bool] = lambda: False,
        health: Callable[[bytes], bytes] = lambda data: data,
        allow: Callable[[str, Any], bool] | None = None,
        options: Sequence[tuple[str, int | str]] = (),
        *,
        shares: bool = False,
    ) -> None:
        every = [
            ("grpc.max_receive_message_length", most),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shares)),  # anybody else's on the same port would take a part of the requests
            *_LIMITS,
            *options,
        ]
        self._allow = allow or (lambda path, headers: True)
        self._take, self._stopping, self._drive, self._port = take, stopping, drive, 0
        self.health, self._looked = health, 0.0
        self.open: dict[GrpcCall, bool] = {}
        self.watchers: dict[HealthWatch, None] = {}
        self.lock, self.over = threading.RLock(), False
        self._young: deque[GrpcCall] = deque()
        self._queue, self._server = cygrpc.CompletionQueue(), cygrpc.Server(every, False)
        self._server.register_completion_queue(self._queue)
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int, credentials: Any = None) -> bool:
        """Begins to listen, with TLS where there are credentials for it. False if the port is taken."""
        try:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._port = self._server.add_http2_port(where.encode(), credentials)
        except RuntimeError:
            return False
        if self._port:
            self._server.start()
            self._request()
            self._thread = threading.Thread(target=self._serve, name="msplit-grpc", daemon=True)
            self._thread.start()
        return bool(self._port)

    async def end(self, grace: float = 0.0) -> None:
        """Closes all connections once what was taken is answered, or so many seconds are over. Requests are refused up to then.

        Connections are closed from below: gRPC would cancel the calls that come while it stops, which clients would take for their own
        doing. A connection that is gone is `UNAVAILABLE`.
        """
        loop = asyncio.get_running_loop()
        over = loop.time() + grace
        while any([*self.open.values()]) and loop.time() < over:
            await asyncio.sleep(_LOOK)
        if grace:
            await asyncio.sleep(_FLUSH)
        if self._thread is None:  # it was told to end at once meanwhile
            return
        _hang_up(self._port)  # before calls are left alone, which gRPC would cancel
        thread, self._thread = self._thread, None
        self._server.shutdown(self._queue, self._end_queue)
        self._server.cancel_all_calls()
        await loop.run_in_executor(None, thread.join)
        self._server.destroy()

    def _end_queue(self, event: Any) -> None:
        del event
        with self.lock:
            self.over = True
            self.open.clear()
            self._queue.shutdown()

    def _request(self) -> None:
        self._server.request_call(self._queue, self._queue, self._asked)

    def _asked(self, event: Any) -> None:
        """Takes note of a call. Its bytes come with a later event."""
        if self._thread is None or not event.success:
            return
        self._request()
        details = event.call_details
        path = _KNOWN.get(details.method)
        kind = HealthWatch if path == WATCH else GrpcCall
        call = kind(self, event.call, path or "", traced(event.invocation_metadata))
        self.open[call] = path != WATCH and not self._stopping.is_set()
        if path is None:
            call.fail(_UNIMPLEMENTED, "Method not found!")
            return
        if not self._allow(path, event.invocation_metadata):
            call.fail(_UNAUTHENTICATED, "a bearer token is needed that the server knows")
            return
        left = details.deadline - time.time()
        call.receive(lambda event: self._came(call, event, None if left > _NO_DEADLINE else left))

    def _came(self, call: GrpcCall, event: Any, left: float | None) -> None:
        """Hands the bytes of a request on. There are none where it is too large, or its client has gone; gRPC then ends the call."""
        data = event.batch_operations[0].message()
        if data is None:
            self.open.pop(call, None)
            return
        self._young.append(call)
        if not isinstance(call, HealthWatch):
            self._take(call, data, left)
            return
        try:
            call.begin(data)
        except Exception:  # noqa: BLE001  whatever it is, the client gets an answer
            call.fail(_INVALID_ARGUMENT, "this is no HealthCheckRequest")

    def _serve(self) -> None:
        """Body of the thread."""
        poll, over = self._queue.poll, cygrpc.CompletionType.queue_shutdown
        busy, last, kind = False, 0.0, None
        while kind != over:
            try:
                deadline = 0.0
                if not busy or time.perf_counter() - last > _SPIN:
                    deadline = time.time() + (_NAP if busy or self._young else _IDLE)
                for _ in range(_AT_ONCE):
                    event = poll(deadline=deadline)
                    kind = event.completion_type
                    if event.tag is None:
                        break
                    event.tag(event)
                    del event  # it has a reference to the call
                    deadline, last = 0.0, time.perf_counter()
                busy = self._drive()
                self._look_after(time.perf_counter())
            except Exception:  # noqa: BLE001  whatever it is, others get their answers
                LOG.exception("gRPC")

    def _look_after(self, now: float) -> None:
        """Watches calls that are not answered soon, and tells those that watch health when it changes."""
        young = self._young
        while young and (young[0] not in self.open or young[0].watch(now)):
            young.popleft()
        stops = self._stopping.is_set()
        if self.watchers and (stops or now - self._looked > _CHANGES):
            self._looked = now
            for watcher in [*self.watchers]:
                watcher.look(stops=stops)


def _hang_up(port: int) -> None:
    """Ends all connections of this process to a port of its own, and has none come about any more.

    Until gRPC stops listening a client that has just lost its connection would make a new one, and gRPC cancel what it then asks. A filter
    that lets nothing through turns such clients away without a word in the log: they try again, and find nobody.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0
    for one in _sockets(port):
        with contextlib.suppress(OSError):
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))
                while True:  # those that gRPC has not seen yet
                    one.accept()[0].close()
    for one in _sockets(port):
        with contextlib.suppress(OSError):
            one.getpeername()  # one that listens has none
            one.shutdown(socket.SHUT_RDWR)


def _sockets(port: int) -> Iterator[socket.socket]:
    """All sockets of this process that are bound to a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copied = os.dup(int(name))
            try:
                one = socket.socket(fileno=copied)
            except OSError:  # not each is a socket
                os.close(copied)
                continue
            with one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                    yield one
