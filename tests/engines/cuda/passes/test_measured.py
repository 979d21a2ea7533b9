"""Fusions that are measured: found, timed, kept under the same keys, and taken where a kernel wins, by times that the tests give."""

import json
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from msplit.engines.cuda.autotune import batched_matmul, conv
from msplit.engines.cuda.autotune.tuner import Family, Tuner, timed_by
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.passes.convolution import fuse_mlp
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, deciding, fastest
from msplit.engines.cuda.passes.pipeline import PIPELINE, Context, Pass, run_passes
from msplit.formats.files import JsonValue
from tests.engines.cuda.cases import CPU
from tests.engines.cuda.passes.convolution.test_merge_convolutions import FLOAT, block

FUSIONS = [one.run for one in PIPELINE if isinstance(one.run, MeasuredFusion)]
KEPT = Path(__file__).with_name("choices.json")


def model():
    """A graph with a candidate of every fusion of convolutions and layers."""
    graph = block()
    x = graph.placeholder("x", [2, 9, 8, 16])
    y = graph.node("Relu", [graph.node("Mul", [x, graph.normal(16)], T=FLOAT)], T=FLOAT)
    z = graph.conv(y, 16, 16)
    siblings = [graph.conv(z, 16, size) for size in (4, 5, 6)]
    filter = graph.normal(3, 3, 16, 1)
    deep = graph.node(
        "DepthwiseConv2dNative", [z, filter], T=FLOAT, strides=[1, 1, 1, 1], padding="SAME", data_format="NHWC"
    )
    axes = graph.constant(np.array([1, 2], np.int32))
    mean = graph.node("Mean", [deep, axes], T=FLOAT, Tidx=3, keep_dims=False)
    hidden = graph.node("Relu", [graph.node("MatMul", [mean, graph.normal(16, 4)], T=FLOAT)], T=FLOAT)
    layers = graph.node("MatMul", [hidden, graph.normal(4, 6)], T=FLOAT)
    return graph.finish([*siblings, deep, layers])


def made(fusion, graph):
    """Key and choice of every candidate, as they are kept. What is timed takes longer from call to call, but side by side."""
    tuner, rows, turns = Tuner(Device(CPU)), [], count()

    def times(lanes):
        return next(turns) + 10 * (len(lanes) == 1 or 20 - next(turns))

    for found in list((fusion.ahead or fusion.find)(graph)):
        key = fusion.key(graph, found, CPU)
        with torch.no_grad(), timed_by(times):
            choice = tuner.choose(fusion.family, key, lambda f=found: fusion.choose(tuner, fusion.trial(graph, f, CPU)))
        rows.append([fusion.family.name, repr(key), fusion.family.pack(choice)])
    return rows


def test_choices_are_kept_under_the_keys_that_they_always_had(monkeypatch):
    """A file of kept choices holds from version to version as long as what is timed is the same: here what PyTorch alone has."""
    for module in (batched_matmul, conv, fuse_mlp):
        monkeypatch.setattr(module, "can_compile", lambda: False)
    feeds = {"x": np.ones((2, 9, 8, 16), np.float32)}
    graph = optimize(model(), feeds, CPU, group=True).graph
    rows = [row for fusion in FUSIONS for row in made(fusion, graph)]
    assert {row[0] for row in rows} == {"merged convolutions", "prologues", "mlps", "squeezes"}
    assert json.loads(json.dumps(rows)) == json.loads(KEPT.read_text())


DOUBLED = Family("doubled", lambda name: name, lambda value: value.or_none(JsonValue.text), None)


def doubling(**more):
    """A fusion of x + x to 2 x, by one of two kernels."""

    def fused(graph, op, kernel):
        op.op, op.inputs = "Mul", [op.inputs[0], graph.constant(np.float32(2))]
        op.attrs = {**op.attrs, "kernel": kernel}

    def trial(graph, op, device):
        data, two = torch.ones(3), torch.full((3,), 2.0)
        calls = [(name, Way(lambda data, two: (data * two,), data, two)) for name in ("a", "b")]
        return Trial([Way(lambda data, two: (data + data,), data, two)], calls, [torch.full((3,), 2.0)])

    def find(graph):
        return [op for op in graph.ops.values() if op.op == "AddV2" and op.inputs[0] == op.inputs[1]]

    return MeasuredFusion(DOUBLED, find, fused, lambda graph, op, device: (op.op,), trial, **more)


def sums():
    graph = OpGraph({}, {}, {"x": (0, 0)}, {"out": (1, 0)}, numbers=10)
    graph.shapes |= {(0, 0): (3,), (1, 0): (3,)}
    graph.dtypes |= {(0, 0): "float32", (1, 0): "float32"}
    graph.ops[1] = Op(1, "sum", "AddV2", {"T": "float32"}, [(0, 0), (0, 0)], [1])
    return graph


@pytest.mark.parametrize(("times", "kernel"), [((9, 5, 4), "b"), ((9, 4, 5), "a"), ((3, 4, 5), None)])
def test_the_fastest_kernel_is_taken_where_it_beats_the_baseline(times, kernel):
    """Times of the baseline and of both kernels."""
    fusion, graph = doubling(), sums()
    baseline, first, second = times

    def milliseconds(lanes):
        (result,) = lanes[0]()
        assert torch.equal(result, torch.full((3,), 2.0))
        return took[id(lanes[0].run)]

    (found,) = fusion.find(graph)
    trial = fusion.trial(graph, found, CPU)
    runs = [trial.baseline[0].run, *(call.run for _, call in trial.candidates)]
    took = dict(zip(map(id, runs), (baseline, first, second), strict=True))
    with timed_by(milliseconds):
        assert fastest(Tuner(Device(CPU)), trial) == kernel


def test_a_fusion_is_its_value_and_its_line_in_the_pipeline():
    """Where nothing can be measured it says itself what is done; a decision that is given comes first."""
    context = Context({"x": np.ones(3, np.float32)}, CPU, 10)
    for more, given, taken in (
        ({}, None, False),
        ({"on_cpu": lambda graph, op: True}, None, True),
        ({"on_cpu": lambda graph, op: True}, (False, None), False),
        ({}, (True, "a"), True),
    ):
        fusion, graph = doubling(**more), sums()
        with deciding({} if given is None else {fusion: lambda graph, op, given=given: given}):
            run_passes(graph, context, Stage.LAID_OUT, pipeline=(Pass("double", fusion, Stage.LAID_OUT),))
        assert [op.op for op in graph.ops.values()] == ["Mul" if taken else "AddV2"]
        if given == (True, "a"):
            assert graph.ops[1].attrs["kernel"] == "a"


def test_copies_of_weights_are_shared_by_the_calls_that_have_them():
    data, weights, others = torch.ones(2), torch.ones(2), torch.zeros(2)
    ways = [Way(lambda data, own: (own.data_ptr(),), data, one) for one in (weights, weights, others)]
    trial = Trial(ways[:1], enumerate(ways[1:]), []).rotating()
    (baseline,), (same, other) = trial.baseline, (call for _, call in trial.candidates)
    places = [[call()[0] for _ in range(3)] for call in (baseline, same, other)]
    assert places[0] == places[1]
    assert len({*places[0], *places[2]}) == 6
