"""Compilers for kernels of our own, where there are some, and the folder in which compiled kernels are kept between runs.

Inductor and Triton name what they keep by its content (code, shapes, device, their own version), so a folder shared by all models and
all versions can not give a wrong kernel. What they find there they run: a folder that others may write to is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msplit.formats.files import writers

ASSEMBLER = "TRITON_PTXAS_PATH"
"""Environment variable: where Triton's assembler is. PyTorch's compiler sets it."""

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_OF_PYTORCH = "torchinductor_"
"""Start of the name of PyTorch's own folder, in the system's folder for temporary files."""


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


def triton_version() -> str:
    """Version of the Triton that compiles here; empty where none does."""
    return importlib.metadata.version("triton") if can_compile() else ""


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
        chosen = _chosen()
        found = {_INDUCTOR: chosen} if chosen is not None else {"XDG_CACHE_HOME": _default()}
        found[_TRITON] = _of_triton()
    return found


def _of_triton() -> Path:
    """Folder in which Triton keeps the kernels that are msplit's own."""
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
    """Folder in which compiled kernels will be kept, and true if that can be written to. Nothing is made, nothing is written.

    None where there is no such place, not even a home.
    """
    try:
        chosen = _chosen() or _default()
        there = next(path for path in (chosen, *chosen.absolute().parents) if path.exists())
        return chosen, there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):
        return None, False


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "msplit" / "kernels"


def _chosen() -> Path | None:
    """The folder that the user has chosen for Inductor; None where PyTorch has set the variable, to its default, when it was loaded."""
    path = Path(os.environ.get(_INDUCTOR) or _OF_PYTORCH)
    return None if path.name.startswith(_OF_PYTORCH) else path


def keeps() -> bool:
    """True if what is compiled inside of `kept` is there afterwards."""
    theirs = _chosen()
    return (theirs is not None and not writers(theirs)) or folder() is not None


@functools.cache
def fixed_assembler() -> str | None:
    """Lets Triton ask for the version of its assembler now, and gives the path of it, None where it is Triton's own.

    Triton asks once per process, and names by the answer what it keeps on the disk. PyTorch's compiler gives it another assembler before it
    compiles, but not before it loads: where the question comes between, as it does in some processes and in others not, each kind would
    not find what the other has kept (PyTorch 2.11, Triton 3.6).
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    make_backend(driver.active.get_current_target()).hash()
    return os.environ.get(ASSEMBLER)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Lets Inductor and Triton keep in `folder` what they compile meanwhile; in a folder that is deleted at the end where there is none.

    Where the user has set ``TORCHINDUCTOR_CACHE_DIR``, that is where, unless others may write there.
    """
    guard_triton()
    theirs = _chosen()
    if theirs is not None and not writers(theirs):
        yield
        return
    before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    chosen = folder() if theirs is None else None
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
