"""A front end: a process that speaks gRPC, and asks the one that runs the models, which has started it.

Python runs one thread at a time, and gRPC takes more of it than all else that a request needs. Several front ends listen on one port.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from typing import Any

from msplit.serving.server import fronts, rpc
from msplit.serving.server.tensors import StatusCode


async def run(listening: str, port: int, most: int, descriptor: int) -> None:
    """Answers requests until the other end says so, or is gone."""
    loop = asyncio.get_running_loop()
    stopping, ended = asyncio.Event(), asyncio.Event()
    waiting: dict[int, asyncio.Future[Any]] = {}
    numbers = itertools.count(1)
    grace = 0.0

    def heard(number: int, kind: int, seconds: float | None, data: bytes) -> None:
        nonlocal grace
        if kind == fronts.STOP:
            stopping.set()
        elif kind == fronts.END:
            grace = seconds or 0.0
            ended.set()
        elif (waiter := waiting.pop(number, None)) is not None and not waiter.done():
            waiter.set_result((kind, data))

    def lost() -> None:
        for number in [*waiting]:
            heard(number, StatusCode.UNAVAILABLE.grpc, None, b"the server has ended")
        stopping.set()
        ended.set()

    _, other = await loop.create_unix_connection(
        lambda: fronts.Link(heard, lost), sock=socket.socket(fileno=descriptor)
    )

    async def ask(path: str, data: bytes, left: float | None) -> tuple[int, bytes]:
        number = next(numbers) & 0xFFFFFFFF
        waiter = waiting[number] = loop.create_future()
        other.say(number, rpc.PATHS.index(path), data, left)
        try:
            status, answer = await waiter
            return status, answer
        finally:
            if waiting.pop(number, None) is not None:
                other.say(number, fronts.CANCEL)

    server = rpc.GrpcServer(ask, stopping, most, shared=True)
    if await server.start(listening, port):
        other.say(0, fronts.READY)
        await ended.wait()
        await server.end(grace)


def main() -> None:
    """The process. Signals from the terminal are for the other one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    host, *numbers = sys.argv[1:]
    with asyncio.Runner(loop_factory=rpc.loop_factory()) as runner:
        runner.run(run(host, *map(int, numbers)))


if __name__ == "__main__":
    main()
