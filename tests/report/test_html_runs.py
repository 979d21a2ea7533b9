"""What the report's timeline can show beside the ids: candidates with the command that makes each, and measured steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import msplit
from msplit.api import price
from msplit.errors import MsplitError
from msplit.report import benchmark, document, trace
from msplit.report.html import page as build
from msplit.report.html import runs
from msplit.report.html.page import render
from msplit.schedule.judge import predict
from tests.campaign import CAMPAIGN
from tests.cli.runner import SAMPLES, fine
from tests.report.test_html_page import data_of
from tests.report.test_timelines import QUICK

MODEL = SAMPLES / "lstm_small.pb"


@pytest.fixture(scope="module")
def page() -> Any:
    flat = msplit.load(MODEL)
    shapes, costs = price(flat, batch=4)
    return build.page(flat, costs, ruleset="rnn", streams=4, shapes=shapes, options="--batch 4")


def test_the_command_of_a_candidate_makes_it(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = {one.name: one for one in page.candidates if one.name in page.timelines}
    assert len(by_name) > 8
    others = ("one", "list-2-coarse") if CAMPAIGN else ()
    for name in ("nimble", *others, max(by_name, key=lambda name: name.startswith("refined"))):
        first, second = page.timelines[name].command.split("\n")
        text, file = re.fullmatch(r"echo '(.*)' > (\S+)", first).groups()  # type: ignore[union-attr]
        Path(file).write_text(text)
        program, *arguments = shlex.split(second)
        assert program == "msplit"
        made = fine(*arguments[:-1], tmp_path / f"{file}.pb", "--format", "json").json
        assert made["judgement"]["gain"] >= page.prediction.one_us / by_name[name].makespan_us * 0.98
        assert "--batch 4" in second


def test_a_candidates_timeline_takes_what_its_row_says(page: Any) -> None:
    candidates = {one.name: one for one in page.candidates}
    assert page.timelines
    for name, run in page.timelines.items():
        assert run.makespan_us == pytest.approx(candidates[name].makespan_us)
        assert len({stream for stream in run.stream if stream >= 0}) == candidates[name].streams
        assert sorted(node for node in run.node if node >= 0) == sorted(page.prediction.node.tolist())


def test_types_and_shapes_stand_at_the_nodes_and_the_path_is_marked(page: Any) -> None:
    data = data_of(render(page))
    nodes = data["nodes"]
    kernel = data["leaves"]["node"][0]
    assert re.match(r"float32 \d", nodes["results"][nodes["result"][kernel]])
    assert data["critical"]
    assert set(data["critical"]) <= set(data["leaves"]["node"])
    assert data["command"] == f"msplit assign {MODEL} --rules rnn --streams 4 --batch 4 -o OUT"
    assert page.judgement in render(page)


@pytest.fixture(scope="module")
def bench_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("torch", reason="PyTorch, the cuda engine's kernel library, is not installed")
    folder = tmp_path_factory.mktemp("bench")
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    plain = {"compare_tensorflow": False, "fuse": False, "group": False, "engine": "cuda", "device": "cpu"}
    request = dict(settings=QUICK, batch=4, timelines=True, streams=(1, 2), command=["msplit", "bench"], **plain)  # type: ignore[arg-type]
    found = msplit.bench(flat, **request)
    (folder / "trace.json").write_bytes(trace.to_bytes(trace.from_bench(flat, found)))
    (folder / "result.json").write_text(document.dumps("bench", benchmark.payload(flat, found)), "utf-8")
    return folder / "result.json", folder / "trace.json"


@pytest.mark.tf
def test_what_bench_measured_is_in_the_report(bench_files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    options = [part for path in bench_files for part in ("--bench", path)]
    fine("report", SAMPLES / "mmoe_small.pb", "--batch", "4", "--no-candidates", *options, "-o", out, "--quiet")
    text = out.read_text("utf-8")
    assert "msplit, 2 streams, CUDA graph" in text
    data = data_of(text)
    assert [run["name"] for run in data["runs"]] == [
        "measured: msplit, 1 stream, CUDA graph",
        "measured: msplit, 2 streams, CUDA graph",
    ]
    one, two = data["runs"]
    assert (one["lanes"], two["lanes"]) == ([0], [0, 1])
    assert two["on"]
    kernels = sum(node >= 0 for node in two["node"])
    assert kernels >= 0.9 * len(two["node"]) > 10
    assert all(0 <= start <= two["makespan"] for start in two["start"])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "{}",
        '{"result": 3}',
        '{"result": {"variants": [{}]}}',
        '{"traceEvents": [{}]}',
        '{"traceEvents": 7}',
        "\xff",
    ],
)
def test_a_file_that_is_neither_is_one_clear_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content, "latin-1")
    with pytest.raises(MsplitError, match="neither a result nor a trace"):
        runs.measured(msplit.load(MODEL), [path])
    with pytest.raises(MsplitError, match="can not be read"):
        runs.measured(msplit.load(MODEL), [tmp_path / "gone.json"])


def test_names_in_a_trace_are_data(tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 1, "tid": 100, "ts": 1, "dur": 2, "name": "</script>\u001b[31m"}
    title = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "<img src=x>"}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [title, event]}))
    flat = msplit.load(MODEL)
    (run,) = runs.measured(flat, [path]).runs
    assert run.node == [-1]
    assert run.columns()["label"] == ["</script>\\x1b[31m"]  # as text: it never becomes HTML


def test_a_prediction_and_its_run_agree() -> None:
    flat = msplit.load(MODEL)
    _, costs = price(flat)
    found = predict(flat, costs, msplit.assign(flat, "rnn").ids)
    run = runs.StepRun.of("a", "b", "c", found)
    assert len(run.waits) == found.plan.waits
    assert max(start + time for start, time in zip(run.start_us, run.time_us, strict=True)) <= found.makespan_us
