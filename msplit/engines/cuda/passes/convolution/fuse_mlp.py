"""Fusions of small dense layers: with each other, with the mean of an image, with a depthwise convolution.

Two dense layers of a few rows are one kernel, and the mean over an image in front of them is in it. So is the end of a classifier: such
a mean, one dense layer, and the softmax behind it.

Squeeze-and-excitation (Hu et al., CVPR 2018) is three launches otherwise, which all wait for each other and have next to nothing to do. So
has a perceptron with one hidden layer, where a request brings a row or a few. Whether the kernel beats the three is measured.

A depthwise convolution takes squeeze-and-excitation's two dense layers along, of the mean of what it gives.

Each block of its kernel adds up its results while it has them, so that nothing reads them again for the mean, and the layers are no launch
of their own. Whether that beats the convolution and the layers behind it, each by its fastest kernel, is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.ir.dtypes import numpy_dtype, to_torch
from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph, attrs_key, known, proved, require
from msplit.engines.cuda.ir.windows import PROLOGUE, TILES
from msplit.engines.cuda.kernels import mlp
from msplit.engines.cuda.kernels.activations import NUMBERS, activate
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.conv import FILTERS
from msplit.engines.cuda.ops.fused import CLASSIFIER, CLASSIFIER_SOFTMAX, MLP, MLP_ACTIVATIONS, MLP_BIASED, SQUEEZE
from msplit.engines.cuda.passes.canonical.rewrites import activation_behind, reshapes_behind
from msplit.engines.cuda.passes.convolution.fuse_prologue import InFront, in_front
from msplit.engines.cuda.passes.measured import MeasuredFusion, Trial, Way, lowered, sample
from msplit.engines.cuda.passes.pattern import Readers, become_reshape, bias_and_activation, channels_last, matches
from msplit.opset.traits import RESHAPES

_DTYPES = ("float32", "float16", "bfloat16")
_RANK = 4


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A product with constant weights, and what follows it.

    Attributes:
        product: A MatMul, or one with a bias and an activation.
        activation: What follows, in the product or behind it; "" for nothing.
        absorbed: The product, and an activation behind it, perhaps in another shape.
    """

    product: Op
    activation: str
    absorbed: tuple[Op, ...]

    @property
    def result(self) -> Key:
        """The layer's result."""
        return self.absorbed[-1].out

    @property
    def weights(self) -> Key:
        """[inputs, outputs]."""
        return self.product.inputs[1]

    @property
    def bias(self) -> list[Key]:
        """The layer's bias, if it has one."""
        return self.product.inputs[2:]


