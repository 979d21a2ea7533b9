"""Integers that TensorFlow computes on the host and the cuda engine on the device: who carries their time, and where they run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msplit.cost import estimate
from msplit.cost.costs import carry, on_device
from msplit.engines.cuda.options import EngineOptions
from msplit.flatten.flat import host_nodes
from msplit.shapes.infer import infer
from tests.shapes.small import Builder

IDS = {"T": "int32"}


def _lookup(b: Builder, name: str, rows: int = 100) -> int:
    """Ids below zero count from the end, as Keras's Embedding has it: Less and AddV2 on int32, a choice, a gather."""
    ids = b.input(name, (16,), dtype="int32")
    negative = b.add("Less", ids, b.const(0, "int32"), **IDS)
    chosen = b.add("SelectV2", negative, b.add("AddV2", ids, b.const(rows, "int32"), **IDS), ids, T="int32")
    return b.add(
        "GatherV2",
        b.const(np.ones((rows, 8))),
        chosen,
        b.const(0, "int32"),
        Tparams="float32",
        Tindices="int32",
        Taxis="int32",
    )


def test_the_kernel_that_reads_integers_carries_their_time() -> None:
    b = Builder()
    _lookup(b, "a")
    flat = b.flat(host=host_nodes(b.graph()))
    costs = estimate(flat, infer(flat))
    by_op = dict(zip(flat.graph.ops, range(len(flat)), strict=True))
    less, select = by_op["Less"], by_op["SelectV2"]
    assert flat.host[less]
    assert costs.time_us[less] == 0
    assert costs.own_us[less] > 1
    assert costs.time_us[select] == pytest.approx(
        costs.own_us[select] + costs.own_us[less] + costs.own_us[by_op["AddV2"]]
    )
    assert costs.time_us.sum() == pytest.approx(costs.own_us.sum())


def test_what_strings_need_stays_on_the_host() -> None:
    b = Builder()
    number = b.add("AddV2", b.input("x", (4,), dtype="int32"), b.const(1, "int32"), **IDS)
    b.add("AsString", number, **IDS)
    flat = b.flat(host=host_nodes(b.graph()))
    assert not on_device(flat.graph, host_nodes(flat.graph)).any()
    assert estimate(flat, infer(flat)).own_us.sum() == 0


@given(st.lists(st.floats(0.1, 9), min_size=3, max_size=3), st.permutations(range(3)))
def test_no_time_is_lost_and_the_order_of_the_file_does_not_matter(times: list[float], order: list[int]) -> None:
    def carried(order: list[int]) -> dict[str, float]:
        b = Builder()
        x = b.input("x", (4,), dtype="int32")
        first = b.add("AddV2", x, x, name="first", **IDS)
        made = {number: b.add("Cast", first, name=f"cast_{number}", SrcT="int32", DstT="float32") for number in order}
        b.add("Neg", made[0], name="neg", T="float32")
        flat = b.flat(host=host_nodes(b.graph()))
        names = flat.graph.names
        host_us = np.zeros(len(flat))
        host_us[names.index("first")] = sum(times)
        launches = np.array([op in ("Cast", "Neg") for op in flat.graph.ops])
        return dict(zip(names, carry(host_us, flat.graph, launches).tolist(), strict=True))

    found = carried(order)
    assert found == pytest.approx(carried(list(range(3))))
    assert sum(found.values()) == pytest.approx(sum(times))
    assert found["neg"] == 0


def test_steps_of_the_hosts_nodes_run_where_what_reads_them_runs() -> None:
    pytest.importorskip("torch", reason="the cuda engine's kernel library is not installed")
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import ENGINE

    b = Builder()
    gathers = [_lookup(b, name) for name in "ab"]
    flat = b.flat(host=host_nodes(b.graph()))
    ids = np.zeros(len(flat), np.int32)
    ids[gathers[1]] = ids[flat.graph.ops.index("SelectV2", gathers[0])] = 3
    feeds = {name: np.array([-1] * 16, np.int32) for name in "ab"}
    program = ENGINE.compile(Job(flat, ids, 4, feeds, options=EngineOptions("cpu"))).program
    lanes, count = program.lanes(ids)
    assert count == 2
    of = {
        step.op.source_nodes[0]: lane for step, lane in zip(program.steps, lanes.tolist(), strict=True) if step.launches
    }
    second = [node for node in of if node > gathers[0]]
    assert {flat.graph.ops[node] for node in second} == {"Less", "AddV2", "SelectV2", "GatherV2"}
    assert {of[node] for node in second} == {1}
    assert {lane for node, lane in of.items() if node <= gathers[0]} == {0}
