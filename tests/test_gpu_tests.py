"""Tests that need a GPU run seldom: that what they put in the place of something is still called so is seen without one."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from msplit.run.request import BenchOptions, RunOptions

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))


def names_of(tree: ast.Module) -> dict[str, object]:
    """The modules, classes and functions of ours that a test imports at its head, by the names that it gives them."""
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("msplit"):
            for one in node.names:
                try:
                    found[one.asname or one.name] = importlib.import_module(f"{node.module}.{one.name}")
                except ModuleNotFoundError:
                    found[one.asname or one.name] = getattr(importlib.import_module(node.module or ""), one.name)
    return found


def replaced(tree: ast.Module) -> list[tuple[str, str]]:
    """What a test replaces: module and name of each ``monkeypatch.setattr(module, "NAME", …)``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        (call.args[0].id, call.args[1].value)
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr" and len(call.args) == 3
        if isinstance(call.args[0], ast.Name) and isinstance(call.args[1], ast.Constant)
        if not any(keyword.arg == "raising" for keyword in call.keywords)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_test_replaces_is_there(file: Path) -> None:
    pytest.importorskip("torch")
    tree = ast.parse(file.read_text("utf-8"))
    names = names_of(tree)
    for module, name in replaced(tree):
        assert module not in names or hasattr(names[module], name), f"{module}.{name}"


def test_what_is_replaced_is_found() -> None:
    calls = (
        'monkeypatch.setattr(module, "NAME", 1); patch.setattr(other, "_name", f, raising=False); setattr(a, "b", 2)'
    )
    assert replaced(ast.parse(calls)) == [("module", "NAME")]
    assert any(replaced(ast.parse(file.read_text("utf-8"))) for file in FILES)


def requests(tree: ast.Module) -> list[set[str]]:
    """The keywords of each request that a test writes down as a dict with an engine."""
    written = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [{key.value for key in one.keys if isinstance(key, ast.Constant)} for one in written]
    return [one for one in keys if "engine" in one]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_test_asks_for_has_a_keyword(file: Path) -> None:
    text = file.read_text("utf-8")
    compares = any(call in text for call in ("bench(", "BenchRequest", "bisect(", "tune("))
    known = {*(BenchOptions if compares else RunOptions).__annotations__, *RunOptions.__annotations__}
    for keys in requests(ast.parse(text)):
        assert keys <= known, f"{sorted(keys - known)} of {sorted(keys)}"


def test_requests_are_found() -> None:
    assert requests(ast.parse('f(**{"engine": "cuda", "batch": 4}, **{"other": 1})')) == [{"engine", "batch"}]
    assert sum(len(requests(ast.parse(file.read_text("utf-8")))) for file in FILES) > 10
