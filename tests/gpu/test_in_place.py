"""Kernels that write their result into channels of a larger tensor, and blocks that end in one without a concatenation."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda import engine, in_place
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.executable import Torture
from msplit.measure.verify import compare
from tests.engines.cuda.cases import job, run, scattered
from tests.engines.cuda.test_conv_kernel import expected, frame
from tests.engines.cuda.test_in_place import inception, joined, pooled, wholes
from tests.engines.cuda.test_siblings import block, data

pytestmark = pytest.mark.gpu


def whole(images, height, width, channels):
    return torch.full((images, height, width, channels), float("nan"), device="cuda")


@pytest.mark.parametrize("tiles", [(16, 32, 64, 4, 3), (64, 64, 64, 4, 4, 2)])
@pytest.mark.parametrize(("sizes", "place"), [((24,), 0), ((48, 64, 16), 1), ((5, 33, 32, 64), 3), ((24, 7), 0)])
@pytest.mark.parametrize("start", [8, 9])
def test_a_convolution_writes_to_its_place_and_nowhere_else(tiles, sizes, place, start, monkeypatch):
    from msplit.engines.cuda import conv_kernel

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    frames = (frame(9, 3, 1, 1, 1, 1), frame(7, 3, 1, 1, 1, 1))
    values, bias = torch.randn(2, 9, 7, 80, device="cuda"), torch.randn(sum(sizes), device="cuda")
    filter = torch.randn(3, 3, 80, sum(sizes), device="cuda")
    memory = whole(2, 9, 7, sizes[place] + 20)
    into = [None] * len(sizes)
    into[place] = memory[..., start : start + sizes[place]]
    found = conv_kernel.convolve_siblings(values, filter, frames, tiles, bias, sizes, relu=True, into=into)
    wanted = expected(values, filter, frames, bias, None, True).split(sizes, 3)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert found[place].data_ptr() == into[place].data_ptr()
    assert memory[..., :start].isnan().all()
    assert memory[..., start + sizes[place] :].isnan().all()


@pytest.mark.parametrize("mean", [False, True])
def test_a_pool_writes_to_its_place_and_nowhere_else(mean):
    from msplit.engines.cuda import pool_kernel

    frames = (frame(9, 3, 2, 1, 0, 1), frame(8, 3, 1, 1, 1, 1))
    values = torch.randn(2, 9, 8, 5, device="cuda")
    dense = pool_kernel.pool(values, frames, mean=mean)
    memory = whole(*dense.shape[:3], 16)
    found = pool_kernel.pool(values, frames, mean=mean, into=memory[..., 3:8])
    assert torch.equal(found, dense)
    assert torch.equal(memory[..., 3:8], dense)
    assert memory[..., :3].isnan().all()
    assert memory[..., 8:].isnan().all()


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_blocks_in_a_row_under_torture(streams, ours, capture, monkeypatch):
    """Every convolution in our kernel, which writes in place, or in the library's, whose result is copied there."""
    from msplit.engines.cuda import convolutions
    from msplit.engines.cuda.conv_kernel import Tiles

    def choose(op, arguments, lowered, *, keep_filter=False):
        return (convolutions._tiled(op, Tiles(16, 32, 64, 4, 3)) if ours else op), arguments[1]

    monkeypatch.setattr(convolutions, "choose", choose)
    monkeypatch.setattr(engine, "with_siblings", lambda lowered, device: lowered)
    if not ours:
        monkeypatch.setattr(in_place, "COPIES", 9)
    graph, parts = inception()
    middle = joined(graph, parts)
    ends = [
        graph.conv(middle, 37, 20, window=(3, 3)),
        graph.conv(graph.conv(middle, 37, 8), 8, 12),
        pooled(graph, middle),
    ]
    flat = graph.finish([joined(graph, ends)])
    feeds = data(1, 6, 6, 8)
    wanted = run(flat, feeds)
    work = job(flat, feeds, scattered(flat, streams, 3), streams=streams, device="cuda", group=True, layout="nhwc")
    assert len(wholes(ENGINE.prepared(work, torch.device("cuda")).program)) == 2
    for seed in range(5):
        torture = Torture(poison=True, delay_cycles=20_000, seed=seed)
        work.options.update(torture=torture, capture=capture)
        executable = ENGINE.build(work)
        for _ in range(3):
            found = compare(executable.step(feeds), wanted)
            assert found.passed, found.describe()
        executable.close()


def test_two_executables_of_one_program_keep_apart():
    """Each has memory of its own for what is written in place: replays of one never change what the other gives."""
    graph = block()
    x = graph.placeholder("x", [1, 6, 6, 8])
    flat = graph.finish([joined(graph, [pooled(graph, x), graph.conv(x, 8, 16)])])
    inputs = [{"x": np.random.default_rng(seed).standard_normal((1, 6, 6, 8)).astype(np.float32)} for seed in range(2)]
    wanted = [run(flat, feeds) for feeds in inputs]
    work = job(flat, inputs[0], device="cuda", group=True, layout="nhwc")
    assert wholes(ENGINE.prepared(work, torch.device("cuda")).program)
    both = [ENGINE.build(work) for _ in inputs]
    for _ in range(20):
        for executable, feeds, values in zip(both, inputs, wanted, strict=True):
            found = compare(executable.step(feeds), values)
            assert found.passed, found.describe()
    for executable in both:
        executable.close()
