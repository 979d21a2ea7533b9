"""One input of the tool, and what running the tool on it must look like."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

from msplit.cli import main
from tests.fuzz.limits import TooSlow, limited

SAMPLE = Path(__file__).parents[2] / "sample_graphs" / "cond_v1.pb"

SECONDS = 1.0
"""Processor time that all commands on a case may take together, for a case of up to `BYTES`."""

MEGABYTES = 500.0
"""Peak resident memory that they may take beyond what the imported program holds, likewise."""

BYTES = 256 << 10
"""A larger case may take as many times more as it is larger."""

LONGEST_MESSAGE = 30_000
"""Characters of standard error: an error is one that can be read."""


@dataclass(frozen=True)
class Case:
    """What a user hands to the tool.

    Attributes:
        name: Says how to make it again.
        model: Content of the model's file.
        saved: Whether that is the main file of a SavedModel's folder.
        files: Further files, by name: rules, settings, plans.
        assign: Options of `msplit assign`; a name of `files` stands for its path.
        check: Options of `msplit check`, likewise.
        special: Further places, by name, and what is there: ``pipe``, ``socket``, ``null`` or ``zero`` (devices of its own), or ``link:``
            and where it leads, ``link:pipe`` to a pipe of its own. The tool must leave each what it is.
        size: Bytes that the limits go by, where they are not those of the files.
    """

    name: str
    model: bytes
    saved: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    assign: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    special: dict[str, str] = field(default_factory=dict)
    size: int = 0

    @property
    def scale(self) -> float:
        """How many times the limits it may take."""
        size = self.size or len(self.model) + sum(map(len, self.files.values()))
        return max(1.0, size / BYTES)


@dataclass
class Result:
    """What the tool did.

    Attributes:
        problem: What is wrong with that, "" if nothing is.
        codes: Exit codes of the commands.
        seconds: Processor time of all of them.
        megabytes: Peak memory.
        over: Whether it took longer than it may.
    """

    problem: str = ""
    codes: tuple[int, ...] = ()
    seconds: float = 0.0
    megabytes: float = 0.0
    over: bool = False


def run(case: Case, folder: Path) -> Result:
    """Runs analyze, assign, check of what was written, and analyze of it again, as a user would.

    A case that takes too long is run twice more, and the quickest counts: what others do on the machine slows this down, too.
    """
    import_all()
    result = _run(case, folder)
    for _ in range(2):
        if result.over:
            again = _run(case, folder)
            result = again if again.seconds < result.seconds else result
    return result


@cache
def import_all() -> None:
    """Imports once what the commands import when they need it: the limits are for what they do."""
    with tempfile.TemporaryDirectory(prefix="msplit-fuzz-") as folder:
        for rules in ("auto", "default"):
            out = str(Path(folder) / rules)
            emits = ["--emit", "plan", f"{out}.plan", "--emit", "stream-file", f"{out}.streams"]
            for arguments in (
                ["analyze", str(SAMPLE), "--format", "json"],
                ["assign", str(SAMPLE), "--rules", rules, "-o", out, *emits],
                ["check", out, "--plan", f"{out}.plan"],
                ["analyze", out],
            ):
                _command(arguments)


def _run(case: Case, folder: Path) -> Result:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = folder / "model"
    if case.saved:
        model.mkdir()
        (model / "saved_model.pb").write_bytes(case.model)
    else:
        model.write_bytes(case.model)
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for name, kind in case.special.items():
        _make_special(folder / name, kind)
    kept = _specials(folder, case)

    def placed(options: tuple[str, ...]) -> list[str]:
        return [str(folder / option) if option in case.files else option for option in options]

    out = folder / "out"
    emits = ["--emit", "plan", str(folder / "out.plan"), "--emit", "stream-file", str(folder / "out.streams")]
    result = Result()
    codes: list[int] = []
    before = os.getcwd()
    os.chdir(folder)
    try:
        with (
            mock.patch("msplit.formats.files.PATIENCE", 0.02),
            limited(SECONDS * case.scale, MEGABYTES * case.scale, slack=3.0) as used,
        ):
            for arguments in (
                ["analyze", str(model), "--format", "json"],
                ["assign", str(model), "-o", str(out), *emits, *placed(case.assign)],
                ["check", str(out if _written(out) else model), *placed(case.check)],
                ["analyze", str(out)],
            ):
                if arguments[-1] == str(out) and not _written(out):
                    continue
                if arguments[0] == "check" and str(out) in arguments:
                    arguments += ["--plan", str(folder / "out.plan")] if "--plan" not in arguments else []
                code, told = _command(arguments)
                codes.append(code)
                result.problem = result.problem or _judged(arguments[0], code, told, codes, out)
    except TooSlow as stopped:
        result.problem, result.over = str(stopped), True
    except MemoryError:
        result.problem = f"asked for more than {3 * MEGABYTES * case.scale:g} MB"
    except BaseException as escaped:
        result.problem = f"{type(escaped).__name__} escaped: {escaped}"
    finally:
        os.chdir(before)
    result.codes = tuple(codes)
    if not result.problem and _specials(folder, case) != kept:
        result.problem = f"something special was replaced: {case.special}"
    left = [name for name in os.listdir(folder) if name.endswith((".tmp", ".old"))]
    if not result.problem and left:
        result.problem = f"left behind: {left}"
    result.seconds, result.megabytes = used.seconds, used.megabytes
    if not result.problem and used.seconds > SECONDS * case.scale:
        result.over = True
        result.problem = f"took {used.seconds:.2f} s of processor time; {SECONDS * case.scale:.2f} s are the limit"
    if not result.problem and used.megabytes > MEGABYTES * case.scale:
        result.problem = f"took {used.megabytes:.0f} MB; {MEGABYTES * case.scale:.0f} MB are the limit"
    return result


def _written(out: Path) -> bool:
    return out.is_file() or out.is_dir()


def _make_special(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.unlink()
    if kind == "link:pipe":
        os.mkfifo(path.with_name(f"{path.name}.pipe"))
        path.symlink_to(f"{path.name}.pipe")
    elif kind.startswith("link:"):
        path.symlink_to(kind.removeprefix("link:"))
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):  # names of sockets are short
            made.bind(path.name)
    elif kind in ("null", "zero") and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3 if kind == "null" else 5))
    else:
        os.mkfifo(path)


def _specials(folder: Path, case: Case) -> dict[str, tuple[int, int]]:
    """What identifies each special place, and what a link leads to where that is the case's own."""
    found = {}
    for name, kind in case.special.items():
        for path in (folder / name, *([folder / f"{name}.pipe"] if kind == "link:pipe" else ())):
            info = path.lstat() if os.path.lexists(path) else os.stat_result((0,) * 10)
            found[path.name] = (info.st_mode, info.st_ino)
    return found


def _command(arguments: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    return code, err.getvalue()


def _judged(command: str, code: int, told: str, codes: list[int], out: Path) -> str:
    """What is wrong with how a command ended, "" if nothing is."""
    if "internal error" in told or "out of memory" in told or "Traceback" in told:
        return f"{command}: {told.strip()[-2000:]}"
    if code not in ((0, 1, 2) if command == "check" else (0, 2)):
        return f"{command} ended with {code}"
    if (code == 2) != ("error: " in told.lower()):
        return f"{command} ended with {code} and said {told[:2000]!r}"
    if len(told) > LONGEST_MESSAGE:
        return f"{command} said {len(told):,} characters: {told[:200]!r}"
    if command == "assign" and (code == 0) != _written(out):
        return f"assign ended with {code} and {'wrote' if _written(out) else 'did not write'} its output"
    if command == "analyze" and len(codes) > 1 and code != 0:
        return f"what assign wrote can not be read again: {told[:2000]}"
    return ""
