"""Hosts of a training: who trains together, and processes on the GPUs of one host.

Processes that train together: torchrun's, TF_CONFIG's, a ClusterSpec's or the options' hosts and ranks.

Starts one process per GPU of this host, and ends all when one of them has ended otherwise than well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from msplit.errors import MsplitError, RankLost
from msplit.formats.files import read_bytes

_MOST = 1 << 20
_TRAINS = ("chief", "master", "worker")
"""Jobs whose tasks train, in the order of their ranks. A ``ps`` or an ``evaluator`` has no part in it."""

CHILD = "MSPLIT_TRAINS_WITH_OTHERS"
"""Environment variable of processes that `msplit train --gpus` has started."""

LISTENER = "MSPLIT_LISTENS_AT"
"""Environment variable: the file descriptor at which the first of them finds its port, which is listened at already."""

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_FORM = '{"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]}'


@dataclass(frozen=True)
class Rank:
    """One of the processes that train together.

    Attributes:
        number: From 0 on; 0 is the chief, which writes checkpoints.
        size: Number of processes.
        local: Number on its host, which is that of its GPU.
        host: Host at which the chief listens.
        port: Port at which the chief listens.
        is_served: True if something else listens there, as torchrun does.
        is_child: True if `msplit train --gpus` has started it; it ends with that.
        listener: File descriptor of a socket that listens at the port, which who started it handed on; None: the chief opens the port.
    """

    number: int
    size: int
    local: int
    host: str
    port: int
    is_served: bool = False
    is_child: bool = False
    listener: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that say so to a process that is started as this one: torchrun's, and `CHILD`."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            CHILD: "1",
            **({} if self.listener is None else {LISTENER: str(self.listener)}),
        }


@dataclass(frozen=True)
class Hosts:
    """The hosts that train together, each with as many processes.

    Attributes:
        count: Number of hosts.
        index: Number of this host; that of the chief is 0.
        master: Address at which the chief's first process listens, ``host:port``; "" where there is one host, and any port will do.
    """

    count: int = 1
    index: int = 0
    master: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            fix = f"--hosts node-rank= is from 0 to {self.count - 1}"
            raise MsplitError(f"host {self.index} is none of {self.count}", fix=fix)
        if self.count > 1 and not self.master:
            fix = "--hosts master=HOST:PORT, the same on all"
            raise MsplitError("several hosts have to know the first one", fix=fix)
        if self.master:
            address(self.master)


def rank_of(environment: Mapping[str, str]) -> Rank | None:
    """The rank that torchrun, or `msplit train --gpus`, has started this process as; None where it runs alone.

    Raises:
        MsplitError: A variable is missing or no number.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None

    def number(name: str, least: int, most: int) -> int:
        text = environment.get(name, "")
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            said = f"is {text!r}, no number from {least} to {most}" if text else "is not set"
            fix = "start it with torchrun, or with msplit train --gpus N"
            raise MsplitError(said, where=f"environment variable {name}", fix=fix)
        return int(text)

    size = number("WORLD_SIZE", 1, 1 << 16)
    rank = number("RANK", 0, size - 1)
    local = number("LOCAL_RANK", 0, rank)
    host, port = environment.get("MASTER_ADDR", ""), number("MASTER_PORT", 1, 65535)
    if not host:
        raise MsplitError("is not set", where="environment variable MASTER_ADDR", fix="set it to the host of rank 0")
    is_served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = number(LISTENER, 0, 1 << 31) if LISTENER in environment else None
    return Rank(rank, size, local, host, port, is_served, CHILD in environment, listener)


def of_file(path: Path, task: str | None) -> Hosts:
    """The hosts of a ClusterSpec in a JSON file: jobs with their addresses, or what TF_CONFIG holds.

    Args:
        task: Job and number of this one, as in ``worker:1``; None: as the file says.

    Raises:
        MsplitError: It can not be read, or is none.
    """
    try:
        text = read_bytes(path, _MOST).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MsplitError(f"the cluster can not be read: {error}", where=str(path)) from None
    return _of_text(text, str(path), task)


