"""What users see at 60 columns, word for word.

After a change that is meant: MSPLIT_GOLDEN=1 python -m pytest tests/serving/loadtest/test_report.py, and read the difference.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from msplit.report import load as report
from msplit.report import render
from msplit.serving.loadtest.generator import Level
from msplit.serving.loadtest.results import Latency, LoadResult, LoadRun, Point, TargetResult

GOLDEN = Path(__file__).parent / "report.txt"


def run(throughput: float, p50: float, **more: int) -> LoadRun:
    latency = Latency(p50, 1.5 * p50, 2.5 * p50, 1.2 * p50, 9 * p50)
    by_priority = {0: latency, 1: Latency(3 * p50, 4 * p50, 5 * p50, 3 * p50, 12 * p50)}
    counts = {
        "requests": 1000,
        "answered": 1000,
        "refused": 0,
        "timed_out": 0,
        "given_up": 0,
        "failed": 0,
        "wrong": 0,
        **more,
    }
    return LoadRun(
        seconds=2.0,
        throughput=throughput,
        latency=latency,
        by_priority=by_priority,
        checked=1200,
        says="request 7: score: 1 of 2 elements differ; score[1] is 3.5, not 2.5; tolerance 0.0002" if more else "",
        why="the device is lost" if counts["failed"] else "",
        most_in_flight=4,
        late_us=1.0,
        cut=False,
        **counts,
    )


def points(target: str, factor: float, *, wrong: int = 0) -> tuple[Point, ...]:
    lost = {"refused": 40, "timed_out": 3, "failed": 1} if wrong else {}
    return (
        Point(
            target, Level(clients=1), "1 client", (run(12_000 / factor, 80 * factor), run(12_500 / factor, 79 * factor))
        ),
        Point(
            target,
            Level(clients=16),
            "16 clients",
            (run(131_000 / factor, 121 * factor),),
            "the generator alone reaches 150,000/s",
        ),
        Point(target, Level(rate=100_000.0), "100,000/s", (run(99_000 / factor, 190 * factor, wrong=wrong, **lost),)),
    )


FACTS = {"requests": 1_234_567, "steps": 34_567, "rows": 2_000_000, "filled": 500_000}
TENSORFLOW = "TensorFlow, logical devices, merged"
RESULT = LoadResult(
    model="<b>model.pb",
    targets=(
        TargetResult("pool", "msplit, 8 streams, CUDA graph, fused and grouped, 8 groups", "echo", FACTS),
        TargetResult(TENSORFLOW, "8 sessions on as many logical devices, 16 threads", "echo, threads"),
        TargetResult("echo", "answers at once, without running anything"),
        TargetResult("TensorFlow with XLA", "compiled with XLA", "echo, threads", skipped="XLA has no strings\x1b[31m"),
    ),
    points=(*points("pool", 1.0, wrong=2), *points(TENSORFLOW, 91.0), *points("echo", 0.5)),
    seconds=2.0,
    warmup=0.5,
    repeat=3,
    rows=1,
    distinct=(64, 63),
    checked_against="TensorFlow on the CPU, one request at a time",
    tolerances={"score": 0.02, "id": 0.0},
    notes=("streams are assigned by the rule set auto",),
    environment={"cpu": {"model": "a processor", "usable_cores": 16}, "gpus": [{"name": "a GPU"}]},
)


def shown(width: int) -> str:
    out = io.StringIO()
    render.to_terminal(report.document(RESULT), Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_the_report() -> None:
    found = shown(60)
    if os.environ.get("MSPLIT_GOLDEN"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()
    assert max(map(len, found.splitlines())) <= 60
    assert "\x1b" not in found


def test_markdown_has_the_same_rows() -> None:
    text = render.to_markdown(report.document(RESULT))
    assert [line for line in text.splitlines() if "131,000" in line and "302 µs" in line]
