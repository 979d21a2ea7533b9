"""Tests are quick, and one that becomes slow fails."""

from __future__ import annotations

import gc
import importlib.util
import threading
import time
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.forked import ROOT

TESTS = ROOT / "tests"


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    plugins = request.config.pluginmanager.get_plugins()
    return next(one for one in plugins if getattr(one, "__file__", None) == str(TESTS / "conftest.py"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item(name: str, *markers: str) -> Any:
    return SimpleNamespace(path=Path("x/test_a.py"), name=name, get_closest_marker=lambda one: one in markers)


def spent(processor: float, most: float = 100.0) -> Any:
    return SimpleNamespace(most=lambda: most, processor=lambda: processor)


def test_a_test_above_its_limit_fails_where_the_machine_is_idle(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "SLOW", {"longest": 3.0, "tests": {"test_a.py::test_b": 8.0}})
    monkeypatch.setattr(conftest, "CAMPAIGN", False)
    monkeypatch.setattr(conftest, "_busy", lambda: None)
    assert conftest._too_slow(item("test_b"), spent(7.9)) is None
    assert conftest._too_slow(item("test_c"), spent(2.9)) is None
    assert "8.1 s of processor time are more than its limit of 8.0 s" in conftest._too_slow(item("test_b"), spent(8.1))
    assert "more than its limit of 3.0 s" in conftest._too_slow(item("test_c"), spent(3.1))
    assert conftest._too_slow(item("test_c", "gpu"), spent(3.1)) is None
    assert conftest._too_slow(item("test_c"), spent(3.1, most=3.0)) is None, "no processor can have worked so long"
    monkeypatch.setattr(conftest, "_busy", lambda: "the machine is busy")
    assert conftest._too_slow(item("test_c"), spent(3.1)) is None


def test_what_a_file_leaves_is_not_looked_through_in_the_next(conftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the garbage collector has run in it, which it does for many objects and in each bench."""
    monkeypatch.setattr(conftest, "_last", {"file": Path("a"), "collections": conftest._collections()})
    left = [[], []]

    def looked_at() -> bool:
        return any(one is left for one in gc.get_objects())

    conftest._settle(Path("b"))
    assert looked_at(), "few objects may be left"
    gc.collect()
    conftest._settle(Path("b"))
    assert looked_at(), "the file goes on"
    conftest._settle(Path("c"))
    assert not looked_at()


def test_time_is_that_of_processors(conftest: Any) -> None:
    time.sleep(2 * conftest._OLD)  # what was read before is not taken for the present
    began = conftest._Spent()
    time.sleep(0.1)
    assert began.wall() >= 0.1
    waited = began.processor()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert waited < 0.1 < began.processor() + 0.02
    assert began.processor() <= began.most()


def test_the_tests_that_have_a_limit_are_there() -> None:
    table = tomllib.loads((TESTS / "slow.toml").read_text("utf-8"))
    for name in table["tests"]:
        file, _, test = name.partition("::")
        assert any(f"def {test.partition('[')[0]}(" in path.read_text("utf-8") for path in TESTS.rglob(file)), name
    assert len(table["tests"]) == 20
    assert table["longest"] <= min(table["tests"].values())


def test_limits_are_twice_what_the_slowest_took() -> None:
    tool = load(ROOT / "tools" / "durations.py")
    rows = [(f"tests/a/test_{number % 3}.py::test_{number}[x-y]", number / 10, 1.0) for number in range(30)]
    table = tomllib.loads(tool.limits(rows))
    assert table["longest"] == 1.8
    assert list(table["tests"].items())[:2] == [("test_2.py::test_29[x-y]", 5.8), ("test_1.py::test_28[x-y]", 5.6)]
    assert tool.by_file(rows)[0] == (pytest.approx(15.5), 10, "tests/a/test_2.py")


@pytest.mark.parametrize("markers", [(), ("idle",)])
def test_no_test_begins_beside_one_that_wants_an_idle_machine(
    markers: tuple[str, ...], conftest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(conftest, "_HOLD", tmp_path / "hold")
    states = iter(["busy", "busy", None])
    monkeypatch.setattr(conftest, "_busy", lambda: next(states, None))
    began = threading.Event()

    def other() -> None:
        with conftest._in_turn(item("test_b", *markers)):
            began.set()

    with conftest._in_turn(item("test_a", "idle")):
        assert next(states, "waited") == "waited"
        thread = threading.Thread(target=other)
        thread.start()
        assert not began.wait(0.2)
    assert began.wait(30)
    thread.join()
    assert not (tmp_path / "hold").exists()


def test_a_hold_of_a_process_that_is_gone_ends(conftest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(conftest, "_HOLD", tmp_path / "hold")
    monkeypatch.setattr(conftest, "_LONGEST_HOLD", 0.1)
    (tmp_path / "hold").touch()
    with conftest._in_turn(item("test_a")):
        assert not (tmp_path / "hold").exists()
