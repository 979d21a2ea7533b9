"""Tests in several processes, forked from the one that has collected them: `pytest --processes 3`.

What all of them need is done once: TensorFlow, PyTorch and 500 files of tests are imported by one process, and not by each. A process that
has nothing to do takes the next file; the first to be taken are those with the slowest tests (`tests/slow.toml`), so that none works alone
at the end. A process that dies fails the test that it ran, and another one goes on behind it.
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest

NUMBER = "MSPLIT_TEST_PROCESS"
"""A variable that names one of several processes, which has no terminal."""

_NEXT = struct.Struct("i")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares `--processes`."""
    parser.addoption(
        "--processes", type=int, default=0, help="processes that are forked to run tests (0: this one alone)"
    )


def in_turns(items: Sequence[pytest.Item], first: Iterable[str]) -> list[list[int]]:
    """Indices of tests by the files that they are in; files with these names come first, and otherwise in the order of collection."""
    files = [[index for index, _ in rows] for _, rows in groupby(enumerate(items), key=lambda row: row[1].path)]
    names = frozenset(first)
    return sorted(files, key=lambda file: items[file[0]].path.name not in names)


@dataclass
class _Child:
    """A forked process, as the one that it was forked from sees it.

    Attributes:
        pid: Its process id.
        tells: Where its messages are read.
        left: Indices of the tests of its file that have not ended, in order.
    """

    pid: int
    tells: connection.Connection
    left: list[int] = field(default_factory=list)


def run(session: pytest.Session, count: int, first: Iterable[str]) -> None:
    """Runs the tests of a session in so many processes, and reports them as if they had run here.

    Args:
        session: What was collected.
        count: Number of processes.
        first: Names of the files that take longest.
    """
    files = in_turns(session.items, first)
    gc.collect()
    gc.freeze()  # otherwise each process copies the memory of what was collected as it looks for garbage in it
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise pytest.UsageError(
            f"{threads} threads run once the tests are imported, and would be missing in forked processes: "
            "an import of a test starts them, or one of a library (run without --processes, or with -n of pytest-xdist)"
        )
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  (one for all)
    ahead, behind = os.pipe()
    os.set_blocking(behind, False)  # fails, and does not wait for ever, where there are more files than a pipe takes
    os.write(behind, b"".join(map(_NEXT.pack, range(len(files)))))
    os.close(behind)
    children: dict[connection.Connection, _Child] = {}
    started = ended = 0

    def fork(begun: Sequence[int] = ()) -> None:
        nonlocal started
        reads, writes = connection.Pipe(duplex=False)
        pid = os.fork()
        if not pid:
            for other in (reads, *children):
                other.close()
            _work(session, files, begun, ahead, writes, started)
        writes.close()
        children[reads] = _Child(pid, reads, list(begun))
        started += 1

    try:
        for _ in range(min(count, len(files))):
            fork()
        while children:
            for tells in connection.wait(list(children)):
                child = children[tells]
                try:
                    kind, value = child.tells.recv()
                except EOFError:
                    del children[tells]
                    if _lost(session, child, os.waitpid(child.pid, 0)[1]):
                        ended += 1
                        if not _stops(session):
                            fork(child.left)
                    continue
                if kind == "file":
                    child.left = list(files[value])
                else:
                    _HEARD[kind](session, child, value)
                    ended += kind == "ended"
            if _stops(session):
                break
    finally:
        for child in children.values():
            os.kill(child.pid, 9)
            os.waitpid(child.pid, 0)
        os.close(ahead)
    if not _stops(session) and ended < len(session.items):
        pytest.exit(f"{len(session.items) - ended} tests have not been run", returncode=1)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _stops(session: pytest.Session) -> bool:
    return bool(session.shouldfail or session.shouldstop)


def _begun(session: pytest.Session, _: _Child, index: int) -> None:
    item = session.items[index]
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)


