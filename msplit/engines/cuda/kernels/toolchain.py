"""Whether kernels of our own can be compiled here."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil


def c_compiler() -> str | None:
    """The C compiler that Triton builds its launchers with: the variable ``CC``, else the first that is there."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def can_compile() -> bool:
    """Triton is installed, and so is the C compiler that it builds its launchers with. It gets a folder that only this user writes to."""
    from msplit.engines.cuda.kernels import cache

    if importlib.util.find_spec("triton") is None or not c_compiler():
        return False
    cache.guard_triton()
    return True
