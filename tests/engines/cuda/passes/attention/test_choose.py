"""Attention runs as one kernel where that measures faster; elsewhere the graph is as if nobody had asked."""

import json

import numpy as np
import pytest
import torch

from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage, fingerprint
from msplit.engines.cuda.ops.attention import KERNEL
from msplit.engines.cuda.passes.attention import choose
from msplit.engines.cuda.passes.attention.rewrite import fuse_attention
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


def asked(monkeypatch, *, beats):
    """`choose._fastest` on the CPU, whose library has another kernel; what it was asked is noted."""
    monkeypatch.setattr(choose, "LIBRARY", ("FLASH_ATTENTION",))
    monkeypatch.setattr(Tuner, "milliseconds", lambda *arguments, **options: 1.0)
    seen = []

    def compared(self, candidate, baseline):
        seen.append((candidate()[0], baseline()[0]))
        return beats

    monkeypatch.setattr(Tuner, "beats", compared)

    def decide(graph, match, op):
        arguments = [choose._sample(graph, key, match.dtype, CPU) for key in op.inputs]
        return choose._fastest(Tuner.of(CPU), match, op, arguments, choose._apart(graph, match, CPU)).kernel

    return decide, seen


@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_timed_against_each_other_computes_the_same(monkeypatch, swapped):
    graph = graph_of(masked=False, swapped=swapped)
    decide, seen = asked(monkeypatch, beats=True)
    assert fuse_attention(graph, decide)
    tidy(graph)
    (op,) = [op for op in graph.ops.values() if op.op == "_Attention"]
    assert op.attrs[KERNEL] == "FLASH_ATTENTION"
    ((one, other),) = seen
    torch.testing.assert_close(one, other)


def test_samples_lie_in_memory_as_what_the_model_reads():
    graph = graph_of(masked=False)
    sample = choose._sample(graph, (10, 0), "float32", CPU)
    assert sample.shape == (B, H, L, D)
    assert sample.stride() == torch.empty(B, L, H, D).transpose(1, 2).stride()


def test_what_is_slower_leaves_the_graph_as_it_was(monkeypatch):
    graph = graph_of(masked=True)
    before = fingerprint(graph)
    decide, seen = asked(monkeypatch, beats=False)
    assert not fuse_attention(graph, decide)
    assert fingerprint(graph) == before
    assert len(seen) == 1


def test_a_kernel_with_other_numbers_is_not_taken(monkeypatch):
    graph = graph_of(masked=False)
    decide, seen = asked(monkeypatch, beats=True)
    monkeypatch.setattr("msplit.engines.cuda.autotune.tuner.SAME", -1.0)
    assert not fuse_attention(graph, decide)
    assert not seen


def test_without_a_gpu_nothing_is_measured():
    graph = graph_of(masked=True)
    assert fuse_attention(graph, choose.decide_on(CPU, measure=True))
    assert all(KERNEL not in op.attrs for op in graph.ops.values())


@pytest.mark.parametrize("kernel", [None, "EFFICIENT_ATTENTION"])
def test_a_choice_can_be_kept(kernel):
    choice = choose.Choice(kernel, {choose.APART: 3.0})
    kept = JsonValue.parse(json.dumps(choose.FAMILY.pack(choice)), "file", what="choice", fix="delete it")
    assert choose.FAMILY.unpack(kept) == choice