def _ended(session: pytest.Session, child: _Child, told: list[dict[str, Any]]) -> None:
    """Reports of a test, which is the first that is left."""
    item = session.items[child.left.pop(0)]
    for data in told:
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=data)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _warned(session: pytest.Session, _: _Child, told: dict[str, Any]) -> None:
    session.config.hook.pytest_warning_recorded.call_historic(kwargs=told)


_HEARD = {"begun": _begun, "ended": _ended, "warned": _warned}


def _lost(session: pytest.Session, child: _Child, status: int) -> bool:
    """Whether a process that has ended leaves work to another one: one that died fails the first test that has not ended."""
    if not status:
        return False
    how = f"a process of tests ended with {os.waitstatus_to_exitcode(status)}"
    if not child.left:
        pytest.exit(f"{how} after its last test", returncode=1)
    item = session.items[child.left.pop(0)]
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", f"{how} while it ran {item.nodeid}", "call")
    item.ihook.pytest_runtest_logreport(report=report)
    return True


class _Teller:
    """What a forked process has in place of a terminal: it passes reports and warnings on."""

    def __init__(self, config: pytest.Config, tells: connection.Connection) -> None:
        self._config, self._tells = config, tells
        self.reports: list[Any] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps a report until its test has ended."""
        self.reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Passes a warning on, by its text where it can not be sent itself."""
        told = {"when": when, "nodeid": nodeid, "location": location}
        try:
            pickle.dumps(warning_message)
        except Exception:
            shown = warnings.WarningMessage(
                UserWarning(str(warning_message.message)), UserWarning, warning_message.filename, warning_message.lineno
            )
            warning_message = shown
        self._tells.send(("warned", {"warning_message": warning_message, **told}))


class _Outside:
    """Stands for a test of another file: behind the last test of one, all is torn down that is not the session's."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session

    def listchain(self) -> list[pytest.Session]:
        """What stays set up."""
        return [self._session]


def _work(
    session: pytest.Session,
    files: Sequence[Sequence[int]],
    begun: Sequence[int],
    ahead: int,
    tells: connection.Connection,
    number: int,
) -> None:
    """Runs in a forked process until no file is left, and ends it.

    Args:
        session: What was collected.
        files: Indices of tests by file.
        begun: Those that are left of a file that another process did not end.
        ahead: A pipe with the indices of the files that nobody has taken.
        tells: Where reports go.
        number: Of this process, from 0.
    """
    status = 1
    try:
        os.environ[NUMBER] = str(number)
        config = session.config
        teller = _settle(session, tells, number)
        traced = _traced()
        session.testsfailed = 0
        rest: Sequence[int] = begun
        while True:
            for at, index in enumerate(rest):
                tells.send(("begun", index))
                following: Any = session.items[rest[at + 1]] if at + 1 < len(rest) else _Outside(session)
                config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=following)
                tells.send(("ended", teller.reports))
                teller.reports = []
            given = os.read(ahead, _NEXT.size)
            if not given:
                break
            (file,) = _NEXT.unpack(given)
            tells.send(("file", file))
            rest = files[file]
        session._setupstate.teardown_exact(None)
        if traced is not None:
            traced.stop()
            traced.save()
        atexit._run_exitfuncs()
        status = 0
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        import traceback

        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _settle(session: pytest.Session, tells: connection.Connection, number: int) -> _Teller:
    """Gives a forked process what it must not share: a folder for files, what captures output, and no terminal."""
    config = session.config
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    teller = _Teller(config, tells)
    plugins.register(teller, "teller")
    config._tmp_path_factory._basetemp = _folder(config, number)  # type: ignore[attr-defined]
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    return teller


def _folder(config: pytest.Config, number: int) -> Path:
    path = config._tmp_path_factory.getbasetemp() / f"process-{number}"  # type: ignore[attr-defined]
    path.mkdir()
    return path


def _traced() -> Any:
    """Coverage of this process, which writes to a file of its own; None where nothing is traced."""
    if "coverage" not in sys.modules:
        return None
    import coverage

    traced = coverage.Coverage.current()
    if traced is not None:
        traced.get_data()._suffix = (
            True  # chosen anew for each process; the name that pytest-cov gave is the first one's
        )
    return traced
