"""Many values converted by one kernel. On a GPU, or with TRITON_INTERPRET=1."""

import os
from types import SimpleNamespace

import pytest
import torch

from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.kernels import optimizers
from msplit.engines.cuda.ops import cast
from msplit.engines.cuda.ops import optimizers as exchange

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def values():
    """Of whole vectors and not, of one element, of none, of many blocks, with numbers that half precision rounds or lacks."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((4, 6), (7,), (), (0, 3), (2, 1), (5, 1024), (3000,))
    found = [torch.randn(shape, generator=draw) for shape in shapes]
    found.append(torch.tensor([1e30, -1e30, torch.inf, torch.nan, 1e-42, 1.00390625, 1.01171875, -0.0]))
    return [one.to(DEVICE) for one in found]


BFLOAT16 = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cuts bits of bfloat16 off")
)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 4096])
def test_values_are_those_of_pytorch(dtype, blocks, monkeypatch):
    monkeypatch.setattr(optimizers, "_PROGRAMS", blocks)  # several steps of a program
    given = values()
    made = [torch.full_like(one, 7, dtype=dtype) for one in given]
    optimizers.convert(given, made)
    for one, result in zip(given, made, strict=True):
        torch.testing.assert_close(result, one.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_those_with_gaps_are_converted_too(monkeypatch):
    monkeypatch.setattr(cast, "can_launch", lambda place: True)
    given = [*values(), torch.arange(24.0, device=DEVICE).reshape(4, 6).T, torch.arange(8.0, device=DEVICE)[::4, None]]
    found = cast.cast_all(SimpleNamespace(attrs={"DstT": "float16"}), *given)
    for one, result in zip(given, found, strict=True):
        torch.testing.assert_close(result, one.half(), rtol=0, atol=0, equal_nan=True)


def test_values_are_packed_with_gaps_or_without(monkeypatch):
    monkeypatch.setattr(exchange, "can_launch", lambda place: True)
    given = [*values(), torch.arange(24.0, device=DEVICE).reshape(4, 6).T, torch.arange(9.0, device=DEVICE)[1:]]
    *made, token = exchange.all_reduce(
        Node("message", "_AllReduce", {"count": len(given), "message": 0, "ranks": 2}), *given
    )
    assert token.numel() == 0
    for one, result in zip(given * 2, made, strict=True):
        torch.testing.assert_close(result, one, rtol=0, atol=0, equal_nan=True)
    assert [one.data_ptr() for one in made[: len(given)]] == [one.data_ptr() for one in made[len(given) :]]


def test_nothing_is_converted_by_no_kernel():
    optimizers.convert([], [])
    optimizers.convert([torch.zeros(0, device=DEVICE)], [torch.zeros(0, device=DEVICE, dtype=torch.float16)])
