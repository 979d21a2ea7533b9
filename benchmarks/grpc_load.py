"""Client of gRPC for load tests that takes a tenth of grpcio's processor time: the frames of its requests are made once, and of answers
only the end is looked at. It asks one method with one request, again and again.

    python benchmarks/grpc_load.py PORT PATH CONNECTIONS IN_FLIGHT REQUESTS < request

Prints JSON: seconds in all, the latency of each request in µs, bytes of an answer.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time

HEADERS, DATA, RESET, SETTINGS, PING, GOAWAY, WINDOW = 1, 0, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MOST = 16384
"""Bytes of the largest frame that any server takes."""
ROOM = 1 << 24
"""Bytes of answers after which the server is told that there is room for as many more."""


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def text(value: bytes) -> bytes:
    """A string of HPACK, of fewer than 254 bytes."""
    return (bytes([len(value)]) if len(value) < 127 else bytes([127, len(value) - 127])) + value


class Connection:
    """A connection, and the answers that it has brought.

    Args:
        port: Port of the server on this host.
        path: Path of the method.
        data: Request.
    """

    def __init__(self, port: int, path: str, data: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": path.encode(),
            b":authority": b"localhost",
            b"te": b"trailers",
            b"content-type": b"application/grpc",
            b"user-agent": b"msplit-load",
        }
        # The first request puts its headers into the server's table, the others name their places there, as all clients do.
        self._first = b"".join([b"\x40" + text(name) + text(value) for name, value in headers.items()])
        self._later = bytes(0x80 | 62 + len(headers) - 1 - place for place in range(len(headers)))
        message = struct.pack(">BI", 0, len(data)) + data
        self._parts = [message[start : start + MOST] for start in range(0, len(message), MOST)]
        settings = struct.pack(">HI", 4, (1 << 31) - 1)  # the room for the answer of each request
        room = struct.pack(">I", (1 << 31) - 1 - 65535)
        self.socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings) + frame(WINDOW, 0, 0, room)
        )
        self._left, self._next, self._used, self._since = bytearray(), 1, 0, dict[int, float]()
        self.taken: list[float] = []
        self.size = 0

    def ask(self, count: int) -> None:
        """Sends so many requests."""
        frames = []
        for _ in range(count):
            stream, self._next = self._next, self._next + 2
            frames.append(frame(HEADERS, END_HEADERS, stream, self._first if stream == 1 else self._later))
            frames += [frame(DATA, 0, stream, part) for part in self._parts[:-1]]
            frames.append(frame(DATA, END_STREAM, stream, self._parts[-1]))
            self._since[stream] = time.perf_counter()
        self.socket.sendall(b"".join(frames))

    def hear(self) -> int:
        """Reads what has come. Number of requests that are answered.

        Raises:
            ConnectionError: The server ends the connection, or does not answer a request.
        """
        came = self.socket.recv(1 << 18)
        if not came:
            raise ConnectionError("the server has gone")
        left, at, done, back = self._left, 0, 0, []
        left += came
        while len(left) - at >= 9:
            size, kind, flags = left[at] << 16 | left[at + 1] << 8 | left[at + 2], left[at + 3], left[at + 4]
            if len(left) - at - 9 < size:
                break
            stream, body = int.from_bytes(left[at + 5 : at + 9], "big"), bytes(left[at + 9 : at + 9 + size])
            at += 9 + size
            if kind in (RESET, GOAWAY):
                raise ConnectionError(f"the server has ended a request: {body!r}")
            if kind in (SETTINGS, PING) and not flags & ACK:
                back.append(frame(kind, ACK, 0, body if kind == PING else b""))
            if kind == DATA:
                self._used += size
                self.size = size
            if kind in (HEADERS, DATA) and flags & END_STREAM:
                done += 1
                self.taken.append(time.perf_counter() - self._since.pop(stream))
        del left[:at]
        if self._used > ROOM:
            back.append(frame(WINDOW, 0, 0, struct.pack(">I", self._used)))
            self._used = 0
        if back:
            self.socket.sendall(b"".join(back))
        return done


def load(
    port: int, path: str, data: bytes, connections: int, in_flight: int, requests: int
) -> tuple[float, list[float], int]:
    """Asks so often, with so many requests in flight on each connection. Seconds in all, of each request, and bytes of an answer."""
    made = [Connection(port, path, data) for _ in range(connections)]
    poll, by_number = select.epoll(), {one.socket.fileno(): one for one in made}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    start, left, done = time.perf_counter(), requests, 0
    for one in made:
        count = min(in_flight, left)
        left -= count
        if count:
            one.ask(count)
    while done < requests:
        for number, _ in poll.poll(60):
            answered = by_number[number].hear()
            done += answered
            count = min(answered, left)
            left -= count
            if count:
                by_number[number].ask(count)
    seconds = time.perf_counter() - start
    for one in made:
        one.socket.close()
    if not made[0].size:
        raise ConnectionError("answers are errors")
    return seconds, sorted(taken for one in made for taken in one.taken), made[0].size


if __name__ == "__main__":
    seconds, taken, size = load(int(sys.argv[1]), sys.argv[2], sys.stdin.buffer.read(), *map(int, sys.argv[3:]))
    print(json.dumps({"seconds": seconds, "us": [round(one * 1e6, 1) for one in taken], "bytes": size}))
