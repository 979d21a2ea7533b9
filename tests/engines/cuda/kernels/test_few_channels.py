"""Convolutions of images with few channels against PyTorch's, in IEEE precision. On a GPU, or with TRITON_INTERPRET=1."""

import os

import pytest
import torch
import torch.nn.functional as F

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import Epilogue
from msplit.engines.cuda.kernels.tiles import Tiles, shares

pytestmark = [pytest.mark.gpu, pytest.mark.interpretable]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def frame(size, kernel, stride, dilation, before, after):
    outputs = (size + before + after - (kernel - 1) * dilation - 1) // stride + 1
    return Window(size, kernel, stride, dilation, before, after, outputs)


def frames_of(sizes, kernel, strides, dilations, before, after):
    return tuple(frame(sizes[i], kernel[i], strides[i], dilations[i], before[i], after[i]) for i in (0, 1))


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def expected(data, filter, frames, bias=None, side=None, *, relu=False):
    """In double precision."""
    vertical, horizontal = frames
    padded = F.pad(data.movedim(-1, 1).double(), (horizontal.before, horizontal.after, vertical.before, vertical.after))
    strides, dilations = (vertical.stride, horizontal.stride), (vertical.dilation, horizontal.dilation)
    result = F.conv2d(padded, filter.permute(3, 2, 0, 1).double(), None, strides, 0, dilations).movedim(1, -1)
    result = result + (0 if bias is None else bias.double()) + (0 if side is None else side.double())
    return result.relu() if relu else result


def turned(filter):
    """The same with its input channels side by side, as the library wants it to lie."""
    return filter.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


