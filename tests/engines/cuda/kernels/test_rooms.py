"""Kernels that write a part of a larger tensor: the same numbers, and nothing else is touched. On a GPU, or with TRITON_INTERPRET=1."""

import os

import pytest
import torch

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import Epilogue

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
TILES = (16, 16, 16, 4, 2, 1)


def frame(size, kernel, stride, before, after):
    return Window(size, kernel, stride, 1, before, after, (size + before + after - kernel) // stride + 1)


FRAMES = frame(5, 3, 1, 1, 1), frame(4, 3, 1, 0, 2)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def whole(dtype=torch.float32):
    return torch.full((2, 5, 4, 40), 7.0, device=DEVICE, dtype=dtype)


def rest_is_untouched(tensor, start, size):
    return bool((tensor[..., :start] == 7).all() and (tensor[..., start + size :] == 7).all())


@pytest.fixture(autouse=True)
def ieee(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("start", [8, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_convolution_with_bias_and_sum(start, dtype):
    from msplit.engines.cuda.kernels import conv

    data = normal(2, 5, 4, 24, dtype=dtype).narrow(3, 8, 16)
    filter, bias, side = normal(3, 3, 16, 8, dtype=dtype), normal(8, dtype=dtype), normal(2, 5, 4, 8, dtype=dtype)
    behind = Epilogue(bias, side, "Relu")
    alone = conv.convolve(data, filter, FRAMES, TILES, behind)
    tensor = whole(dtype)
    room = tensor.narrow(3, start, 8)
    assert conv.fits_in(room)
    assert conv.convolve(data, filter, FRAMES, TILES, behind, room=room) is room
    torch.testing.assert_close(room, alone, rtol=0, atol=0)
    assert rest_is_untouched(tensor, start, 8)


def test_what_is_not_aligned_or_has_no_even_pixels_is_no_room():
    from msplit.engines.cuda.kernels import conv

    assert not conv.fits_in(whole().narrow(3, 3, 8))
    assert not conv.fits_in(whole().narrow(1, 1, 2))
    assert conv.fits_in(whole().narrow(0, 1, 1))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_of_siblings(which):
    from msplit.engines.cuda.kernels import conv

    data, sizes = normal(2, 5, 4, 16), (8, 16, 4)
    filter, bias = normal(3, 3, 16, 28), normal(28)
    alone = conv.convolve_siblings(data, filter, FRAMES, TILES, sizes, Epilogue(bias))
    tensor = whole()
    room = tensor.narrow(3, 8, sizes[which])
    found = conv.convolve_siblings(data, filter, FRAMES, TILES, sizes, Epilogue(bias), rooms={which: room})
    assert found[which] is room
    for mine, other in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    assert rest_is_untouched(tensor, 8, sizes[which])


@pytest.mark.parametrize("mean", [False, True])
def test_a_pool(mean):
    from msplit.engines.cuda.kernels import channelwise

    data = normal(2, 5, 4, 24).narrow(3, 4, 16)
    expected = channelwise.pool(data.contiguous(), FRAMES, mean=mean)
    tensor = whole()
    room = tensor.narrow(3, 5, 16)
    assert channelwise.fits_in(room)
    assert channelwise.pool(data, FRAMES, room, mean=mean) is room
    torch.testing.assert_close(room, expected, rtol=0, atol=0)
    assert rest_is_untouched(tensor, 5, 16)


@pytest.mark.parametrize("name", ["Relu", "Relu6", "Sigmoid", "Swish"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations(name, dtype):
    from msplit.engines.cuda.kernels import conv
    from msplit.engines.cuda.kernels.activations import activate

    data, filter, bias = normal(2, 5, 4, 16, dtype=dtype), normal(3, 3, 16, 8, dtype=dtype), normal(8, dtype=dtype)
    plain = conv.convolve(data, filter, FRAMES, TILES, Epilogue(bias))
    found = conv.convolve(data, filter, FRAMES, TILES, Epilogue(bias, activation=name))
    near = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, activate(name)(plain), rtol=near, atol=near)
