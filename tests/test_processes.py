"""Tests in several processes: all are run once, what they report arrives, and a process that dies fails its test alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import forked

CONFTEST = """
import pytest
from tests import processes
from tests.processes import pytest_addoption

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    processes.run(session, session.config.getoption("processes"), ["test_b.py"])
    return True
"""

FILES = {
    "test_a.py": """
import os, warnings, pytest

@pytest.fixture(scope="module")
def made():
    print("made in", os.getpid())
    yield os.getpid()
    assert False, "module torn down"

def test_passes(made, tmp_path):
    assert tmp_path.parent.name.startswith("process-") and made == os.getpid() != os.getppid()

def test_warns(made):
    warnings.warn("something is odd")

def test_fails(made):
    print("said before")
    assert made == 1
""",
    "test_b.py": """
import os, pytest

def test_skipped():
    pytest.skip("no reason")

def test_dies():
    os._exit(3)

@pytest.mark.parametrize("number", range(20))
def test_goes_on(number):
    pass
""",
}


def _pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-p", "no:cacheprovider", "-rA", *arguments]
    done = forked.run(command, capture_output=True, text=True, cwd=folder, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_each_test_is_run_and_told_once(tmp_path: Path) -> None:
    code, said = _pytest(tmp_path, "--processes", "2")
    assert code == 1
    summary = said.rpartition("short test summary info")[2]
    assert re.search(r"2 failed, 22 passed, 1 skipped, 1 warning, 1 error in", summary), said
    assert len(re.findall(r"PASSED test_b.py::test_goes_on", summary)) == 20
    assert "a process of tests ended with 3 while it ran test_b.py::test_dies" in said
    assert "something is odd" in said
    assert "said before" in said
    assert "module torn down" in summary


def test_the_first_failure_can_end_it(tmp_path: Path) -> None:
    code, said = _pytest(tmp_path, "--processes", "1", "-x")
    assert code == 1
    assert re.search(r"1 failed, 1 skipped in", said), said
