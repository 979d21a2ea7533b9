"""The kernels that convolve each channel by itself against PyTorch's: in Triton's interpreter, and on a GPU as it is chosen."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cuda.interpreted import run_interpreted

SCRIPT = """
import torch
import torch.nn.functional as F
from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels import channelwise as depthwise
from msplit.engines.cuda.kernels.activations import Epilogue, activate
from msplit.engines.cuda.kernels.mlp import Layers
from msplit.engines.cuda.kernels.tiles import Tiles

def frame(size, kernel, stride, dilation, before, after):
    outputs = (size + before + after - (kernel - 1) * dilation - 1) // stride + 1
    return Window(size, kernel, stride, dilation, before, after, outputs)

generator = torch.Generator().manual_seed(0)

def normal(*shape):
    return torch.randn(shape, generator=generator)

for images, height, width, channels, kernel, strides, dilations, before, after in [
    (1, 7, 7, 40, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (2, 9, 6, 33, (5, 3), (2, 1), (1, 2), (2, 0), (1, 3)),
    (1, 5, 8, 1, (2, 2), (1, 3), (2, 1), (0, 1), (2, 0)),
    (3, 1, 1, 70, (5, 5), (1, 1), (1, 1), (2, 2), (2, 2)),
    (2, 5, 10, 12, (5, 5), (2, 2), (1, 1), (1, 2), (2, 1)),
    (1, 4, 7, 16, (2, 1), (1, 3), (1, 1), (0, 0), (1, 2)),
]:
    frames = [frame((height, width)[i], kernel[i], strides[i], dilations[i], before[i], after[i]) for i in (0, 1)]
    wide, filter, bias = normal(images, height, width, channels + 3), normal(*kernel, channels, 1), normal(channels)
    first, second, shift = normal(channels, 6), normal(6, channels), normal(6)
    layers = Layers((first, second), (shift, None), ("Relu", "Sigmoid"))
    turned = filter.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    for data, weights, b, name in (
        (wide[..., :channels].contiguous(), filter, bias, "Relu"),
        (wide[..., :channels].contiguous(), filter, bias, "Relu6"),
        (wide[..., :channels].contiguous(), filter, bias, "Sigmoid"),
        (wide[..., 2 : channels + 2], turned, None, "Swish"),
        (wide[..., :channels].contiguous(), turned, bias, ""),
    ):
        padded = F.pad(data.movedim(-1, 1), (before[1], after[1], before[0], after[0]))
        wanted = F.conv2d(padded, weights.permute(2, 3, 0, 1), b, strides, 0, dilations, channels).movedim(1, -1)
        wanted = activate(name)(wanted) if name else wanted
        for tiles in (Tiles(4, 16, 1, 4, 1), Tiles(16, 32, 1, 4, 1), Tiles(16, 32, 1, 4, 1, across=4), Tiles(4, 64, 1, 1, 1, across=2)):
            if tiles.across > 1 and dilations[1] > 1:
                continue
            found = depthwise.convolve(data, weights, frames, tiles, Epilogue(b, activation=name))
            assert found.is_contiguous()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    squeezed = activate("Sigmoid")(torch.relu(wanted.mean((1, 2)) @ first + shift) @ second)
    found, factors = depthwise.convolve_and_squeeze(
        data, weights, frames, Tiles(16, 16, 32, 4, 1), Epilogue(b, activation=name), layers
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors, squeezed, rtol=1e-4, atol=1e-4)
    half = depthwise.convolve(data.half(), weights.half(), frames, Tiles(16, 32, 1, 4, 1), Epilogue(b.half()))
    torch.testing.assert_close(half.float(), wanted, rtol=1e-2, atol=2e-2)

data = normal(1, 6, 6, 16)
data[0, 3, 3, 5] = float("nan")
frames = [frame(6, 3, 1, 1, 1, 1)] * 2
found = depthwise.convolve(data, normal(3, 3, 16, 1), frames, Tiles(8, 32, 1, 4, 1), Epilogue(activation="Relu6"))
assert found[0, 2:5, 2:5, 5].isnan().all() and found.isnan().sum() == 9
"""


@pytest.mark.needs_triton
def test_the_kernels_convolve_like_pytorch_in_the_interpreter():
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "channels", "window", "stride"), [(14, 480, 5, 1), (57, 96, 3, 2), (7, 1152, 3, 1)])
def test_all_that_may_be_chosen_gives_the_library_s_numbers(size, channels, window, stride, dtype, monkeypatch):
    from msplit.engines.cuda.autotune import conv
    from msplit.engines.cuda.ir.graph import Op
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node

    attrs = {"strides": (1, stride, stride, 1), "padding": "SAME", "fused_ops": ("BiasAdd", "Relu6"), "num_args": 1}
    op = Op(0, "conv", "_FusedDepthwiseConv2dNative", attrs, [(1, 0), (2, 0), (3, 0)], [0])
    data = torch.randn(1, size, size, channels, device="cuda", dtype=dtype)
    bias = torch.randn(channels, device="cuda", dtype=dtype)
    filter = torch.randn(window, window, channels, 1, device="cuda", dtype=dtype)
    filter = filter.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)

    def lowered(op):
        return lambda *tensors: (table()[op.op].function(Node(op.name, op.op, op.attrs), *tensors),)

    (wanted,) = lowered(op)(data, filter, bias)
    close = {"rtol": 1e-2, "atol": 5e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    tried = list(conv.cuts(op, data, filter, [wanted]))
    assert tried
    for tiles in tried:
        for weights in (filter, filter.contiguous()):
            torch.testing.assert_close(lowered(conv._tiled(op, tiles))(data, weights, bias)[0], wanted, **close)
    chosen, weights = conv.choose(op, [data, filter, bias], lowered)
    torch.testing.assert_close(lowered(chosen)(data, weights, bias)[0], wanted, **close)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("images", "size", "channels", "hidden"), [(1, 14, 480, 20), (3, 57, 96, 4), (1, 112, 32, 8)])
def test_layers_behind_it_are_the_same_in_every_replay(images, size, channels, hidden, dtype):
    from msplit.engines.cuda.autotune import conv
    from msplit.engines.cuda.ir.windows import Window
    from msplit.engines.cuda.kernels import channelwise
    from msplit.engines.cuda.kernels.activations import Epilogue
    from msplit.engines.cuda.kernels.mlp import Layers

    chance = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=chance).to(dtype)

    data, filter, bias = normal(images, size, size, channels), normal(3, 3, channels, 1), normal(channels)
    matrices = normal(channels, hidden) / 8, normal(hidden, channels) / 4
    layers = Layers(matrices, (normal(hidden), normal(channels)), ("Swish", "Sigmoid"))
    frames = [Window(size, 3, 1, 1, 1, 1, size)] * 2
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    for tiles in conv.SQUEEZES:

        def run(tiles=tiles):
            return channelwise.convolve_and_squeeze(
                data, filter, frames, tiles, Epilogue(bias, activation="Swish"), layers
            )

        plain = channelwise.convolve(data, filter, frames, tiles, Epilogue(bias, activation="Swish"))
        first, factors = run()
        torch.testing.assert_close(first, plain, rtol=0, atol=0)
        wide = Layers(*(tuple(one.double() for one in part) for part in layers[:2]), layers.activations)
        torch.testing.assert_close(factors.double(), wide.of(plain.double().mean((1, 2))), **close)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            made = [run() for _ in range(10)]
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, first) and torch.equal(other, factors) for one, other in made)
