"""A conversion in front of a convolution of an image rides on its load.

In half precision the image that is fed is converted first, by a kernel that does nothing else; and so are images of bytes in any precision.
Our own kernel of few channels converts its data as it loads them, and gives the same numbers. Whether it beats the best kernel behind a
conversion is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.choices import Family
from msplit.engines.cuda.autotune.tuner import RotatingWeights, Tuner, copies
from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.windows import CAST_FROM, TILES
from msplit.engines.cuda.kernels import few_channels
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.convolution.merge_convolutions import lowered
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
        """What both become, with the tiles of its kernel if one was chosen."""
        op = self.convolution
        attrs = {**op.attrs, CAST_FROM: self.source, **({} if tiles is None else {TILES: tiles})}
        source_nodes = list(dict.fromkeys([*op.source_nodes, *self.cast.source_nodes]))
        return replace(op, op=OP, attrs=attrs, inputs=[self.cast.inputs[0], *op.inputs[1:]], source_nodes=source_nodes)


Decide = Callable[[OpGraph, Candidate], "tuple[bool, Tiles | None]"]
"""Whether a convolution converts its data, and the tiles of its kernel; none where a library runs it behind the conversion."""


def fuse_cast(graph: OpGraph, decide: Decide) -> bool:
    """Lets each convolution of an image take the conversion in front of it along, where that is decided."""
    changed = False
    for found in find_casts(graph):
        takes, tiles = decide(graph, found)
        if takes:
            graph.ops[found.convolution.node] = found.fused(tiles)
            del graph.ops[found.cast.node]
            changed = True
    return changed


def find_casts(graph: OpGraph) -> list[Candidate]:
    """Convolutions of NHWC data of few channels with a constant filter that alone read what is converted. What is computed in front of the
    conversion rather shares a kernel with it."""
    readers = Readers(graph)
    found = (_candidate(graph, readers, op) for op in graph.ops.values() if op.op in CONV2D)
    return [one for one in found if one is not None]


def _candidate(graph: OpGraph, readers: Readers, convolution: Op) -> Candidate | None:
    data, weights = convolution.inputs[:2]
    cast, filter, shape = graph.ops.get(data[0]), graph.constants.get(weights), graph.shapes.get(data)
    if (
        cast is None
        or cast.op != "Cast"
        or readers.only(data) is None
        or filter is None
        or not channels_last(convolution)
    ):
        return None
    if shape is None or len(shape) != _RANK or 0 in shape or not shape[-1] == filter.shape[2] < few_channels.MANY:
        return None
    attrs, (source,) = cast.attrs, cast.inputs
    if attrs.get("saturate") or attrs.get("Truncate") or source in graph.constants:
        return None
    types = str(attrs.get("SrcT")), str(attrs.get("DstT"))
    known = graph.dtypes.get(source, types[0]) == types[0] and torch_dtype(types[0]) in few_channels.CONVERTED
    maker = graph.ops.get(source[0])
    if (
        not known
        or types[1] != filter.dtype.name
        or (maker is not None and role(graph, maker, graph.dtypes) is not None)
    ):
        return None
    return Candidate(convolution, cast, shape)


FAMILY: Family[Tiles | None] = Family(
    "converting convolutions", lambda tiles: tiles, lambda value: value.or_none(conv.tiles_of), None
)
"""The choices that are made here: `Tiles`, or None where a kernel of its own in front of the convolution is better."""


def decide_on(device: torch.device, *, measure: bool) -> Decide:
    """What `fuse_cast` asks, for data that lie as NHWC on this device: on a GPU by measurement; elsewhere it makes no difference, and is
    done."""

    def decide(graph: OpGraph, found: Candidate) -> tuple[bool, Tiles | None]:
        op = found.convolution
        filter = graph.constants[op.inputs[1]]
        if device.type != "cuda":
            return True, None
        if not measure or not conv.worth_a_kernel(to_torch(filter[:0]).dtype):
            return False, None
        shapes = [graph.shape(key) for key in op.inputs]
        key = (found.source, op.op, attrs_key(op.attrs), filter.dtype.name, *shapes)
        tiles = Tuner.of(device).decide(FAMILY, key, lambda: _Trial.of(graph, found, device))
        return tiles is not None, tiles

    return decide


@dataclass(frozen=True, eq=False)
class _Trial:
    """A convolution and the conversion in front of it on the device, with data at random.

    Attributes:
        found: Both.
        data: In the type that is converted.
        filter: As the library wants it to lie.
        rest: What else the convolution reads.
    """

    found: Candidate
    data: torch.Tensor
    filter: torch.Tensor
    rest: tuple[torch.Tensor, ...]

    @staticmethod
    def of(graph: OpGraph, found: Candidate, device: torch.device) -> _Trial:
        op = found.convolution
        filter = FILTERS[op.op](to_torch(graph.constants[op.inputs[1]], device), True)
        chance = torch.Generator(device).manual_seed(0)

        def like(key: Key) -> torch.Tensor:
            if key in graph.constants:
                return to_torch(graph.constants[key], device)
            dtype = torch_dtype(graph.dtypes[key]) if key in graph.dtypes else filter.dtype
            return torch.randn(graph.shapes[key], device=device, dtype=dtype, generator=chance)

        data = (torch.rand(found.shape, device=device, generator=chance) * 255).to(torch_dtype(found.source))
        return _Trial(found, data, filter, tuple(like(key) for key in op.inputs[2:]))

    def kernels(self, expected: torch.Tensor) -> Iterator[tuple[Tiles, Op]]:
        """Our kernels that could run it."""
        results = int(self.filter.shape[3])
        for tiles in conv.candidates(self.data, self.filter, expected.numel() // max(results, 1), [results]):
            yield tiles, self.found.fused(tiles)

    def calls(self) -> Iterator[Callable[[], Any]]:
        """Calls of all kernels of ours that `winner` times."""
        converted = self.data.to(self.filter.dtype)
        conv.choose(self.found.convolution, [converted, self.filter, *self.rest], lowered)
        for tiles, op in self.kernels(lowered(self.found.convolution)(converted, self.filter, *self.rest)[0]):
            filter = self.filter.contiguous() if tiles.turned else self.filter
            yield functools.partial(lowered(op), self.data, filter, *self.rest)

    def winner(self, tuner: Tuner) -> Tiles | None:
        """The fastest kernel that converts, if it beats a conversion with the best convolution behind it."""
        converted = self.data.to(self.filter.dtype)
        chosen, weights = conv.choose(self.found.convolution, [converted, self.filter, *self.rest], lowered)
        convolution = lowered(chosen)

        def apart(data: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> Any:
            return convolution(data.to(weights.dtype), weights, *rest)

        baseline = RotatingWeights(apart, self.data, copies(weights), self.rest)
        expected = lowered(self.found.convolution)(converted, self.filter, *self.rest)
        lying = {False: copies(self.filter), True: copies(self.filter.contiguous())}
        calls = (
            (tiles, RotatingWeights(lowered(op), self.data, lying[tiles.turned], self.rest))
            for tiles, op in self.kernels(expected[0])
        )
        return tuner.first_to_beat(tuner.ranked(calls, expected, cold=True), baseline)
