"""Triton's kernels on the CPU, in its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.forked import ROOT


def patch_once() -> None:
    """Has the interpreter put its own functions in the place of Triton's once for each launch. It does so at each call of a function by
    a kernel, too, which finds nothing left to do and takes a fifth of all time."""
    from triton import language
    from triton.runtime import interpreter

    def patch(fn: Any) -> Any:
        modules = {
            id(one) for one in (language, language.core) if any(one is value for value in fn.__globals__.values())
        }
        if modules <= patched:
            return None
        scope = usual(fn)
        restore = scope.restore
        scope.restore = lambda: (patched.clear(), restore())
        patched.update(modules)
        return scope

    usual, patched = interpreter._patch_lang, set[int]()
    interpreter._patch_lang = patch


def pytest_configure() -> None:
    """Makes this module a plugin of pytest, for tests that run in the interpreter themselves: `.ci/kernels` names it."""
    patch_once()


def run_interpreted(script: str) -> None:
    """Runs a script in a process of its own: Triton decides at import whether it interprets its kernels or compiles them."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.engines.cuda import interpreted\ninterpreted.patch_once()\n{script}"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
