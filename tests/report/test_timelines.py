"""Measured timelines: of the simulated streams, of TensorFlow on the CPU, and of what TensorFlow's statistics may say."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import msplit
from msplit.benchmark.results import Traced
from msplit.engines.base import Pause, Span, Timeline
from msplit.errors import EngineError
from msplit.report import bench_sections, trace
from msplit.report.trace import Slice, TracedRun
from msplit.verify.results import Settings
from tests.cli.runner import ROOT, SAMPLES
from tests.report.perfetto import complaints

QUICK = Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1, verify_inputs=1)


def measured(model: str, **request: Any) -> tuple[msplit.FlatGraph, msplit.Bench]:
    flat = msplit.load(SAMPLES / model)
    found = msplit.bench(flat, settings=QUICK, batch=4, timelines=True, **request)
    return flat, found


def slices_of(found: dict, process: int) -> list[dict]:
    return [event for event in found["traceEvents"] if event["ph"] == "X" and event["pid"] == process]


def arrows_of(found: dict, process: int) -> int:
    return sum(event["ph"] == "s" and event["pid"] == process for event in found["traceEvents"])


def test_runs_lie_below_each_other_with_arrows_of_their_own():
    beside = [Slice("x", 0, 0, 2), Slice("y", 0, 3, 1, row=1)]
    runs = [TracedRun("a", [Slice("x", 0, 0, 1), Slice("y", 1, 2, 1)], [(0, 1)]), TracedRun("b", beside, [(0, 1)])]
    found = trace.from_runs(runs)
    assert complaints(found) == []
    assert [arrows_of(found, process) for process in (1, 2)] == [1, 1]
    names = [e["args"]["name"] for e in found["traceEvents"] if e["ph"] == "M" and "name" in e["args"]]
    assert names == ["a", "stream 0", "stream 1", "b", "stream 0", "stream 0, beside"]
    assert [run["title"] for run in found["otherData"]["runs"]] == ["a", "b"]


@pytest.mark.tf
def test_the_cuda_engine_with_simulated_streams_tells_kernels_rules_and_waits():
    pytest.importorskip("torch", reason="PyTorch, the cuda engine's kernel library, is not installed")
    plain = {"compare_tensorflow": False, "fuse": False, "group": False}
    flat, bench = measured("mmoe_small.pb", streams=(1, 2), engine="cuda", device="cpu", **plain)
    assert [one.label for one in bench.traced] == ["msplit, 1 stream, CUDA graph", "msplit, 2 streams, CUDA graph"]
    found = trace.from_bench(flat, bench)
    assert complaints(found) == []
    one, two = slices_of(found, 1), slices_of(found, 2)
    kernels = {variant.label: variant.facts["kernels"] for variant in bench.result.variants}
    assert [len(one), len(two)] == list(kernels.values())
    assert len({event["tid"] for event in one}) == 1
    assert len({event["tid"] for event in two}) == 2
    waits = {variant.label: variant.facts["waits"] for variant in bench.result.variants}
    assert [arrows_of(found, 1), arrows_of(found, 2)] == list(waits.values())
    assert arrows_of(found, 2) > 0
    product = next(event for event in two if "expert_1/dense_0" in event["args"].get("nodes", event["name"]))
    assert product["args"]["rule"] == "auto"
    assert product["args"]["cost_us"] > 0
    assert "on the CPU" in found["otherData"]["runs"][1]["clock"]


def test_a_stream_keeps_the_id_that_the_user_gave_it():
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    span = Span("k", (3,), 0, 0.0, 1.0)
    ids = np.full(len(flat), 7, np.int32)
    bench = SimpleNamespace(costs=None, traced=[Traced("v", Timeline((span,), (), "c"), ids, None)])
    found = trace.from_bench(flat, bench)  # type: ignore[arg-type]
    assert "stream 7" in [e["args"].get("name") for e in found["traceEvents"] if e["ph"] == "M"]


@pytest.mark.tf
@pytest.mark.parametrize("model", ["mmoe_small.pb", "keras_lookup"])
def test_tensorflow_on_the_cpu_tells_its_nodes(model: str):
    flat, bench = measured(model, streams=(1, 2), engine="tensorflow")
    found = trace.from_bench(flat, bench)
    assert complaints(found) == []
    assert len(bench.traced) == 2
    known = set(flat.graph.names)
    named = [event for event in slices_of(found, 2) if event["name"] in known]
    assert named
    assert all(event["args"]["cost_us"] >= 0 for event in named)
    if model == "mmoe_small.pb":
        assert arrows_of(found, 1) == 0
        assert arrows_of(found, 2) > 0
    assert "CPU devices" in found["otherData"]["runs"][0]["clock"]


def test_times_of_a_gpu_device_are_refused_with_the_way_out():
    from msplit.engines.tensorflow.session import from_metadata

    device = SimpleNamespace(device="/job:localhost/replica:0/task:0/device:GPU:0", node_stats=[])
    metadata = SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[device]), partition_graphs=[])
    with pytest.raises(EngineError) as caught:
        from_metadata(metadata)
    assert "--engine cuda" in str(caught.value)


def test_nodes_of_one_stream_that_ran_at_a_time_get_tracks_of_their_own():
    from msplit.engines.tensorflow.session import from_metadata

    def node(name: str, op: str, start: int, end: int) -> SimpleNamespace:
        return SimpleNamespace(
            node_name=name,
            timeline_label=f"{name} = {op}(x)",
            all_start_nanos=1_000_000 + start,
            op_start_rel_nanos=0,
            op_end_rel_nanos=end - start,
        )

    stats = [
        node("a", "MatMul", 0, 1000),
        node("b", "Relu", 500, 900),
        node("c", "Relu", 1000, 1200),
        node("k", "Const", 0, 9),
    ]
    device = SimpleNamespace(device="/job:localhost/replica:0/task:0/device:CPU:1", node_stats=stats)
    found = from_metadata(SimpleNamespace(step_stats=SimpleNamespace(dev_stats=[device]), partition_graphs=[]))
    assert [(span.name, span.stream, span.row, span.start_us, span.end_us) for span in found.spans] == [
        ("a", 1, 0, 0.0, 1.0),
        ("b", 1, 1, 0.5, 0.9),
        ("c", 1, 0, 1.0, 1.2),
    ]


def test_waits_and_gaps_of_a_step_are_named_and_add_up():
    """A wait lasts until the last kernel that is waited for is over, but never into the kernel that waits."""
    spans = [
        Span("a", (0,), 0, 0.0, 10.0),
        Span("b", (1,), 1, 11.0, 15.0),
        Span("c", (2,), 0, 20.0, 21.0),
        Span("early", (3,), 1, 20.5, 22.0),
        Span("beside", (4,), 1, 21.0, 21.5, row=1),
    ]
    timeline = Timeline(tuple(spans), ((0, 1), (1, 2), (2, 3)), "a clock")
    assert timeline.pauses() == [
        Pause(1, 0, 0.0, 10.0),
        Pause(3, 2, 15.0, 5.5),
        Pause(2, 1, 10.0, 5.0),
        Pause(2, None, 15.0, 5.0),
        Pause(1, None, 10.0, 1.0),
    ]
    traced = Traced("2 streams", timeline, np.array([0, 7, 0, 7, 7], np.int32), None)
    table = bench_sections.pauses([traced])
    assert table is not None
    assert table.rows[0] == ("2 streams", "7", "0 µs", "10.0 µs", "b", "a", "0")
    assert table.rows[3] == ("2 streams", "0", "15.0 µs", "5.0 µs", "c", "nothing", "-")
    assert bench_sections.pauses([Traced("one", Timeline((spans[0],), (), ""), traced.ids, None)]) is None


QUERIES = [(ROOT / "docs" / "examples" / f"trace_{name}.sql").read_text("utf-8") for name in ("ops", "waits", "busy")]
TOOL = shutil.which("trace_processor") or shutil.which("trace_processor_shell")


@pytest.fixture(scope="module")
def traced() -> tuple[msplit.FlatGraph, msplit.Bench]:
    """A traced step on one stream and on three, with times of its own: which stream waits for long is not left to the machine."""
    pytest.importorskip("torch")
    flat, bench = measured("mmoe_small.pb", engine="cuda", device="cpu", streams=(1, 3))
    return flat, replace(bench, traced=tuple(replace(one, timeline=timed(one.timeline)) for one in bench.traced))


def timed(timeline: Timeline) -> Timeline:
    """The same step where each span begins when its stream is free and what it waits for is over; what is waited for is long."""
    spans, free, awaited = list(timeline.spans), dict[int, float](), {before for before, _ in timeline.waits}
    for position in sorted(range(len(spans)), key=lambda one: spans[one].start_us):
        span = spans[position]
        over = [spans[before].end_us for before, after in timeline.waits if after == position]
        start = max([free.get(span.stream, 0.0), *over])
        free[span.stream] = start + (50 if position in awaited else 1)
        spans[position] = replace(span, start_us=start, end_us=free[span.stream])
    return replace(timeline, spans=tuple(spans))


def tables(found: dict[str, Any]) -> sqlite3.Connection:
    """What Perfetto's importer makes of a trace, as far as the queries ask: its documents describe the tables."""
    base = sqlite3.connect(":memory:")
    events = found["traceEvents"]
    args = [event.get("args", {}) for event in events]
    base.create_function("EXTRACT_ARG", 2, lambda number, key: args[number].get(key.removeprefix("args.")))
    base.executescript(
        """CREATE TABLE process (upid, pid, name); CREATE TABLE thread (utid, upid, tid, name); CREATE TABLE thread_track (id, utid);
        CREATE TABLE slice (id, ts, dur, track_id, category, name, arg_set_id); CREATE TABLE flow (slice_out, slice_in);"""
    )
    tracks = sorted({(event["pid"], event["tid"]) for event in events})
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events if event["ph"] == "M"
    }
    for number, (pid, tid) in enumerate(tracks):
        base.execute(
            "INSERT INTO thread VALUES (?, ?, ?, ?)", (number, 10 + pid, tid, names.get(("thread_name", pid, tid)))
        )
        base.execute("INSERT INTO thread_track VALUES (?, ?)", (100 + number, number))
    for (kind, pid, _), name in names.items():
        if kind == "process_name":
            base.execute("INSERT INTO process VALUES (?, ?, ?)", (10 + pid, pid, name))
    on_track: dict[int, list[tuple[int, int, int]]] = {}
    for number, event in enumerate(events):
        if event["ph"] == "X":
            track, begin, length = (
                100 + tracks.index((event["pid"], event["tid"])),
                int(event["ts"] * 1000),
                int(event["dur"] * 1000),
            )
            on_track.setdefault(track, []).append((begin, begin + length, number))
            row = (number, begin, length, track, event["cat"], event["name"], number)
            base.execute("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    ends: dict[int, dict[str, int]] = {}
    for event in events:
        if event["ph"] in "sf":
            at, track = int(event["ts"] * 1000), 100 + tracks.index((event["pid"], event["tid"]))
            around = next(number for begin, end, number in on_track[track] if begin <= at < end)
            ends.setdefault(event["id"], {})[event["ph"]] = around
    base.executemany("INSERT INTO flow VALUES (?, ?)", [(one["s"], one["f"]) for one in ends.values()])
    return base


def test_the_queries_of_the_documents_find_what_the_report_tells(traced: tuple[msplit.FlatGraph, msplit.Bench]):
    flat, bench = traced
    base = tables(trace.from_bench(flat, bench))
    ops, waits, busy = (base.execute(query).fetchall() for query in QUERIES)
    spans = sum(len(one.timeline.spans) for one in bench.traced)
    assert (
        sum(row[2] for row in base.execute(QUERIES[0].replace("LIMIT 20", ""))) == spans == sum(row[2] for row in busy)
    )
    assert {op for _, op, _, _ in ops} & {"MatMul", "Softmax"}
    assert all(0 < percent <= 100 for *_, percent in busy)
    told = [one for one in bench_sections.pauses_payload(bench.traced) if one["waits_for"] is not None]
    longest = sorted((one["time_us"] for one in told), reverse=True)[:20]
    assert [row[3] for row in waits] == pytest.approx(longest[: len(waits)], abs=0.01)
    assert len(waits) >= len([time for time in longest if time > 0.01]) > 0


@pytest.mark.skipif(
    TOOL is None, reason="there is no trace_processor on the PATH (https://perfetto.dev/docs/analysis/trace-processor)"
)
@pytest.mark.parametrize("number", range(3))
def test_perfetto_takes_the_queries(traced: tuple[msplit.FlatGraph, msplit.Bench], tmp_path: Path, number: int):
    path, query = tmp_path / "trace.json", tmp_path / "query.sql"
    path.write_bytes(trace.to_bytes(trace.from_bench(*traced)))
    query.write_text(QUERIES[number])
    done = subprocess.run([str(TOOL), "-q", query, path], capture_output=True, text=True, timeout=60, check=True)
    rows = tables(json.loads(path.read_bytes())).execute(QUERIES[number]).fetchall()
    assert len(done.stdout.strip().splitlines()) == 1 + len(rows) > 1
