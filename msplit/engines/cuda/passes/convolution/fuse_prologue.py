"""Fusions of what stands in front of a convolution: scale, shift and ReLU, or a conversion.

A scale, a shift and a ReLU in front of a convolution ride on its load (a prologue).

What stands behind a convolution is folded into it (`fold_affine`, `fuse_epilogue`). Where a Concat or a sum lies between, a normalization
can not go back: DenseNet and ResNet-v2 normalize in front of each convolution (He et al., "Identity Mappings in Deep Residual Networks",
ECCV 2016), and so does squeeze-and-excitation, whose factors are another value of the model (Hu et al., CVPR 2018). Our own kernel does
that to its data between their load and the product.

A library can not, and a window of several elements does it to the same data again for each. So whether the convolution with its prologue
beats the best one behind a kernel of its own is measured.

A conversion in front of a convolution of an image rides on its load.

In half precision the image that is fed is converted first, by a kernel that does nothing else; and so are images of bytes in any precision.
Our own kernel of few channels converts its data as it loads them, and gives the same numbers. Whether it beats the best kernel behind a
conversion is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.ir.dtypes import to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Attrs, Key, Op, OpGraph, Shape, attrs_key, known, require
from msplit.engines.cuda.ir.windows import CAST_FROM, PROLOGUE, PROLOGUE_STEPS, ROUNDED, TILES
from msplit.engines.cuda.kernels import conv as few_channels
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.passes.convolution.fold import step_in_front
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, lowered, sample
from msplit.engines.cuda.passes.pattern import Readers, channels_last, matches
from msplit.engines.cuda.passes.pointwise_fusion.partition import role
from msplit.opset.traits import CONV2D

OP = "_PrologueConv2D"
_RANK = 4
_FEWEST_CHANNELS = 16
"""With fewer, the kernel sums over several elements of the window at once, and dividing to find them costs more than a kernel saves."""


class InFront(NamedTuple):
    """Steps in front of an op that it could do to its data itself.

    Attributes:
        steps: Their names, in `PROLOGUE_STEPS`' order.
        absorbed: The ops of these steps.
        data: What they begin with.
        operands: Of the steps that have one: constants per channel, or a factor per image and channel.
    """

    steps: tuple[str, ...]
    absorbed: tuple[Op, ...]
    data: Key
    operands: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A convolution as it is, and the steps in front of it that could be its prologue."""

    convolution: Op
    front: InFront

    def fused(self, tiles: Tiles | None = None) -> Attrs:
        """Attributes of the convolution with its prologue, with the tiles of its kernel if one was chosen."""
        return {**self.convolution.attrs, PROLOGUE: self.front.steps, **({} if tiles is None else {TILES: tiles})}


def find_prologues(graph: OpGraph) -> list[Candidate]:
    """Convolutions of NHWC data with a constant filter that alone read what is scaled, shifted or cut off."""
    return matches(_candidate, graph, Readers(graph), [op for op in graph.ops.values() if op.op in CONV2D])


def _candidate(graph: OpGraph, readers: Readers, convolution: Op) -> Candidate:
    shape, filter = known(graph.shapes.get(convolution.inputs[0])), known(graph.constants.get(convolution.inputs[1]))
    require(len(shape) == _RANK and channels_last(convolution) and 0 not in shape)
    require(shape[-1] == filter.shape[2] and shape[-1] >= _FEWEST_CHANNELS)
    require(convolution.inputs.count(convolution.inputs[0]) == 1)
    return Candidate(convolution, in_front(graph, readers, convolution, shape, filter.dtype))


def in_front(graph: OpGraph, readers: Readers, reader: Op, shape: Shape, dtype: np.dtype[Any]) -> InFront:
    """The ops that scale, shift and cut off the data of an op, NHWC, which alone reads them.

    Args:
        reader: The op.
        shape: Of its data.
        dtype: Which these must be of, as what they are made of.
    """
    key, walk = reader.inputs[0], _Walk(graph, readers, reader, shape)
    while not walk.over and (op := readers.maker(key)) is not None and (data := walk.take(op)) is not None:
        key = data
    operands, present = walk.operands(dtype), (walk.scales, walk.shifts, walk.relu)
    require(any(present) and key not in graph.constants and graph.dtypes.get(key) == dtype.name)
    steps = tuple(step for step, there in zip(PROLOGUE_STEPS, present, strict=True) if there)
    return InFront(steps, tuple(walk.absorbed), key, operands)


