"""Starts one process per GPU of this host, and ends all when one of them has ended otherwise than well."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import IO

from msplit.errors import RankLost
from msplit.training.hosts import Hosts, Rank, address

GRACE = 6.0
"""Seconds that the others have to find out for themselves that one has ended, and to say so."""

_LOOK = 0.05
_LAST_WORDS = 4096
_LOCAL = "127.0.0.1"


def launch(command: Sequence[str], hosts: Hosts, gpus: Sequence[str]) -> int:
    """Runs a command in one process per GPU, all of which train together, and gives the exit code of the first that ended otherwise than
    with 0. The first rank of the host has this process's standard output and error; of the others the last words are kept.

    Args:
        command: Program and arguments.
        gpus: Which GPUs of this host, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        RankLost: One was killed, or failed where nobody else could tell.
    """
    # A free port is taken at once, and handed on: another process may have it by the time that the first rank has loaded its libraries.
    listener = None if hosts.master else socket.create_server((_LOCAL, 0))
    host, port = address(hosts.master) if listener is None else listener.getsockname()
    ranks = [
        Rank(hosts.index * len(gpus) + local, hosts.count * len(gpus), local, host, port) for local in range(len(gpus))
    ]
    if listener is not None:
        ranks[0] = replace(ranks[0], listener=listener.fileno())
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(gpus))))
    if hosts.count == 1:  # not by a name of this host that may lead elsewhere
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with listener or contextlib.nullcontext(), contextlib.ExitStack() as stack:
        words = [stack.enter_context(tempfile.TemporaryFile()) for _ in ranks]
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill, started)
        with _passed_on(started) as hand_on:
            for rank, said in zip(ranks, words, strict=True):
                quiet = {"stdout": subprocess.DEVNULL, "stderr": said} if rank.local else {}
                variables = {**environment, **rank.environment()}
                started.append(
                    subprocess.Popen(
                        command,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                        pass_fds=[] if rank.listener is None else [rank.listener],
                        **quiet,  # type: ignore[call-overload]
                    )
                )
                if listener is not None:
                    listener.close()  # it is the first rank's now: nobody answers there once that is gone
                hand_on()
            return _watched(started, ranks, words)


def _watched(started: Sequence[subprocess.Popen[bytes]], ranks: Sequence[Rank], words: Sequence[IO[bytes]]) -> int:
    first: int | None = None  # who ended first otherwise than well
    until = 0.0
    while True:
        codes = [one.poll() for one in started]
        if first is None:
            first = next((at for at, code in enumerate(codes) if code), None)
            until = time.monotonic() + GRACE
        if first is None and None not in codes:
            return 0
        if first is not None:
            code = codes[first] or 0
            if code < 0:
                number = ranks[first].number
                raise RankLost(
                    f"rank {number} was ended by {signal.Signals(-code).name}",
                    fix="the last checkpoint is whole: go on with --resume",
                )
            if None not in codes or time.monotonic() > until:
                if first and codes[0] is None:  # who would have told it does not know of it
                    raise RankLost(f"rank {ranks[first].number} ended: {_last_words(words[first])}")
                return code
        time.sleep(_LOOK)


def _last_words(said: IO[bytes]) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - _LAST_WORDS))
    return said.read().decode(errors="replace").strip() or "it did not say why"


def _kill(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in started:
        one.kill()
        one.wait()


@contextlib.contextmanager
def _passed_on(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[Callable[[], None]]:
    """Hands signals to all, once each: they are in sessions of their own, and who is asked twice does not end in order. What is given hands
    those that were heard before to whoever was started since: else one in the middle would end this process and leave them behind."""
    heard: list[int] = []
    handed: dict[tuple[int, int], object] = {}

    def hand_on() -> None:
        for one in started:
            for place, number in enumerate(heard):
                mark = object()
                if handed.setdefault((one.pid, place), mark) is mark:  # a signal may come in between
                    with contextlib.suppress(ProcessLookupError):
                        one.send_signal(number)

    def hear(number: int, frame: FrameType | None) -> None:
        del frame
        heard.append(number)
        hand_on()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield hand_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def own_command() -> list[str]:
    """What this process was started with, as a command."""
    return [sys.executable, "-m", "msplit", *sys.argv[1:]]
