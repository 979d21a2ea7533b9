"""Lower bounds and what streams can gain at most."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.cost import estimate
from msplit.cost.costs import Costs
from msplit.flatten.flat import FlatGraph
from msplit.schedule.judge import bounds
from msplit.shapes.infer import infer
from tests import graphs
from tests.shapes.small import Builder
from tests.strategies import graphs as plain_graphs


@st.composite
def priced(draw: st.DrawFn) -> tuple[FlatGraph, Costs]:
    graph = draw(plain_graphs(max_nodes=12))
    count = len(graph)
    times = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    shares = draw(st.lists(st.sampled_from([0.01, 0.3, 1.0]), min_size=count, max_size=count))
    return graphs.build(graph.names, graph.ops, graph.edges, times, share=shares)


def test_two_equal_branches_gain_two_and_a_chain_gains_nothing() -> None:
    fork, costs = graphs.parse("x:Placeholder; a:Op(x)@10us; b:Op(x)@10us; c:NoOp(^a,^b)")
    assert bounds(fork, costs).max_gain == 2
    assert [bounds(fork, costs).gain_at_most(n) for n in (1, 2, 8)] == [1, 2, 2]
    chain, costs = graphs.parse("x:Placeholder; a:Op(x)@10us; b:Op(a)@10us")
    assert bounds(chain, costs).gain_at_most(8) == 1
    assert bounds(chain, costs).path.tolist() == [0, 1, 2]


def test_kernels_that_fill_the_gpu_gain_nothing_from_streams() -> None:
    view, costs = graphs.build(["a", "b"], ["Op", "Op"], [], [10.0, 10.0], share=1.0)
    found = bounds(view, costs)
    assert found.sm_time_us == found.serial_us == 20
    assert found.max_gain == 1


def test_bytes_bound_what_overlaps() -> None:
    view, costs = graphs.build(["a", "b"], ["Op", "Op"], [], [10.0, 10.0], share=0.1, bytes_=4800e3 * 8)
    found = bounds(view, costs)
    assert found.bandwidth_us == pytest.approx(16)
    assert found.lower_bound_us == pytest.approx(16)


@given(priced(), st.integers(1, 16))
def test_bound_lies_between_nothing_and_the_serial_time_and_more_streams_never_gain_less(
    case: tuple[FlatGraph, Costs], streams: int
) -> None:
    view, costs = case
    found = bounds(view, costs)
    assert found.critical_path_us <= found.serial_us + 1e-9
    assert found.sm_time_us <= found.serial_us + 1e-9
    bound_by = (found.critical_path_us, found.bandwidth_us, found.flops_us, found.sm_time_us, found.whole_us)
    assert found.lower_bound_us == max(bound_by)
    gain = bounds(view, costs).gain_at_most(streams)
    assert 1 <= gain <= max(streams, 1)
    assert gain <= bounds(view, costs).gain_at_most(streams + 1) + 1e-9
    assert gain <= max(1.0, found.max_gain) + 1e-9


@given(priced(), st.sampled_from([0.5, 4.0]))
def test_scaling_all_times_scales_what_depends_on_them(case: tuple[FlatGraph, Costs], factor: float) -> None:
    view, costs = case
    scaled = Costs(
        costs.flops, costs.bytes, costs.time_us * factor, costs.share, costs.out_bytes, costs.known, costs.gpu
    )
    before, after = bounds(view, costs), bounds(view, scaled)
    for name in ("critical_path_us", "sm_time_us", "serial_us"):
        assert getattr(after, name) == pytest.approx(getattr(before, name) * factor)


def test_graph_without_kernels_has_nothing_to_gain() -> None:
    view, costs = graphs.parse("x:Placeholder; y:Identity(x)")
    assert bounds(view, costs).max_gain == 1
    assert bounds(view, costs).gain_at_most(4) == 1


def test_streams_are_counted_from_one() -> None:
    view, costs = graphs.parse("x:Placeholder")
    with pytest.raises(ValueError, match="at least one"):
        bounds(view, costs).gain_at_most(0)


def test_fused_bound_counts_weights_inputs_and_outputs_once_and_of_a_table_only_rows() -> None:
    b = Builder()
    ids = b.input("ids", (64,), "int32")
    rows = b.add("GatherV2", b.weight(1_000_000, 32), ids, b.scalar(0), Tparams="float32", Tindices="int32")
    weight = b.add("Identity", b.weight(32, 32), T="float32")
    first = b.add("MatMul", rows, weight, T="float32")
    b.add("MatMul", first, weight, T="float32")
    view = b.flat()
    costs = estimate(view, infer(view))
    unique = bounds(view, costs).fused_us * 4800e3
    row_bytes, product_bytes, output = 64 * 32 * 4, 32 * 32 * 4, 64 * 32 * 4
    # A gather's bytes are its rows twice and its ids: that is all that is known of what it read of the table.
    assert row_bytes + product_bytes + output <= unique <= 2 * row_bytes + product_bytes + output + 3 * 64 * 4
    assert unique < costs.bytes.sum()
    assert np.argmax(costs.time_us) == first