CASES = [
    # images, height, width, channels, results, kernel, stride, dilation, padding before and after
    (1, 20, 22, 3, 32, (3, 3), (2, 2), (1, 1), (0, 0), (1, 1)),
    (2, 15, 17, 3, 40, (7, 7), (2, 2), (1, 1), (2, 3), (3, 3)),
    (2, 19, 37, 3, 33, (3, 3), (2, 2), (1, 1), (0, 0), (0, 0)),
    (3, 5, 5, 1, 1, (2, 2), (1, 3), (2, 1), (1, 0), (0, 1)),
    (1, 9, 40, 2, 17, (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    (1, 12, 11, 4, 20, (3, 5), (1, 2), (1, 1), (1, 2), (0, 2)),
    (1, 11, 14, 7, 70, (3, 2), (3, 1), (1, 3), (2, 3), (2, 0)),
    (2, 10, 9, 8, 16, (4, 4), (4, 4), (1, 1), (1, 1), (1, 2)),
    (1, 8, 13, 12, 10, (3, 3), (1, 1), (2, 2), (2, 2), (2, 2)),
    (1, 7, 6, 15, 5, (5, 3), (2, 2), (1, 1), (4, 0), (0, 2)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(32, 64, 32, 1, 1),
        Tiles(64, 32, 16, 4, 1),
        Tiles(128, 64, 64, 4, 1),
        pytest.param(
            Tiles(64, 64, 32, 2, 1, early=True),
            marks=pytest.mark.skipif(
                not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
                reason="kernels start early from compute capability 9.0 on",
            ),
        ),
    ],
)
def test_it_convolves_like_pytorch(case, tiles, monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images, height, width, channels, results, kernel, *_ = case
    frames = frames_of((height, width), *case[5:])
    wide, filter, bias = (
        normal(images, height, width, channels + 5),
        normal(*kernel, channels, results),
        normal(results),
    )
    shape = (images, frames[0].outputs, frames[1].outputs, results)
    side = normal(*shape)
    whole, narrowed = wide[..., :channels].contiguous(), wide[..., 2 : channels + 2]
    for data, weights, b, s, relu in (
        (whole, filter, bias, None, True),
        (narrowed, turned(filter), bias, side, True),
        (whole, turned(filter), None, side, False),
    ):
        assert data.device.type == "cpu" or conv.fits(data, weights, frames)
        found = conv.convolve(data, weights, frames, tiles, Epilogue(b, s, "Relu" if relu else ""))
        assert found.is_contiguous()
        wanted = expected(data, weights, frames, b, s, relu=relu)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter multiplies the bits of bfloat16"),
        ),
    ],
)
def test_half_precision_is_rounded_once(dtype):
    from msplit.engines.cuda.kernels import conv

    frames = frames_of((21, 35), (3, 3), (2, 2), (1, 1), (0, 1), (1, 1))
    data, filter, bias = (one.to(dtype) for one in (normal(2, 21, 35, 3), normal(3, 3, 3, 24), normal(24)))
    wanted = expected(data, filter, frames, bias, relu=True)
    for tiles in (Tiles(64, 32, 32, 4, 1), Tiles(32, 32, 16, 1, 1)):
        found = conv.convolve(data, filter, frames, tiles, Epilogue(bias, activation="Relu"))
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("source", [torch.float32, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 8])
def test_it_converts_what_it_loads(source, dtype, channels, monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    frames = frames_of((13, 21), (3, 3), (2, 2), (1, 1), (0, 1), (1, 1))
    data = (normal(2, 13, 21, channels) * 40 + 100).to(source)
    filter, bias = normal(3, 3, channels, 24).to(dtype), normal(24).to(dtype)
    assert DEVICE == "cpu" or conv.fits(data, filter, frames)
    found = conv.convolve(data, filter, frames, Tiles(64, 32, 32, 4, 1), Epilogue(bias))
    assert found.dtype == dtype
    assert torch.equal(found, conv.convolve(data.to(dtype), filter, frames, Tiles(64, 32, 32, 4, 1), Epilogue(bias)))
    wanted = expected(data.to(dtype), filter, frames, bias)
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_what_is_not_a_number_spreads_over_its_windows_only():
    from msplit.engines.cuda.kernels import conv

    data = normal(1, 9, 9, 3)
    data[0, 4, 4, 1] = float("nan")
    data[0, 0, 8, 2] = float("inf")  # next to padding and to summands that there are not, both times zero
    frames = frames_of((9, 9), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    found = conv.convolve(data, torch.ones(3, 3, 3, 20, device=DEVICE), frames, Tiles(64, 32, 32, 4, 1))
    assert found[0, 3:6, 3:6].isnan().all()
    assert found.isnan().sum() == 9 * 20
    assert found[0, :2, 7:].isinf().all()
    assert found.isinf().sum() == 4 * 20


def test_it_writes_a_part_of_a_larger_tensor():
    from msplit.engines.cuda.kernels import conv

    frames = frames_of((8, 8), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1))
    data, filter, bias = normal(2, 8, 8, 3), normal(3, 3, 3, 16), normal(16)
    whole = torch.full((2, 8, 8, 48), 7.0, device=DEVICE)
    room = whole[..., 16:32]
    assert conv.fits_in(room)
    alone = conv.convolve(data, filter, frames, Tiles(32, 32, 32, 1, 1), Epilogue(bias))
    assert conv.convolve(data, filter, frames, Tiles(32, 32, 32, 1, 1), Epilogue(bias), room=room) is room
    assert torch.equal(room, alone)
    assert (whole[..., :16] == 7).all()
    assert (whole[..., 32:] == 7).all()


def test_prologues_and_shared_sums_of_few_channels_are_the_other_kernel_s(monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    frames = frames_of((6, 7), (3, 3), (1, 2), (1, 1), (1, 0), (1, 1))
    data, filter = normal(1, 6, 7, 5), normal(3, 3, 5, 12)
    found = conv.convolve(data, filter, frames, Tiles(16, 16, 16, 4, 1), prologue=conv.Prologue(relu=True))
    torch.testing.assert_close(found.double(), expected(data.relu(), filter, frames), rtol=1e-5, atol=1e-5)
    found = conv.convolve(data, filter, frames, Tiles(16, 16, 16, 4, 1, parts=3))
    torch.testing.assert_close(found.double(), expected(data, filter, frames), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no library to choose from")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("images", "size", "channels", "results", "window", "padding"),
    [(1, 224, 3, 32, 3, "SAME"), (2, 224, 3, 64, 7, "SAME"), (3, 299, 3, 32, 3, "VALID"), (1, 65, 1, 100, 5, "SAME")],
)
def test_all_that_may_be_chosen_gives_the_library_s_numbers(
    images, size, channels, results, window, padding, dtype, monkeypatch
):
    from msplit.engines.cuda.autotune import conv
    from msplit.engines.cuda.ir.graph import Op
    from msplit.engines.cuda.passes.convolution.concat_into import lowered

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    attrs = {"strides": (1, 2, 2, 1), "padding": padding, "fused_ops": ("BiasAdd", "Relu"), "num_args": 1}
    op = Op(0, "conv", "_FusedConv2D", attrs, [(1, 0), (2, 0), (3, 0)], [0])
    data, filter = normal(images, size, size, channels).to(dtype), normal(window, window, channels, results).to(dtype)
    bias, filter = normal(results).to(dtype), turned(filter)
    (wanted,) = lowered(op)(data.double(), filter.double(), bias.double())
    tried = list(conv.cuts(op, data, filter, [wanted]))
    assert len(tried) >= 5
    most = 1e-2 if dtype == torch.bfloat16 else 2e-3
    for tiles in tried:
        for weights in (filter, filter.contiguous()):
            found = lowered(conv._tiled(op, tiles))(data, weights, bias)[0]
            assert float((found - wanted).abs().max()) < most * float(wanted.abs().max())
    chosen, weights = conv.choose(op, [data, filter, bias], lowered)
    found = lowered(chosen)(data, weights, bias)[0]
    assert float((found - wanted).abs().max()) < most * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("pixels", "rows", "columns", "width"),
    [(64, 112, 112, 16), (64, 149, 149, 32), (128, 112, 112, 16), (256, 5, 4, 4), (32, 1, 1, 1), (32, 1, 500, 32)],
)
def test_tiles_leave_few_pixels_over(pixels, rows, columns, width):
    from msplit.engines.cuda.kernels import conv as few_channels

    assert few_channels._columns(pixels, rows, columns) == width


def test_tiles_are_no_larger_than_the_filter():
    from msplit.engines.cuda.kernels import conv as few_channels

    given = [Tiles(64, 64, 32, 4, 1), Tiles(64, 64, 64, 4, 1), Tiles(128, 64, 64, 4, 1)]
    assert few_channels.tiles_for(torch.empty(7, 7, 3, 64), given) == given
    assert few_channels.tiles_for(torch.empty(3, 3, 3, 20), given) == [
        Tiles(64, 32, 32, 4, 1),
        Tiles(128, 32, 32, 4, 1),
    ]
    assert {one[1:3] for one in few_channels.tiles_for(torch.empty(1, 1, 1, 3), given)} == {(16, 16)}
    assert all(shares(500, one.results) == 8 for one in few_channels.tiles_for(torch.empty(7, 7, 3, 500), given))
