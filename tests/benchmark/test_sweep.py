"""One bench over several batches: a table, a plot, CSV, and a comparison with an earlier result."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from msplit import api
from msplit.benchmark.benchmark import sweep
from msplit.benchmark.results import lines
from msplit.errors import EngineError, MsplitError
from msplit.report import document
from msplit.report import sweep as bench_csv
from msplit.report import sweep as report
from msplit.report.render import to_markdown
from msplit.run.setup import BenchRequest
from tests.assignment.test_plans import QUICK
from tests.cli.runner import SAMPLES, fine, msplit
from tests.report.test_html_page import Reader, data_of
from tests.report.test_schemas import validate

pytestmark = pytest.mark.tf
MODEL = SAMPLES / "towers_small.pb"
SHORT = (
    "--engine",
    "tensorflow",
    "--measure",
    "duration=0",
    "--measure",
    "warmup=0",
    "--measure",
    "min-iters=2",
    "--measure",
    "builds=1",
    "--streams",
    "2,16",
)


@pytest.fixture(scope="module")
def swept():
    flat = api.load(MODEL)
    request = {"engine": "tensorflow", "streams": (2, 16), "settings": QUICK, "ruleset": "auto"}
    return flat, sweep(flat, BenchRequest.of(**request), (1, 8))


def test_each_batch_is_a_column_and_each_way_a_row(swept) -> None:
    flat, found = swept
    assert [{shape[0] for _, shape in run.inputs.values()} for run in found.runs.values()] == [{1}, {8}]
    shown = lines(found)
    assert shown[0].name == "TensorFlow, 1 stream"
    assert all(list(line.variants) == [1, 8] for line in shown)
    text = to_markdown(report.document(flat, found))
    assert "|  | 1 | 8 |" in text
    assert text.count("**One step, by batch**") == 1
    assert text.count("| verified | outputs are equal") == 1
    data = json.loads(document.dumps("bench", report.payload(flat, found)))
    validate("bench", data)
    assert [run["batch"] for run in data["runs"]] == [1, 8]
    assert [point["batch"] for point in data["sweep"]["lines"][0]["points"]] == [1, 8]


def test_the_page_has_the_curves_and_the_tables(swept) -> None:
    flat, found = swept
    text = report.page(flat, found)
    (plot,) = data_of(text)["plots"]
    assert (plot["names"], plot["ticks"]) == ([line.name for line in lines(found)], [1, 8])
    assert (plot["x"], plot["y"]) == ("batch, rows", "one step by the host's clock, µs")
    variant = lines(found)[0].variants[8]
    point = next(point for point in plot["points"] if point["line"] == plot["names"][0] and point["x"] == 8)
    assert point["y"] == pytest.approx(variant.host.median * 1e6)
    assert point["low"] <= point["y"] <= point["high"]
    assert "One step, by batch" in Reader(text).text


def test_csv_has_a_row_per_variant_and_batch(swept) -> None:
    flat, found = swept
    rows = list(csv.DictReader(io.StringIO(bench_csv.text(flat, found.runs.values()))))
    assert [row["batch"] for row in rows] == ["1"] * (len(rows) // 2) + ["8"] * (len(rows) // 2)
    for row, variant in zip(rows, [v for run in found.runs.values() for v in run.result.variants], strict=True):
        assert row["variant"] == variant.label
        assert float(row["host_median_us"]) == pytest.approx(variant.host.median * 1e6, abs=1e-3)
        assert row["verified"] == ("yes" if variant.checks else "")
    assert (rows[0]["over"], rows[1]["verified"]) == ("", "yes")
    assert float(rows[1]["host_gain"]) > 0


def test_a_name_that_is_a_formula_stays_text(swept) -> None:
    flat, found = swept
    hostile = replace(flat, model=replace(flat.model, path=Path('=HYPERLINK("http://x")')))
    (row, *_) = csv.DictReader(io.StringIO(bench_csv.text(hostile, found.runs.values())))
    assert row["model"] == '\'=HYPERLINK("http://x")' or row["model"].startswith("'=")


def test_a_batch_that_fails_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = api.load(MODEL)
    request = {"engine": "tensorflow", "streams": (2,), "settings": QUICK}
    from msplit.benchmark import benchmark as module

    def bench(flat, request, *, progress=None, warn=None):
        if request.run.workload.batch == 4:
            raise EngineError("out of memory")
        return real(flat, request, progress=progress, warn=warn)

    real = module.bench_for
    monkeypatch.setattr(module, "bench_for", bench)
    found = sweep(flat, BenchRequest.of(**request), (2, 4))
    assert (list(found.runs), found.failed) == ([2], {4: "out of memory"})
    assert "batch 4 could not be run: out of memory" in to_markdown(report.document(flat, found))
    with pytest.raises(EngineError, match="out of memory"):
        sweep(flat, BenchRequest.of(**request), (4,))


def test_what_is_for_one_batch_is_refused(tmp_path: Path) -> None:
    for option in (
        ("--reference", "r.npz"),
        ("--plan", "p.json"),
        ("--trace", "t.json"),
        ("--measure", "save-reference=s.npz"),
    ):
        done = msplit("bench", MODEL, "--batch", "1,2", *option)
        assert done.code == 2
        assert f"--batch excludes {option[0]}" in " ".join(done.err.split())
    with pytest.raises(MsplitError, match="no input has an unknown size"):
        sweep(api.load(SAMPLES / "while_v1.pb", inputs=[]), BenchRequest.of(engine="tensorflow"), (1, 2))
    done = msplit("bench", MODEL, "--plot", "x.html")
    assert (done.code, "--batch 1,8,32" in done.err) == (2, True)
    assert "ends in .html" in msplit("bench", MODEL, "--batch", "1,2", "--plot", "x.svg").err
    assert "'--batch'" in msplit("bench", MODEL, "--batch", "1,0").err


def test_the_command_writes_all_of_it_and_compares(tmp_path: Path) -> None:
    plot, then = tmp_path / "plot.html", tmp_path / "then.json"
    done = fine("bench", MODEL, *SHORT, "--batch", "2,4", "--plot", plot, "--format", "json")
    then.write_text(done.out)
    (curves,) = data_of(plot.read_text())["plots"]
    assert (curves["ticks"], curves["x"]) == ([2, 4], "batch, rows")
    assert len(curves["points"]) == 2 * len(curves["names"])
    assert done.json["written"] == [f"Written: {plot}, the times by batch."]
    # A measurement that was ten thousand times faster is missed by everything, and by more than noise.
    fast = json.loads(done.out)
    for run in fast["runs"]:
        for variant in run["result"]["variants"]:
            variant["host"] |= {"median": variant["host"]["median"] / 1e4, "iqr": 0.0}
            variant["host"] |= {"median_us": variant["host"]["median"] * 1e6, "iqr_us": 0.0}
    (tmp_path / "fast.json").write_text(json.dumps(fast))
    worse = msplit(
        "bench", MODEL, *SHORT, "--batch", "2,4", "--baseline", tmp_path / "fast.json", "--fail-if-slower", "5%"
    )
    assert worse.code == 1
    assert "slower than the baseline" in worse.err
    assert "Beside" in worse.out
    told = msplit("bench", MODEL, *SHORT, "--batch", "2", "--baseline", tmp_path / "fast.json", "--format", "json")
    assert told.code == 0
    assert len(told.json["baseline"]["changes"]) == len(told.json["result"]["variants"])
    validate("bench", told.json)
    rows = list(csv.DictReader(io.StringIO(fine("bench", MODEL, *SHORT, "--batch", "2", "--format", "csv").out)))
    assert {row["batch"] for row in rows} == {"2"}


def test_a_baseline_of_other_circumstances_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    told = fine("bench", MODEL, *SHORT, "--batch", "2", "--format", "json").json
    told["result"]["environment"]["gpus"] = [{"name": "NVIDIA H200"}]
    (tmp_path / "then.json").write_text(json.dumps(told))
    base = ("bench", MODEL, *SHORT, "--batch", "2", "--baseline", tmp_path / "then.json")
    refused = msplit(*base, "--fail-if-slower", "5")
    assert (refused.code, refused.out) == (2, "")
    assert "another GPU: NVIDIA H200 then" in " ".join(refused.err.split())
    warned = msplit(*base)
    assert warned.code == 0
    assert "another GPU: NVIDIA H200 then" in " ".join(warned.out.split())
    assert msplit("bench", MODEL, "--fail-if-slower", "5%").code == 2
    assert msplit(*base, "--fail-if-slower", "-1").code == 2
    assert msplit(*base, "--fail-if-slower", "nan").code == 2
