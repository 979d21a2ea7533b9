"""The pools of our own equal PyTorch's, for every padding, on a GPU."""

from __future__ import annotations

import pytest
import torch

from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.conv import average_pool, max_pool

gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("window", "stride"), [((3, 3), (2, 2)), ((3, 3), (1, 1)), ((2, 3), (2, 1)), ((7, 1), (3, 1))])
@pytest.mark.parametrize("shape", [(1, 28, 28, 192), (2, 7, 9, 5), (3, 8, 8, 1), (1, 112, 112, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_equals_the_pool_of_nchw_data(padding, window, stride, shape, dtype):
    data = torch.randn(shape, device="cuda").to(dtype)
    data[0, 1, 2, 0] = float("nan")
    data[0, 3, 3, 0] = float("-inf")
    attrs = {"ksize": (1, *window, 1), "strides": (1, *stride, 1), "padding": padding, "data_format": "NHWC"}
    ours = max_pool(Node("pool", "MaxPool", attrs), data)
    theirs = max_pool(Node("pool", "MaxPool", attrs, nchw=True), data)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs.contiguous(), rtol=0, atol=0, equal_nan=True)


@gpu
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("window", "stride"), [((3, 3), (2, 2)), ((3, 3), (1, 1)), ((2, 3), (2, 1)), ((5, 1), (3, 1))])
@pytest.mark.parametrize("shape", [(1, 28, 28, 192), (2, 7, 9, 5), (3, 8, 8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_averages_equal_those_of_nchw_data(padding, window, stride, shape, dtype):
    data = torch.randn(shape, device="cuda").to(dtype)
    data[0, 1, 2, 0] = float("nan")
    data[0, 3, 3, 0] = float("inf")
    attrs = {"ksize": (1, *window, 1), "strides": (1, *stride, 1), "padding": padding, "data_format": "NHWC"}
    ours = average_pool(Node("pool", "AvgPool", attrs), data)
    theirs = average_pool(Node("pool", "AvgPool", attrs, nchw=True), data)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs.contiguous(), equal_nan=True)
