"""gRPC on an event loop: paths and bytes come in, and whoever is asked has the answer. What is no message is so told in our words."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

Ask = Callable[[str, bytes, float | None], Awaitable[tuple[int, bytes]]]
"""Path of a method, the request, and the seconds that are left -> gRPC's number of a status; the answer where it is 0, else what to say."""

_OPEN = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
PATHS = (
    "/tensorflow.serving.PredictionService/Predict",
    "/tensorflow.serving.PredictionService/GetModelMetadata",
    "/tensorflow.serving.ModelService/GetModelStatus",
    *(
        f"{_OPEN}{name}"
        for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
    ),
    f"{_HEALTH}Check",
)
"""Methods that have one answer."""
SERVICES = ("", *dict.fromkeys(path.split("/")[1] for path in PATHS))
"""Services whose health can be asked for."""

_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_NOT_SERVING, _UNKNOWN = b"\x08\x02", b"\x08\x03"
"""HealthCheckResponses."""


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


class GrpcServer:
    """A server that listens nowhere yet.

    Args:
        ask: Has the answers.
        stopping: An asyncio.Event; set when no more requests are taken.
        most: Bytes of the largest request.
        shared: True if other processes of this server may listen on its port.
    """

    def __init__(self, ask: Ask, stopping: Any, most: int, *, shared: bool = False) -> None:
        options = [
            ("grpc.max_receive_message_length", most),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),  # anybody else's on the same port would take a part of the requests
            *_LIMITS,
        ]
        self._handlers, self._port = _Handlers(ask, stopping), 0
        self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((self._handlers,))

    async def start(self, host: str, port: int) -> bool:
        """Begins to listen. Whether it does."""
        try:
            listens = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            return False
        if listens:
            self._port = listens
            await self._server.start()
        return bool(listens)

    async def end(self, grace: float = 0.0) -> None:
        """Closes all connections once what was taken is answered, or so many seconds are over. Requests are refused up to then.

        Connections are closed from below: gRPC would cancel the calls that come while it stops, which clients would take for their own
        doing. A connection that is gone is `UNAVAILABLE`.
        """
        loop = asyncio.get_running_loop()
        over = loop.time() + grace
        while self._handlers.taken and loop.time() < over:
            await asyncio.sleep(_LOOK)
        if grace:
            await asyncio.sleep(_FLUSH)
        _hang_up(self._port)
        await self._server.stop(None)


def loop_factory() -> Callable[[], Any] | None:
    """Factory of event loops: uvloop if installed, which takes a quarter less time per request."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    found: Callable[[], Any] = uvloop.new_event_loop
    return found


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
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:  # not each is a socket
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                yield one


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """All methods, by path.

    Attributes:
        taken: Number of requests being answered that came before the server was to stop.
    """

    def __init__(self, ask: Ask, stopping: Any) -> None:
        self._ask, self._stopping, self.taken = ask, stopping, 0
        self._by_path = {path: grpc.unary_unary_rpc_method_handler(self._answering(path)) for path in PATHS}
        self._by_path[f"{_HEALTH}Watch"] = grpc.unary_stream_rpc_method_handler(_watching(ask, stopping))

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method, None where there is none."""
        return self._by_path.get(handler_call_details.method)

    def _answering(self, path: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(data: bytes, context: Any) -> bytes:
            counts = int(not self._stopping.is_set())
            self.taken += counts
            try:
                status, answer = await self._ask(path, data, context.time_remaining())
                if status:
                    await context.abort(_STATUS[status], answer.decode())
                return answer
            finally:
                self.taken -= counts

        return handle


def _watching(ask: Ask, stopping: Any) -> Callable[[bytes, Any], AsyncIterator[bytes]]:
    async def watch(data: bytes, context: Any) -> AsyncIterator[bytes]:
        status, answer = await ask(f"{_HEALTH}Check", data, context.time_remaining())
        yield answer if not status else _UNKNOWN
        if not stopping.is_set():
            await stopping.wait()
            if not status:
                yield _NOT_SERVING

    return watch
