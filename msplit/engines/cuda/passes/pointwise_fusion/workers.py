"""Processes that compile groups ahead of this one, on as many cores as there are, and leave the kernels in the cache on the disk.

Inductor compiles one group after the other: it can not do so in threads, and keeps Python's lock for much of the time. So each of these
processes has one of its own. They are given groups as plain data over a pipe, and say with a line when a kernel is on the disk; this
process then finds it there in some milliseconds. A worker that fails, or is killed, costs nothing but time: what it had is compiled here.

Workers see no GPU. What a kernel has to be made for is handed to them (`worker.py`), so that none of them takes memory of the GPU or
disturbs what is timed on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from msplit.engines.cuda.device.device import Device, cores, product_switches
from msplit.engines.cuda.kernels.toolchain import ASSEMBLER, can_compile, fixed_assembler, keeps, kept

LIMIT = "MSPLIT_COMPILE_PROCESSES"
"""Environment variable: how many processes compile at most, on a CPU too; with ``0`` this one compiles all."""

MOST = 8
"""Processes at most: each has its own interpreter to start and PyTorch to import."""

FEWEST_GROUPS = 4
"""Fewer are compiled here before a worker has started."""

PATIENCE = 10.0
"""Seconds after which workers that have begun, and say nothing, are waited for no longer. A group takes a half, the first one two."""

DONE = ""
"""Answer of a worker to a task that it has done; else it says why it has not."""

BUSY = "no worker was free"
"""Reason for which a task is left to the caller."""

EACH = 2
"""Groups that a worker is given at once: it has the next one when it is done with one, whatever this process does meanwhile."""

COMMAND = [sys.executable, "-m", f"{__package__}.worker"]
"""Command line of a worker."""

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # what a worker compiles for is handed to it
    "PYTHONSAFEPATH": "1",  # no module of the present folder is taken for a library
}


class Workers:
    """The workers for one device, which owns them. They are started where it is known that they will be needed, and end with `stop`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[subprocess.Popen[bytes]] = []
        self._started: set[subprocess.Popen[bytes]] = set()
        self._said: defaultdict[subprocess.Popen[bytes], bytes] = defaultdict(bytes)
        self._scratch: str | None = None

    def start(self, groups: int) -> None:
        """Starts as many as are worth it for so many groups, without waiting for them. Where some are running, or none can be started,
        that is all.
        """
        count = how_many(groups, gpu=self._device.is_gpu)
        if self._running or not count or not keeps() or (self._device.is_gpu and not can_compile()):
            return
        try:
            self._scratch = tempfile.mkdtemp(prefix="msplit-workers-")
            setup = json.dumps({**_settings(self._device), "scratch": self._scratch}).encode() + b"\n"
            with kept():
                environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            environment["TMPDIR"] = self._scratch
            if self._device.is_gpu:
                assembler = fixed_assembler()
                environment.pop(ASSEMBLER, None)
                environment |= {} if assembler is None else {ASSEMBLER: assembler}
            for _ in range(count):
                worker = subprocess.Popen(
                    COMMAND,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for this process, which then stops them and what they have started
                    bufsize=0,
                )
                self._running.append(worker)
                _give(worker, setup)
        except Exception:  # whatever is missing here, this process compiles what there is to compile
            self.stop()

    def __len__(self) -> int:
        """Number of workers that are running."""
        return sum(worker.poll() is None for worker in self._running)

    def each(self, tasks: Sequence[Any], seconds: float) -> Iterator[tuple[int, str]]:
        """Has tasks done, the first ones first, and gives the number of each as soon as it is, and `DONE`, or why it is not.

        While no worker is done with one, it gives the last one that none has begun with, so that who asks can do it meanwhile. Workers that
        have not started yet are not waited for.

        Args:
            tasks: Plain data, as `worker.py` wants it.
            seconds: When those that are not done yet are given up.
        """
        waiting, now = deque(range(len(tasks))), time.monotonic()
        stop, heard = now + seconds, now
        given: dict[Any, deque[int]] = {worker: deque() for worker in self._running}
        with selectors.DefaultSelector() as answers:
            for worker in given:
                answers.register(worker.stdout, selectors.EVENT_READ, worker)
                self._feed(worker, given[worker], waiting, tasks)
            # Until all is done, the time is up, or no worker says anything.
            while (waiting or any(given.values())) and now < min(stop, heard + PATIENCE):
                ready = answers.select(0 if waiting else min(stop, heard + PATIENCE) - now)
                if not ready and waiting:
                    yield waiting.pop(), BUSY
                now = time.monotonic()
                heard = now if ready or waiting else heard
                for key, _ in ready:
                    worker, own = key.data, given[key.data]
                    new = os.read(key.fd, 1 << 16)
                    # Each line answers the task that was given first; the first line of all says that it has started.
                    *lines, self._said[worker] = (self._said[worker] + new).split(b"\n")
                    if lines and worker not in self._started:
                        self._started.add(worker)
                        del lines[0]
                    numbers = [own.popleft() for _ in lines]
                    self._feed(worker, own, waiting, tasks)
                    yield from zip(numbers, (line.decode("utf-8", "replace") for line in lines), strict=True)
                    if not new:  # it has ended
                        answers.unregister(key.fileobj)
                        lost, given[worker] = given[worker], deque()
                        yield from ((number, "the worker ended") for number in lost)
        for worker, own in given.items():
            if own:
                self._end([worker])  # what it says later would be taken for an answer to something else
            yield from ((number, "the worker took too long") for number in own)
        yield from ((number, BUSY) for number in waiting)

    def _feed(
        self, worker: subprocess.Popen[bytes], own: deque[int], waiting: deque[int], tasks: Sequence[Any]
    ) -> None:
        """Gives a worker that has started what it can do next."""
        while worker in self._started and waiting and len(own) < EACH:
            own.append(waiting.popleft())
            if not _give(worker, json.dumps(tasks[own[-1]]).encode() + b"\n"):
                return

    def stop(self) -> None:
        """Ends all of them, and what they have started. Nothing of them is left."""
        self._end(list(self._running))
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _end(self, ending: Sequence[subprocess.Popen[bytes]]) -> None:
        for worker in ending:
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)
        for worker in ending:
            self._running.remove(worker)
            self._started.discard(worker)
            self._said.pop(worker, None)
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
            worker.wait()


