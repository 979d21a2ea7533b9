"""Our own convolution kernel against PyTorch's, in IEEE precision."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels.activations import Epilogue

pytestmark = pytest.mark.gpu


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="kernels start early from compute capability 9.0 on",
)


def frame(size, kernel, stride, dilation, before, after):
    outputs = (size + before + after - (kernel - 1) * dilation - 1) // stride + 1
    return Window(size, kernel, stride, dilation, before, after, outputs)


def expected(data, filter, frames, bias, side, relu):
    vertical, horizontal = frames
    padded = F.pad(data.movedim(-1, 1).double(), (horizontal.before, horizontal.after, vertical.before, vertical.after))
    result = F.conv2d(
        padded,
        filter.permute(3, 2, 0, 1).double(),
        None,
        (vertical.stride, horizontal.stride),
        0,
        (vertical.dilation, horizontal.dilation),
    ).movedim(1, -1)
    result = result + (0 if bias is None else bias.double()) + (0 if side is None else side.double())
    return result.relu() if relu else result


CASES = [
    # images, height, width, channels, results, kernel, stride, dilation, padding before and after
    (1, 14, 14, 480, 64, (1, 1), (1, 1), (1, 1), (0, 0), (0, 0)),
    (1, 28, 28, 24, 65, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1)),
    (2, 15, 9, 33, 7, (3, 5), (2, 1), (1, 2), (0, 3), (1, 2)),
    (1, 30, 31, 3, 40, (7, 7), (2, 2), (1, 1), (2, 3), (3, 3)),
    (3, 5, 5, 1, 1, (2, 2), (1, 3), (2, 1), (1, 0), (0, 1)),
    (1, 17, 17, 64, 80, (1, 7), (1, 1), (1, 1), (0, 3), (0, 3)),
    (2, 12, 13, 128, 32, (3, 2), (1, 2), (2, 3), (2, 1), (1, 2)),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "tiles",
    [
        (16, 32, 64, 4, 3),
        (32, 32, 32, 4, 4),
        (32, 32, 32, 4, 4, 4),
        (64, 64, 64, 4, 4, 2),
        (64, 32, 64, 4, 3, 4),
        (64, 64, 32, 4, 3),
        pytest.param((32, 32, 64, 4, 3, 4, False, True), marks=needs_hopper),
        pytest.param((64, 64, 64, 4, 4, 1, False, True), marks=needs_hopper),
    ],
)
def test_it_convolves_like_pytorch(case, tiles, monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    images, height, width, channels, results, kernel, strides, dilations, before, after = case
    torch.manual_seed(0)
    wide = torch.randn(images, height, width, channels + 5, device="cuda")
    filter = torch.randn(*kernel, channels, results, device="cuda")
    frames = tuple(
        frame((height, width)[axis], kernel[axis], strides[axis], dilations[axis], before[axis], after[axis])
        for axis in (0, 1)
    )
    shape = (images, frames[0].outputs, frames[1].outputs, results)
    bias, side = torch.randn(results, device="cuda"), torch.randn(shape, device="cuda")
    turned = filter.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for data, weights, b, s, relu in (  # few, as each is compiled, and products in IEEE precision take long to
        (wide[..., :channels].contiguous(), filter, bias, None, True),
        (wide[..., 2 : channels + 2], turned, bias, side, True),
        (wide[..., :channels].contiguous(), turned, None, side, False),
    ):
        assert conv.fits(data, weights, frames)
        found = conv.convolve(data, weights, frames, tiles, Epilogue(b, s, "Relu" if relu else ""))
        wanted = expected(data, weights, frames, b, s, relu)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_half_precision_and_what_is_not_a_number():
    from msplit.engines.cuda.kernels import conv

    tiles = (16, 32, 64, 4, 3, 1)
    frames = (frame(8, 3, 1, 1, 1, 1), frame(8, 3, 1, 1, 1, 1))
    data = torch.randn(1, 8, 8, 32, device="cuda", dtype=torch.float16)
    filter = torch.randn(3, 3, 32, 16, device="cuda", dtype=torch.float16) / 16
    found = conv.convolve(data, filter, frames, tiles, Epilogue(activation="Relu"))
    torch.testing.assert_close(found.double(), expected(data, filter, frames, None, None, True), rtol=2e-3, atol=2e-3)
    data[0, 4, 4, 0] = float("nan")
    found = conv.convolve(data, filter, frames, tiles, Epilogue(activation="Relu"))
    assert found[0, 3:6, 3:6].isnan().all()
    assert found.isnan().sum() == 9 * 16


@pytest.mark.parametrize("sizes", [(40,), (48, 64, 16), (24, 7), (5, 33, 32, 64), (192, 128, 128)])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3)])
@pytest.mark.parametrize(
    "tiles", [(32, 32, 64, 4, 3, 1), (16, 32, 64, 4, 3, 3), (64, 64, 64, 4, 4, 1), (64, 64, 64, 4, 4, 2)]
)
def test_siblings_are_convolved_like_each_alone(sizes, kernel, tiles, monkeypatch):
    from msplit.engines.cuda.kernels import conv

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(0)
    pad = kernel[0] // 2
    frames = (frame(9, kernel[0], 1, 1, pad, pad), frame(7, kernel[1], 1, 1, pad, pad))
    data = torch.randn(2, 9, 7, 192, device="cuda")
    filter = torch.randn(*kernel, 192, sum(sizes), device="cuda")
    filter = filter.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for bias, relu in ((torch.randn(sum(sizes), device="cuda"), True), (None, False)):
        found = conv.convolve_siblings(
            data, filter, frames, tiles, sizes, Epilogue(bias, activation="Relu" if relu else "")
        )
        wanted = expected(data, filter, frames, bias, None, relu).split(sizes, 3)
        for one, other in zip(found, wanted, strict=True):
            assert one.is_contiguous()
            # In TF32, whose operands have 11 bits.
            torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=3e-3 * float(other.abs().max()))


def test_siblings_in_half_precision_and_what_is_not_a_number():
    from msplit.engines.cuda.kernels import conv

    frames = (frame(8, 1, 1, 1, 0, 0), frame(8, 1, 1, 1, 0, 0))
    data = torch.randn(1, 8, 8, 256, device="cuda", dtype=torch.float16)
    filter = torch.randn(1, 1, 256, 80, device="cuda", dtype=torch.float16) / 16
    filter = filter.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    data[0, 4, 4, 0] = float("nan")
    for tiles in ((16, 32, 64, 4, 3, 2), (64, 64, 64, 4, 4)):
        found = conv.convolve_siblings(data, filter, frames, tiles, (48, 32), Epilogue(activation="Relu"))
        wanted = expected(data, filter, frames, None, None, True).split((48, 32), 3)
        for one, other in zip(found, wanted, strict=True):
            assert one[0, 4, 4].isnan().all()
            assert one.isnan().sum() == one.shape[-1]
            torch.testing.assert_close(one.double(), other, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_shared_sums_are_the_same_in_every_replay_and_side_by_side():
    """The block that is done last adds up all parts in one order; counters are back at zero for the next run."""
    from msplit.engines.cuda.device.device import Device
    from msplit.engines.cuda.kernels import conv

    frames = (frame(17, 3, 1, 1, 1, 1), frame(17, 3, 1, 1, 1, 1))
    data = torch.randn(1, 17, 17, 192, device="cuda")
    filter = torch.randn(3, 3, 192, 64, device="cuda").permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    tiles = (32, 32, 64, 4, 3, 8)
    first = conv.convolve(data, filter, frames, tiles)
    streams = [torch.cuda.Stream() for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=streams[0]):
        made = []
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for stream in streams:
            with torch.cuda.stream(stream):
                made += [conv.convolve(data, filter, frames, tiles) for _ in range(5)]
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
    for _ in range(50):
        for one in made:
            one.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, first) for one in made)
    assert not Device.of(data.device).semaphores.supply.any()


@needs_hopper
@pytest.mark.parametrize("parts", [1, 4])
def test_early_kernels_wait_for_what_is_in_front_on_their_stream_and_on_others(parts):
    """Chains in which each convolution reads what the one before has just written, in memory that is used again and again; streams fork
    behind the first, wait for each other in the middle, between kernels of the library, and join."""
    from msplit.engines.cuda.kernels import conv

    frames = (frame(17, 3, 1, 1, 1, 1), frame(17, 3, 1, 1, 1, 1))
    data = torch.randn(1, 17, 17, 96, device="cuda")
    filters = torch.randn(6, 3, 3, 96, 96, device="cuda") / 30
    filters = filters.permute(0, 4, 1, 2, 3).contiguous().permute(0, 2, 3, 4, 1)
    streams = [torch.cuda.Stream() for _ in range(4)]

    def run(early):
        tiles = (32, 32, 64, 4, 3, parts, False, early)

        def step(value, number):
            return conv.convolve(value, filters[number % 6], frames, tiles, Epilogue(activation="Relu"))

        first = step(data, 0)
        values = [first + one for one in range(len(streams))]
        kept = list(values)  # what other streams read than those that made it
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        for number in range(12):
            for place, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    values[place] = step(values[place], number + place)
                    if number == 5:  # a kernel that knows nothing of it, behind one that does
                        values[place] = values[place] * 2
            if number % 4 == 3:
                kept.append(values[0])
                streams[1].wait_stream(streams[0])
                with torch.cuda.stream(streams[1]):
                    values[1] = step(values[0], number) + values[1]
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        return values

    with torch.cuda.stream(streams[0]):
        expected = run(False)
        run(True)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]):
        found = run(True)
    for _ in range(200):
        for one in found:
            one.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


def test_siblings_are_decided_by_measurement_in_tf32_only(monkeypatch):
    from msplit.engines.cuda.autotune.tuner import Tuner
    from msplit.engines.cuda.device.device import precision
    from msplit.engines.cuda.passes.convolution.concat_into import FAMILY, SIBLING_CONVOLUTIONS
    from tests.engines.cuda.passes.convolution.test_merge_convolutions import block, source_of

    graph = block()
    x = graph.placeholder("x", [1, 17, 17, 256])
    flat = graph.finish([graph.conv(x, 256, size) for size in (48, 64, 96)])
    source = source_of(flat, {"x": torch.randn(1, 17, 17, 256).numpy()})
    decide = functools.partial(SIBLING_CONVOLUTIONS.decide, device=torch.device("cuda"))
    (members,) = SIBLING_CONVOLUTIONS.find(source)
    with precision(True):
        assert decide(source, members) == (False, None)
    measured = Tuner.of(torch.device("cuda")).chosen(FAMILY)
    count = len(measured)
    with precision(False):
        takes, tiles = decide(source, members)
        assert decide(source, members) == (takes, tiles)
    assert len(measured) == count + 1
    times = next(reversed(measured.values()))
    assert times is not None
    assert takes == (tiles is not None) == times.wins()
    assert 0 < times.merged < times.one_by_one_loaded


def test_a_slow_library_loses_and_the_numbers_stay():
    """A convolution of few channels, whose cuDNN kernel takes three times as long, through the whole of the choice."""
    from msplit.engines.cuda.autotune import conv
    from msplit.engines.cuda.device.device import precision
    from msplit.engines.cuda.ir.graph import Op
    from msplit.engines.cuda.ir.lowering import table
    from msplit.engines.cuda.ir.node import Node

    attrs = {"strides": (1, 1, 1, 1), "padding": "SAME", "fused_ops": ("BiasAdd", "Relu"), "num_args": 1}
    op = Op(0, "conv", "_FusedConv2D", attrs, [(1, 0), (2, 0), (3, 0)], [0])
    data, bias = torch.randn(1, 14, 14, 24, device="cuda"), torch.randn(64, device="cuda")
    filter = torch.randn(3, 3, 24, 64, device="cuda").permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)

    def lowered(op):
        return lambda *tensors: (table()[op.op].function(Node(op.name, op.op, op.attrs), *tensors),)

    with precision(ieee=False):
        chosen, weights = conv.choose(op, [data, filter, bias], lowered)
        found, wanted = lowered(chosen)(data, weights, bias)[0], lowered(op)(data, filter, bias)[0]
    assert weights.is_contiguous() == chosen.attrs["_tiles"].turned
    assert weights.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=5e-2)
