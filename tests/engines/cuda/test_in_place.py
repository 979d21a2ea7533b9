"""Concatenations whose parts are written to their places: the same bits on any streams. That kernels write there is tested on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda import in_place
from msplit.engines.cuda.engine import plan_for, prepare
from msplit.engines.cuda.in_place import BUFFER
from msplit.engines.cuda.lanes import arrange
from msplit.engines.cuda.simulated import SimulatedExecutable
from tests.engines.cuda.cases import CPU, bits, job, kernels, scattered
from tests.engines.cuda.random_graphs import FLOAT
from tests.engines.cuda.test_siblings import Block, block, data


@pytest.fixture
def all_can_write(monkeypatch):
    """Everything may write in place on the CPU too, where it is copied there."""
    monkeypatch.setattr(in_place, "_can_write", lambda step, device: True)


def joined(graph: Block, parts, axis=3):
    return graph.node("ConcatV2", [*parts, graph.constant(np.int32(axis))], T=FLOAT)


def pooled(graph: Block, value):
    return graph.node(
        "MaxPool", [value], T=FLOAT, ksize=[1, 3, 3, 1], strides=[1, 1, 1, 1], padding="SAME", data_format="NHWC"
    )


def grouped(flat, feeds):
    return prepare(job(flat, feeds, group=True), CPU, "auto").program


def wholes(program):
    return [step for step in program.steps if step.op.op == BUFFER]


BRANCH = st.tuples(st.sampled_from(["conv", "conv", "two", "pool", "same"]), st.sampled_from([1, 3, 8]))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    blocks=st.lists(st.lists(BRANCH, min_size=1, max_size=4), min_size=1, max_size=3),
    batch=st.integers(1, 2),
    also_read=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_same_bits_on_any_streams(all_can_write, blocks, batch, also_read, seed):
    graph = block(seed)
    value, channels = graph.placeholder("x", [batch, 5, 4, 3]), 3
    ends = []
    for branches in blocks:
        parts, widths = [], []
        for kind, width in branches:
            if kind == "same":
                parts.append(value)
            elif kind == "pool":
                parts.append(pooled(graph, value))
            else:
                part = graph.conv(value, channels, width, window=(3, 3))
                parts.append(graph.conv(part, width, width) if kind == "two" else part)
            widths.append(channels if kind in ("same", "pool") else width)
        if also_read:
            ends.append(parts[0])
        value, channels = joined(graph, parts) if len(parts) > 1 else parts[0], sum(widths)
    flat = graph.finish([*ends, value])
    feeds = data(batch, 5, 4, 3)
    program = grouped(flat, feeds)
    plain = prepare(job(flat, feeds), CPU, "auto").program
    plan = plan_for(plain, np.zeros(len(flat), np.int32), None)
    expected = bits(SimulatedExecutable(plain, arrange(plain, plan), {}).step(feeds))
    for streams in (1, 2, 4):
        lanes = arrange(program, plan_for(program, scattered(flat, streams, seed), None))
        executable = SimulatedExecutable(program, lanes, {}, seed=seed)
        for _ in range(4):
            assert bits(executable.step(feeds)) == expected, f"{streams} streams"


def inception(axis=3, outer=False):
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    parts = [
        graph.conv(x, 8, 16),
        graph.conv(graph.conv(x, 8, 4), 4, 6, window=(3, 3)),
        graph.conv(graph.conv(x, 8, 5), 5, 7, window=(3, 3)),
        pooled(graph, x),
    ]
    return graph, parts


def test_a_block_ends_without_a_kernel(all_can_write):
    graph, parts = inception()
    whole = joined(graph, parts)
    flat = graph.finish([graph.conv(whole, 37, 3)])
    feeds = data(1, 6, 6, 8)
    program = grouped(flat, feeds)
    assert "ConcatV2" in kernels(prepare(job(flat, feeds), CPU, "auto").program)
    assert "ConcatV2" not in kernels(program)
    (memory,) = wholes(program)
    assert memory.bytes == 6 * 6 * 37 * 4
    lanes = arrange(program, plan_for(program, scattered(flat, 3), None))
    assert lanes.peak_bytes >= memory.bytes
    released = {key for action in lanes.actions for key in action.releases}
    assert not released & {
        (memory.op.node, 0),
        *(key for step in program.steps if step.op.op == "ConcatV2" for key in step.inputs),
    }
    reader = next(step for step in program.steps if step.op.op == "ConcatV2")
    assert reader.call(*[torch.zeros(1)] * 4, torch.ones(2))[0].tolist() == [1, 1]


def test_each_part_lies_in_its_place(all_can_write):
    graph, parts = inception()
    flat = graph.finish([joined(graph, parts)])
    program = grouped(flat, data(1, 6, 6, 8))
    (memory,) = wholes(program)
    whole = torch.full((1, 6, 6, 37), float("nan"))
    assert memory.call()[0].shape == whole.shape
    concat = next(step for step in program.steps if step.op.op == "ConcatV2")
    start = 0
    for key, width in zip(concat.inputs, (16, 6, 7, 8), strict=False):
        maker = next(step for step in program.steps if step.op.node == key[0])
        inputs = [program.constants.get(one) for one in maker.inputs[:-1]]
        shape = (1, 6, 6, {16: 8, 6: 4, 7: 5, 8: 8}[width])
        arguments = [torch.randn(shape) if one is None else one for one in inputs]
        (made,) = maker.call(*arguments, whole)
        assert made.data_ptr() == whole[..., start:].data_ptr()
        assert not made.isnan().any()
        assert whole[..., start + width :].isnan().all()
        start += width


def cases():
    """Concatenations that must stay as they are."""
    graph, parts = inception()
    yield "another axis", graph.finish([joined(graph, [parts[0], graph.conv(parts[0], 16, 16)], 1)])
    graph, parts = inception()
    yield "a part that others read", graph.finish([joined(graph, parts), parts[1]])
    graph, parts = inception()
    yield "a part twice", graph.finish([joined(graph, [parts[0], parts[0], parts[1]])])
    graph, parts = inception()
    yield "a constant", graph.finish([joined(graph, [parts[0], graph.normal(1, 6, 6, 2)])])
    graph, parts = inception()
    yield "an input", graph.finish([joined(graph, [parts[0], "x"])])


@pytest.mark.parametrize(("why", "flat"), list(cases()))
def test_what_can_not_be_written_in_place_stays(all_can_write, why, flat):
    program = grouped(flat, data(1, 6, 6, 8))
    assert not wholes(program), why
    assert "ConcatV2" in kernels(program)


def test_large_wholes_and_many_copies_stay(all_can_write, monkeypatch):
    graph, parts = inception()
    flat = graph.finish([joined(graph, parts)])
    feeds = data(1, 6, 6, 8)
    assert wholes(grouped(flat, feeds))
    monkeypatch.setattr(in_place, "_can_write", lambda step, device: step.op.op != "MaxPool")
    assert wholes(grouped(flat, feeds)), "one copy"
    monkeypatch.setattr(in_place, "_can_write", lambda step, device: step.op.attrs.get("_large", False))
    assert not wholes(grouped(flat, feeds))
    monkeypatch.setattr(in_place, "_can_write", lambda step, device: True)
    for limit in ("LARGEST", "LARGEST_IN_ALL"):
        with monkeypatch.context() as patch:
            patch.setattr(in_place, limit, 6 * 6 * 37 * 4 - 1)
            assert not wholes(grouped(flat, feeds))


def test_on_a_cpu_nothing_can():
    graph, parts = inception()
    assert not wholes(grouped(graph.finish([joined(graph, parts)]), data(1, 6, 6, 8)))
