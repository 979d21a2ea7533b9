"""Every combination of settings under load, and which of them is chosen."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from msplit.errors import EngineError, MsplitError
from msplit.report import load as report
from msplit.report import render
from msplit.run.request import RunRequest
from msplit.serving.loadtest import run, sweep
from msplit.serving.loadtest.clients import ServerUnderTest
from msplit.serving.loadtest.results import Common, LoadResult, TargetResult
from msplit.serving.loadtest.run import LoadSettings
from msplit.serving.pool.settings import PoolSettings, Tried, choose
from tests.cli.runner import SAMPLES, fine, msplit
from tests.report.test_schemas import validate
from tests.serving.loadtest.fakes import FakeModel, instead
from tests.serving.loadtest.test_report import RESULT
from tests.serving.loadtest.test_report import run as measured

MMOE = SAMPLES / "mmoe_small.pb"
QUICK = ("--measure", "seconds=9,requests=40,warmup=0", "--measure", "distinct=4", "--clients", "2")


@pytest.mark.parametrize(
    ("bound", "chosen"),
    [(None, "four"), (400.0, "four"), (300.0, "two"), (150.0, "one"), (50.0, None)],
)
def test_what_takes_least_for_nearly_the_most_requests_is_chosen(bound: float | None, chosen: str | None) -> None:
    tried = [
        Tried(1000, 100, (1,), "one"),
        Tried(1500, 250, (2,), "two"),
        Tried(2000, 350, (4,), "four"),
        Tried(2080, 380, (8,), "eight"),  # 4 % more is not worth twice as many
    ]
    best = choose(tried, bound)
    assert (best.settings if best else None) == chosen


def fake(rates: dict[str, tuple[float, float]], **more: int) -> Any:
    """What measures a combination, named by its settings, as a rate and a p50; p99 is 2.5 times as long."""

    def load(
        model: Any, request: Any, *, settings: LoadSettings, pool: PoolSettings, common: Common, **how: Any
    ) -> LoadResult:
        if pool.groups == 3:
            raise EngineError("there is no room")
        first = RESULT.points[0]
        others = [point for point in RESULT.points if point.target != first.target]
        found = measured(
            *rates[f"{settings.rows} {pool.max_batch} {pool.groups}"], **(more if pool.groups == 4 else {})
        )
        how["progress"]("measuring", 0.5)
        return replace(RESULT, points=(replace(first, runs=(found,)), *others), rows=settings.rows)

    return load


RATES = {"1 1 1": (500.0, 20.0), "1 1 4": (900.0, 30.0), "1 8 1": (2000.0, 100.0), "1 8 4": (3000.0, 900.0)}


def swept(load: Any, values: Any, bound: float | None = None, server: Any = None, **settings: Any) -> LoadResult:
    told = list[tuple[str, float]]()
    with (
        mock.patch("msplit.serving.loadtest.sweep.recipes") as recipes,
        mock.patch("msplit.serving.loadtest.sweep.opened", lambda model: model),
    ):
        found = sweep.sweep(
            load, MMOE, RunRequest.of(), values, settings=LoadSettings(**settings), pool=PoolSettings(latency_us=bound),
            server=server, progress=lambda what, share: told.append((what, share)),
        )  # fmt: skip
    assert recipes.call_count == (server is None), "a model is compiled once"
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert not told or told[-1][1] < 1
    return found


@pytest.mark.parametrize(
    ("bound", "best", "options"),
    [
        (None, "max-batch 8, groups 4", "--max-batch 8 --groups 4"),
        (300.0, "max-batch 8, groups 1", "--max-batch 8 --groups 1"),
        (80.0, "max-batch 1, groups 4", "--max-batch 1 --groups 4"),
        (10.0, "", ""),
    ],
)
def test_the_best_under_a_bound(bound: float | None, best: str, options: str) -> None:
    found = swept(fake(RATES), {"max_batch": (1, 8), "groups": (1, 4)}, bound)
    assert found.sweep is not None
    assert (found.sweep.best, found.sweep.options) == (best, options)
    assert [target.label for target in found.targets[:4]] == [
        f"max-batch {batch}, groups {groups}" for batch in (1, 8) for groups in (1, 4)
    ]
    rows = list(csv.DictReader(io.StringIO(report.text(found))))
    assert [row["target"] for row in rows if row["best"]] == ([best] if best else [])
    assert {(row["max_batch"], row["groups"]): float(row["p99_us"]) for row in rows[:4]} == {
        (str(batch), str(groups)): 2.5 * RATES[f"1 {batch} {groups}"][1] for batch in (1, 8) for groups in (1, 4)
    }
    shown = render.to_markdown(report.document(found))
    assert (options or "none is within the bound") in shown
    assert shown.count("over the bound") == {None: 0, 300.0: 1, 80.0: 2, 10.0: 4}[bound]


def test_a_combination_that_answers_wrongly_or_not_is_not_chosen() -> None:
    for bad in ({"wrong": 1}, {"failed": 1}, {"answered": 900}):
        found = swept(fake(RATES, **bad), {"max_batch": (8,), "groups": (1, 4)})
        assert found.sweep is not None
        assert found.sweep.best == "max-batch 8, groups 1"
        assert found.wrong == bad.get("wrong", 0)


def test_what_can_not_be_made_is_told_and_the_others_are_measured() -> None:
    found = swept(fake(RATES), {"max_batch": (8,), "groups": (3, 1)})
    assert found.sweep is not None
    assert found.sweep.best == "max-batch 8, groups 1"
    assert "max-batch 8, groups 3: not measured: there is no room" in render.to_markdown(report.document(found))
    with pytest.raises(EngineError, match="there is no room"):
        swept(fake(RATES), {"groups": (3,)})


def test_a_server_is_asked_for_other_rows_only() -> None:
    rates = {"1 None 4": (5000.0, 200.0), "32 None 4": (400.0, 900.0)}
    server = ServerUnderTest("127.0.0.1:1", "m")
    found = swept(fake(rates), {"rows": (1, 32)}, server=server)
    assert found.sweep is not None
    assert (found.sweep.best, found.sweep.options) == ("rows 32", ""), "12,800 rows a second are more than 5,000"
    with pytest.raises(MsplitError, match="groups can not be tried here\n  fix: give values of: rows"):
        swept(fake(rates), {"groups": (1, 2)}, server=server)


def test_values_are_read_and_each_is_tried_once() -> None:
    seen = SimpleNamespace(values=None, settings=None, pool=None)

    def found(load: Any, model: Any, request: Any, values: Any, *, settings: Any, pool: Any, **how: Any) -> LoadResult:
        seen.values, seen.settings, seen.pool = values, settings, pool
        raise MsplitError("enough")

    with mock.patch("msplit.serving.loadtest.sweep.sweep", found), instead(FakeModel()):
        msplit("load", MMOE, "--sweep", "groups=1,4,4,max-batch=1,8", "--sweep", "rows=2", "--pool", "latency-us=900")
        assert list(seen.values.items()) == [("rows", (2,)), ("max_batch", (1, 8)), ("groups", (1, 4))]
        assert (seen.settings.repeat, seen.pool.latency_us) == (1, 900)
        msplit("load", MMOE, "--sweep", "groups=1", "--measure", "repeat=2")
        assert seen.settings.repeat == 2
    for wrong, said in (
        ("groups=0", "0 is not in the range"),
        ("slots=1", "there is no key 'slots'"),
        ("groups=a", "not a list"),
    ):
        done = msplit("load", MMOE, "--sweep", wrong)
        assert (done.code, said in done.err) == (2, True)


def test_csv_of_a_load_test() -> None:
    without = replace(RESULT, targets=(*RESULT.targets, TargetResult("XLA", "", skipped="no kernel")))
    with mock.patch("msplit.serving.loadtest.run.load", return_value=without), instead(FakeModel()):
        done = msplit("load", MMOE, "--format", "csv")
    assert "warning: XLA: not measured: no kernel" in done.err
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert done.code == int(bool(RESULT.wrong or RESULT.broken))
    assert [(row["target"], row["name"]) for row in rows] == [(point.target, point.name) for point in RESULT.points]
    assert [float(row["throughput_per_s"]) for row in rows] == [point.throughput.value for point in RESULT.points]
    assert {(row["rows"], row["groups"], row["best"]) for row in rows} == {(str(RESULT.rows), "", "")}


@pytest.mark.tf
def test_a_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    simulated = ("--device", "cpu", "--cuda", "effort=fast", "--streams", "2")
    tried = ("--sweep", "rows=5", "--sweep", "max-batch=1,4,groups=2")
    with (
        mock.patch.object(sweep, "recipes", wraps=sweep.recipes) as recipes,
        mock.patch.object(run, "make_pool", wraps=run.make_pool) as made,
    ):
        done = fine("load", MMOE, *simulated, *tried, *QUICK, "--html", tmp_path / "page.html", "--format", "json")
    validate("load", done.json)
    assert (recipes.call_count, made.call_count) == (1, 2)
    arms = {arm["label"]: arm for arm in done.json["arms"]}
    assert len(arms) == 2 + 1
    assert arms["rows 5, max-batch 1, groups 2"]["facts"]["settings"] == {"rows": 5, "max_batch": 1, "groups": 2}
    assert done.json["wrong"] == 0
    assert done.json["sweep"]["best"] in arms
    # A step of at most one row answers each row by itself.
    for label, arm in arms.items():
        if "max-batch 1," in label:
            assert arm["facts"]["steps"] == arm["facts"]["rows"]
    assert "groups 2" in (tmp_path / "page.html").read_text()
