"""A request over gRPC without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msplit.serving.server.exchange import take
from msplit.serving.server.service import Service


class Reply:
    """Call whose answer is status and bytes, wherever it is given."""

    def __init__(self, path: str, said: Callable[[tuple[int, bytes]], object]) -> None:
        self.path, self._said = path, said
        self.headers: dict[str, str] = {}
        self.cancel: Any = None

    def answer(self, data: bytes) -> None:
        self._said((0, data))

    def fail(self, status: int, message: str) -> None:
        self._said((status, message.encode()))


async def answer(service: Service, path: str, data: bytes, left: float | None) -> tuple[int, bytes]:
    """Status and answer, with the event loop in the place of gRPC's thread."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[tuple[int, bytes]] = loop.create_future()
    take(service, Reply(path, lambda said: loop.call_soon_threadsafe(waiter.set_result, said)), data, left)
    while not waiter.done():
        service.drive()
        await asyncio.sleep(0)
    return waiter.result()
