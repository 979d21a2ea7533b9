"""Processes of Python that begin with their imports done: forked from one that has made them, in place of a new interpreter.

    forked.run([sys.executable, "-m", "msplit", "analyze", model], capture_output=True, text=True)
    forked.Popen(command, stdout=subprocess.PIPE, server=forked.TENSORFLOW)

For commands whose work, signals and streams are tested. Where it is the start of a process that is tested (what is imported, variables that
Python reads as it begins, limits), a new one is needed: `subprocess`. The exit of the interpreter is the same,
unless it is told to be quick.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]

COMMANDS = ("msplit.api", "msplit.cli.main", "msplit.formats", "rich.console", "rich.table", "yaml")
"""Imports of commands that only decide."""

TENSORFLOW = ("tensorflow", "torch", *COMMANDS, "msplit.engines.cuda.engine", "msplit.engines.tensorflow.session")
"""Imports of what runs models. No thread of TensorFlow is started by them, so that a fork is safe."""

ENGINE = ("torch", *COMMANDS, "msplit.engines.cuda.engine", "msplit.run.build")
"""Imports of the CUDA engine, which does without TensorFlow."""

COMPILER = (*ENGINE, "tests.engines.cuda.passes.pointwise_fusion.compiler")
"""The same with PyTorch's compiler."""

POOLED = (*COMMANDS, "msplit.serving.pool.worker", "tests.serving.pool.remote")
"""Imports of a process of a pool in tests."""

SERVED = (*ENGINE, "msplit.serving.server.run")
"""Imports of a server of builds, which does without TensorFlow."""

PARSER = (*COMMANDS, "jaxlib.mlir.ir", "jaxlib.mlir.dialects.stablehlo")
"""Imports of a process that parses a module of StableHLO."""

STAGE = "--"
"""Among the imports of a server: another one is forked from it there, which has what stands before."""

