"""Workers of pytest-xdist begin with the test modules loaded: they are forked from one process that has imported what they collect.

Each would import it for itself otherwise, and rewrite all asserts where no earlier run has: 13 seconds of a processor in each, or 33.
`tests/conftest.py` has xdist start its workers so, and `tests/forked.py` forks. Where there is a GPU they are new processes, since CUDA
does not outlive a fork; so they are where `MSPLIT_FORK_WORKERS=0` says it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked

_VARIABLE = "MSPLIT_PRELOADED"


def modules(arguments: Iterable[str]) -> Iterator[Path]:
    """Files of tests that pytest's arguments name."""
    for argument in arguments:
        path = Path(argument.partition("::")[0]).absolute()
        yield from sorted(path.rglob("test_*.py")) if path.is_dir() else [path]


def fork_workers(config: pytest.Config) -> None:
    """Has execnet fork its processes, from one that is started with the first of them."""
    if os.environ.get("MSPLIT_FORK_WORKERS") == "0" or any(Path("/dev").glob("nvidia*")):
        return
    from execnet import gateway_base, gateway_io

    given = json.dumps(config.args)
    asks = any(path.is_file() and b"torch" in path.read_bytes() for path in modules(config.args))
    engine = (*forked.ENGINE, forked.STAGE) if asks and importlib.util.find_spec("torch") else ()
    began = gateway_io.Popen2IOMaster.__init__

    def begin(io: Any, arguments: list[str], execmodel: Any) -> None:
        os.environ[_VARIABLE] = given
        try:
            command = [one for one in arguments if one not in ("-u", "-B")]
            io.popen = forked.Popen(
                command,
                server=(*forked.COMMANDS, forked.STAGE, *engine, __name__),
                beside=True,
                quick=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_without(_VARIABLE),
            )
        except (OSError, AssertionError) as error:
            sys.stderr.write(f"workers begin anew, since there is no process to be forked: {error}\n")
            began(io, arguments, execmodel)
        else:
            gateway_base.Popen2IO.__init__(io, io.popen.stdin, io.popen.stdout, execmodel)
        finally:
            del os.environ[_VARIABLE]

    gateway_io.Popen2IOMaster.__init__ = begin  # type: ignore[method-assign]


def _without(name: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != name}


def _rewrite_beside(paths: Sequence[Path], config: pytest.Config) -> int | None:
    """Starts a process that rewrites asserts from the last module on while this one imports the first, and libraries with them. There is
    none where an earlier run has rewritten all, and where Python keeps nothing. The number of the process."""
    from _pytest.assertion import rewrite

    kept = [rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}" for path in paths]
    if sys.dont_write_bytecode or all(map(Path.exists, kept)):
        return None
    if child := os.fork():
        return child
    try:
        for path, made in zip(reversed(paths), reversed(kept), strict=True):
            if not made.exists() and rewrite.try_makedirs(made.parent):
                digest, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, made)
    finally:
        os._exit(0)  # whatever is left, or can not be done here, the other process does


def _import(path: Path, root: Path) -> None:
    """Imports a module of tests as pytest does. Of one that can not be imported nothing stays: a worker that found it among the modules
    that are loaded would take it for one without tests, and not say why."""
    from _pytest import pathlib

    before = set(sys.modules)
    with contextlib.suppress(Exception, pytest.skip.Exception):
        pathlib.import_path(path, mode="importlib", root=root, consider_namespace_packages=False)
        return
    for name in sys.modules.keys() - before:
        if name.rpartition(".")[2] == path.stem:
            del sys.modules[name]


class _Loading:
    """A plugin that imports test modules as pytest does, and collects nothing."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """Imports all. A module that can not be imported is left to the workers, which say so."""
        from _pytest import assertion

        assertion.pytest_collection(session)
        paths = list(modules(self.arguments))
        beside = _rewrite_beside(paths, session.config)
        for path in paths:
            _import(path, session.config.rootpath)
            assert len(os.listdir("/proc/self/task")) == 1, f"{path} starts a thread when it is imported"
        if beside is not None:
            os.waitpid(beside, 0)
        return True


def _load(arguments: list[str]) -> None:
    pytest.main(["-p", "no:cacheprovider", "-p", "no:unraisableexception", *arguments], plugins=[_Loading(arguments)])
    for name in [name for name in sys.modules if name.startswith("tests.") and name.endswith("conftest")]:
        del sys.modules[name]  # settings of a process
    if "tensorflow" in sys.modules:
        for name in forked.TENSORFLOW:
            importlib.import_module(name)
    if "msplit.engines.cuda.passes.pointwise_fusion.fuse" in sys.modules:
        for name in forked.COMPILER:
            importlib.import_module(name)
    if "hypothesis" in sys.modules:
        # Each worker would look for numbers and words in all modules of ours otherwise: a second.
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants()


LOADED = _VARIABLE in os.environ
"""Whether this process was forked from one that has loaded test modules."""

if LOADED:
    _load(json.loads(os.environ.pop(_VARIABLE)))
if __name__ == "__main__":  # python -m tests.preloaded tests/rules: says which module starts a thread
    _load(sys.argv[1:])
