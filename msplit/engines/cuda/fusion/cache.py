"""Where compiled kernels are kept between runs.

Inductor and Triton name what they keep by its content (code, shapes, device, their own version), so a folder shared by all models and
all versions can not give a wrong kernel.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_OF_PYTORCH = "torchinductor_"
"""What the name of PyTorch's own folder starts with, in the system's folder for temporary files."""


def folder() -> Path | None:
    """``$XDG_CACHE_HOME/msplit/kernels`` (by default below ``~/.cache``), made if need be; None where nothing can be written there."""
    try:
        chosen = _default()
        chosen.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=chosen):
            return chosen
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None


def place() -> tuple[Path | None, bool]:
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

    Where the user has set ``TORCHINDUCTOR_CACHE_DIR``, that is where.
    """
    if not _is_pytorchs(os.environ.get(_INDUCTOR)):
        yield
        return
    before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    chosen = folder()
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
