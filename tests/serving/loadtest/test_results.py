"""Figures are NumPy's, over the requests that they are said to be of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.serving.loadtest.corpus import Verdict
from msplit.serving.loadtest.generator import SENT, Level, RequestState, Sent
from msplit.serving.loadtest.results import Latency, LoadRun, Point, RepeatSpread, in_flight, measured
from msplit.serving.loadtest.run import limit
from tests.serving.loadtest.fakes import table

times = st.integers(0, 1000)
rows = st.lists(
    st.tuples(
        times,
        times,
        times,
        st.sampled_from(
            [
                RequestState.DONE,
                RequestState.REFUSED,
                RequestState.TIMED_OUT,
                RequestState.GIVEN_UP,
                RequestState.FAILED,
                RequestState.MISSHAPEN,
            ]
        ),
    ),
    min_size=1,
)


@given(rows, times, times, st.booleans())
def test_figures_of_a_run(found: list[tuple[int, int, int, int]], a: int, b: int, is_open: bool) -> None:
    begin, end = min(a, b), max(a, b) + 1
    made = table(len(found))
    made.counters[SENT] = len(found)
    requests = []
    for row, (due, late, took, status) in enumerate(found):
        made.scheduled[row], made.sent[row], made.answered[row] = due, due + late, due + late + took
        made.status[row] = status
        start = due if is_open else due + late
        requests.append((start, due + late + took, status))
    run = measured(made, Sent(begin, end, False), Verdict(0, 0, ""), is_open=is_open)
    inside = [one for one in requests if begin <= one[0] < end]
    latencies = [answered - start for start, answered, status in inside if status == RequestState.DONE]
    assert run.requests == len(inside)
    assert run.answered == len(latencies)
    kinds = (RequestState.REFUSED, RequestState.TIMED_OUT, RequestState.GIVEN_UP)
    assert (run.refused, run.timed_out, run.given_up) == tuple(sum(one[2] == kind for one in inside) for kind in kinds)
    assert run.failed == sum(
        one[2] in (RequestState.FAILED, RequestState.MISSHAPEN) for one in requests
    )  # warming up is no excuse
    ended = sum(begin <= answered < end and status == RequestState.DONE for _, answered, status in requests)
    assert run.throughput == pytest.approx(ended / ((end - begin) / 1e9))
    if latencies:
        assert run.latency is not None
        assert run.latency.p50 == pytest.approx(np.median(latencies) / 1e3)
        assert run.latency.p99 == pytest.approx(np.percentile(latencies, 99) / 1e3)
        assert run.latency.mean == pytest.approx(np.mean(latencies) / 1e3)
        assert run.latency.max == pytest.approx(max(latencies) / 1e3)
    else:
        assert run.latency is None
    made.close()


@given(st.lists(st.tuples(times, times), min_size=1, max_size=30))
def test_most_in_flight(found: list[tuple[int, int]]) -> None:
    sent = np.array([start for start, _ in found])
    answered = np.array([start + 1 + took for start, took in found])
    brute = max(int(((sent <= moment) & (answered > moment)).sum()) for moment in sent)
    assert in_flight(sent, answered) == brute


def run(throughput: float, p50: float, late: float = 0.0, *, cut: bool = False) -> LoadRun:
    latency = Latency(p50, p50, p50, p50, p50)
    return LoadRun(1.0, 1, 1, 0, 0, 0, 0, throughput, latency, {}, 1, 0, "", "", 1, late, cut)


def test_repeats_give_a_median_and_its_spread() -> None:
    point = Point("a", Level(clients=2), "2", (run(10, 5), run(30, 7), run(20, 6)))
    assert point.throughput == RepeatSpread(20, 10, 30)
    assert point.latency("p99") == RepeatSpread(6, 5, 7)
    assert point.latency("p99", priority=1) is None


def test_it_is_told_where_the_generator_is_the_limit() -> None:
    def point(*runs: LoadRun, rate: float | None = None) -> Point:
        return Point("a", Level(rate=rate) if rate else Level(clients=1), "1", runs)

    assert "alone reaches 100/s" in limit(point(run(80, 5)), point(run(100, 5)))
    assert limit(point(run(60, 5)), point(run(100, 5))) == ""
    assert "up to 2 µs late" in limit(point(run(60, 5, late=2), rate=60), point(run(60, 1), rate=60))
    assert limit(point(run(60, 50, late=2), rate=60), point(run(60, 1), rate=60)) == ""
    assert limit(point(run(60, 5)), None) == ""
    assert "no more memory" in limit(point(run(60, 5, cut=True)), None)
