"""Calls of lowerings. GPUs are pretended: PyTorch's fake tensors have devices, and no values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.interpret import LoweringCall
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes.tracing import Tracer


@pytest.mark.parametrize(
    ("name", "devices", "bound"),
    [
        ("ConcatV2", ["cpu", "cuda"], {2: np.int32(0)}),
        ("ConcatV2", ["cuda", "cpu"], {2: np.int32(0)}),
        ("Pack", ["cpu", "cuda", "cpu"], {}),
        ("AddV2", ["cpu", "cuda"], {}),
        ("ConcatV2", ["cpu", "cpu"], {2: np.int32(0)}),
    ],
)
def test_shapes_are_joined_with_what_is_on_the_gpu(name, devices, bound):
    """A shape that only the run knows is on the CPU. It was joined with a constant, which was on the GPU: PyTorch refused."""
    op = Op(5, "n", name, {}, [(number, 0) for number in range(len(devices) + len(bound))], [5])
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(2, dtype=torch.int32, device=device) for device in devices]
        (result,) = LoweringCall(table()[name], op, bound, mixed=len(set(devices)) > 1)(*tensors)
    assert result.device.type == ("cuda" if "cuda" in devices else "cpu")


def test_what_is_read_back_is_in_no_place():
    """A shape that only the run knows, of a Reshape or a Fill: the lowering gets it as an array."""
    op = Op(5, "n", "Fill", {}, [(0, 0), (1, 0)], [5])
    value = torch.ones((), dtype=torch.float32, device="meta")
    (result,) = LoweringCall(table()["Fill"], op, {}, unknown=(0,))(torch.tensor([2, 3]), value)
    assert (result.device.type, tuple(result.shape)) == ("meta", (2, 3))


def test_a_call_of_tensors_in_two_places_is_told_so():
    graph = OpGraph({}, {(2, 0): np.array([7], np.int32), (3, 0): np.int32(0)}, {"x": (1, 0)}, {"y": (4, 0)}, {})
    concat = Op(4, "n", "ConcatV2", {"N": 2}, [(1, 0), (2, 0), (3, 0)], [4])
    for there, mixed in (("cpu", False), ("meta", True)):
        tracer = Tracer(graph, torch.device("cpu"), nchw=False)
        tracer.values[1, 0] = torch.ones(2, dtype=torch.int32)
        tracer.constants[2, 0] = torch.ones(1, dtype=torch.int32, device=there)
        tracer.run(concat)
        call = tracer.steps[-1].call
        assert isinstance(call, LoweringCall)
        assert call.mixed == mixed
        assert tracer.values[4, 0].device.type == there


def test_a_damaged_build_may_say_of_a_step_on_the_cpu_that_it_has_inputs_on_both():
    """It raised StopIteration, which is no message."""
    op = Op(5, "n", "AddV2", {}, [(0, 0), (1, 0)], [5])
    one = torch.ones(2)
    (found,) = LoweringCall(table()["AddV2"], op, {}, mixed=True)(one, one)
    assert found.tolist() == [2, 2]
