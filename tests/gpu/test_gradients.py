"""Pools, convolutions, normalizations and their gradients on a real GPU: as on the CPU, in both memory layouts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.ir.interpret import as_tuple
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WINDOWS = [*itertools.product((1, 2, 3, 5), (1, 2, 3), ("SAME", "VALID"))]


def run_lowering(
    op: str, inputs: list[Any], attrs: dict[str, Any], *, nchw: bool = False, device: str
) -> tuple[torch.Tensor, ...]:
    lowering = table()[op]
    given = [one if slot in lowering.static else torch.from_numpy(one).to(device) for slot, one in enumerate(inputs)]
    return as_tuple(lowering.function(Node("node", op, attrs, nchw), *given))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_as_on_the_cpu(op: str, inputs: list[Any], attrs: dict[str, Any]) -> None:
    """In float64 on the CPU, that is, and in both layouts on the device."""
    wide = [one.astype(np.float64) if one.dtype == np.float32 else one for one in inputs]
    expected = run_lowering(op, wide, attrs, device="cpu")
    for nchw in (False, True):
        with precision(ieee=True):
            found = run_lowering(op, inputs, attrs, nchw=nchw, device=DEVICE)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            off = one.detach().cpu().double() - other.double()
            scale = float(other.double().square().mean().sqrt()) if other.numel() else 0.0
            worst = float(off.abs().max()) if off.numel() else 0.0
            assert worst <= 1e-4 * scale + 1e-12, f"{op} {attrs}, nchw {nchw}, output {number}: {worst} of {scale}"


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
def test_windows(kernel: int, stride: int, padding: str) -> None:
    size = (17, 12)
    data, sizes = normal(3, *size, 24), np.array([3, *size, 24], np.int32)
    pool = {"ksize": (1, kernel, kernel, 1), "strides": (1, stride, stride, 1), "padding": padding}
    slid = {"strides": (1, stride, stride, 1), "padding": padding}
    filter = normal(kernel, kernel, 24, 8, seed=1)
    each = normal(kernel, kernel, 24, 1, seed=2)
    (largest,) = run_lowering("MaxPool", [data], pool, device="cpu")
    gradients = normal(*largest.shape, seed=3)
    narrow = np.ascontiguousarray(gradients[..., :8])
    for op, inputs, attrs in [
        ("MaxPool", [data], pool),
        ("AvgPool", [data], pool),
        ("MaxPoolGrad", [data, largest.numpy(), gradients], pool),
        ("AvgPoolGrad", [sizes, gradients], pool),
        ("Conv2D", [data, filter], slid),
        ("Conv2DBackpropInput", [sizes, filter, narrow], slid),
        ("Conv2DBackpropFilter", [data, np.array(filter.shape, np.int32), narrow], slid),
        ("DepthwiseConv2dNative", [data, each], slid),
        ("DepthwiseConv2dNativeBackpropInput", [sizes, each, gradients], slid),
        ("DepthwiseConv2dNativeBackpropFilter", [data, np.array(each.shape, np.int32), gradients], slid),
    ]:
        assert_as_on_the_cpu(op, inputs, attrs)


@pytest.mark.parametrize("channels", [1, 3, 32, 129])
def test_normalization(channels: int) -> None:
    data, gradients = normal(4, 9, 7, channels), normal(4, 9, 7, channels, seed=1)
    scale, offset = normal(channels, seed=2), normal(channels, seed=3)
    mean, variance = data.mean((0, 1, 2)), data.var((0, 1, 2))
    trains = {"is_training": True, "epsilon": 1e-3}
    empty = np.zeros(0, np.float32)
    assert_as_on_the_cpu("BiasAddGrad", [gradients], {})
    inputs = [gradients, data, scale, mean, variance, empty]
    for attrs in (trains, {**trains, "is_training": False}):
        assert_as_on_the_cpu("FusedBatchNormGradV3", inputs, attrs)
    factor = run_lowering("FusedBatchNormV3", [data, scale, offset, empty, empty], trains, device="cpu")
    with precision(ieee=True):
        for nchw in (False, True):
            found = run_lowering(
                "FusedBatchNormV3", [data, scale, offset, empty, empty], trains, nchw=nchw, device=DEVICE
            )
            for one, other in zip(found[:3], factor[:3], strict=True):
                torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)