def of_tf_config(text: str) -> Hosts:
    """The hosts that the environment variable TF_CONFIG names, and which of them this is.

    Raises:
        MsplitError: It is no such text.
    """
    return _of_text(text, "environment variable TF_CONFIG", None)


def _of_text(text: str, where: str, task: str | None) -> Hosts:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MsplitError(f"is no JSON: {error}", where=where, fix=f"give {_FORM}") from None
    if not isinstance(found, dict):
        raise MsplitError("holds no jobs", where=where, fix=f"give {_FORM}")
    cluster = found.get("cluster", found)
    hosts = [(job, index, one) for job in _TRAINS for index, one in _tasks(cluster, job, where)]
    if not hosts:
        raise MsplitError("names no chief and no worker", where=where, fix=f"give {_FORM}")
    at = _task(found, task, where)
    for place, (job, index, _) in enumerate(hosts):
        if (job, index) == at:
            return Hosts(len(hosts), place, hosts[0][2])
    fix = f"--hosts task= with one of: {', '.join(f'{job}:{index}' for job, index, _ in hosts[:8])}"
    raise MsplitError(f"task {at[0]}:{at[1]} trains nothing here", where=where, fix=fix)


def _tasks(cluster: Any, job: str, where: str) -> Sequence[tuple[int, str]]:
    """Number and address of each task of a job: a list, or a mapping from number to address."""
    named = cluster.get(job, []) if isinstance(cluster, dict) else None
    if isinstance(named, dict) and all(str(key).isdecimal() for key in named):
        every = sorted((int(key), value) for key, value in named.items())
    elif isinstance(named, list):
        every = list(enumerate(named))
    else:
        raise MsplitError(f"the job {job} is no list of addresses", where=where, fix=f"give {_FORM}")
    for index, one in every:
        if not isinstance(one, str) or not _ADDRESS.fullmatch(one):
            raise MsplitError(f"task {job}:{index} has no address but {one!r}", where=where, fix="give host:port")
    return every


def _task(found: Mapping[str, Any], task: str | None, where: str) -> tuple[str, int]:
    if task is not None:
        job, _, index = task.partition(":")
        if index.isascii() and index.isdigit():
            return job, int(index)
        raise MsplitError(f"{task!r} is no task", where="--hosts task=", fix="give one such as worker:0")
    said = found.get("task") if "cluster" in found else None
    if not isinstance(said, dict) or not str(said.get("index", "")).isdecimal():
        raise MsplitError("does not say which task this is", where=where, fix="--hosts task=worker:0")
    return str(said.get("type")), int(said["index"])


def address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        MsplitError: It is none.
    """
    host, _, port = text.rpartition(":")
    if not _ADDRESS.fullmatch(text) or not 0 < int(port) < 65536:
        raise MsplitError(f"{text!r} is no address", fix="give host:port, such as host0:2222")
    return host.strip("[]"), int(port)


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
        gpus: GPUs of this host, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        RankLost: One was killed, or failed where nobody else could tell.
    """
    # A free port is taken at once, and handed on: another process may have it by the time that the first rank has loaded its libraries.
    listener = None if hosts.master else socket.create_server((_LOCAL, 0))
    host, port = address(hosts.master) if listener is None else listener.getsockname()
    first, size = hosts.index * len(gpus), hosts.count * len(gpus)
    ranks = [Rank(first + local, size, local, host, port) for local in range(len(gpus))]
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
                process = subprocess.Popen(
                    command,
                    env={**environment, **rank.environment()},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[] if rank.listener is None else [rank.listener],
                    **quiet,  # type: ignore[call-overload]
                )
                started.append(process)
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
                fix = "the last checkpoint is whole: go on with --resume"
                raise RankLost(f"rank {number} was ended by {signal.Signals(-code).name}", fix=fix)
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
    """The command that this process was started with."""
    return [sys.executable, "-m", "msplit", *sys.argv[1:]]
