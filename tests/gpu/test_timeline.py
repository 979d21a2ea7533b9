"""When each step of a run was on a real GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import msplit
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import EngineOptions
from msplit.inputs.make import make_inputs
from msplit.report.trace import from_bench
from msplit.verify.results import Settings
from tests.cli.runner import SAMPLES
from tests.report.perfetto import complaints

pytestmark = pytest.mark.gpu

TICK_US = 1.5
"""Events tell time in half microseconds or so."""


@pytest.mark.parametrize("capture", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("streams", [1, 4])
def test_steps_run_in_the_order_of_the_plan_and_side_by_side(streams: int, capture: bool) -> None:
    flat = msplit.load(SAMPLES / "towers_small.pb")
    ids = msplit.assign(flat, "recsys", streams=streams, batch=64).ids if streams > 1 else np.zeros(len(flat), np.int32)
    feeds = make_inputs(flat, {}, batch=64, seed=0, given={})
    executable = CudaEngine().build(Job(flat, ids, streams, feeds, options=EngineOptions(capture=capture)))
    try:
        before = executable.step(feeds)
        found = executable.timeline()
        assert len(found.spans) == executable.facts()["kernels"]
        assert len(found.waits) == executable.facts()["waits"]
        assert {span.stream for span in found.spans} == set(range(streams))
        assert all(0 <= span.start_us <= span.end_us < 1e5 for span in found.spans)
        assert sum(span.end_us > span.start_us for span in found.spans) > len(found.spans) / 2
        for on, waiting in found.waits:
            assert found.spans[on].end_us <= found.spans[waiting].start_us + TICK_US
        for stream in range(streams):
            lane = [span for span in found.spans if span.stream == stream]
            assert all(one.end_us <= two.start_us + TICK_US for one, two in itertools.pairwise(lane))
        if streams > 1:
            one, two = ([span for span in found.spans if span.stream == stream] for stream in (0, 1))
            assert min(s.start_us for s in two) < max(s.end_us for s in one)  # not one stream after the other
        assert ("captured CUDA graph" in found.clock) == capture
        after = executable.step(feeds)  # it runs as before
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)
    finally:
        executable.close()


def test_bench_traces_what_it_measured() -> None:
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    quick = Settings(duration=0.1, warmup=0.0, min_rounds=1, builds=1, verify_inputs=1)
    request = {
        "streams": (1, 4),
        "ruleset": "default",
        "engine": "cuda",
        "batch": 128,
        "settings": quick,
        "timelines": True,
        "compare_tensorflow": False,
        "fuse": False,
        "group": False,
    }
    found = msplit.bench(flat, **request)
    labels = [one.label for one in found.traced]
    assert labels == ["msplit, 1 stream, eager", "msplit, 1 stream, CUDA graph", "msplit, 4 streams, CUDA graph"]
    trace = from_bench(flat, found)
    assert complaints(trace) == []
    assert all(run["clipped_us"] < 2 * TICK_US for run in trace["otherData"]["runs"])
    rules = {event["args"].get("rule") for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 3}
    assert "branch" in rules
