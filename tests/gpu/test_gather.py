"""Gathers on the device: rows out of range are zeros, as in TensorFlow on a GPU; the rows are those of the CPU; they can be captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node

pytestmark = pytest.mark.gpu

DTYPES = ["float32", "float16", "bfloat16", "int32", "int64", "bool", "uint8", "complex64"]
WRONG = np.array([0, -1, 5, 6, 3, 2**31 - 1, -(2**31)])


def _values(shape: tuple[int, ...], dtype: str = "float32") -> torch.Tensor:
    numbers = np.random.default_rng(0).integers(-100, 100, shape)
    return torch.from_numpy(numbers).to(getattr(torch, dtype))


def _gather(array: torch.Tensor, indices: torch.Tensor, axis: int, **attrs: Any) -> torch.Tensor:
    result = table()["GatherV2"].function(Node("node", "GatherV2", attrs), array, indices, np.int32(axis))
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 64), (2, 6, 5)], ids=str)
def test_a_wrong_index_gives_zeros(dtype: str, shape: tuple[int, ...]) -> None:
    axis = 1 if len(shape) == 3 else 0
    array = _values(shape, dtype)
    result = _gather(array.cuda(), to_torch(WRONG).cuda(), axis)
    inside = (WRONG >= 0) & (WRONG < 6)
    expected = np.take(to_numpy(array), np.where(inside, WRONG, 0), axis)
    expected[(slice(None),) * axis + (~inside,)] = 0
    np.testing.assert_array_equal(to_numpy(result), expected)


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_rows_are_those_of_the_cpu(batch_dims: int, axis: int, transposed: bool) -> None:
    array = _values((3, 40, 50))
    if transposed:
        array = array.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    indices = torch.from_numpy(np.random.default_rng(7).integers(0, 40, (3, 70)))
    expected = _gather(array, indices, axis, batch_dims=batch_dims)
    assert (_gather(array.cuda(), indices.cuda(), axis, batch_dims=batch_dims).cpu() == expected).all()


def test_a_gather_can_be_captured() -> None:
    array = _values((100, 16)).cuda()
    indices = torch.arange(50, device="cuda")
    _gather(array, indices, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _gather(array, indices, 0)
    indices.add_(60)
    graph.replay()
    torch.cuda.synchronize()
    assert (result[:40] == array[60:]).all()
    assert (result[40:] == 0).all()
