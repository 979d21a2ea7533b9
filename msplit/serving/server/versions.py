"""Versions of models that come and go while a server runs: from folders that are looked at again and again, and at a client's word.

A thread opens versions beside those that are served, takes them over when they are ready, and closes what is served no more once its last
request is answered. Nobody else changes `Models`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msplit import escape
from msplit.errors import LoadError, MsplitError
from msplit.progress import LOG, Progress
from msplit.serving.server.config import ModelConfig, distinct, listed_models
from msplit.serving.server.models import Models, Status, Version, VersionState
from msplit.serving.server.tensors import Refusal, StatusCode

Open = Callable[[str, int, Path, Progress], Version]
"""Opens a version: name of its model, its number, its folder, and who is told of progress."""
Stamp = frozenset[tuple[str, int, int, int]]
"""Names, sizes, times and inodes of all files of a version: while it is written, they change."""

_DRAIN = 5e-3
"""Seconds between two looks whether a version that is to be closed is in use."""
_ENDED = 16
"""Versions of a model that are not served and whose statuses are kept."""
_RETRIES, _AGAIN = 5, 60.0
"""How often a version that can not be opened is tried again though its files are the same, as memory may be free by then; and the seconds
in between. TensorFlow Serving's."""


class _Failed(NamedTuple):
    """Version that could not be opened.

    Attributes:
        stamp: Stamp that it had.
        tries: How often it was tried.
        again: Time of the next try.
    """

    stamp: Stamp
    tries: int
    again: float


class _Stopped(Exception):
    """The server stops while a version is opened."""


def stamp_of(path: Path) -> Stamp:
    """Stamp of a version's file or folder; empty where there is none."""

    def files() -> Iterator[str]:
        yield str(path)
        for folder, folders, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in (*folders, *names))

    found = set()
    for name in files():
        try:
            info = os.stat(name)
        except OSError:  # it is being moved
            continue
        found.add((name, info.st_size, info.st_mtime_ns, info.st_ino))
    return frozenset(found)


@dataclass(frozen=True)
class Polling:
    """Settings of the looks for new versions.

    Attributes:
        poll: Seconds between two looks; 0: none but at a client's word.
        read: Reads what models are to be served.
        reread: Seconds between two such readings; 0: none.
    """

    poll: float = 0.0
    read: Callable[[], Sequence[ModelConfig]] = tuple
    reread: float = 0.0


