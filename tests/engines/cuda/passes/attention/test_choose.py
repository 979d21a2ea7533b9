"""Attention runs as one kernel where that measures faster; elsewhere the graph is as if nobody had asked."""

import functools
import json

import numpy as np
import pytest
import torch

from msplit.engines.cuda.autotune.tuner import Tuner, timed_by
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage, fingerprint
from msplit.engines.cuda.ops.fused import KERNEL
from msplit.engines.cuda.passes.attention import fuse_attention as choose
from msplit.engines.cuda.passes.attention.fuse_attention import ATTENTION
from msplit.engines.cuda.passes.measured import deciding
from msplit.engines.cuda.passes.pipeline import Context, run_passes, tidy
from msplit.formats.files import JsonValue
from tests.engines.cuda.cases import CPU

B, H, L, D = 2, 3, 5, 4


def graph_of(masked, swapped=False):
    """Attention of queries, keys and values as [batch, length, heads, depth], at the stage in which kernels are chosen."""
    graph = OpGraph({}, {}, {name: (number, 0) for number, name in enumerate("qkvm")}, {}, numbers=100)
    graph.constants[50, 0] = np.asarray([0, 2, 1, 3])
    ops = [("Transpose", [(number, 0), (50, 0)], {}) for number in range(3)]
    pair = [(11, 0), (10, 0)] if swapped else [(10, 0), (11, 0)]
    ops.append(("BatchMatMulV2", pair, {"adj_x": False, "adj_y": True}))
    if swapped:
        graph.constants[51, 0] = np.asarray([0, 1, 3, 2])
        ops.append(("Transpose", [(13, 0), (51, 0)], {}))
    if masked:
        ops.append(("SelectV2", [(3, 0), (9 + len(ops), 0), (52, 0)], {}))
        graph.constants[52, 0] = np.asarray(-1e9, np.float32)
    ops.append(("Softmax", [(9 + len(ops), 0)], {}))
    ops.append(("BatchMatMulV2", [(9 + len(ops), 0), (12, 0)], {"adj_x": False, "adj_y": False}))
    for number, (op, inputs, attrs) in enumerate(ops, 10):
        graph.ops[number] = Op(number, f"{op}_{number}", op, {"T": "float32", **attrs}, inputs, [number])
    graph.fetches["out"] = (9 + len(ops), 0)
    feeds = {name: np.ones((B, L, H, D), np.float32) for name in "qkv"}
    graph.prune()
    feeds = {name: np.ones((B, 1, L, L), bool) if name == "m" else feeds[name] for name in graph.feeds}
    run_passes(graph, Context(feeds, CPU, 100), Stage.SPECIALIZED)
    return graph


@pytest.fixture
def tried(monkeypatch):
    """Runs the fusion on the CPU, whose library has another kernel, by a time of each; what was timed is noted."""
    monkeypatch.setattr(choose, "LIBRARY", ("FLASH_ATTENTION",))
    seen = []

    def run(graph, *, kernel):
        tuner = Tuner(Device(CPU))

        def times(lanes):
            (result, *_), one = lanes[0](), isinstance(lanes[0], functools.partial)
            seen.append((one, result))
            return kernel if one else 1.0

        def decide(graph, found):
            with torch.no_grad(), timed_by(lambda lanes: 1.0):
                trial = ATTENTION.trial(graph, found, CPU)
            with torch.no_grad(), timed_by(times):
                name = ATTENTION.choose(tuner, trial).kernel
            return name is not None, name

        with deciding({ATTENTION: decide}):
            return ATTENTION.run(graph, CPU)

    return run, seen


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_timed_against_each_other_computes_the_same(tried, swapped):
    graph = graph_of(masked=False, swapped=swapped)
    run, seen = tried
    assert run(graph, kernel=0.5)
    tidy(graph)
    (op,) = [op for op in graph.ops.values() if op.op == "_Attention"]
    assert op.attrs[KERNEL] == "FLASH_ATTENTION"
    assert {one for one, _ in seen} == {True, False}
    for _, result in seen:
        torch.testing.assert_close(result, seen[0][1])


def test_samples_lie_in_memory_as_what_the_model_reads():
    graph = graph_of(masked=False)
    sample = choose._sample(graph, (10, 0), "float32", CPU)
    assert sample.shape == (B, H, L, D)
    assert sample.stride() == torch.empty(B, L, H, D).transpose(1, 2).stride()


def test_what_is_slower_leaves_the_graph_as_it_was(tried):
    graph = graph_of(masked=True)
    before = fingerprint(graph)
    run, seen = tried
    assert not run(graph, kernel=2.0)
    assert fingerprint(graph) == before
    assert {one for one, _ in seen} == {True, False}


def test_a_kernel_with_other_numbers_is_not_taken(tried, monkeypatch):
    graph = graph_of(masked=False)
    run, seen = tried
    monkeypatch.setattr("msplit.engines.cuda.autotune.tuner.SAME", -1.0)
    assert not run(graph, kernel=0.5)
    assert not any(one for one, _ in seen)


def test_without_a_gpu_nothing_is_measured():
    graph = graph_of(masked=True)
    assert ATTENTION.run(graph, CPU)
    assert all(KERNEL not in op.attrs for op in graph.ops.values())


@pytest.mark.parametrize("kernel", [None, "EFFICIENT_ATTENTION"])
def test_a_choice_can_be_kept(kernel):
    choice = choose.Choice(kernel, {choose.APART: 3.0})
    kept = JsonValue.parse(json.dumps(choose.FAMILY.pack(choice)), "file", what="choice", fix="delete it")
    assert choose.FAMILY.unpack(kept) == choice