_SERVER = """
import atexit, fcntl, gc, importlib, io, json, logging, os, runpy, signal, socket, sys, threading

signal.signal(signal.SIGINT, signal.SIG_IGN)
stages = {}
asks = socket.socket(fileno=int(sys.argv[1]))

def load(names):
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if problem.name not in ("torch", "triton"):  # which .ci/lowest does without
                raise
    assert len(os.listdir("/proc/self/task")) == 1, "a thread of an import would be missing in the copies"
    gc.freeze()

def leave_stages():
    for stage in stages.values():
        stage.close()
    stages.clear()

names = []
for name in sys.argv[2:]:
    if name != "--":
        load([name])
        names.append(name)
        continue
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        leave_stages()
        mine.close()
        asks.close()
        asks = its
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # as msplit sets it, for the one that goes on to TensorFlow
        break
    its.close()
    stages[frozenset(names)] = mine
load(names)

def forked_for(asks):
    # Forks whatever is asked for. Returns in each of these processes, with what was asked.
    while True:
        text, given, _, _ = socket.recv_fds(asks, 1 << 20, 16)
        if not text:
            os._exit(0)
        asked = json.loads(text)
        if "ended" in asked:
            asks.send(str(os.waitpid(asked["ended"], 0)[1]).encode())
            continue
        if "imports" in asked:  # by a worker of pytest: forks a server of its own
            its = socket.socket(fileno=given[0])
            if os.fork():
                its.close()
            else:
                asks.close()
                asks = its
                load(asked["imports"])
                asks.send(str(os.getpid()).encode())
            continue
        child = os.fork()
        if not child:
            asks.close()
            return asked, given
        for number in given:
            os.close(number)
        asks.send(str(child).encode())

asked, given = forked_for(asks)
while asked["beside"]:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server:
        its.close()
        own = importlib.import_module("tests.forked")
        own.BESIDE, own.STAGES = (mine, server, frozenset(sys.modules)), stages
        break
    mine.close()
    for number in given:
        os.close(number)
    for handler in [one for one in logging.getLogger().handlers if type(one) is logging.NullHandler]:
        logging.getLogger().removeHandler(handler)  # of `tests/conftest.py`
    asked, given = forked_for(its)  # a server with front ends, say, which has one beside itself
if not asked["beside"]:
    leave_stages()
if asked["session"]:
    os.setsid()
# What is passed on beside the three streams gets its own number in the end: first it goes out of the way of all of them.
apart = [fcntl.fcntl(number, fcntl.F_DUPFD, 512) for number in given[3:]]
for number in given[3:]:
    os.close(number)
for number, name in enumerate(("stdin", "stdout", "stderr")):
    os.dup2(given[number], number)
    os.close(given[number])
    own, at_once = getattr(sys, name), name == "stderr" or os.isatty(number)
    binary = open(number, "wb" if number else "rb", 0 if number and own.write_through else -1, closefd=False)
    stream = io.TextIOWrapper(
        binary, own.encoding, own.errors, line_buffering=at_once and not own.write_through, write_through=own.write_through
    )
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)
for number, wanted in zip(apart, asked["handles"], strict=True):
    os.dup2(number, wanted)
    os.close(number)
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else usual)
set_here = {name: value for name, value in os.environ.items() if name in ("LC_CTYPE", "TF_CPP_MIN_LOG_LEVEL")}
os.environ.clear()
os.environ.update(set_here | asked["environment"])
os.chdir(asked["folder"])
sys.path[:0] = [path for path in asked["environment"].get("PYTHONPATH", "").split(os.pathsep) if path]

def run_quickly(run, *arguments, **options):
    # Everything but the end of the interpreter, which destroys all objects that were loaded, one by one.
    try:
        run(*arguments, **options)
        code = 0
    except SystemExit as end:
        if not (end.code is None or isinstance(end.code, int)):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)

def run_whole(run, *arguments, **options):
    run(*arguments, **options)

how = run_quickly if asked["quick"] else run_whole
first, *rest = asked["command"]
sys.argv = [first, *rest[1:]] if first in ("-c", "-m") else [first, *rest]
sys.path.insert(0, asked["folder"] if first in ("-c", "-m") else os.path.dirname(os.path.abspath(first)))
if first == "-c":
    how(exec, compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
elif first == "-m":
    how(runpy.run_module, rest[0], run_name="__main__", alter_sys=True)
else:
    how(runpy.run_path, first, run_name="__main__")
"""


BESIDE: tuple[socket.socket, int, frozenset[str]] | None = None
"""Socket, number and modules of a process that was forked beside this one: a worker of pytest has one (`tests/preloaded.py`)."""

_LARGE = frozenset({"tensorflow", "torch"})
"""What is not to be there where it is not asked for."""

STAGES: dict[frozenset[str], socket.socket] = {}
"""Sockets of processes with a part of its imports, by these: workers of pytest share them, and have each of them fork a server."""


@functools.cache
def _server(imports: tuple[str, ...]) -> tuple[socket.socket, int]:
    """The socket and the number of the process that is forked. It ends with this one."""
    if BESIDE and BESIDE[2].issuperset(imports) and (imports == COMPILER or _LARGE & BESIDE[2] <= {*imports}):
        return _beside(*BESIDE[:2])
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if begun := [names for names in STAGES if names.issubset(imports)]:
        most = max(begun, key=len)
        with its:
            socket.send_fds(STAGES[most], [json.dumps({"imports": imports}).encode()], [its.fileno()])
        atexit.register(mine.close)
        return mine, _answer(mine)
    with its:
        quiet = (
            {"TF_CPP_MIN_LOG_LEVEL": "2"} if {"tensorflow", "tests.preloaded"} & {*imports} else {}
        )  # as msplit sets it
        path = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )  # where there is no environment of its own
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(its.fileno()), *imports],
            pass_fds=(its.fileno(),),
            cwd=ROOT,
            env={**quiet, **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # no threads of libraries
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # TensorFlow has much to say
        )
    atexit.register(process.wait)
    atexit.register(mine.close)
    return mine, process.pid


