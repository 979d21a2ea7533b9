"""Convolutions of the same data at once: what `--group` makes of siblings where one kernel for all is faster."""

from __future__ import annotations

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import SIBLINGS, TILES
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.conv import convolve, frames_of


@lowering("_SiblingConv2D", own=True)
def sibling_convolutions(node: Node, data: Tensor, filter: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Convolutions of the same data with windows of one kind, bias and activation included: an output for each.

    Their filters and biases lie side by side along the output channels; the attribute `_siblings` says how many each has.
    """
    sizes = node.get(SIBLINGS)
    if sizes is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    relu = "Relu" in node.get("fused_ops", ())
    tiles = node.get(TILES)
    if tiles is not None and data.is_cuda and can_compile():
        from msplit.engines.cuda.kernels import conv

        frames = frames_of(node, data, filter)
        if conv.fits(data, filter, frames):
            return tuple(conv.convolve_siblings(data, filter, frames, tiles, bias, sizes, relu=relu))
    results, start = [], 0
    for size in sizes:
        own = None if bias is None else bias.narrow(0, start, size)
        results.append(convolve(node, data, filter.narrow(3, start, size), own, relu=relu))
        start += size
    return tuple(results)