class Versions:
    """Versions of a server's models.

    Args:
        open_version: Opens a version.
        polling: When to look for others.

    Attributes:
        models: Models that are served.
    """

    def __init__(self, open_version: Open, polling: Polling) -> None:
        self.models = Models({}, control=self.change)
        self._open, self._read = open_version, polling.read
        tasks = ((polling.poll, self._look), (polling.reread, self._reread))
        self._tasks = [(seconds, work) for seconds, work in tasks if seconds]
        self._said: Sequence[ModelConfig] = ()
        self._configs: dict[str, ModelConfig] = {}
        self._unloaded = set[str]()
        self._seen: dict[tuple[str, int], Stamp] = {}
        self._failed: dict[tuple[str, int], _Failed] = {}
        self._opened: dict[Version, Stamp] = {}
        self._complaints: dict[str, str] = {}
        self._closing: list[Version] = []
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], None], Any] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="msplit-versions", daemon=True)

    def start(self, configs: Sequence[ModelConfig], progress: Progress) -> None:
        """Opens the first versions, and begins to look for others.

        Raises:
            MsplitError: One of them can not be served; then none is.
        """
        distinct(configs)
        for config in configs:
            for number in config.folders():  # what is not there is told before one is opened
                self._say(config.name, number, Status(VersionState.START))
        self.models.opening = [config.name for config in configs]
        self._take(configs, progress)
        self.models.opening = ()
        self._said = configs
        self._thread.start()

    def close(self) -> None:
        """Looks for no more, and closes all that are open."""
        self._over.set()
        self._asked.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._refuse_all()
        for version in (*self.models, *self._closing):
            version.close()

    # --- What clients ask for

    def change(self, kind: str, what: Any, result: Any = None) -> Future[Any]:
        """Changes what is served; see `Control`."""
        done: Future[Any] = Future()
        kinds = {"reload": self._reload, "reread": self._reread_now, "load": self._load, "unload": self._unload}
        work = kinds[kind]
        self._asked.put((done, partial(work, what), result))
        if self._over.is_set():
            self._refuse_all()
        return done

    def _refuse_all(self) -> None:
        """Refuses what nobody will do any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (asked := self._asked.get_nowait()) is not None:
                    asked[0].set_exception(Refusal(StatusCode.UNAVAILABLE, "the server is stopping"))

    def _reload(self, config: Any) -> None:
        self._take(listed_models(config, "the request"), self._tell)

    def _config(self, name: str) -> ModelConfig:
        if name not in self._configs:
            raise Refusal(StatusCode.NOT_FOUND, f"no model {name!r} is configured")
        return self._configs[name]

    def _load(self, name: str) -> None:
        self._renew({name: self._config(name)}, self._tell)
        self._unloaded.discard(name)

    def _unload(self, name: str) -> None:
        self._config(name)
        self._unloaded.add(name)
        self._retire([*self.models.versions.get(name, {}).values()])

    # --- Thread

    def _run(self) -> None:
        """Body of the thread."""
        due = [time.monotonic() + seconds for seconds, _ in self._tasks]
        while not self._over.is_set():
            wait = max(min(due) - time.monotonic(), 0.0) if due else None
            try:
                asked = self._asked.get(timeout=_DRAIN if self._closing else wait)
            except queue.Empty:
                asked = None
            if asked is not None:
                self._do(*asked)
            for i, (seconds, work) in enumerate(self._tasks):
                if time.monotonic() >= due[i]:
                    self._safely(work)
                    due[i] = time.monotonic() + seconds
            self._safely(self._close_unused)

    def _safely(self, work: Callable[[], None]) -> None:
        """Does what must not end the thread."""
        try:
            work()
        except _Stopped:
            pass
        except Exception:  # noqa: BLE001  whatever it is, later versions are still looked for
            LOG.exception("looking for versions")

    def _reread(self) -> None:
        """Takes what models are to be served, if that was changed. A client's word holds until then."""
        try:
            if (configs := self._read()) != self._said:
                self._take(configs, self._tell)
                self._said = configs
            self._complaints.pop("", None)
        except MsplitError as problem:
            self._complain("", _said(problem))

    def _reread_now(self, _: Any) -> None:
        """Takes what models are to be served, whether that was changed or not: their new versions, too."""
        configs = self._read() or self._said
        self._take(configs, self._tell)
        self._said = configs

    def _do(self, done: Future[Any], work: Callable[[], None], result: Any) -> None:
        """Does what a client asked for."""
        done.set_running_or_notify_cancel()
        try:
            work()
            if self.models.follower is not None:
                self.models.follower.settle()  # whom its client asks next has followed
        except Exception as problem:  # noqa: BLE001  who asked for it gets it
            if isinstance(problem, _Stopped):
                problem = Refusal(StatusCode.UNAVAILABLE, "the server is stopping")
            elif isinstance(problem, MsplitError):
                problem = Refusal(StatusCode.FAILED_PRECONDITION, _said(problem))
            done.set_exception(problem)
        else:
            done.set_result(result)

    def _tell(self, what: str, share: float) -> None:
        """Takes note of progress, which is where work that nobody needs any more can end."""
        del what, share
        if self._over.is_set():
            raise _Stopped

    def _look(self) -> None:
        """Looks for new versions of all models."""
        for name, config in self._configs.items():
            if name in self._unloaded:
                continue
            try:
                wanted = config.present()
            except LoadError as problem:  # those of before stay
                self._complain(name, _said(problem))
                continue
            self._complaints.pop(name, None)
            for number, path in wanted.items():
                if number not in self.models.versions.get(name, {}):
                    self._try(name, number, path)
            for known in (self._seen, self._failed):
                for key in [key for key in known if key[0] == name and key[1] not in wanted]:
                    known.pop(key)
                    if self.models.statuses[name][key[1]].state is VersionState.START:  # it went while it was written
                        self._say(*key, Status(VersionState.END))
            served = self.models.versions.get(name, {})
            if wanted and wanted.keys() <= served.keys():  # a version that is not ready replaces none
                self._retire([version for number, version in served.items() if number not in wanted])

    def _try(self, name: str, number: int, path: Path) -> None:
        """Opens a new version, if nobody has written to its folder since the last look."""
        key, stamp = (name, number), stamp_of(path)
        failed = self._failed.get(key)
        if failed is not None and failed.stamp == stamp and time.monotonic() < failed.again:
            return
        if self._seen.get(key) != stamp:
            self._seen[key] = stamp
            self._say(name, number, Status(VersionState.START))
            return
        try:
            version = self._opening(name, number, path, self._tell)
        except _Stopped:
            raise
        except Exception:  # noqa: BLE001  whatever is wrong with it, others are served
            if stamp_of(path) != stamp:  # it was still being written
                self._say(name, number, Status(VersionState.START))
                return
            tries = failed.tries + 1 if failed is not None and failed.stamp == stamp else 1
            again = time.monotonic() + _AGAIN if tries <= _RETRIES else math.inf
            self._failed[key] = _Failed(stamp, tries, again)
            return
        if stamp_of(path) != stamp:
            self._opened.pop(version)
            version.close()
            self._say(name, number, Status(VersionState.START))
            return
        versions = self.models.versions
        self.models.versions = {**versions, name: {**versions.get(name, {}), number: version}}
        self._say(name, number, Status(VersionState.AVAILABLE))

    def _opening(self, name: str, number: int, path: Path, progress: Progress) -> Version:
        """Opens a version, to be served next."""
        self._say(name, number, Status(VersionState.LOADING))
        stamp = stamp_of(path)
        try:
            version = self._open(name, number, path, progress)
        except Exception as problem:  # not a signal, which ends the whole server
            why = _said(problem) if isinstance(problem, MsplitError) else f"{type(problem).__name__}: {problem}"
            if not isinstance(problem, MsplitError | _Stopped):
                LOG.exception("a fault of the server's, or of a model's file")
            self._say(name, number, Status(VersionState.END, escape.line(why)))
            raise
        self._opened[version] = stamp
        return version

    def _take(self, configs: Sequence[ModelConfig], progress: Progress) -> None:
        """Serves these models in place of those of before.

        Raises:
            MsplitError: One of them can not be served; then all is as before.
        """
        distinct(configs)
        found = {config.name: config for config in configs}
        labels = {name: config.labels for name, config in found.items()}
        before = {name: config for name, config in self._configs.items() if name not in found}
        self._renew(found, progress, labels)
        self._configs, self._unloaded = found, set()
        for name in before:
            self._retire([*self.models.versions.get(name, {}).values()])
        self.models.labels = labels

    def _renew(self, configs: dict[str, ModelConfig], progress: Progress, labels: Any = None) -> None:
        """Opens what is not served of these models, or was changed since; retires what is not wanted of them.

        Raises:
            MsplitError: One of them can not be served; then all is as before.
        """
        wanted = {name: config.folders() for name, config in configs.items()}
        served, opened = self.models.versions, list[Version]()
        fresh: dict[str, dict[int, Version]] = {}
        try:
            for name, folders in wanted.items():
                moved = name in self._configs and configs[name].path != self._configs[name].path
                same = {} if moved else served.get(name, {})
                for number, path in folders.items():
                    version = same.get(number)
                    if version is None or (labels is None and self._opened[version] != stamp_of(path)):
                        version = self._opening(name, number, path, progress)
                        opened.append(version)
                    fresh.setdefault(name, {})[number] = version
        except BaseException:
            for version in opened:
                version.close()
                self._opened.pop(version)
                if version.number not in served.get(version.model, {}):
                    self._say(version.model, version.number, Status(VersionState.END))
            raise
        if labels is not None:  # a label means its version from when there is one, up to when there is none
            both = {name: {**served.get(name, {}), **versions} for name, versions in fresh.items()}
            self.models.versions = {**served, **both}
            self.models.labels = labels
        self.models.versions = {**served, **fresh}
        for version in opened:
            self._say(version.model, version.number, Status(VersionState.AVAILABLE))
        kept = {*self.models}
        self._retire([version for versions in served.values() for version in versions.values() if version not in kept])

    def _retire(self, versions: Sequence[Version]) -> None:
        """Has no more requests go to versions. They are closed when those in flight are answered."""
        gone = {*versions}
        left = {
            name: {number: version for number, version in those.items() if version not in gone}
            for name, those in self.models.versions.items()
        }
        self.models.versions = {name: those for name, those in left.items() if those}
        for version in versions:
            version.retired = True
            self._closing.append(version)
            if version.number not in left.get(version.model, {}):
                self._say(version.model, version.number, Status(VersionState.UNLOADING))

    def _close_unused(self) -> None:
        """Closes versions that are served no more and whose requests are answered."""
        for version in [version for version in self._closing if not version.users]:
            self._closing.remove(version)
            version.close(finish=True)
            self._opened.pop(version)
            for forget in self.models.closing:
                forget(version)
            if version.number not in self.models.versions.get(version.model, {}):
                self._say(version.model, version.number, Status(VersionState.END))

    def _say(self, name: str, number: int, status: Status) -> None:
        """Tells a status, to clients and in the log."""
        level = logging.WARNING if status.why else logging.INFO
        what = f"can not be opened: {status.why}" if status.why else status.state.name
        where = {"model": name, "version": number}
        LOG.log(level, "model %s version %d: %s", escape.line(name), number, what, extra=where)
        known = {one: found for one, found in self.models.statuses.get(name, {}).items() if one != number}
        ended = [one for one, found in known.items() if found.state in (VersionState.START, VersionState.END)]
        for one in ended[: len(ended) - _ENDED]:
            del known[one]
        self.models.statuses = {**self.models.statuses, name: {**known, number: status}}

    def _complain(self, name: str, why: str) -> None:
        """Tells what is wrong with a model's folder, or the list of models (""), once."""
        if self._complaints.get(name) != why:
            self._complaints[name] = why
            what = f"model {escape.line(name)}" if name else "the list of models"
            LOG.warning("%s: %s; versions of before stay", what, why, extra={"model": name})


def _said(problem: MsplitError) -> str:
    """An error on a line, with where and how to mend it."""
    return escape.line(" ".join(str(problem).split("\n")))
