"""A conversion in front of a convolution of an image rides on its load.

In half precision the image that is fed is converted first, by a kernel that does nothing else; and so are images of bytes in any precision.
Our own kernel of few channels converts its data as it loads them, and gives the same numbers. Whether it beats the best kernel behind a
conversion is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.windows import CAST_FROM, TILES
from msplit.engines.cuda.kernels import few_channels
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.convolution.fuse_prologue import constant_filter_gains, convolution_trial
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, sample
from msplit.engines.cuda.passes.pattern import Readers, channels_last
from msplit.engines.cuda.passes.pointwise_fusion.legality import role
from msplit.opset.traits import CONV2D

OP = "_CastConv2D"
_RANK = 4


@dataclass(frozen=True, eq=False)
class Candidate:
    """A convolution that could convert its data itself.

    Attributes:
        convolution: As it is.
        cast: What converts the data for it alone.
        shape: Of the data.
    """

    convolution: Op
    cast: Op
    shape: tuple[int, ...]

    @property
    def source(self) -> str:
        """The type that is converted."""
        return str(self.cast.attrs["SrcT"])

    def fused(self, tiles: Tiles | None = None) -> Op:
        """The op that both become, with the tiles of its kernel if one was chosen."""
        op = self.convolution
        attrs = {**op.attrs, CAST_FROM: self.source, **({} if tiles is None else {TILES: tiles})}
        source_nodes = list(dict.fromkeys([*op.source_nodes, *self.cast.source_nodes]))
        return replace(op, op=OP, attrs=attrs, inputs=[self.cast.inputs[0], *op.inputs[1:]], source_nodes=source_nodes)


def find_casts(graph: OpGraph) -> list[Candidate]:
    """Convolutions of NHWC data of few channels with a constant filter that alone read what is converted. What is computed in front of the
    conversion rather shares a kernel with it."""
    readers = Readers(graph)
    found = (_candidate(graph, readers, op) for op in graph.ops.values() if op.op in CONV2D)
    return [one for one in found if one is not None]


def _candidate(graph: OpGraph, readers: Readers, convolution: Op) -> Candidate | None:
    data, weights = convolution.inputs[:2]
    cast, filter, shape = readers.maker(data), graph.constants.get(weights), graph.shapes.get(data)
    if cast is None or cast.op != "Cast" or filter is None or not channels_last(convolution):
        return None
    if shape is None or len(shape) != _RANK or 0 in shape or not shape[-1] == filter.shape[2] < few_channels.MANY:
        return None
    attrs, (source,) = cast.attrs, cast.inputs
    if attrs.get("saturate") or attrs.get("Truncate") or source in graph.constants:
        return None
    types = str(attrs.get("SrcT")), str(attrs.get("DstT"))
    known = graph.dtypes.get(source, types[0]) == types[0] and torch_dtype(types[0]) in few_channels.CONVERTED
    maker = graph.ops.get(source[0])
    shares = maker is not None and role(graph, maker, graph.dtypes) is not None
    return None if shares or not known or types[1] != filter.dtype.name else Candidate(convolution, cast, shape)


def _fuse(graph: OpGraph, found: Candidate, tiles: Tiles | None) -> None:
    graph.ops[found.convolution.node] = found.fused(tiles)
    del graph.ops[found.cast.node]


def _key(graph: OpGraph, found: Candidate, device: torch.device) -> tuple[Any, ...]:
    op = found.convolution
    shapes = [graph.shape(key) for key in op.inputs]
    return found.source, op.op, attrs_key(op.attrs), graph.constants[op.inputs[1]].dtype.name, *shapes


def _trial(graph: OpGraph, found: Candidate, device: torch.device) -> Trial[Tiles]:
    op = found.convolution
    filter = FILTERS[op.op](to_torch(graph.constants[op.inputs[1]], device), True)
    chance = torch.Generator(device).manual_seed(0)
    data = (torch.rand(found.shape, device=device, generator=chance) * 255).to(torch_dtype(found.source))
    rest = [sample(graph, key, filter.dtype, device) for key in op.inputs[2:]]
    return convolution_trial(op, found.fused(), data, filter, rest, lambda data, weights: data.to(weights.dtype))


CASTS = MeasuredFusion(
    conv.tiles_family("converting convolutions"),
    find_casts,
    _fuse,
    _key,
    _trial,
    worth=constant_filter_gains,
    on_cpu=lambda *_: True,  # where it makes no difference
)
