"""Calls of lowerings. GPUs are pretended: PyTorch's fake tensors have devices, and no values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from msplit.engines.cuda.ir.graph import Op
from msplit.engines.cuda.ir.interpret import LoweringCall
from msplit.engines.cuda.ir.lowering import table


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
        (result,) = LoweringCall(table()[name], op, bound)(*tensors)
    assert result.device.type == ("cuda" if "cuda" in devices else "cpu")
