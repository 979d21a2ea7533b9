"""Two dense layers of a few rows are one kernel, and the mean over an image in front of them is in it. So is the end of a classifier: such
a mean, one dense layer, and the softmax behind it.

Squeeze-and-excitation (Hu et al., CVPR 2018) is three launches otherwise, which all wait for each other and have next to nothing to do. So
has a perceptron with one hidden layer, where a request brings a row or a few. Whether the kernel beats the three is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from msplit.engines.cuda.autotune import conv, matmul
from msplit.engines.cuda.autotune.choices import Family
from msplit.engines.cuda.autotune.tuner import RotatingWeights, Tuner, copies
from msplit.engines.cuda.ir.dtypes import numpy_dtype, to_torch
from msplit.engines.cuda.ir.graph import RESULT, Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.windows import PROLOGUE, TILES
from msplit.engines.cuda.kernels import classifier, mlp
from msplit.engines.cuda.kernels.activations import NUMBERS, activate
from msplit.engines.cuda.kernels.tiles import Tiles
from msplit.engines.cuda.kernels.toolchain import can_compile
from msplit.engines.cuda.ops.fused import CLASSIFIER, CLASSIFIER_SOFTMAX, MLP, MLP_ACTIVATIONS, MLP_BIASED
from msplit.engines.cuda.passes.canonical.fuse_epilogue import activation_behind, reshapes_behind
from msplit.engines.cuda.passes.convolution.fuse_prologue import InFront, in_front
from msplit.engines.cuda.passes.convolution.merge_convolutions import lowered
from msplit.engines.cuda.passes.pattern import Readers, become_reshape
from msplit.opset.traits import RESHAPES

_DTYPES = ("float32", "float16", "bfloat16")
_RANK = 4


@dataclass(frozen=True, eq=False)
class Layer:
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
        """What it gives."""
        return self.absorbed[-1].node, 0

    @property
    def weights(self) -> Key:
        """[inputs, outputs]."""
        return self.product.inputs[1]

    @property
    def bias(self) -> list[Key]:
        """Of the layer, if it has one."""
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
    layers: tuple[Layer, ...]
    absorbed: tuple[Op, ...]
    softmax: Op | None = None
    prologue: InFront | None = None

    @property
    def pooled(self) -> bool:
        """Whether the mean is in it."""
        return any(op.op == "Mean" for op in self.absorbed)

    @property
    def operands(self) -> tuple[Any, ...]:
        """Of the prologue: a constant per channel for each step that has one."""
        return () if self.prologue is None else self.prologue.operands

    def op(self, tiles: Tiles | None = None) -> Op:
        """What it becomes, with the tiles of its kernel if one was chosen, but for the operands of its prologue."""
        attrs: dict[str, Any] = {} if tiles is None else {TILES: tiles}
        attrs[MLP_ACTIVATIONS] = tuple(layer.activation for layer in self.layers)
        attrs[MLP_BIASED] = tuple(bool(layer.bias) for layer in self.layers)
        if len(self.layers) == 1:
            attrs[CLASSIFIER_SOFTMAX] = self.softmax is not None
        last = self.softmax or self.layers[-1].product
        attrs |= {RESULT: last.attrs[RESULT]} if RESULT in last.attrs else {}
        attrs |= {} if self.prologue is None else {PROLOGUE: self.prologue.steps}
        inputs = [
            self.data,
            *(layer.weights for layer in self.layers),
            *(key for one in self.layers for key in one.bias),
        ]
        source_nodes = [node for op in self.absorbed for node in op.source_nodes]
        kind = CLASSIFIER if len(self.layers) == 1 else MLP
        return Op(self.absorbed[-1].node, self.absorbed[0].name, kind, attrs, inputs, source_nodes)


Decide = Callable[[OpGraph, Candidate], "tuple[bool, Tiles | None]"]
"""Whether layers become one op, and the tiles of its kernel; none where libraries run it step by step."""


def fuse_mlp(graph: OpGraph, decide: Decide) -> bool:
    """Makes one op of two dense layers, and of the end of a classifier, where that is decided."""
    gone: set[int] = set()
    for found in find_mlps(graph):
        if gone.isdisjoint(one.node for one in found.absorbed):
            takes, tiles = decide(graph, found)
            if takes:
                _fuse(graph, found, tiles)
                gone.update(one.node for one in found.absorbed)
    return bool(gone)


def find_mlps(graph: OpGraph) -> list[Candidate]:
    """Layers of a few rows. First two, the second the only reader of the first: of three in a row each pair is one. Then single layers of a
    mean, and those with a softmax behind them."""
    readers = Readers(graph)
    layers = [one for one in (_layer(graph, readers, op) for op in graph.ops.values()) if one is not None]
    pairs = [one for one in (_pair(graph, readers, layer) for layer in layers) if one is not None]
    paired = {layer.product.node for one in pairs for layer in one.layers}
    singles = [one for one in (_single(graph, readers, layer) for layer in layers) if one is not None]
    return [*pairs, *(one for one in singles if one.softmax or one.layers[0].product.node not in paired)]


def _pair(graph: OpGraph, readers: Readers, first: Layer) -> Candidate | None:
    between = reshapes_behind(readers, first.result)
    key = (between[-1].node, 0) if between else first.result
    op, reader = first.product, readers.only(key)
    second = None if reader is None or reader.inputs[0] != key else _layer(graph, readers, reader)
    if reader is None or second is None or graph.shape(key) != graph.shape((op.node, 0)):
        return None
    data, before = _pooled(graph, readers, op.inputs[0], str(op.attrs["T"]))
    hidden, results = graph.constants[second.weights].shape
    shape = graph.shape(data)
    if shape is None or reader.attrs["T"] != op.attrs["T"] or not mlp.fits(shape, hidden, results):
        return None
    return Candidate(data, (first, second), (*before, *first.absorbed, *between, *second.absorbed))


def _single(graph: OpGraph, readers: Readers, layer: Layer) -> Candidate | None:
    dtype, results = str(layer.product.attrs["T"]), graph.constants[layer.weights].shape[1]
    data, before = _pooled(graph, readers, layer.product.inputs[0], dtype)
    between = reshapes_behind(readers, layer.result)
    key = (between[-1].node, 0) if between else layer.result
    softmax = readers.only(key)
    alike = softmax is not None and softmax.op == "Softmax" and softmax.attrs.get("T") == dtype
    if not alike or (graph.shape(key) or ())[-1:] != (results,):
        softmax = None
    shape = graph.shape(data)
    if shape is None or not (before or softmax) or not classifier.fits(shape, results, softmax=softmax is not None):
        return None
    prologue = in_front(graph, readers, before[0], shape, numpy_dtype(dtype)) if before else None
    if prologue is not None and any(isinstance(one, tuple) for one in prologue.operands):
        prologue = None  # factors that another value has
    if prologue is not None:
        data, before = prologue.data, [*reversed(prologue.absorbed), *before]
    behind = () if softmax is None else (*between, softmax)
    return Candidate(data, (layer,), (*before, *layer.absorbed, *behind), softmax, prologue)


def _layer(graph: OpGraph, readers: Readers, op: Op) -> Layer | None:
    if op.op.removeprefix("_Fused") != "MatMul" or op.attrs.get("T") not in _DTYPES:
        return None
    steps = tuple(op.attrs.get("fused_ops", ()))
    biased = steps[:1] == ("BiasAdd",)
    activation = "".join(steps[biased:])
    constant = all(key in graph.constants for key in op.inputs[1:])
    if not constant or len(op.inputs) != 2 + biased or activation not in NUMBERS:
        return None
    if op.attrs.get("transpose_a") or op.attrs.get("transpose_b"):
        return None
    reshapes = reshapes_behind(readers, (op.node, 0))
    last = reshapes[-1] if reshapes else op
    follows = not activation and op.attrs.get(RESULT) in (None, op.attrs["T"])
    name, ops = activation_behind(graph, readers, (last.node, 0)) if follows else (None, [])
    if name is None or name not in NUMBERS:
        return Layer(op, activation, (op,))
    return Layer(op, name, (op, *reshapes, *ops))


def _pooled(graph: OpGraph, readers: Readers, rows: Key, dtype: str) -> tuple[Key, list[Op]]:
    """What rows are the mean of over height and width, with the ops in between; themselves and none where they are no such thing, or of
    another type."""
    key, absorbed = rows, list[Op]()
    while (op := graph.ops.get(key[0])) is not None and readers.only(key) is not None:
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
    shape = graph.shapes[found.layers[-1].product.node, 0]
    for one in others:
        del graph.ops[one.node]
    if graph.shapes[last.node, 0] == shape:
        graph.ops[last.node] = op
        return
    made = graph.add(op.op, op, op.attrs, op.inputs, shape)
    graph.dtypes[made.node, 0] = str(op.attrs.get(RESULT, found.layers[-1].product.attrs["T"]))
    last.source_nodes = made.source_nodes = op.source_nodes
    become_reshape(graph, last, (made.node, 0))


FAMILY: Family[Tiles | None] = Family("mlps", lambda tiles: tiles, lambda value: value.or_none(conv.tiles_of), None)
"""The choices that are made here: `Tiles`, or None where a kernel for each is better."""


def decide_on(device: torch.device, *, measure: bool) -> Decide:
    """What `fuse_mlp` asks, for data that lie as NHWC on this device: on a GPU by measurement; elsewhere, where nothing can be measured,
    what has a mean in it becomes one, since that saves most."""

    def decide(graph: OpGraph, found: Candidate) -> tuple[bool, Tiles | None]:
        if device.type != "cuda":
            return found.pooled, None
        if not (measure and can_compile()):
            return False, None
        op = found.op()
        shapes = [graph.shape(key) for key in op.inputs]
        layers = tuple((layer.product.op, attrs_key(layer.product.attrs)) for layer in found.layers)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        key = (tuple(sorted(op.attrs.items())), layers, tf32, *shapes)
        tiles = Tuner.of(device).decide(FAMILY, key, lambda: _Trial.of(graph, found, device))
        return tiles is not None, tiles

    return decide


@dataclass(frozen=True, eq=False)
class _Trial:
    """Layers on the device, with data at random.

    Attributes:
        found: What could become one op.
        data: What it reads.
        weights: The matrix of each.
        biases: Of the layers that have one, and the operands of a prologue.
    """

    found: Candidate
    data: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor, ...]

    @staticmethod
    def of(graph: OpGraph, found: Candidate, device: torch.device) -> _Trial:
        chance = torch.Generator(device).manual_seed(0)
        rest = [to_torch(graph.constants[key], device) for key in found.op().inputs[1:]]
        rest += [to_torch(one, device) for one in found.operands]
        data = torch.randn(graph.shapes[found.data], device=device, dtype=rest[0].dtype, generator=chance)
        count = len(found.layers)
        return _Trial(found, data, tuple(rest[:count]), tuple(rest[count:]))

    def kernels(self) -> Iterator[tuple[Tiles, Callable[..., Any]]]:
        """Our kernels that could run it, each called with data, the matrices in a tuple, and biases."""
        channels, early = self.data.shape[-1], conv.starts_early(self.data)
        single, pixels = len(self.weights) == 1, self.data[0].numel() // channels
        cuts = classifier.candidates(channels, early=early) if single else mlp.candidates(pixels, early=early)
        for tiles in cuts:
            run = lowered(self.found.op(tiles))
            yield tiles, lambda data, matrices, *biases, run=run: run(data, *matrices, *biases)

    def calls(self) -> Iterator[Callable[[], Any]]:
        """Calls of all kernels of ours that `winner` times."""
        self._apart()
        for _, run in self.kernels():
            yield functools.partial(run, self.data, self.weights, *self.biases)

    def _apart(self) -> list[tuple[Callable[..., Any], list[torch.Tensor], Callable[..., Any] | None, torch.Tensor]]:
        """Per layer what runs it by its own fastest kernel, its bias, an activation with a launch of its own, and its matrix as it then
        lies.
        """
        biases = iter(self.biases)
        rows = self.data.mean((1, 2)) if self.found.pooled else self.data
        found = []
        for layer, matrix in zip(self.found.layers, self.weights, strict=True):
            bias = [next(biases)] if layer.bias else []
            op, weights = matmul.choose(layer.product, [rows, matrix, *bias], lowered, movable=True)
            last = activate(layer.activation) if len(layer.absorbed) > 1 else None
            found.append((lowered(op), bias, last, weights))
            (rows,) = lowered(op)(rows, weights, *bias)
        return found

    def winner(self, tuner: Tuner) -> Tiles | None:
        """The fastest kernel, if it beats the mean, each product by its own fastest kernel, and the softmax."""
        steps = self._apart()
        softmax = None if self.found.softmax is None else lowered(self.found.softmax)

        def apart(data: torch.Tensor, weights: tuple[torch.Tensor, ...], *biases: torch.Tensor) -> Any:
            rows = torch.relu(data) if self.found.prologue else data  # a launch that it can not do without
            rows = rows.mean((1, 2)) if self.found.pooled else rows
            for (run, bias, last, _), matrix in zip(steps, weights, strict=True):
                (rows,) = run(rows, matrix, *bias)
                rows = rows if last is None else last(rows)
            return (rows,) if softmax is None else softmax(rows)

        laid = list(zip(*(copies(weights) for *_, weights in steps), strict=False))
        baseline = RotatingWeights(apart, self.data, laid, ())
        own = list(zip(*map(copies, self.weights), strict=False))
        calls = ((tiles, RotatingWeights(run, self.data, own, self.biases)) for tiles, run in self.kernels())
        expected = lowered(self.found.op())(self.data, *self.weights, *self.biases)
        return tuner.first_to_beat(tuner.ranked(calls, expected, cold=True), baseline)
