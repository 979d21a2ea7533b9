"""A real server, in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests import forked
from tests.cli.runner import ROOT


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@dataclass
class Server:
    process: subprocess.Popen[str] | forked.Popen
    port: int
    rest: int
    said: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def http(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer; a body of bytes is sent as it is."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.rest}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as problem:
            return problem.code, json.loads(problem.read() or b"null")

    def text(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.rest}{path}", timeout=60) as answer:
            return answer.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Exit code, and what it said to the end."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


def start_new(*arguments: object) -> Server:
    """Starts `msplit serve` as users do, and waits until it is ready."""
    return started(
        subprocess.Popen, lambda port, rest: ["msplit", "serve", *arguments, "--port", port, "--rest_api_port", rest]
    )


def start(*arguments: object) -> Server:
    """The same with its imports done. As in a new process, TensorFlow is not loaded; processes of its pools are forked, too."""
    return started(
        functools.partial(forked.Popen, server=forked.SERVED, quick=True, beside=True),
        lambda port, rest: [__name__, "serve", *arguments, "--port", port, "--rest_api_port", rest],
    )


def start_trivial(*options: str, until: str = "ready:") -> Server:
    """The same of the server of `trivial`."""
    return started(
        functools.partial(
            forked.Popen, server=forked.TENSORFLOW, quick=True, beside=any("fronts=" in one for one in options)
        ),
        lambda port, rest: ["tests.serving.server.trivial", port, rest, *options],
        until,
    )


@contextlib.contextmanager
def _heeding() -> Iterator[None]:
    """A block whose processes heed all signals. Under `nohup`, and behind a shell, this one ignores some, and they would, too."""
    ignored = [one for one in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM) if signal.getsignal(one) is signal.SIG_IGN]
    for one in ignored:
        signal.signal(one, signal.SIG_DFL)
    try:
        yield
    finally:
        for one in ignored:
            signal.signal(one, signal.SIG_IGN)


def started(begin: Callable[..., Any], command: Callable[[int, int], list[object]], until: str = "ready:") -> Server:
    """A server that some module runs, as soon as it is ready.

    Args:
        begin: Starts a process, as `subprocess.Popen`.
        command: Gives the module and its arguments for two ports.
        until: Start of the line that says so.
    """
    port, rest = free_port(), free_port()
    with _heeding():
        process = begin(
            [sys.executable, "-m", *map(str, command(port, rest))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith(until):
            return Server(process, port, rest, said)
    raise AssertionError(f"the server ended with {process.wait()}: {said}")


if __name__ == "__main__":
    from msplit.__main__ import entry

    with forked.instead(forked.ENGINE):
        entry()
