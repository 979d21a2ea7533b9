"""Attention as one kernel against its two products and its softmax, µs: what the engine chooses by. Needs a GPU, and no TensorFlow.

    python benchmarks/attention.py [--shapes 128x4x128x128x64,…] [--precisions tf32,ieee,bfloat16,float16]

A shape is batch x heads x queries x keys x numbers of a head. Queries, keys and values lie as dense layers give them; a mask of keys is
added to the scores, or, with `causal` behind the shape, a query counts the keys up to its own place. Scales and masks count for the
kernel and not for what it is held against.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.ir.dtypes import numpy_dtype
from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.passes.attention import fuse_attention as choose
from msplit.engines.cuda.passes.pipeline import Context, run_passes

SHAPES = (
    "128x4x128x128x64,1024x4x128x128x64,32x12x128x128x64,8x12x197x197x64,1x12x512x512x64,"
    "8x8x256x256x64causal,256x2x39x39x16,64x16x1x256x64"
)
"""Two of the sample BERT, BERT-base, ViT-B/16, one long sequence, a decoder, AutoInt, and a step of a decoder."""


def attention(shape: tuple[int, ...], dtype: str, *, causal: bool) -> tuple[OpGraph, dict[str, np.ndarray]]:
    """The graph of one attention, and feeds."""
    batch, heads, rows, columns, inner = shape
    order = np.asarray([0, 2, 1, 3])
    below = np.where(np.tril(np.ones((rows, columns), bool)), 0.0, -1e4).astype(numpy_dtype(dtype))
    scale = np.asarray(inner**-0.5, numpy_dtype(dtype))
    graph = OpGraph({}, {(50, 0): order, (51, 0): scale, (52, 0): below}, {}, {}, numbers=100)
    graph.feeds = {name: (number, 0) for number, name in enumerate("qkv" if causal else "qkvm")}
    ops = [("Transpose", [(number, 0), (50, 0)]) for number in range(3)]
    ops += [("BatchMatMulV2", [(10, 0), (11, 0)]), ("Mul", [(13, 0), (51, 0)])]
    ops += [
        ("AddV2", [(14, 0), (52 if causal else 3, 0)]),
        ("Softmax", [(15, 0)]),
        ("BatchMatMulV2", [(16, 0), (12, 0)]),
    ]
    for number, (op, inputs) in enumerate(ops, 10):
        attrs = {"T": dtype, "adj_x": False, "adj_y": number == 13}
        graph.ops[number] = Op(number, f"{op}_{number}", op, attrs, inputs, [number])
    graph.fetches["out"] = (17, 0)
    sizes = {"q": (batch, rows, heads, inner), "k": (batch, columns, heads, inner), "v": (batch, columns, heads, inner)}
    feeds = {name: np.ones(sizes.get(name, (batch, 1, 1, columns)), numpy_dtype(dtype)) for name in graph.feeds}
    return graph, feeds


def main() -> None:
    """Prints a row per shape and precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--precisions", default="tf32,ieee,bfloat16,float16")
    args = parser.parse_args()
    device = torch.device("cuda")
    tuner = Tuner.of(device)
    print("| shape | precision | products and softmax | taken | all |\n| --- | --- | ---: | --- | --- |")
    for shape in args.shapes.split(","):
        sizes = tuple(int(size) for size in shape.removesuffix("causal").split("x"))
        for name in args.precisions.split(","):
            dtype = "float32" if name in ("tf32", "ieee") else name
            graph, feeds = attention(sizes, dtype, causal=shape.endswith("causal"))
            tuner.spent = 0.0
            before = set(tuner.chosen(choose.FAMILY))
            with precision(name == "ieee"):
                run_passes(graph, Context(feeds, device, 100), Stage.SPECIALIZED)
                choose.ATTENTION.run(graph, device)
            for key in tuner.chosen(choose.FAMILY).keys() - before:
                choice = tuner.chosen(choose.FAMILY)[key]
                times = ", ".join(f"{one} {us:.1f}" for one, us in choice.times.items() if one != choose.APART)
                print(
                    f"| {shape} | {name} | {choice.times[choose.APART]:.1f} | {choice.kernel} | {times} |", flush=True
                )


if __name__ == "__main__":
    main()