def how_many(groups: int, *, gpu: bool) -> int:
    """Number of processes that are worth starting for so many groups."""
    limit = os.environ.get(LIMIT, "")
    if limit.isdigit():
        return min(int(limit), groups)
    if not gpu or groups < FEWEST_GROUPS or os.name != "posix":
        return 0
    return min(cores() - 1, groups // 2, MOST)


def _give(worker: subprocess.Popen[bytes], line: bytes) -> bool:
    """Writes to a worker; whether it was there to take it."""
    assert worker.stdin is not None
    view = memoryview(line)
    try:
        while view:
            view = view[worker.stdin.write(view) :]
    except OSError:
        return False
    return True


def matmul_precision() -> str:
    """Precision of float32 products as PyTorch calls it: "tf32", "ieee", or "none" where nobody has said so."""
    matmul = torch.backends.cuda.matmul
    return str(getattr(matmul, "fp32_precision", "tf32" if matmul.allow_tf32 else "ieee"))


def _settings(device: Device) -> dict[str, Any]:
    """Settings that kernels depend on beside the groups."""
    found: dict[str, Any] = {
        "device": str(device.place),
        "matmul": matmul_precision(),
        "allowed": list(product_switches()),
        "threads": torch.get_num_threads(),
    }
    if device.is_gpu:
        from triton.runtime import driver

        gpu = torch.cuda.get_device_properties(device.place)
        facts = {name: getattr(gpu, name) for name in dir(gpu) if not name.startswith("_")}
        target = driver.active.get_current_target()
        found["gpu"] = {name: fact for name, fact in facts.items() if isinstance(fact, bool | int | float | str)}
        found["target"] = [target.backend, target.arch, target.warp_size]
    return found
