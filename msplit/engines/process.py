"""Processes beside this one, and messages between them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from msplit.errors import EngineError, MsplitError

_GRACE = 1.0
"""Seconds that a process has to end by itself."""

WEIGHTS: ContextVar[tuple[socket.socket, socket.socket] | None] = ContextVar("WEIGHTS", default=None)
"""Socket, with both of its ends, through which processes with one build on one device share the memory of its weights."""


def shared_weights() -> tuple[socket.socket, socket.socket]:
    """A new socket for `WEIGHTS`. Its message says that there is no memory yet."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ends[1].send(b"0")
    return ends


LOST = (EOFError, OSError)
"""Errors of a pipe whose other end is gone."""


def is_ours(line: socket.socket) -> bool:
    """True if the other end of a connection is this user's: any process can connect, and what is pickled is trusted."""
    _, user, _ = struct.unpack("iII", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


class Process:
    """A module of this package that runs as a process of its own, and ends with this one.

    Args:
        module: Its full name.
        name: What it is called in messages.
        handles: Descriptors that it is given.
    """

    def __init__(self, module: str, name: str, handles: Sequence[int] = ()) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            self._running = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(), *handles),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if os.environ.get("MSPLIT_LOAD_DEBUG") else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then ends it
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"},
            )
        self._pipe = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Its number."""
        return self._running.pid

    def send(self, message: Any) -> None:
        """Gives it something to do.

        Raises:
            EngineError: It has ended.
        """
        try:
            self._pipe.send(message)
        except LOST as problem:
            raise self._lost() from problem

    def receive(self) -> Any:
        """Next message of the process; waits for it.

        Raises:
            EngineError: It has ended.
        """
        try:
            return self._pipe.recv()
        except LOST as problem:
            raise self._lost() from problem

    def said(self, seconds: float) -> bool:
        """True if it has something to say, after at most so long.

        Raises:
            EngineError: It was ended here.
        """
        try:
            return self._pipe.poll(seconds)
        except LOST as problem:
            raise self._lost() from problem

    def alive(self) -> None:
        """Nothing, while it runs.

        Raises:
            EngineError: It has ended.
        """
        if self._running.poll() is not None:
            raise self._lost()

    def hang_up(self) -> None:
        """Has it end, and does not wait for that."""
        with suppress(*LOST):
            self._pipe.close()

    def close(self) -> None:
        """Ends it."""
        self.hang_up()
        try:
            self._running.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, whatever it does."""
        self.hang_up()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._running.wait()

    def _lost(self) -> EngineError:
        with suppress(subprocess.TimeoutExpired):
            self._running.wait(_GRACE)  # its pipe is closed a moment before
        code = self._running.poll()
        how = "was lost" if code is None else f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        return EngineError(
            f"the process of {self.name} {how}", fix="is the machine out of memory? run again; else report this"
        )


def serve(arguments: Sequence[str], answer: Callable[[Any], Any]) -> None:
    """Main loop of such a process: answers messages one after the other until the other end is gone."""
    pipe, parent = Connection(int(arguments[0])), int(arguments[1])
    with suppress(*LOST):
        while os.getppid() == parent:
            pipe.send(answer(pipe.recv()))


def told(reply: Any) -> Any:
    """Answer of a process.

    Raises:
        EngineError: What it raised.
    """
    if isinstance(reply, RemoteError):
        raise reply.error()
    return reply


@dataclass(frozen=True)
class RemoteError:
    """An error on its way from another process."""

    what: str
    where: str | None
    fix: str | None
    kind: type[EngineError] = EngineError

    @staticmethod
    def of(error: Exception) -> RemoteError:
        """Plain data of an error, to be sent."""
        if isinstance(error, MsplitError):
            kind = type(error) if isinstance(error, EngineError) else EngineError
            return RemoteError(error.what, error.where, error.fix, kind)
        return RemoteError(f"{type(error).__name__}: {error}", None, "this is a bug in msplit; please report it")

    def error(self) -> EngineError:
        """Error made of the plain data, to be raised."""
        return self.kind(self.what, where=self.where, fix=self.fix)
