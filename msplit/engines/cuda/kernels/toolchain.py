"""Whether kernels of our own can be compiled here, and where compiled kernels are kept between runs.

Inductor and Triton name what they keep by its content (code, shapes, device, their own version), so a folder shared by all models and
all versions can not give a wrong kernel. What they find there they run: a folder that others may write to is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

MOST_WORKERS = 16
"""Threads that compile at once."""

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_OF_PYTORCH = "torchinductor_"
"""What the name of PyTorch's own folder starts with, in the system's folder for temporary files."""


def c_compiler() -> str | None:
    """The C compiler that Triton builds its launchers with: the variable ``CC``, else the first that is there."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def can_compile() -> bool:
    """Whether Triton is installed, and the C compiler too. Triton then gets a folder that only this user writes to."""
    if importlib.util.find_spec("triton") is None or not c_compiler():
        return False
    guard_triton()
    return True


_AHEAD: ContextVar[bool] = ContextVar("compiling_ahead", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What starts a kernel of Triton's on a grid of programs; in `compiling_ahead` it is compiled only."""
    return functools.partial(kernel.warmup, grid=grid) if _AHEAD.get() else kernel[grid]


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Of kernels that are to be timed, all are compiled at once, on as many cores as there are: inside, `launch` starts none.

    Most of a compilation is done without Python's lock, and one after the other, 0.3 s each, they make a model's first start take half a
    minute. What can not be compiled is told when it is launched. See `can_compile_ahead`.
    """
    from concurrent.futures import ThreadPoolExecutor

    from triton.runtime import _async_compile  # private, and the only way

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    token = _AHEAD.set(True)
    try:
        with (
            ThreadPoolExecutor(min(workers, MOST_WORKERS)) as pool,
            _async_compile.AsyncCompileMode(pool, ignore_errors=True),
        ):
            yield
    finally:
        _AHEAD.reset(token)


@functools.cache
def can_compile_ahead() -> bool:
    """Whether Triton knows how to, as it does from version 3.5 on."""
    return can_compile() and importlib.util.find_spec("triton.runtime._async_compile") is not None


def folder() -> Path | None:
    """``$XDG_CACHE_HOME/msplit/kernels`` (by default below ``~/.cache``), made if need be.

    None where nothing can be written there, or where others can.
    """
    try:
        chosen = _default()
        chosen.parent.mkdir(parents=True, exist_ok=True)
        chosen.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            return None if writers(chosen) else chosen
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def writers(path: Path) -> str | None:
    """Who but this user and root could put a file into a folder, or another folder in its place, in words; None where nobody could.

    What is not there yet will be made by this user. A folder in which nobody may remove what is another's (``/tmp``) is no danger to what
    is inside of it.
    """
    if os.name != "posix":
        return None
    place = path.absolute()
    held = place.resolve()
    for one in dict.fromkeys((held, *held.parents, place, *place.parents)):
        try:
            found = one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if found.st_uid not in (0, os.getuid()):
            return f"{one} belongs to another user"
        if stat.S_ISLNK(found.st_mode) or (found.st_mode & stat.S_ISVTX and one not in (held, place)):
            continue
        if found.st_mode & stat.S_IWOTH:
            return f"anybody may write to {one}"
        if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
            return f"a group may write to {one}"
    return None


def _is_own_group(group: int) -> bool:
    """Whether it has no member but this user, as some systems give one to everybody, or is root's."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == 0 or (
        group == user.pw_gid and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
    )


def refused_folders() -> list[str]:
    """Folders of compiled kernels that are not used because others may write there, one sentence each."""
    found = []
    for name, path in _places().items():
        try:
            why = writers(path)
        except (OSError, RuntimeError) as problem:
            why = str(problem)
        if why:
            found.append(
                f"compiled kernels in {path} are not used, and none are kept there, for they are code and {why}: "
                f"name a folder of your own in {name}"
            )
    return found


def _places() -> dict[str, Path]:
    """By the variable that chooses it, each folder that Inductor and Triton would use."""
    found = {}
    with contextlib.suppress(RuntimeError):  # there is no home
        if _is_pytorchs(os.environ.get(_INDUCTOR)):
            found["XDG_CACHE_HOME"] = _default()
        else:
            found[_INDUCTOR] = Path(os.environ[_INDUCTOR])
        found[_TRITON] = _of_triton()
    return found


def _of_triton() -> Path:
    """Where Triton keeps the kernels that are msplit's own."""
    return Path(os.environ.get(_TRITON) or Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache")


def guard_triton() -> None:
    """Gives Triton a folder that ends with this process, where others may write to its own."""
    try:
        safe = writers(_of_triton()) is None
    except (OSError, RuntimeError):
        safe = False
    if not safe:
        made = tempfile.mkdtemp(prefix="msplit-kernels-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        os.environ[_TRITON] = made


def kernel_folder() -> tuple[Path | None, bool]:
    """Where compiled kernels will be kept, and whether that can be written to. Nothing is made, nothing is written.

    None where there is no such place, not even a home.
    """
    try:
        chosen = _default() if _is_pytorchs(os.environ.get(_INDUCTOR)) else Path(os.environ[_INDUCTOR])
        there = next(path for path in (chosen, *chosen.absolute().parents) if path.exists())
        return chosen, there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        return None, False


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "msplit" / "kernels"


def _is_pytorchs(path: str | None) -> bool:
    """Whether the user has not chosen it: PyTorch sets the variable itself, to its default, when it is loaded."""
    return Path(path or _OF_PYTORCH).name.startswith(_OF_PYTORCH)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Lets Inductor and Triton keep in `folder` what they compile meanwhile; in a folder that is deleted at the end where there is none.

    Where the user has set ``TORCHINDUCTOR_CACHE_DIR``, that is where, unless others may write there.
    """
    guard_triton()
    theirs = not _is_pytorchs(os.environ.get(_INDUCTOR))
    if theirs and not writers(Path(os.environ[_INDUCTOR])):
        yield
        return
    before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    chosen = None if theirs else folder()
    with contextlib.nullcontext(chosen) if chosen else tempfile.TemporaryDirectory() as path:
        os.environ[_INDUCTOR] = str(path)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
