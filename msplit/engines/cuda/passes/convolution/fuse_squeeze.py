"""A depthwise convolution takes squeeze-and-excitation's two dense layers along, of the mean of what it gives.

Each block of its kernel adds up its results while it has them, so that nothing reads them again for the mean, and the layers are no launch
of their own. Whether that beats the convolution and the layers behind it, each by its fastest kernel, is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.autotune.choices import Family
from msplit.engines.cuda.autotune.tuner import RotatingWeights, Tuner, copies
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.kernels.activations import NUMBERS
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.ops.fused import MLP, MLP_ACTIVATIONS, MLP_BIASED, SQUEEZE
from msplit.engines.cuda.passes.convolution.fuse_mlp import decide_on as joined_on
from msplit.engines.cuda.passes.convolution.fuse_mlp import find_mlps
from msplit.engines.cuda.passes.convolution.merge_convolutions import lowered
from msplit.engines.cuda.passes.pattern import channels_last

Decide = Callable[[OpGraph, Op, Op], "tuple[bool, Tiles | None]"]
"""Whether a convolution takes layers along, and the tiles of its kernel; none where libraries run it step by step."""


def fuse_squeeze(graph: OpGraph, decide: Decide) -> bool:
    """Lets depthwise convolutions take the layers along that read the mean of their results."""
    names: dict[Key, Key] = {}
    for convolution, layers in find_squeezes(graph, list(graph.ops.values())):
        takes, tiles = decide(graph, convolution, layers)
        if takes:
            shape = graph.shapes[layers.node, 0]
            squeezed = _squeezed(convolution, layers, tiles)
            convolution.op, convolution.attrs, convolution.inputs = squeezed.op, squeezed.attrs, squeezed.inputs
            convolution.source_nodes = [*convolution.source_nodes, *layers.source_nodes]
            names[layers.node, 0] = convolution.node, 1
            graph.shapes[convolution.node, 1] = shape
            graph.dtypes[convolution.node, 1] = str(convolution.attrs["T"])
            del graph.ops[layers.node]
    graph.rename(names)
    return bool(names)


def find_squeezes(graph: OpGraph, layers: Iterable[Op]) -> list[tuple[Op, Op]]:
    """The layers that a depthwise convolution could take along, each behind it: of ops that are layers, or could be (`fuse_mlp`)."""
    pairs = ((graph.ops.get(one.inputs[0][0]), one) for one in layers if one.op == MLP)
    return [(op, one) for op, one in pairs if op is not None and _takes(graph, op, one)]


def _takes(graph: OpGraph, convolution: Op, layers: Op) -> bool:
    """Whether our kernel does both: NHWC data, constant weights, a bias and an activation at most."""
    steps = tuple(convolution.attrs.get("fused_ops", ()))
    biased = steps[:1] == ("BiasAdd",)
    return (
        RESULT not in layers.attrs
        and conv.is_depthwise(convolution)
        and channels_last(convolution)
        and "".join(steps[biased:]) in NUMBERS
        and len(convolution.inputs) == 2 + biased
        and all(key in graph.constants for key in convolution.inputs[1:])
        and graph.constants[convolution.inputs[1]].shape[3] == 1
        and layers.inputs[0] == (convolution.node, 0)
        and len(graph.shape((convolution.node, 0)) or ()) == 4  # and not a view of it
    )


def _squeezed(convolution: Op, layers: Op, tiles: Tiles | None) -> Op:
    attrs = {**convolution.attrs, **{name: layers.attrs[name] for name in (MLP_ACTIVATIONS, MLP_BIASED)}}
    attrs |= {} if tiles is None else {TILES: tiles}
    return replace(convolution, op=SQUEEZE, attrs=attrs, inputs=[*convolution.inputs, *layers.inputs[1:]])


FAMILY: Family[Tiles | None] = Family("squeezes", lambda tiles: tiles, lambda value: value.or_none(conv.tiles_of), None)
"""The choices that are made here: `Tiles`, or None where layers of a kernel of their own are better."""


def decide_on(device: torch.device, *, measure: bool) -> Decide:
    """What `fuse_squeeze` asks, for data that lie as NHWC on this device: measured on a GPU, never elsewhere."""

    def decide(graph: OpGraph, convolution: Op, layers: Op) -> tuple[bool, Tiles | None]:
        if device.type != "cuda" or not (measure and can_compile()):
            return False, None
        attrs = (attrs_key(convolution.attrs), *sorted(layers.attrs.items()))
        shapes = [graph.shape(key) for key in (*convolution.inputs, *layers.inputs[1:])]
        key = (convolution.op, attrs, graph.constants[convolution.inputs[1]].dtype.name, *shapes)
        tiles = Tuner.of(device).decide(FAMILY, key, lambda: _Trial.of(graph, convolution, layers, device))
        return tiles is not None, tiles

    return decide


def list_layers(graph: OpGraph, device: torch.device) -> None:
    """Has the tuner, in `Tuner.listing`, hear of every choice that `fuse_mlp` and `fuse_squeeze` may make."""
    found = find_mlps(graph)
    joins, takes = joined_on(device, measure=True), decide_on(device, measure=True)
    for one in found:
        joins(graph, one)
    for convolution, layers in find_squeezes(graph, [one.op() for one in found]):
        takes(graph, convolution, layers)


@dataclass(frozen=True, eq=False)
class _Trial:
    """A convolution and layers on the device, with data at random.

    Attributes:
        convolution: As it is.
        layers: Likewise.
        data: What the convolution reads.
        own: Its filter, as the library wants it to lie, and its bias if it has one.
        rest: What the layers read beside its result.
    """

    convolution: Op
    layers: Op
    data: torch.Tensor
    own: tuple[torch.Tensor, ...]
    rest: tuple[torch.Tensor, ...]

    @staticmethod
    def of(graph: OpGraph, convolution: Op, layers: Op, device: torch.device) -> _Trial:
        chance = torch.Generator(device).manual_seed(0)
        own, rest = ([to_torch(graph.constants[key], device) for key in op.inputs[1:]] for op in (convolution, layers))
        own[0] = FILTERS[convolution.op](own[0], True)
        data = torch.randn(graph.shapes[convolution.inputs[0]], device=device, dtype=own[0].dtype, generator=chance)
        return _Trial(convolution, layers, data, tuple(own), tuple(rest))

    def kernels(self) -> Iterator[tuple[Tiles, Callable[..., Any]]]:
        """Our kernels that could run both, each called with data, the layers' inputs, and the convolution's."""
        for tiles in conv.squeezes(self.data):
            run = lowered(_squeezed(self.convolution, self.layers, tiles))
            yield tiles, lambda data, rest, *own, run=run: run(data, *own, *rest)

    def calls(self) -> Iterator[Callable[[], Any]]:
        """Calls of all kernels of ours that `winner` times."""
        conv.choose(self.convolution, [self.data, *self.own], lowered)
        for _, run in self.kernels():
            yield functools.partial(run, self.data, self.rest, self.own[0].contiguous(), *self.own[1:])

    def winner(self, tuner: Tuner) -> Tiles | None:
        """The fastest kernel, if it beats the convolution and the layers by the fastest of each."""
        chosen, filter = conv.choose(self.convolution, [self.data, *self.own], lowered)
        convolve, squeeze = lowered(chosen), lowered(self.layers)

        def apart(data: torch.Tensor, rest: tuple[torch.Tensor, ...], *own: torch.Tensor) -> Any:
            (result,) = convolve(data, *own)
            return (result, *squeeze(result, *rest))

        rotated = list(zip(*map(copies, self.rest), strict=False))
        baseline = RotatingWeights(apart, self.data, rotated, [filter, *self.own[1:]])
        own = [self.own[0].contiguous(), *self.own[1:]]
        calls = ((tiles, RotatingWeights(run, self.data, rotated, own)) for tiles, run in self.kernels())
        return tuner.first_to_beat(tuner.ranked(calls, baseline(), cold=True), baseline)
