"""Connections that bring nothing end, and take nobody's place."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("uvicorn")

from starlette.requests import Request  # noqa: E402

from msplit.serving.server import rest, rpc, run  # noqa: E402
from msplit.serving.server.metrics import Metrics  # noqa: E402
from msplit.serving.server.models import Models  # noqa: E402
from msplit.serving.server.service import RequestContext, Service  # noqa: E402
from msplit.serving.server.tensors import Refusal  # noqa: E402

SOON = 20.0
"""Seconds within which what is to end after a fraction of one does, on whatever machine."""


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """The port of a server over HTTP."""
    models = Models({})
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
        http = run._Http(Service(models, Metrics(models)), run.Listening(rest_port=port))
        await http.start({port: door})
        try:
            yield port
        finally:
            await http.stop()


async def ended(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """What a connection says to the end that brings these bytes and then nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause)
    try:
        return await asyncio.wait_for(reader.read(), SOON)
    finally:
        writer.close()


WHOLE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = {
    "nothing": (b"", b""),
    "half a line": (b"GET /v2", b""),
    "half a head": (WHOLE[:-4], b""),
    "half a body": (b"POST /v1/models/m:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{", b""),
    "nothing after a request": (WHOLE, b'{"live": true}'),
    "half of a second request": (WHOLE + WHOLE[:-4], b'{"live": true}'),
}


@pytest.mark.parametrize("name", HALF)
def test_half_of_a_request_does_not_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "SILENCE", 0.3)
    data, said = HALF[name]

    async def go() -> None:
        async with listening() as port:
            found = await ended(port, data)
            assert (said in found) if said else b"200 OK" not in found

    asyncio.run(go())


def test_a_slow_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "SILENCE", 2.0)

    async def go() -> None:
        async with listening() as port:
            close = WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in await ended(port, close[:9], close[9:20], close[20:], pause=0.3)

    asyncio.run(go())


def test_a_connection_of_grpc_that_says_nothing_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"grpc.server_handshake_timeout_ms": 300, "grpc.max_connection_idle_ms": 300}
    assert limits.keys() < dict(rpc._LIMITS).keys()
    monkeypatch.setattr(rpc, "_LIMITS", tuple(limits.items()))

    async def go() -> None:
        server = rpc.GrpcServer(lambda call, data, left: call.answer(data), threading.Event(), 1 << 20)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        assert server.start("127.0.0.1", port)
        await ended(port)  # neither who says nothing at all
        await ended(
            port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        )  # nor who asks nothing
        await server.end()

    asyncio.run(go())


@pytest.mark.parametrize("encoding", ["", "identity", "zstd", "BR"])
def test_a_body_that_is_compressed_otherwise_is_refused_as_that(encoding: str) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    models = Models({})
    request = Request({"type": "http", "headers": [(b"content-encoding", encoding.encode())][: len(encoding)]}, receive)
    call = rest.HttpCall(RequestContext(Service(models, Metrics(models))), request, 9)
    if encoding in ("", "identity"):
        assert asyncio.run(call.body()) == b"{}"
    else:
        with pytest.raises(Refusal, match=f"content-encoding {encoding.lower()} is not taken"):
            asyncio.run(call.body())


def test_no_library_that_is_there_by_chance_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn speaks WebSocket where such a library is installed: those connections have no limits, and no request that `on_tick` knows."""
    from uvicorn.protocols.websockets import auto

    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", asyncio.Protocol)
    models = Models({})
    config = run._Http(Service(models, Metrics(models)), run.Listening()).config
    config.load()
    assert config.ws_protocol_class is None