@functools.cache
def _beside(mine: socket.socket, pid: int) -> tuple[socket.socket, int]:
    atexit.register(os.waitpid, pid, 0)
    atexit.register(mine.close)
    return mine, pid


_ONE = threading.Lock()
"""Held from a question to its answer."""


def _answer(server: socket.socket) -> int:
    said = server.recv(64)
    assert said, "the process that is forked has ended"
    return int(said)


class Popen(subprocess.Popen[Any]):
    """A forked process, to be used as `subprocess.Popen`; of its options those that tests need.

    Args:
        server: Imports of the process that is forked.
        beside: Another one is forked for what the new process has to fork itself.
        quick: Its interpreter is not taken down at its end: half a second, where TensorFlow is loaded.
    """

    def __init__(
        self,
        command: list[str],
        *,
        server: tuple[str, ...] = COMMANDS,
        beside: bool = False,
        quick: bool = False,
        **options: Any,
    ) -> None:
        self._server, _ = _server(server)
        self._how = {"beside": beside, "quick": quick}
        super().__init__(command, **options)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *rest: Any
    ) -> None:  # type: ignore[override]
        assert args[0] == sys.executable
        pipes = rest[3:9]  # of standard input, output and errors: to read from and to write to
        ends = [own if end == -1 else end for own, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        asked = {
            "command": [os.fspath(argument) for argument in args[1 + (args[1] == "-P") :]],
            "environment": dict(os.environ if env is None else env),
            **self._how,
            "handles": list(pass_fds),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": rest[14],  # start_new_session
            "ignored": [
                int(number)
                for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
                if signal.getsignal(number) == signal.SIG_IGN
            ],
        }
        with _ONE:
            socket.send_fds(self._server, [json.dumps(asked).encode()], [*ends, *pass_fds])
            self.pid = _answer(self._server)
        self._child_created = True
        self._over = os.pidfd_open(self.pid)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As `os.waitpid`: the process is a child of the one that was forked."""
        if not select.select([self._over], [], [], 0 if flags & os.WNOHANG else None)[0]:
            return 0, 0
        os.close(self._over)
        with _ONE:
            self._server.send(json.dumps({"ended": self.pid}).encode())
            return self.pid, _answer(self._server)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._child_created:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


class Own(Popen):
    """A process of `msplit.engines.process`. It ends with the one that is told to it: here, that which is forked."""

    def __init__(self, command: list[str], *, server: tuple[str, ...] = TENSORFLOW, **options: Any) -> None:
        _, parent = _server(server)
        super().__init__([*command[:-1], str(parent)], server=server, quick=True, **options)


OWN = SimpleNamespace(Popen=Own, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""To be put in the place of `subprocess` in `msplit.engines.process`."""


@contextlib.contextmanager
def instead(server: tuple[str, ...]) -> Iterator[None]:
    """Has `msplit.engines.process.Process` fork its processes, from one with these imports."""
    own = SimpleNamespace(**{**vars(OWN), "Popen": functools.partial(Own, server=server)})
    with mock.patch("msplit.engines.process.subprocess", own):
        yield


def always(enter: Callable[..., contextlib.AbstractContextManager[object]], *arguments: Any) -> Any:
    """A fixture of all tests of a module, which run inside of `instead`, say."""
    import pytest  # which processes that are forked do without

    @pytest.fixture(scope="module", autouse=True)
    def entered() -> Iterator[None]:
        with enter(*arguments):
            yield

    return entered


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """Has modules of StableHLO be parsed by forked processes."""
    own = SimpleNamespace(
        run=functools.partial(run, server=PARSER, quick=True), TimeoutExpired=subprocess.TimeoutExpired
    )
    with mock.patch("msplit.formats.stablehlo.subprocess", own):
        yield


def run(
    command: list[str],
    *,
    input: bytes | str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """A forked process to its end, as `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
