"""Echo of HTTP servers for Python: processor time of the server for each request, and requests per second.

    python benchmarks/notes/probes/http_fronts.py [BYTES]

Each sends back the body of a POST, behind 1 and behind 64 connections with a request in flight on each, in turns.
"""

from __future__ import annotations

import importlib.util
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from serving import free_port, processor_time

FRONTS = ("uvicorn:h11", "uvicorn:httptools", "starlette:h11", "starlette:httptools", "granian:rsgi", "granian:asgi")
REQUESTS, ROUNDS = 3000, 3


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    headers = [(b"content-length", b"%d" % len(message["body"]))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": message["body"]})


async def rsgi(scope: Any, protocol: Any) -> None:
    body = await protocol()
    protocol.response_bytes(200, [("content-length", str(len(body)))], body)


def serve(front: str, how: str, port: int) -> None:
    if front == "granian":
        options = ["--interface", how, "--port", str(port), "--no-ws", "--workers", "1", "--loop", "uvloop", "--no-log"]
        os.chdir(Path(__file__).parent)
        os.execv(sys.executable, [sys.executable, "-m", "granian", *options, f"http_fronts:{how}"])
    import uvicorn

    app: Any = asgi
    if front == "starlette":
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route

        async def back(request: Any) -> Any:
            return Response(await request.body())

        app = Starlette(routes=[Route("/v1/models/{model}:predict", back, methods=["POST"])])
    uvicorn.run(app, port=port, http=how, loop="uvloop", log_config=None, access_log=False, lifespan="off")  # type: ignore[arg-type]


def load(port: int, data: bytes, connections: int) -> float:
    """Requests per second."""
    poll, waiting = select.epoll(), dict[int, tuple[socket.socket, bytearray]]()
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data)
    for _ in range(connections):
        made = socket.create_connection(("127.0.0.1", port))
        poll.register(made.fileno(), select.EPOLLIN)
        waiting[made.fileno()] = made, bytearray()
        made.sendall(head + data)
    start, done, asked = time.perf_counter(), 0, connections
    while done < REQUESTS:
        for number, _ in poll.poll(60):
            made, came = waiting[number]
            came += made.recv(1 << 18)
            if came.endswith(data) and len(came) > len(data):
                came.clear()
                done += 1
                if asked < REQUESTS:
                    asked += 1
                    made.sendall(head + data)
    return REQUESTS / (time.perf_counter() - start)


def main() -> None:
    data = b"x" * int(sys.argv[1] if len(sys.argv) > 1 else 400)
    servers = []
    for name in FRONTS:
        front, how = name.split(":")
        if importlib.util.find_spec(front) and (how != "httptools" or importlib.util.find_spec(how)):
            port = free_port()
            command = [sys.executable, __file__, "--as", front, how, str(port)]
            servers.append((name, subprocess.Popen(command, stderr=subprocess.DEVNULL), port))
    time.sleep(4)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(ROUNDS + 1):
        for name, server, port in servers:
            for connections in (1, 64):
                before = processor_time(server.pid)
                rate = load(port, data, connections)
                if turn:
                    taken = (processor_time(server.pid) - before) / REQUESTS * 1e6
                    found.setdefault((name, connections), []).append((taken, rate))
    for (name, connections), rounds in found.items():
        taken, rate = (median(values) for values in zip(*rounds, strict=True))
        print(f"{name}, {connections} connections: {taken:.0f} µs of the processor a request, {rate:,.0f}/s")
    for _, server, _ in servers:
        server.terminate()


if __name__ == "__main__":
    if "--as" in sys.argv:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
