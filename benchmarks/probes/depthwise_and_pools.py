"""Depthwise convolutions of NASNet-mobile at batch 128 in float16, µs: the library's, and ways to cut ours. Captured, three copies of data.

PYTHONPATH=. python benchmarks/probes/depthwise_and_pools.py
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ir.windows import Window
from msplit.engines.cuda.kernels import depthwise
from msplit.engines.cuda.kernels.tiles import Tiles

BATCH, COPIES, CALLS, ROUNDS = 128, 3, 8, 5
SHAPES = ((14, 88, 3), (14, 88, 5), (28, 44, 3), (28, 44, 5), (7, 176, 3), (7, 176, 5), (14, 88, 7))
"""Rows and columns, channels, rows and columns of a window."""
PLAIN = ((4, 64, 4, 1), (8, 32, 4, 1), (8, 64, 4, 1), (16, 32, 4, 1), (16, 64, 4, 1))
STRIPS = (
    *((32, 32, 4, 2), (64, 32, 4, 4), (128, 32, 4, 8), (16, 64, 4, 2), (32, 64, 4, 4), (64, 64, 4, 8)),
    *((32, 64, 4, 2), (64, 64, 4, 4), (32, 32, 2, 4), (16, 32, 2, 2), (32, 16, 2, 4), (64, 16, 2, 4)),
)
"""Pixels, channels, warps of a block, pixels of a row per thread."""


def timed(call: Callable[[torch.Tensor], Any], datas: list[torch.Tensor]) -> float:
    """µs of a call, the median of some replays of a graph of some calls."""
    call(datas[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            call(datas[number % COPIES])
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(found)


def main() -> None:
    """Prints a line per shape: the library's time, the fastest of `PLAIN`, the three fastest of `STRIPS`."""
    for size, channels, kernel in SHAPES:
        before = (kernel - 1) // 2
        frame = Window(size, kernel, 1, 1, before, kernel - 1 - before, size)
        datas = [torch.randn(BATCH, size, size, channels, device="cuda").half() for _ in range(COPIES)]
        filter = torch.randn(kernel, kernel, channels, 1, device="cuda").half()
        laid = filter.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last).permute(2, 3, 0, 1)
        node = Node("c", "DepthwiseConv2dNative", {"strides": (1, 1, 1, 1), "padding": "SAME"})
        library = functools.partial(
            lambda function, node, filter, data: function(node, data, filter), table()[node.op].function, node, laid
        )
        wanted, times = library(datas[0]), {}
        for pixels, results, warps, across in (*PLAIN, *STRIPS):
            tiles = Tiles(pixels, results, 1, warps, 1, turned=True, across=across)
            ours = functools.partial(depthwise.convolve, filter=filter, frames=[frame, frame], tiles=tiles)
            torch.testing.assert_close(ours(datas[0]).float(), wanted.float(), rtol=2e-2, atol=2e-1)
            times[pixels, results, warps, across] = timed(ours, datas)
        strips = sorted((times[one], one) for one in STRIPS)[:3]
        plain = min(times[one] for one in PLAIN)
        print(f"{size}x{size}x{channels} {kernel}x{kernel}", timed(library, datas), plain, strips)


if __name__ == "__main__":
    main()
