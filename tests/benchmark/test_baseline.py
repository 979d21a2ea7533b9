"""An earlier measurement as a baseline: noise is no failure, and other circumstances are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msplit.benchmark.results import Baseline, Change, Timed, compare, differences, load
from msplit.errors import MsplitError
from msplit.report import bench_sections


def timed(
    median: float, iqr: float = 1.0, label: str = "a", asked: tuple[str, ...] = (), batch: int | None = 1
) -> Timed:
    return Timed(batch, label, asked, "device", median, iqr)


def run(*times: Timed, **more) -> dict:
    variants = []
    for t in times:
        device = {"median": t.median_us / 1e6, "iqr": t.iqr_us / 1e6}
        variants.append({"label": t.label, "asked": list(t.asked), "checks": [], "host": None, "device": device})
    environment = {"gpus": [{"name": "H200"}], "cpu": {"model": "x"}}
    return {
        "engine": "cuda",
        "batch": times[0].batch,
        "result": {"environment": environment, "variants": variants},
        **more,
    }


@pytest.mark.parametrize(
    ("then", "now", "fails"),
    [
        (timed(100), timed(104), False),  # within the limit
        (timed(100), timed(106), True),
        (timed(100, 10), timed(106, 10), False),  # within noise
        (timed(100, 10), timed(120, 10), True),
        (timed(100), timed(50), False),  # faster
        (timed(100, 0), timed(105, 0), False),  # not more than the limit
    ],
)
def test_slower_by_more_than_the_limit_and_by_more_than_noise_fails(then: Timed, now: Timed, fails: bool) -> None:
    assert Change(then, now).fails(0.05) is fails


def test_variants_are_matched_by_batch_and_label_else_by_what_was_asked_for() -> None:
    then = Baseline(
        Path("x"), {}, (timed(1, label="6 streams", asked=("8", "16")), timed(2, batch=8), timed(3, label="gone"))
    )
    now = [run(timed(1, label="5 streams", asked=("16",)), timed(1)), run(timed(2, batch=8))]
    found = compare(then, now, None)
    assert [(one.then.label, one.now.label, one.now.batch) for one in found.changes] == [
        ("6 streams", "5 streams", 1),
        ("a", "a", 8),
    ]
    assert [one.label for one in found.missing] == ["gone"]
    assert [(one.label, one.batch) for one in found.new] == [("a", 1)]
    assert found.failing == ()


def test_noise_beyond_the_limit_is_told() -> None:
    then = Baseline(Path("x"), {}, (timed(100, 20), timed(100, 1, label="b")))
    now = [run(timed(101, 20), timed(101, 1, label="b"))]
    (said,) = bench_sections.warnings(compare(then, now, 0.05))
    assert said.startswith("1 variant varies by more than the limit of 5 %")
    assert bench_sections.warnings(compare(then, now, None)) == []


def test_other_circumstances_are_named_and_unknown_ones_are_not() -> None:
    then = {"GPU": ["H200"], "engine": "cuda", "precision": ["tf32"], "inputs": {1: "x", 8: "y"}}
    assert differences(then, {"GPU": ["H200"], "engine": "cuda", "inputs": {1: "x", 2: "z"}}) == []
    assert differences(then, {"GPU": ["L4"], "engine": "cuda", "inputs": {8: "x"}}) == [
        "another GPU: H200 then, L4 now",
        "inputs of other shapes",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"command": "check", "schema_version": 1}',
        '{"command": "bench", "schema_version": 1}',
        '{"command": "bench", "schema_version": 1, "runs": []}',
        '{"command": "bench", "schema_version": 1, "runs": [3]}',
        '{"command": "bench", "schema_version": 1, "result": {"environment": {}, "variants": []}}',
        '{"command": "bench", "schema_version": 2, "runs": []}',
        "[" * 100_000,
    ],
)
def test_what_is_no_result_of_bench_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(MsplitError) as caught:
        load(path)
    assert str(path) in str(caught.value.where)


@pytest.mark.parametrize("median", ["1", None, float("nan"), -1.0, 0.0, True])
def test_times_that_are_none_are_refused(tmp_path: Path, median: object) -> None:
    data = {"command": "bench", "schema_version": 1, **run(timed(100))}
    data["result"]["variants"][0]["device"]["median"] = median
    path = tmp_path / "b.json"
    path.write_text(json.dumps(data))
    if median in ("1", True):  # numbers of another kind are numbers
        assert load(path).times
        return
    with pytest.raises(MsplitError):
        load(path)


def test_a_result_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(json.dumps({"command": "bench", "schema_version": 1, **run(timed(100, 2))}))
    (one,) = load(path).times
    assert (one.label, one.batch, one.clock) == ("a", 1, "device")
    assert (one.median_us, one.iqr_us) == (pytest.approx(100), pytest.approx(2))