@dataclass(frozen=True, eq=False)
class Candidate:
    """Layers that could be one kernel.

    Attributes:
        data: What it reads: rows, or images of which it takes the mean.
        layers: Two, one behind the other, or one.
        absorbed: All ops that it would be in place of, the first one first.
        softmax: The one behind a single layer.
        prologue: What a single layer's images go through before their mean is taken. Its operands are the op's last inputs.
    """

    data: Key
    layers: tuple[DenseLayer, ...]
    absorbed: tuple[Op, ...]
    softmax: Op | None = None
    prologue: InFront | None = None

    @property
    def pooled(self) -> bool:
        """Returns whether the mean is in it."""
        return any(op.op == "Mean" for op in self.absorbed)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Operands of the prologue: a constant per channel for each step that has one."""
        return () if self.prologue is None else self.prologue.operands

    def op(self, tiles: Tiles | None = None) -> Op:
        """The op that the layers become, with the tiles of its kernel if one was chosen, but for the operands of its prologue."""
        attrs: dict[str, Any] = {} if tiles is None else {TILES: tiles}
        attrs[MLP_ACTIVATIONS] = tuple(layer.activation for layer in self.layers)
        attrs[MLP_BIASED] = tuple(bool(layer.bias) for layer in self.layers)
        if len(self.layers) == 1:
            attrs[CLASSIFIER_SOFTMAX] = self.softmax is not None
        gives = (self.softmax or self.layers[-1].product).attrs.get(RESULT)
        attrs |= {} if gives is None else {RESULT: gives}
        attrs |= {} if self.prologue is None else {PROLOGUE: self.prologue.steps}
        weights, biases = [layer.weights for layer in self.layers], [key for layer in self.layers for key in layer.bias]
        source_nodes = [node for op in self.absorbed for node in op.source_nodes]
        kind = CLASSIFIER if len(self.layers) == 1 else MLP
        first, last = self.absorbed[0], self.absorbed[-1]
        return Op(last.node, first.name, kind, attrs, [self.data, *weights, *biases], source_nodes)


def find_mlps(graph: OpGraph) -> list[Candidate]:
    """Layers of a few rows. First two, the second the only reader of the first: of three in a row each pair is one. Then single layers of a
    mean, and those with a softmax behind them."""
    readers = Readers(graph)
    layers = matches(_layer, graph, readers, graph.ops.values())
    pairs = matches(_pair, graph, readers, layers)
    paired = {layer.product.node for one in pairs for layer in one.layers}
    singles = matches(_single, graph, readers, layers)
    return [*pairs, *(one for one in singles if one.softmax or one.layers[0].product.node not in paired)]


def _pair(graph: OpGraph, readers: Readers, first: DenseLayer) -> Candidate:
    between, key = reshapes_behind(readers, first.result)
    op, reader = first.product, known(readers.only(key))
    require(reader.inputs[0] == key and graph.shape(key) == graph.shape(op.out))
    second = _layer(graph, readers, reader)
    data, before = _pooled(graph, readers, op.inputs[0], str(op.attrs["T"]))
    hidden, results = graph.constants[second.weights].shape
    require(reader.attrs["T"] == op.attrs["T"] and mlp.fits(known(graph.shape(data)), hidden, results))
    return Candidate(data, (first, second), (*before, *first.absorbed, *between, *second.absorbed))


def _single(graph: OpGraph, readers: Readers, layer: DenseLayer) -> Candidate:
    dtype, results = str(layer.product.attrs["T"]), graph.constants[layer.weights].shape[1]
    data, before = _pooled(graph, readers, layer.product.inputs[0], dtype)
    between, key = reshapes_behind(readers, layer.result)
    softmax = readers.only(key)
    alike = softmax is not None and softmax.op == "Softmax" and softmax.attrs.get("T") == dtype
    if not alike or (graph.shape(key) or ())[-1:] != (results,):
        softmax = None
    shape = known(graph.shape(data))
    require((before or softmax) and mlp.classifier_fits(shape, results, softmax=softmax is not None))
    prologue = proved(in_front, graph, readers, before[0], shape, numpy_dtype(dtype)) if before else None
    if prologue is not None and any(isinstance(one, tuple) for one in prologue.operands):
        prologue = None  # factors that another value has
    if prologue is not None:
        data, before = prologue.data, [*reversed(prologue.absorbed), *before]
    behind = () if softmax is None else (*between, softmax)
    return Candidate(data, (layer,), (*before, *layer.absorbed, *behind), softmax, prologue)


def _layer(graph: OpGraph, readers: Readers, op: Op) -> DenseLayer:
    require(op.op.removeprefix("_Fused") == "MatMul" and op.attrs.get("T") in _DTYPES)
    biased, activation = bias_and_activation(op)
    require(len(op.inputs) == 2 + biased and all(key in graph.constants for key in op.inputs[1:]))
    require(activation in NUMBERS and not op.attrs.get("transpose_a") and not op.attrs.get("transpose_b"))
    reshapes, key = reshapes_behind(readers, op.out)
    follows = not activation and op.attrs.get(RESULT) in (None, op.attrs["T"])
    name, ops = activation_behind(graph, readers, key) if follows else (None, [])
    if name is None or name not in NUMBERS:
        return DenseLayer(op, activation, (op,))
    return DenseLayer(op, name, (op, *reshapes, *ops))


def _pooled(graph: OpGraph, readers: Readers, rows: Key, dtype: str) -> tuple[Key, list[Op]]:
    """Images whose mean rows are over height and width, with the ops in between; themselves and none where they are no such thing, or of
    another type."""
    key, absorbed = rows, list[Op]()
    while (op := readers.maker(key)) is not None:
        absorbed.insert(0, op)
        if op.op == "Mean":
            shape, axes = graph.shape(op.inputs[0]), graph.constants.get(op.inputs[1])
            if shape is None or axes is None or len(shape) != _RANK or graph.shape(rows) != (shape[0], shape[3]):
                break
            of_image = sorted(axes.reshape(-1) % _RANK) == [1, 2]
            alike = op.attrs.get("T") == dtype == op.attrs.get(RESULT, dtype)
            return (op.inputs[0], absorbed) if of_image and alike else (rows, [])
        if op.op not in RESHAPES:
            break
        key = op.inputs[0]
    return rows, []


def _fuse(graph: OpGraph, found: Candidate, tiles: Tiles | None) -> None:
    *others, last = found.absorbed
    op = found.op(tiles)
    op.inputs += [graph.constant(one) for one in found.operands]
    product = found.layers[-1].product
    shape = graph.shapes[product.out]
    graph.drop(others)
    if graph.shapes[last.out] == shape:
        graph.ops[last.node] = op
        return
    made = graph.add(op.op, op, op.attrs, op.inputs, shape, str(op.attrs.get(RESULT, product.attrs["T"])))
    last.source_nodes = made.source_nodes = op.source_nodes
    become_reshape(graph, last, made.out)


def _find(graph: OpGraph) -> Iterator[Candidate]:
    """Candidates that share no op with one that was fused."""
    gone: set[int] = set()
    for found in find_mlps(graph):
        nodes = {op.node for op in found.absorbed}
        if gone.isdisjoint(nodes):
            yield found
            if found.absorbed[0].node not in graph.ops:
                gone |= nodes


def _key(graph: OpGraph, found: Candidate, device: torch.device) -> tuple[Any, ...]:
    op = found.op()
    shapes = [graph.shape(key) for key in op.inputs]
    layers = tuple((layer.product.op, attrs_key(layer.product.attrs)) for layer in found.layers)
    return tuple(sorted(op.attrs.items())), layers, torch.backends.cuda.matmul.allow_tf32, *shapes


def _trial(graph: OpGraph, found: Candidate, device: torch.device) -> Trial[Tiles]:
    """The mean, each product by its own fastest kernel, and the softmax, against one kernel for all."""
    rest = [to_torch(graph.constants[key], device) for key in found.op().inputs[1:]]
    rest += [to_torch(one, device) for one in found.operands]
    count = len(found.layers)
    data, weights, biases = sample(graph, found.data, rest[0].dtype, device), tuple(rest[:count]), rest[count:]
    steps = _apart(found, data, weights, biases)
    softmax = None if found.softmax is None else lowered(found.softmax)

    def apart(data: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> Any:
        rows = torch.relu(data) if found.prologue else data  # a launch that it can not do without
        rows = rows.mean((1, 2)) if found.pooled else rows
        for (run, bias, last, _), matrix in zip(steps, weights, strict=True):
            (rows,) = run(rows, matrix, *bias)
            rows = rows if last is None else last(rows)
        return (rows,) if softmax is None else softmax(rows)

    def candidates() -> Iterator[tuple[Tiles, Way]]:
        channels, early = data.shape[-1], conv.starts_early(data)
        pixels = data[0].numel() // channels
        cuts = mlp.classifier_candidates(channels, early=early) if count == 1 else mlp.candidates(pixels, early=early)
        for tiles in cuts:
            run = lowered(found.op(tiles))
            yield tiles, Way(lambda data, own, *rest, run=run: run(data, *own, *rest), data, weights, biases)

    expected = lowered(found.op())(data, *weights, *biases)
    return Trial([Way(apart, data, tuple(laid for *_, laid in steps))], candidates(), expected)


def _apart(
    found: Candidate, data: torch.Tensor, weights: Sequence[torch.Tensor], biases: Iterable[torch.Tensor]
) -> list[tuple[Callable[..., Any], list[torch.Tensor], Callable[..., Any] | None, torch.Tensor]]:
    """Per layer its fastest kernel, its bias, an activation with a launch of its own, and its matrix as that kernel wants it."""
    biases, steps = iter(biases), []
    rows = data.mean((1, 2)) if found.pooled else data
    for layer, matrix in zip(found.layers, weights, strict=True):
        bias = [next(biases)] if layer.bias else []
        op, laid = matmul.choose(layer.product, [rows, matrix, *bias], lowered, movable=True)
        last = activate(layer.activation) if len(layer.absorbed) > 1 else None
        steps.append((lowered(op), bias, last, laid))
        (rows,) = lowered(op)(rows, laid, *bias)
    return steps


MLPS = MeasuredFusion(
    conv.tiles_family("mlps"),
    _find,
    _fuse,
    _key,
    _trial,
    worth=lambda *_: can_compile(),
    on_cpu=lambda _, found: found.pooled,  # where nothing can be measured: a mean that is in it saves most
)


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


def _fuse_squeeze(graph: OpGraph, found: Pair, tiles: Tiles | None) -> None:
    convolution, layers = found
    squeezed, result = _squeezed(convolution, layers, tiles), (convolution.node, 1)
    convolution.op, convolution.attrs, convolution.inputs = squeezed.op, squeezed.attrs, squeezed.inputs
    convolution.source_nodes = [*convolution.source_nodes, *layers.source_nodes]
    graph.describe(result, graph.shapes[layers.out], str(convolution.attrs["T"]))
    del graph.ops[layers.node]
    graph.rename({layers.out: result})


def _squeeze_key(graph: OpGraph, found: Pair, device: torch.device) -> tuple[Any, ...]:
    convolution, layers = found
    attrs = (attrs_key(convolution.attrs), *sorted(layers.attrs.items()))
    shapes = [graph.shape(key) for key in (*convolution.inputs, *layers.inputs[1:])]
    return convolution.op, attrs, graph.constants[convolution.inputs[1]].dtype.name, *shapes


def _squeeze_trial(graph: OpGraph, found: Pair, device: torch.device) -> Trial[Tiles]:
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
    _fuse_squeeze,
    _squeeze_key,
    _squeeze_trial,
    worth=lambda *_: can_compile(),
    ahead=lambda graph: find_squeezes(graph, [one.op() for one in find_mlps(graph)]),
)
