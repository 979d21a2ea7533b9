"""The command line in this process, as a pipe of a given width sees it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from msplit.cli import main
from tests import forked

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_graphs"
ALL = sorted(path.name for path in SAMPLES.iterdir() if path.name != "README.md")
SEVERAL_TAGS = ("two_tags",)
_LARGE = 64 << 20


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as JSON, which knows no NaN and no Infinity."""
        return json.loads(self.out, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def msplit(*arguments: object, columns: int = 80, **environment: str) -> Done:
    """Runs a command."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": str(columns), **environment}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main.run([str(argument) for argument in arguments])
    return Done(code, out.getvalue(), err.getvalue())


def fine(*arguments: object, **options: Any) -> Done:
    """Runs a command that must succeed and has nothing to say on standard error."""
    done = msplit(*arguments, **options)
    assert done.code == 0, done.err
    assert done.err == ""
    return done


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder with a digest of what is there (the size of very large files)."""
    return {str(path.relative_to(folder)): _digest(path) for path in sorted(folder.rglob("*"))}


def _digest(path: Path) -> str:
    if path.is_dir():
        return "folder"
    if path.stat().st_size > _LARGE:
        return f"{path.stat().st_size} bytes"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Asserts that nothing below the folders is written, replaced or removed."""
    before = [contents(folder) for folder in folders]
    yield
    assert [contents(folder) for folder in folders] == before


def options_of(model: str) -> tuple[str, ...]:
    """What a command needs to open a sample."""
    return ("--part", "tag=serve") if model in SEVERAL_TAGS else ()


def process(*arguments: object, seconds: float = 120, **environment: str) -> Done:
    """A command in a process of its own, which has so many seconds."""
    done = forked.run(
        [sys.executable, "-m", "msplit", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=seconds,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """What is started within hears Ctrl-C and hanging up, to which processes of pytest-xdist are deaf, as is what a script runs in its
    background: what is handled here has its default there.

    `preexec_fn` would do it in the child, and so fork in place of vfork: where gRPC is in use, it ends such a child now and then (SIGABRT).
    """
    before = {one: signal.signal(one, signal.default_int_handler) for one in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def on_terminal(command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None) -> tuple[str, bytes]:
    """What a command that succeeds writes to a terminal, which its standard error is and, unless told, its output; and its other output."""
    leader, follower = os.openpty()
    with forked.Popen(
        list(command), stdout=stdout or follower, stderr=follower, cwd=ROOT, env={**environment, "TERM": "xterm"}
    ) as running:
        os.close(follower)
        text = b""
        try:
            while part := os.read(leader, 65536):
                text += part
        except OSError:  # the other end is closed
            pass
        output = b"" if running.stdout is None else running.stdout.read()
        assert running.wait() == 0
    os.close(leader)
    return text.decode(), output


def only_contents(path: Path) -> object:
    """A file, or what is in a folder, to be compared."""
    return contents(path) if path.is_dir() else path.read_bytes()
