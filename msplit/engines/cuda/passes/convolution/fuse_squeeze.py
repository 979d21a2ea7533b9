"""A depthwise convolution takes squeeze-and-excitation's two dense layers along, of the mean of what it gives.

Each block of its kernel adds up its results while it has them, so that nothing reads them again for the mean, and the layers are no launch
of their own. Whether that beats the convolution and the layers behind it, each by its fastest kernel, is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.ir.graph import RESULT, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.windows import TILES
from msplit.engines.cuda.kernels.activations import NUMBERS
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.ops.fused import MLP, MLP_ACTIVATIONS, MLP_BIASED, SQUEEZE
from msplit.engines.cuda.passes.convolution.fuse_mlp import find_mlps
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, lowered, sample
from msplit.engines.cuda.passes.pattern import bias_and_activation, channels_last

Pair = tuple[Op, Op]
"""A convolution and the layers behind it."""


def find_squeezes(graph: OpGraph, layers: Iterable[Op]) -> list[Pair]:
    """The layers that a depthwise convolution could take along, each behind it: of ops that are layers, or could be (`fuse_mlp`)."""
    pairs = ((graph.ops.get(one.inputs[0][0]), one) for one in layers if one.op == MLP)
    return [(op, one) for op, one in pairs if op is not None and _takes(graph, op, one)]


def _takes(graph: OpGraph, convolution: Op, layers: Op) -> bool:
    """Returns whether our kernel does both: NHWC data, constant weights, a bias and an activation at most."""
    biased, activation = bias_and_activation(convolution)
    return (
        RESULT not in layers.attrs
        and conv.is_depthwise(convolution)
        and channels_last(convolution)
        and activation in NUMBERS
        and len(convolution.inputs) == 2 + biased
        and all(key in graph.constants for key in convolution.inputs[1:])
        and graph.constants[convolution.inputs[1]].shape[3] == 1
        and layers.inputs[0] == convolution.out
        and len(graph.shape(convolution.out) or ()) == 4  # and not a view of it
    )


def _squeezed(convolution: Op, layers: Op, tiles: Tiles | None) -> Op:
    attrs = {**convolution.attrs, **{name: layers.attrs[name] for name in (MLP_ACTIVATIONS, MLP_BIASED)}}
    attrs |= {} if tiles is None else {TILES: tiles}
    return replace(convolution, op=SQUEEZE, attrs=attrs, inputs=[*convolution.inputs, *layers.inputs[1:]])


def _fuse(graph: OpGraph, found: Pair, tiles: Tiles | None) -> None:
    convolution, layers = found
    squeezed, result = _squeezed(convolution, layers, tiles), (convolution.node, 1)
    convolution.op, convolution.attrs, convolution.inputs = squeezed.op, squeezed.attrs, squeezed.inputs
    convolution.source_nodes = [*convolution.source_nodes, *layers.source_nodes]
    graph.describe(result, graph.shapes[layers.out], str(convolution.attrs["T"]))
    del graph.ops[layers.node]
    graph.rename({layers.out: result})


def _key(graph: OpGraph, found: Pair, device: torch.device) -> tuple[Any, ...]:
    convolution, layers = found
    attrs = (attrs_key(convolution.attrs), *sorted(layers.attrs.items()))
    shapes = [graph.shape(key) for key in (*convolution.inputs, *layers.inputs[1:])]
    return convolution.op, attrs, graph.constants[convolution.inputs[1]].dtype.name, *shapes


def _trial(graph: OpGraph, found: Pair, device: torch.device) -> Trial[Tiles]:
    convolution, layers = found
    own, rest = ([to_torch(graph.constants[key], device) for key in op.inputs[1:]] for op in found)
    own[0], weights = FILTERS[convolution.op](own[0], True), tuple(rest)
    data = sample(graph, convolution.inputs[0], own[0].dtype, device)
    chosen, filter = conv.choose(convolution, [data, *own], lowered)
    convolve, squeeze, turned = lowered(chosen), lowered(layers), [own[0].contiguous(), *own[1:]]

    def apart(data: torch.Tensor, rest: tuple[torch.Tensor, ...], *own: torch.Tensor) -> Any:
        (result,) = convolve(data, *own)
        return (result, *squeeze(result, *rest))

    def candidates() -> Iterator[tuple[Tiles, Way]]:
        for tiles in conv.squeezes(data):
            run = lowered(_squeezed(convolution, layers, tiles))
            yield tiles, Way(lambda data, rest, *own, run=run: run(data, *own, *rest), data, weights, turned)

    baseline = Way(apart, data, weights, [filter, *own[1:]])
    return Trial([baseline], candidates(), baseline())


SQUEEZES = MeasuredFusion(
    conv.tiles_family("squeezes"),
    lambda graph: find_squeezes(graph, list(graph.ops.values())),
    _fuse,
    _key,
    _trial,
    worth=lambda *_: can_compile(),
    ahead=lambda graph: find_squeezes(graph, [one.op() for one in find_mlps(graph)]),
)
