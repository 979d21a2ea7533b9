"""A server whose requests are taken by several processes, its fronts: each listens on all ports (`front`), and the kernel gives each
connection to one of them.

This process takes none. It opens versions, and tells each front all changes of `Models` one after the other, so that each serves what this
one has decided, in the same order. It starts a front again that has ended, adds up what fronts have counted, and has all of them end. A
version is closed when no front needs it any more: fronts are among its `users`.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from msplit.engines.process import Process
from msplit.errors import EngineError
from msplit.serving.pool.ring import unpacked_error
from msplit.serving.server import messages
from msplit.serving.server.listening import Listening, heeding
from msplit.serving.server.logs import LOG, LogHandler
from msplit.serving.server.metrics import Counts, Metrics, added, left
from msplit.serving.server.models import FOLLOWED, Models, Version
from msplit.serving.server.service import Service
from msplit.serving.server.tensors import refusal

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before a front that could not begin is started once more: at first, and at most."""
_LOOK = 0.5
"""Seconds between two looks at the fronts."""
_COUNTING = 2.0
"""Seconds that they have to say what they have counted; then what they said before holds."""
_DEAF = 30.0
"""Seconds after which a front that does not say what it has counted is ended, and another one started."""
_NAP = 0.01
"""Seconds between two looks whether all have followed."""
_LATE = 5.0
"""Seconds beyond its grace after which a front that is to stop is ended."""


@dataclass(eq=False)
class _Front:
    """A front, and then the one that takes its place.

    Attributes:
        process: The process.
        linked: True while it is told of changes.
        up: True while it listens.
        change: Number of the last change that it has followed.
        counts: What it has counted.
        counted: Number of the question that these answer.
        heard: Time of that answer.
        needs: Versions that it serves, or that its requests still need, by serial.
    """

    process: Process | None = None
    linked: bool = False
    up: bool = False
    change: int = -1
    counts: Counts = field(default_factory=dict)
    counted: int = 0
    heard: float = math.inf
    needs: dict[int, Version] = field(default_factory=dict)


