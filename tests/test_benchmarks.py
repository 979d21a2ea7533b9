"""Every script under `benchmarks/` starts: on the CPU, with what it imports at its head."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py"))
NEEDS = {"memory_needed.py": "scipy", "serving.py": "uvicorn", "two_towers.py": "uvicorn"}
"""What a script needs that the tests' environment may lack."""

_START = """
import contextlib, io, json, runpy, sys
sys.path[0] = sys.argv[1]  # as Python has it for a script
began = {}
for name in sys.argv[2:]:
    path = f"{sys.path[0]}/{name}"
    with open(path) as file:
        takes_options = "ArgumentParser(" in file.read()
    sys.argv, before = [path, "--help"], list(sys.path)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__" if takes_options else "imported")
        began[name] = "" if not takes_options else "it has options and ran on after --help"
    except SystemExit as end:
        began[name] = "" if end.code in (0, None) else f"it ended with {end.code}"
    except BaseException as problem:
        began[name] = f"{type(problem).__name__}: {problem}"
    sys.path[:] = before
print(json.dumps(began))
"""


@functools.cache
def _started() -> dict[str, str]:
    """What went wrong with each script, "" where nothing did. All in one process: most of the time is that of imports."""
    command = [sys.executable, "-c", _START, BENCHMARKS, *SCRIPTS]
    run = functools.partial(forked.run, server=forked.TENSORFLOW) if forked.BESIDE else subprocess.run
    done = run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_starts(script: str) -> None:
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    told = _started()[script]
    if "'torch'" in told:
        pytest.importorskip("torch")
    assert told == ""
