"""Front of a server: a process that takes requests on all ports of it, beside others, and asks the pools that the main process has opened.

It serves what that process says (`fronts`): its `Models` take all changes in the same order. It ends with that process, however that ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from msplit.engines.process import LOST
from msplit.errors import MsplitError
from msplit.serving.pool.ring import packed_error
from msplit.serving.server import logs
from msplit.serving.server.listening import Listening, held
from msplit.serving.server.metrics import Metrics
from msplit.serving.server.models import Models, Signature, Version
from msplit.serving.server.run import Answering
from msplit.serving.server.tensors import Refusal, StatusCode

_WATCH = 1.0
"""Seconds between two looks whether the main process is there, in case that another one holds the end of its pipe."""
_DRAIN = 5e-3
"""Seconds between two looks whether a version that is to be closed is in use."""


class _AllMetrics(Metrics):
    """Metrics of the whole server, which the main process adds up."""

    def __init__(self, front: _Front) -> None:
        super().__init__(front.models)
        self._front = front

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """All of it, and its type."""
        found: tuple[bytes, str] = self._front.ask("metrics", accept).result()
        return found


class _Front:
    """State of the process, and its conversation with the main process.

    Args:
        pipe: Where that one is heard.
        where: It listens.
        state: Attributes of `Models` as of now, in this order.
        change: Number of the last change that is in them.

    Attributes:
        models: What is served.
    """

    def __init__(self, pipe: Connection, where: Listening, state: Mapping[str, Any], change: int) -> None:
        self.models = Models({}, control=self._control)
        self._pipe, self._where, self._change, self._sending = pipe, where, change, threading.Lock()
        self._state = state
        self._metrics = _AllMetrics(self)
        self._server = Answering.of(self.models, where, self._metrics)
        self._changes: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._open, self._closing = dict[int, Version](), list[Version]()
        self._numbers, self._asked = count(), dict[int, tuple[Future[Any], Any]]()

    def run(self) -> None:
        """Takes requests until it is to stop."""
        for name, value in self._state.items():
            self._take(name, value)
        with held(self._where, shares=True) as ports:
            self._server.start(ports)
            gc.collect()
            gc.freeze()
            self._send("listens")
            threading.Thread(target=self._follow, daemon=True).start()
            self._server.join()

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(*LOST):
            self._pipe.send(message)

    def hear(self, parent: int) -> None:
        """Body of a thread: takes messages. The process ends where there is nobody to send more."""
        with contextlib.suppress(*LOST):
            while os.getppid() == parent:
                if self._pipe.poll(_WATCH):
                    self._hear(*self._pipe.recv())
        os._exit(1)

    def _hear(self, kind: str, *said: Any) -> None:
        if kind == "change":
            self._changes.put(said)
        elif kind == "count":
            counts = self._metrics.counts()  # are sent in a thread, so that this one hears whatever the other side does
            threading.Thread(target=self._send, args=("counts", *said, counts)).start()
        elif kind == "stop":
            self._server.stop(0)
        elif kind == "reread":
            for proof in (self._where.tokens, self._where.certificates):
                with contextlib.suppress(MsplitError):  # the main process tells of it, and what was there stays in both
                    if proof is not None:
                        proof.read()
        else:
            number, why, result = said
            future, known = self._asked.pop(number)
            if why is None:
                future.set_result(result if known is None else known)
            else:
                future.set_exception(Refusal(StatusCode[why[0]], why[1]))

    # --- What it asks for

    def ask(self, kind: str, what: Any, result: Any = None) -> Future[Any]:
        """Asks the main process for something. The future gives its answer, or `result` in place of that."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        self._asked[number] = future, result
        self._send("asks", number, kind, what)
        return future

    def _control(self, kind: str, what: Any, result: Any) -> Future[Any]:
        return self.ask(kind, what if isinstance(what, str) else what.SerializeToString(), result)

    # --- What it serves

    def _follow(self) -> None:
        """Body of a thread: takes changes, and closes what is served no more once its last request is answered."""
        try:
            self._send("followed", self._change, {*self._open})
            while True:
                kept = len(self._open)
                with contextlib.suppress(queue.Empty):
                    number, name, value = self._changes.get(timeout=_DRAIN if self._closing else None)
                    self._take(name, value)
                    kept, self._change = -1, number
                self._close_unused()
                if len(self._open) != kept:
                    self._send("followed", self._change, {*self._open})
        except Exception:  # noqa: BLE001  another front, which begins with what is served by then, takes its place
            logs.LOG.exception("a front end can not follow")
            os._exit(1)

    def _take(self, name: str, value: Any) -> None:
        """Takes a change of `Models`."""
        if name == "versions":
            before = [*self.models]
            value = {
                model: {number: self._version(model, number, *sent) for number, sent in versions.items()}
                for model, versions in value.items()
            }
        setattr(self.models, name, value)
        if name == "versions":
            served = {*self.models}
            for version in before:
                if version not in served:
                    version.retired = True
                    self._closing.append(version)

    def _version(
        self, model: str, number: int, serial: int, pools: Mapping[str, Any], others: Sequence[str]
    ) -> Version:
        """A version, which is opened where it is not yet."""
        if serial not in self._open:
            found = {name: Signature(name, attach(*values), ends) for name, ((attach, values), ends) in pools.items()}
            self._open[serial] = Version(model, number, found, others, serial=serial)
        return self._open[serial]

    def _close_unused(self) -> None:
        for version in [version for version in self._closing if not version.users]:
            self._closing.remove(version)
            version.close(finish=True)
            for forget in self.models.closing:
                forget(version)
            del self._open[version.serial]


def main(arguments: Sequence[str]) -> None:
    """The process. Signals are the main process's: it says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe, parent = Connection(int(arguments[0])), int(arguments[1])
    where, as_json, state, change = pipe.recv()
    front = _Front(pipe, where, state, change)
    with logs.logging_to(lambda text: front._send("log", text), as_json=as_json):
        threading.Thread(target=front.hear, args=(parent,), daemon=True).start()
        try:
            front.run()
        except Exception as problem:  # noqa: BLE001  the main process raises or logs it
            front._send("failed", packed_error(problem))
    os._exit(0)  # what is left in memory needs no tidying up


if __name__ == "__main__":
    from msplit.serving.server import front  # so that classes of what is sent are those of the module

    front.main(sys.argv[1:])
