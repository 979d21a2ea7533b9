"""Clusters for tests: servers in this process, which TensorFlow can not end, and processes of their own, which can be killed."""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from msplit.engines.tensorflow import cluster as clusters
from msplit.formats.cluster import Cluster, parse
from tests import forked

_SECONDS = 60


def free_ports(count: int) -> list[int]:
    """Ports that nobody has."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def described(workers: int, servers: int) -> Cluster:
    """A cluster of so many tasks on this machine, none of which runs."""
    ports = iter(free_ports(workers + servers))
    jobs = {"worker": [f"127.0.0.1:{next(ports)}" for _ in range(workers)]}
    if servers:
        jobs["ps"] = [f"127.0.0.1:{next(ports)}" for _ in range(servers)]
    return parse(yaml.safe_dump(jobs), "cluster.yaml")


def write(cluster: Cluster, path: Path) -> Path:
    """Its file."""
    path.write_text(yaml.safe_dump(cluster.spec()))
    return path


@functools.cache
def here(workers: int, servers: int) -> Cluster:
    """A cluster in this process, the first worker with two CPU devices."""
    import threading

    cluster = described(workers, servers)
    for task in cluster.tasks:
        ready = threading.Event()
        serve = functools.partial(
            clusters.serve,
            cluster,
            task,
            devices=2 - task.index if task.job == "worker" else 1,
            ready=lambda _, r=ready: r.set(),
        )
        threading.Thread(target=serve, daemon=True).start()
        assert ready.wait(_SECONDS)
    return cluster


class Process:
    """`msplit worker` in a process of its own, which has TensorFlow in memory from its first moment."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "msplit", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = forked.Popen(command, server=forked.TENSORFLOW, quick=True, **pipes)
        self.pid = self._process.pid

    def said(self, until: str = "\n") -> str:
        """What it says up to a text, or to its end."""
        text, out = b"", self._process.stdout
        while until.encode() not in text and select.select([out], [], [], _SECONDS)[0] and (more := out.read1()):
            text += more
        return text.decode()

    def ended(self) -> int | None:
        """Its exit code, once it has ended."""
        code = self._process.wait(_SECONDS)
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self.ended()


def start(path: Path, name: str) -> Process:
    """The process of a task, such as ``/job:ps/task:0``; see `Process.said`."""
    job, task = (part.partition(":")[2] for part in name.strip("/").split("/"))
    return Process("worker", "--cluster", path, "--job", job, "--task", task)


@contextlib.contextmanager
def processes(cluster: Cluster, path: Path) -> Iterator[dict[str, Process]]:
    """All tasks of a cluster, ready, by name."""
    running = {task.name: start(path, task.name) for task in cluster.tasks}
    try:
        for name, one in running.items():
            assert one.said().startswith(f"ready: {name} on port ")
        yield running
    finally:
        for one in running.values():
            one.kill()