class _Walk:
    """From an op back over what only scales, shifts and cuts off its data.

    Attributes:
        absorbed: The ops so far, the last one first.
        scale: Per channel, of the data where it is now.
        shift: Likewise.
        factors: Those that another value has for each image and channel.
        relu: Whether the last op is a ReLU.
        over: Whether nothing further can be taken.
    """

    def __init__(self, graph: OpGraph, readers: Readers, convolution: Op, shape: tuple[int, ...]) -> None:
        self.graph, self.readers, self.convolution, self.shape = graph, readers, convolution, shape
        self.absorbed: list[Op] = []
        self.scale, self.shift = np.ones(shape[-1]), np.zeros(shape[-1])
        self.factors: Key | None = None
        self.relu = self.over = False

    @property
    def scales(self) -> bool:
        """Returns whether there are factors."""
        return self.factors is not None or bool((self.scale != 1).any())

    @property
    def shifts(self) -> bool:
        """Returns whether something is added."""
        return bool((self.shift != 0).any())

    def take(self, op: Op) -> Key | None:
        """Takes an op along: the data that it reads. None where it does anything else."""
        if op.op == "Relu":
            data = None if self.absorbed else op.inputs[0]
            self.relu = self.relu or data is not None
        else:
            data = self._affine(op) or self._factors(op)
        if data is not None:
            self.absorbed.append(op)
        return data

    def _affine(self, op: Op) -> Key | None:
        found = step_in_front(self.graph, self.readers, self.convolution, op, self.shape, _RANK - 1)
        if found is None:
            return None
        data, (scale, shift) = found
        self.shift, self.scale = self.shift + self.scale * shift, self.scale * scale
        return data

    def _factors(self, op: Op) -> Key | None:
        """A product with a value of one factor per image and channel. It comes first of all, and instead of constant factors."""
        if op.op != "Mul" or self.scales:
            return None
        own = (self.shape[0], 1, 1, self.shape[3])
        for data, other in (op.inputs, op.inputs[::-1]):
            if self.graph.shapes.get(data) == self.shape != own and self.graph.shapes.get(other) == own:
                self.factors, self.over = other, True
                return data
        return None

    def operands(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Operands of the steps that have one, those of data in half precision in float32; None where the type can not hold them."""
        dtype = dtype if dtype.itemsize > 2 else np.dtype(np.float32)
        with np.errstate(all="ignore"):
            scale, shift = (one.astype(dtype) for one in (self.scale, self.shift))
        require(all(np.isfinite(one.astype(np.float64)).all() for one in (scale, shift)))
        factors = [scale if self.factors is None else self.factors] if self.scales else []
        return (*factors, *([shift] if self.shifts else []))


def _fuse(graph: OpGraph, found: Candidate, tiles: Tiles | None) -> None:
    op, front = found.convolution, found.front
    operands = [one if isinstance(one, tuple) else graph.constant(one) for one in front.operands]
    op.op, op.attrs, op.inputs = OP, found.fused(tiles), [front.data, *op.inputs[1:], *operands]
    op.source_nodes = [*op.source_nodes, *(node for one in front.absorbed for node in one.source_nodes)]
    graph.drop(front.absorbed)


def _key(graph: OpGraph, found: Candidate, device: torch.device) -> tuple[Any, ...]:
    op, front = found.convolution, found.front
    shapes = [graph.shape(key) for key in (front.data, *op.inputs[1:])]
    own = tuple(isinstance(one, tuple) for one in front.operands)
    rounded, dtype = bool(op.attrs.get(ROUNDED)), graph.constants[op.inputs[1]].dtype.name
    return front.steps, own, op.op, attrs_key(op.attrs), rounded, dtype, *shapes


def _trial(graph: OpGraph, found: Candidate, device: torch.device) -> Trial[Tiles]:
    op = found.convolution
    filter = FILTERS[op.op](to_torch(graph.constants[op.inputs[1]], device), True)
    data, *rest = (
        sample(graph, one, filter.dtype, device) if isinstance(one, tuple) else to_torch(one, device)
        for one in (found.front.data, *op.inputs[2:], *found.front.operands)
    )
    fused = replace(op, op=OP, attrs=found.fused())
    # A kernel that only reads and writes the data stands for what is replaced, which can not be faster.
    return convolution_trial(op, fused, data, filter, rest, lambda data, _: torch.relu(data))


def convolution_trial(
    plain: Op,
    fused: Op,
    data: torch.Tensor,
    filter: torch.Tensor,
    rest: list[torch.Tensor],
    prepare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Trial[Tiles]:
    """A trial of a convolution that prepares its data itself against the best convolution behind a kernel that does.

    Kernels of all tiles are candidates: those that are best without a prologue, which leaves the data in shared memory for the tensor
    cores, often are not with one.

    Args:
        plain: The convolution, which reads prepared data.
        fused: The one that prepares them.
        data: Unprepared data.
        filter: As the library wants it to lie.
        rest: What else `fused` reads, first the inputs of `plain`.
        prepare: Prepares data, given them and the filter.
    """
    own = rest[: len(plain.inputs) - 2]
    chosen, weights = conv.choose(plain, [prepare(data, filter), filter, *own], lowered)
    convolution, expected = lowered(chosen), lowered(fused)(data, filter, *rest)
    results, turned = int(filter.shape[3]), filter.contiguous()

    def apart(data: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> Any:
        return convolution(prepare(data, weights), weights, *rest)

    def candidate(tiles: Tiles) -> tuple[Tiles, Way]:
        run = lowered(replace(fused, attrs={**fused.attrs, TILES: tiles}))
        return tiles, Way(run, data, turned if tiles.turned else filter, rest)

    every = conv.candidates(data, filter, expected[0].numel() // max(results, 1), [results])
    return Trial([Way(apart, data, weights, own)], map(candidate, every), expected)


def constant_filter_gains(graph: OpGraph, found: Any) -> bool:
    """Returns whether a kernel of ours may win for a candidate's `convolution`."""
    return conv.worth_a_kernel(to_torch(graph.constants[found.convolution.inputs[1]][:0]).dtype)


PROLOGUES = MeasuredFusion(
    conv.tiles_family("prologues"),
    find_prologues,
    _fuse,
    _key,
    _trial,
    worth=constant_filter_gains,
    # Where nothing can be measured, windows of one element take it, since they read each of their data once.
    on_cpu=lambda graph, found: graph.constants[found.convolution.inputs[1]].shape[:2] == (1, 1),
)


CAST = "_CastConv2D"


@dataclass(frozen=True, eq=False)
class CastCandidate:
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
        return replace(
            op, op=CAST, attrs=attrs, inputs=[self.cast.inputs[0], *op.inputs[1:]], source_nodes=source_nodes
        )


def find_casts(graph: OpGraph) -> list[CastCandidate]:
    """Convolutions of NHWC data of few channels with a constant filter that alone read what is converted. What is computed in front of the
    conversion rather shares a kernel with it."""
    return matches(_cast_candidate, graph, Readers(graph), [op for op in graph.ops.values() if op.op in CONV2D])


def _cast_candidate(graph: OpGraph, readers: Readers, convolution: Op) -> CastCandidate:
    data, weights = convolution.inputs[:2]
    cast, filter, shape = known(readers.maker(data)), known(graph.constants.get(weights)), known(graph.shapes.get(data))
    require(cast.op == "Cast" and channels_last(convolution))
    require(len(shape) == _RANK and 0 not in shape and shape[-1] == filter.shape[2] < few_channels.MANY)
    attrs, (source,) = cast.attrs, cast.inputs
    require(not attrs.get("saturate") and not attrs.get("Truncate") and source not in graph.constants)
    types = str(attrs.get("SrcT")), str(attrs.get("DstT"))
    require(graph.dtypes.get(source, types[0]) == types[0] and torch_dtype(types[0]) in few_channels.CONVERTED)
    maker = graph.ops.get(source[0])  # with which the cast shares a kernel, if it is pointwise
    require(types[1] == filter.dtype.name and (maker is None or role(graph, maker, graph.dtypes) is None))
    return CastCandidate(convolution, cast, shape)


def _fuse_cast(graph: OpGraph, found: CastCandidate, tiles: Tiles | None) -> None:
    graph.ops[found.convolution.node] = found.fused(tiles)
    del graph.ops[found.cast.node]


def _cast_key(graph: OpGraph, found: CastCandidate, device: torch.device) -> tuple[Any, ...]:
    op = found.convolution
    shapes = [graph.shape(key) for key in op.inputs]
    return found.source, op.op, attrs_key(op.attrs), graph.constants[op.inputs[1]].dtype.name, *shapes


def _cast_trial(graph: OpGraph, found: CastCandidate, device: torch.device) -> Trial[Tiles]:
    op = found.convolution
    filter = FILTERS[op.op](to_torch(graph.constants[op.inputs[1]], device), True)
    chance = torch.Generator(device).manual_seed(0)
    data = (torch.rand(found.shape, device=device, generator=chance) * 255).to(torch_dtype(found.source))
    rest = [sample(graph, key, filter.dtype, device) for key in op.inputs[2:]]
    return convolution_trial(op, found.fused(), data, filter, rest, lambda data, weights: data.to(weights.dtype))


CASTS = MeasuredFusion(
    conv.tiles_family("converting convolutions"),
    find_casts,
    _fuse_cast,
    _cast_key,
    _cast_trial,
    worth=constant_filter_gains,
    on_cpu=lambda *_: True,  # where it makes no difference
)
