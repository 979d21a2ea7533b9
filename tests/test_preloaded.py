"""Workers begin with what they test loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

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


def test_asserts_are_rewritten_beside_the_first_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """As pytest itself rewrites them; once."""
    paths, ends = [tmp_path / f"test_{name}.py" for name in "abc"], []
    for path in paths:
        path.write_text("def test_one():\n    assert not 1\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(os, "fork", lambda: 0)
    monkeypatch.setattr(os, "_exit", ends.append)
    preloaded._rewrite_beside(paths, pytestconfig)
    assert ends == [0]
    for path in paths:
        code = rewrite._read_pyc(path, tmp_path / "__pycache__" / f"{path.stem}{rewrite.PYC_TAIL}")
        assert code == rewrite._rewrite_test(path, pytestconfig)[1]
    assert preloaded._rewrite_beside(paths, pytestconfig) is None
    assert ends == [0]


@pytest.mark.parametrize(
    "text", ["def test_one(:", "import no_such_module", "import pytest\npytest.skip('why', allow_module_level=True)"]
)
def test_what_can_not_be_imported_is_left_to_the_workers(tmp_path: Path, text: str) -> None:
    """They would find an empty module otherwise, and nobody would miss its tests."""
    path = tmp_path / "test_that_can_not_be_imported.py"
    path.write_text(text)
    preloaded._import(path, tmp_path)
    assert not [name for name in sys.modules if path.stem in name]
    path.write_text("def test_one(): pass")
    preloaded._import(path, tmp_path)
    (name,) = [name for name in sys.modules if path.stem in name]
    assert sys.modules.pop(name).test_one
