"""Two dense layers and a mean in one kernel against PyTorch: in Triton's interpreter, and on a GPU as it runs there."""

from __future__ import annotations

import pytest
import torch

from tests.engines.cuda.interpreted import run_interpreted

SCRIPT = """
import torch
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels import mlp
from msplit.engines.cuda.kernels.activations import activate
from msplit.engines.cuda.kernels.tiles import Tiles

generator = torch.Generator().manual_seed(0)

def normal(*shape):
    return torch.randn(shape, generator=generator)

supply, taken = Device.of(torch.device("cpu")).semaphores, []
take = supply.take
supply.take = lambda count: taken.append(take(count)) or taken[-1]

for rows, pixels, channels, hidden, results, activations in [
    (1, 49, 40, 6, 70, ("Swish", "Sigmoid")),
    (3, 200, 33, 48, 33, ("Relu", "")),
    (2, 1, 70, 20, 5, ("GeluApproximate", "Relu6")),
    (1, 1, 16, 1, 1, ("", "")),
]:
    data = normal(rows, pixels, channels + 3)[..., 1 : channels + 1]
    matrices = normal(channels, hidden), normal(results, hidden).t()
    for biases in ((normal(hidden), normal(results)), (None, None), (normal(hidden), None)):
        wanted = data.mean(1)
        for matrix, bias, name in zip(matrices, biases, activations):
            wanted = wanted @ matrix + (0 if bias is None else bias)
            wanted = activate(name)(wanted) if name else wanted
        for tiles in (*list(mlp.candidates(pixels))[:1], Tiles(16, 32, 16, 4, 1)):
            found = mlp.mlp(data, mlp.Layers(matrices, biases, activations), tiles)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            assert not taken[-1].any()  # for the next run of a graph

data = torch.ones(1, 4, 16)
data[0, 2, 5] = float("nan")
assert mlp.mlp(data, mlp.Layers((normal(16, 4), normal(4, 8)), (None, None), ("Relu", "Relu6")), tiles).isnan().all()
"""


@pytest.mark.needs_triton
def test_the_kernel_gives_pytorch_s_numbers_in_the_interpreter():
    run_interpreted(SCRIPT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "pixels", "channels", "hidden", "results"),
    [(1, 49, 1152, 48, 1152), (1, 112 * 112, 32, 8, 32), (3, 196, 672, 28, 672), (2, 1, 300, 100, 10)],
)
def test_all_tiles_give_the_same_numbers_again_and_again(rows, pixels, channels, hidden, results, dtype):
    from msplit.engines.cuda.kernels import mlp

    chance = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=chance)

    data, matrices = normal(rows, pixels, channels) + 1, (normal(channels, hidden) / 30, normal(hidden, results) / 7)
    biases = normal(hidden), normal(results)
    data, matrices, biases = (
        data.to(dtype),
        [one.to(dtype) for one in matrices],
        [one.to(dtype) for one in biases],
    )
    inner = torch.nn.functional.silu(data.double().mean(1) @ matrices[0].double() + biases[0].double())
    wanted = torch.sigmoid(inner @ matrices[1].double() + biases[1].double()).to(dtype)
    for tiles in mlp.candidates(pixels):

        def run(tiles=tiles):
            return mlp.mlp(data, mlp.Layers(matrices, biases, ("Swish", "Sigmoid")), tiles)

        first = run()
        torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-4 if dtype == torch.float32 else 2e-3)
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