class Fronts:
    """Processes that take requests; used as `run.Answering`.

    Args:
        models: Models that are served.
        where: They listen.
    """

    def __init__(self, models: Models, where: Listening) -> None:
        self._models, self._where = models, where
        self._service = Service(models, Metrics(models, self._count))  # for its looks at GPUs
        self._log = next((one for one in LOG.handlers if isinstance(one, LogHandler)), None)
        self._fronts = [_Front() for _ in range(where.fronts)]
        self._threads = [threading.Thread(target=self._keep, args=(one,), daemon=True) for one in self._fronts]
        self._news, self._stopping = threading.Condition(threading.RLock()), threading.Event()
        self._change = self._question = 0
        self._gone: Counts = {}
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._began, self._failed = False, list[Exception]()

    def start(self, ports: Mapping[int, socket.socket]) -> None:
        """Has all of them listen, on ports that this process holds.

        Raises:
            MsplitError: One can not.
        """
        del ports  # are held for as long as they are served, and named in `where`
        self._models.follower = self
        self._models.closing.append(self._forget)
        for thread in self._threads:
            thread.start()
        with self._news:
            self._news.wait_for(lambda: self._failed or all(front.up for front in self._fronts))
            self._began = True
        if self._failed:
            raise self._failed[0]

    def wait(self, ready: Callable[[], None]) -> None:
        """Waits until a signal comes and all fronts have ended; see `run.Answering.wait`."""
        over = math.inf
        with heeding(self._came.put):
            while self._came.empty() and not self._is_settled():
                time.sleep(_NAP)
            ready()
            while any(thread.is_alive() for thread in self._threads):
                self._look(over)
                number = 0
                with contextlib.suppress(queue.Empty):
                    number = self._came.get(timeout=_LOOK)
                if number or (self._service.lost and over == math.inf):
                    over = self._stop(over)
        if self._service.lost:
            raise self._service.lost[0]

    def end(self) -> None:
        """Ends all without delay."""
        self._models.follower = None
        for _ in range(2):
            self._stop(0.0)
        for thread, front in zip(self._threads, self._fronts, strict=True):
            thread.join(_LOOK)
            if thread.is_alive() and front.process is not None:
                front.process.kill()
            thread.join()

    def reread(self) -> None:
        """Has all read tokens and certificates again."""
        with self._news:
            for front in self._fronts:
                self._send(front.process, "reread")

    def _stop(self, over: float) -> float:
        """Has all of them stop; a second time at once. Returns the time when the last one has to be over."""
        self._stopping.set()
        with self._news:
            self._news.notify_all()
            for front in self._fronts:
                self._send(front.process, "stop")
        return min(over, time.monotonic() + self._where.lame_duck + self._where.grace + _LATE)

    def _look(self, over: float) -> None:
        """Looks after GPUs and fronts: asks these for their counts, and ends those that do not answer."""
        self._service.look()
        now = time.monotonic()
        for front in self._fronts:
            if now > over or now - front.heard > _DEAF:
                LOG.error("a front end does not answer, and is ended")
                front.heard = math.inf
                if front.process is not None:
                    front.process.kill()
        self._ask_counts()

    # --- What is served

    def change(self, name: str, value: Any) -> None:
        """Tells all of a change of `Models`."""
        with self._news:
            self._change += 1
            for front in self._fronts:
                if front.linked:
                    self._need(front)
                    self._send(front.process, "change", self._change, name, _sent(name, value))

    def settle(self) -> None:
        """Returns when all have followed, or the server stops."""
        with self._news:
            self._news.wait_for(lambda: self._is_settled() or self._stopping.is_set())

    def _is_settled(self) -> bool:
        return all(front.change == self._change for front in self._fronts if front.linked)

    def _need(self, front: _Front) -> None:
        for version in self._models:
            version.users[front], front.needs[version.serial] = None, version

    def _followed(self, front: _Front, change: int, kept: Collection[int]) -> None:
        """Takes note of what a front has followed, and which versions it needs."""
        with self._news:
            front.change = change
            if change == self._change:  # else it may be about to open one that it does not have yet
                for serial in front.needs.keys() - kept:
                    front.needs.pop(serial).users.pop(front, None)
            self._news.notify_all()

    def _asked(self, process: Process, number: int, kind: str, what: Any) -> None:
        """Does what a front can not: changes what is served, or tells the metrics of all."""
        if kind == "metrics":
            asked = self._service.aside.submit(self._service.metrics.text, what)
        else:
            assert self._models.control is not None
            what = messages.ModelServerConfig.FromString(what) if kind == "reload" else what
            asked = self._models.control(kind, what, None)

        def tell(done: Future[Any]) -> None:
            problem = done.exception()
            why = None if problem is None else refusal(problem)
            result = done.result() if problem is None else None
            self._send(process, "answer", number, None if why is None else (why.code.name, why.said), result)

        asked.add_done_callback(tell)

    # --- What was counted

    def _ask_counts(self) -> int:
        """Asks all what they have counted. Returns the number of the question."""
        with self._news:
            self._question += 1
            for front in self._fronts:
                if front.up:
                    self._send(front.process, "count", self._question)
            return self._question

    def _count(self) -> Counts:
        """Counts of all fronts, also of those that have ended, as they are now."""
        with self._news:
            number = self._ask_counts()
            self._news.wait_for(lambda: all(one.counted >= number for one in self._fronts if one.up), _COUNTING)
            return added([self._gone, *(front.counts for front in self._fronts)])

    def _forget(self, version: Version) -> None:
        """Drops what ended fronts have counted for a version that is closed; see `left`."""
        with self._news:
            self._gone = left(self._gone, version, self._models)

    # --- Processes

    def _keep(self, front: _Front) -> None:
        """Body of a thread: starts a front, hears what it says, and starts another one when it has ended."""
        pause = _PAUSE
        while not self._stopping.is_set():
            problem = self._run(front)
            was_up = front.up
            self._lose(front)
            if not self._began:
                with self._news:
                    self._failed.append(problem)
                    self._news.notify_all()
                break
            if not self._stopping.is_set():
                LOG.error("a front end has ended, and is started again: %s", getattr(problem, "what", problem))
                pause = _PAUSE if was_up else min(2 * pause, _LONGEST_PAUSE)
                self._stopping.wait(0.0 if was_up else pause)
        self._came.put(0)

    def _run(self, front: _Front) -> Exception:
        """Starts a front and hears what it says, until it ends. Returns why."""
        try:
            process = Process("msplit.serving.server.front", "a front end")
            with self._news:
                front.process, front.linked = process, True
                state = {name: _sent(name, getattr(self._models, name)) for name in FOLLOWED}
                as_json = self._log is not None and self._log.as_json
                self._need(front)
                process.send((self._where, as_json, state, self._change))
                if self._stopping.is_set():
                    self._send(process, "stop")
            while True:
                self._hear(front, process, *process.receive())
        except Exception as problem:  # noqa: BLE001  whatever it is, another one is started
            return problem

    def _hear(self, front: _Front, process: Process, kind: str, *said: Any) -> None:
        """Takes a message of a front. Raises the error that hinders it to begin."""
        if kind == "failed":
            raise unpacked_error(*said)
        if kind == "log":
            if self._log is not None:
                self._log.write(*said)
        elif kind == "asks":
            self._asked(process, *said)
        elif kind == "followed":
            self._followed(front, *said)
        else:
            with self._news:
                if kind == "listens":
                    front.up, front.counted = True, self._question
                else:
                    front.counted, front.counts = said
                front.heard = time.monotonic()
                self._news.notify_all()

    def _send(self, process: Process | None, *message: Any) -> None:
        """Sends a message, if the process is there."""
        with self._news, contextlib.suppress(EngineError):
            if process is not None:
                process.send(message)

    def _lose(self, front: _Front) -> None:
        """Takes note that a front has ended. What it has counted stays, but for requests that wait."""
        with self._news:
            front.linked = front.up = False
            for version in front.needs.values():
                version.users.pop(front, None)
            ended = {key: value if key[3] else [*value[:-2], 0.0, 0.0] for key, value in front.counts.items()}
            self._gone, front.counts = added([self._gone, ended]), {}
            front.needs, front.change, front.heard = {}, -1, math.inf
            self._news.notify_all()
        if front.process is not None:
            front.process.close()


def _sent(name: str, value: Any) -> Any:
    """A value of `Models` as it is sent: of a version its serial number, the pool of each signature as it is pickled, and the rest."""
    if name != "versions":
        return value
    return {
        model: {
            number: (
                one.serial,
                {name: (each.pool.__reduce__(), each.tensors) for name, each in one.signatures.items()},
                one.others,
            )
            for number, one in versions.items()
        }
        for model, versions in value.items()
    }
