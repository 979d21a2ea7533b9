"""Workers begin with what they test loaded."""

from __future__ import annotations

import os
from pathlib import Path

from tests import preloaded
from tests.forked import ROOT


def test_workers_are_forked() -> None:
    """`python -m tests.preloaded tests` says which test module starts a thread, behind which no process is forked."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    asked = os.environ.get("MSPLIT_FORK_WORKERS") != "0" and not any(Path("/dev").glob("nvidia*"))
    assert (is_worker and asked) == preloaded.LOADED


def test_files_of_tests_are_those_that_arguments_name() -> None:
    folder = ROOT / "tests" / "rules"
    assert list(preloaded.modules([f"{folder / 'test_regex.py'}::test_a[b]"])) == [folder / "test_regex.py"]
    found = list(preloaded.modules([str(folder)]))
    assert folder / "test_branch.py" in found
    assert all(path.name.startswith("test_") for path in found)
