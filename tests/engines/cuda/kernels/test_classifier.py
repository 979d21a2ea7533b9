"""Mean, dense layer and softmax in one kernel against PyTorch: in Triton's interpreter, and on a GPU as it runs there."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cuda.interpreted import run_interpreted

SCRIPT = """
import torch
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.ir.windows import Prologue
from msplit.engines.cuda.kernels.activations import activate
from msplit.engines.cuda.kernels.mlp import Dense, candidates, classify
from msplit.engines.cuda.kernels.tiles import Tiles

generator = torch.Generator().manual_seed(0)

def normal(*shape):
    return torch.randn(shape, generator=generator)

supply, taken = Device.of(torch.device("cpu")).semaphores, []
take = supply.take
supply.take = lambda count: taken.append(take(count)) or taken[-1]

for rows, pixels, channels, results, activation, softmax in [
    (1, 49, 40, 70, "", True),
    (3, 200, 33, 33, "Relu", True),
    (2, 49, 70, 20, "GeluApproximate", False),
    (3, 1, 70, 5, "", True),
    (2, 1, 24, 9, "Sigmoid", False),
    (1, 16, 1, 1, "", False),
    (1, 70, 1, 1, "Relu6", True),
]:
    data = normal(rows, pixels, channels + 3)[..., 1 : channels + 1]
    for turned, bias in ((False, normal(results)), (True, None)):
        weights = normal(results, channels).t() if turned else normal(channels, results)
        wanted = data.mean(1) @ weights + (0 if bias is None else bias)
        wanted = activate(activation)(wanted) if activation else wanted
        wanted = wanted.softmax(1) if softmax else wanted
        dense = Dense(weights, bias, activation, softmax, torch.float32)
        torch.testing.assert_close(dense.of(data), wanted)
        for tiles in (next(candidates(channels)), Tiles(16, 8, 16, 4, 1)):  # which holds the weights of some channels only
            found = classify(data, dense, tiles)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            assert not taken[-1].any()  # for the next run of a graph

scale, shift = normal(40), normal(40)
for pixels in (1, 49):
    data, weights = normal(2, pixels, 40), normal(40, 30)
    for prologue in (Prologue(scale, shift, True), Prologue(None, shift), Prologue(scale), Prologue(relu=True)):
        dense = Dense(weights, None, "", True, torch.float32, prologue)
        torch.testing.assert_close(classify(data, dense, tiles), dense.of(data), rtol=1e-4, atol=1e-5)
        assert not taken[-1].any()

for softmax in (True, False):
    data = torch.ones(2, 4, 16)
    data[0, 2, 5] = float("nan")
    found = classify(data, Dense(normal(16, 4), None, "Relu", softmax, torch.float32), tiles)
    assert found[0].isnan().all() and not found[1].isnan().any()

data, dense = normal(2, 60, 40).half(), Dense(normal(40, 30).half(), normal(30).half(), "", True, torch.float32)
found = classify(data, dense, tiles)
assert found.dtype == torch.float32
wanted = (data.float().mean(1) @ dense.weights.float() + dense.bias).softmax(1)
torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.needs_triton
def test_the_kernel_gives_pytorch_s_numbers_in_the_interpreter():
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize(
    ("rows", "pixels", "channels", "results"),
    [(1, 49, 1280, 1000), (1, 64, 2048, 1000), (4, 196, 3000, 21), (16, 49, 100, 3000), (2, 1, 300, 100)],
)
def test_all_tiles_give_the_same_numbers_again_and_again(rows, pixels, channels, results, softmax, dtype):
    from msplit.engines.cuda.kernels.mlp import Dense, classifier_candidates, classify

    chance = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=chance).to(dtype)

    data, weights, bias = normal(rows, pixels, channels) + 1, normal(channels, results) / 30, normal(results)
    wanted = data.double().mean(1) @ weights.double() + bias.double()
    wanted = (wanted.softmax(1) if softmax else wanted).float()
    for laid in (weights, weights.t().contiguous().t()):
        for tiles in classifier_candidates(channels, early=torch.cuda.get_device_capability() >= (9, 0)):

            def run(laid=laid, tiles=tiles):
                return classify(data, Dense(laid, bias, "", softmax, torch.float32), tiles)

            first = run()
            torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-5 if softmax else 1e-3)
            streams, graphs = [torch.cuda.Stream() for _ in range(4)], []
            for stream in streams:
                with torch.cuda.graph(graph := torch.cuda.CUDAGraph(), stream=stream):
                    made = [run() for _ in range(20)]
                graphs.append((graph, made))
            for _ in range(20):  # side by side, each graph on counters of its own
                for stream, (graph, _) in zip(streams, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(one, first) for _, made in graphs for one in made)
