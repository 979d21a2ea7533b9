"""A convolution that scales, shifts and cuts off its data as it loads them. On a GPU, or with TRITON_INTERPRET=1."""

import os

import pytest
import torch

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import Epilogue

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def frame(size, kernel, stride, before, after):
    return Window(size, kernel, stride, 1, before, after, (size + before + after - kernel) // stride + 1)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


@pytest.mark.parametrize("tiles", [(16, 16, 16, 4, 2, 1), (32, 32, 64, 4, 3, 1)])
@pytest.mark.parametrize(("images", "channels", "kernel"), [(1, 24, 1), (2, 33, 1), (2, 20, 3), (3, 5, 3)])
@pytest.mark.parametrize("steps", ["scale shift relu", "own scale", "relu", "shift", "own scale shift relu"])
def test_it_gives_what_the_steps_give_one_by_one(tiles, images, channels, kernel, steps, monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    frames = (frame(5, kernel, 1, kernel // 2, kernel // 2), frame(4, kernel, 2, 0, kernel - 1))
    data = normal(images, 5, 4, channels + 8).narrow(3, 4, channels)
    filter, bias = normal(kernel, kernel, channels, 12), normal(12)
    scale = normal(images, 1, 1, channels) if "own" in steps else normal(channels) if "scale" in steps else None
    shift = normal(channels) + 1 if "shift" in steps else None
    first = data if scale is None else data * scale
    first = first if shift is None else first + shift
    first = first.relu() if "relu" in steps else first
    expected = conv.convolve(first, filter, frames, tiles, Epilogue(bias, activation="Relu"))
    prologue = conv.Prologue(scale, shift, "relu" in steps)
    found = conv.convolve(data, filter, frames, tiles, Epilogue(bias, activation="Relu"), prologue=prologue)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_none():
    from msplit.engines.cuda.kernels import conv

    data = normal(1, 4, 4, 16)
    data[0, 1, 1, 3] = float("nan")
    frames = (frame(4, 1, 1, 0, 0), frame(4, 1, 1, 0, 0))
    found = conv.convolve(data, normal(1, 1, 16, 8), frames, (16, 16, 16, 4, 2, 1), prologue=conv.Prologue(relu=True))
    assert found.isnan().sum() == 8
