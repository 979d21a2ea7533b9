import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msplit.checks.ms014_idle_stream import overlaps
from tests.checks.harness import found

CHAIN = "x:Placeholder; a:MatMul(x)@9us; b:MatMul(a)@9us[_stream_id=1]; c:MatMul(b)@9us"


def test_finds_a_chain_cut_in_two():
    (one,) = found(CHAIN, "MS014")
    assert one.text.startswith("streams 0 and 1 never run at the same time")


def test_finds_one_stream_among_busy_ones():
    graph = "x:Placeholder; a:MatMul(x)@9us; b:MatMul(x)@9us[_stream_id=1]; j:AddV2(a,b)@3us; late:Relu(j)@5us[_stream_id=2]"
    (one,) = found(graph, "MS014")
    assert one.text.startswith("stream 2 never runs")


def test_passes_streams_that_overlap():
    assert found("x:Placeholder; a:MatMul(x)@9us; b:MatMul(x)@9us[_stream_id=1]", "MS014") == []


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=5), min_size=1, max_size=4))
def test_overlaps_are_those_of_a_count_of_instants(lanes):
    stream, start, end = [], [], []
    busy = np.zeros((len(lanes), 200), bool)
    for lane, blocks in enumerate(lanes):
        now = 0
        for pause, length in blocks:
            stream.append(lane)
            start.append(float(now + pause))
            end.append(float(now + pause + length))
            busy[lane, now + pause : now + pause + length] = True
            now += pause + length
    shared = busy & (busy.sum(axis=0) > 1)
    got = overlaps(np.asarray(stream, np.int32), np.asarray(start), np.asarray(end), len(lanes))
    np.testing.assert_allclose(got, shared.sum(axis=1))
