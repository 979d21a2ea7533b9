"""Ops that do the work of several: TensorFlow's Grappler makes some of them, the engine's passes the others.

Of a matrix product or a convolution with what follows it, `fused_ops` lists that, in order; each takes its inputs from the node's
`args`. On a GPU the library's epilogue is used where there is one that is right: bias in cuBLAS, with approximate GELU in cuBLASLt.

Attention: products of queries and keys, their softmax, and the product of that with values.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir import windows
from msplit.engines.cuda.ir.dtypes import torch_dtype, wider_type
from msplit.engines.cuda.ir.graph import RESULT
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels import channelwise, conv
from msplit.engines.cuda.kernels import matmul as kernels
from msplit.engines.cuda.kernels import mlp as layers_behind
from msplit.engines.cuda.kernels.activations import IN_LIBRARY, LEAKY_ALPHA, Epilogue, activate
from msplit.engines.cuda.kernels.launch import can_launch
from msplit.engines.cuda.kernels.matmul import ATTENTION_TILES
from msplit.engines.cuda.kernels.memory import grouped_gather
from msplit.engines.cuda.kernels.mlp import Dense, Layers, classify
from msplit.engines.cuda.ops.conv import convolution_windows, convolve, spatial_sizes
from msplit.engines.cuda.ops.gather import or_zeros
from msplit.engines.cuda.ops.linalg import product_in_tiles
from msplit.engines.cuda.ops.nn import EPSILON, normalize
from msplit.engines.cuda.ops.shape import own_attribute
from msplit.opset.traits import EPILOGUE_STEPS

MLP, SQUEEZE, CLASSIFIER = "_MLP", "_SqueezeDepthwiseConv2dNative", "_Classifier"

MLP_ACTIVATIONS, MLP_BIASED = "_activations", "_biased"
"""Attributes of dense layers that are one op: what follows each, "" for nothing, and whether it has a bias. Biases come last."""

CLASSIFIER_SOFTMAX = "_softmax"
"""Attribute of such a layer that is the end of a classifier: whether a softmax follows."""

_BATCH_NORM_INPUTS = 4


@lowering("_FusedMatMul")
def fused_matmul(node: Node, a: Tensor, b: Tensor, *args: Tensor) -> Tensor:
    """A matrix product, then a bias, a sum and an activation as `fused_ops` says."""
    steps = _steps(node)
    a = a.t() if node.get("transpose_a") else a
    b = b.t() if node.get("transpose_b") else b
    if batched_matmul.TILE in node.attrs:
        return product_in_tiles(node, a, b, steps, args)
    _, result = wider_type(node, a)
    if not steps or steps[0] != "BiasAdd":
        found = _follow(node, torch.mm(a, b), list(args), steps, first=False)
    elif len(steps) == 2 and steps[1] in IN_LIBRARY and a.is_cuda and torch.version.hip is None:
        found = torch._addmm_activation(args[0], a, b, use_gelu=True)
    else:
        found = _follow(node, torch.addmm(args[0], a, b), list(args[1:]), steps[1:], first=False)
    return windows.for_products(node, found.to(result))


@lowering("_FusedConv2D", "_FusedDepthwiseConv2dNative")
def fused_convolution(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> Tensor:
    """A convolution, then a bias or a batch normalization, a sum and an activation as `fused_ops` says."""
    if node.get("filter_format", "HWIO") != "HWIO":
        raise Unsupported(
            f"{node.op} {node.name}: filter_format {node.get('filter_format')} is not supported, only HWIO"
        )
    if len(args) > int(node.get("num_args", len(args))):
        raise Unsupported(f"{node.op} {node.name}: host_args belong to a quantized convolution, which is not supported")
    return _convolved(node, data, filter, args)


@lowering("_PrologueConv2D", own=True)
def convolution_with_prologue(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> Tensor:
    """A convolution of NHWC data that are scaled, shifted or cut off below zero first, as the attribute `_prologue` says."""
    steps = own_attribute(node, windows.PROLOGUE)
    count = len(args) - len({*steps} - {"relu"})
    return _convolved(node, data, filter, args[:count], _prologue(steps, args[count:]))


def _prologue(steps: tuple[str, ...], operands: tuple[Tensor, ...]) -> windows.Prologue:
    """The prologue of some steps, those of which have an operand that have one."""
    rest = iter(operands)
    scale, shift = (next(rest) if step in steps else None for step in windows.PROLOGUE_STEPS[:2])
    return windows.Prologue(scale, shift, "relu" in steps)


@lowering("_CastConv2D", own=True)
def convolution_with_cast(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> Tensor:
    """A convolution of NHWC data of another type, as the attribute `_cast_from` says, which are converted to the filter's."""
    own_attribute(node, windows.CAST_FROM)
    return _convolved(node, data, filter, args)


def _convolved(
    node: Node, data: Tensor, filter: Tensor, args: tuple[Tensor, ...], prologue: windows.Prologue = windows.NO_PROLOGUE
) -> Tensor:
    steps = _steps(node)
    first, rounds = windows.channels_first(node), 0 in node.get(windows.ROUNDS, ())
    if not steps or steps[0] != "BiasAdd":
        result = convolve(node, data, filter, Epilogue(rounds=rounds and not steps), prologue)
        return _follow(node, result, list(args), steps, first=first, rounds=rounds)
    bias, *rest = args
    steps = steps[1:]
    side = None
    if steps[:1] == ("Add",):
        side, *rest = rest
        steps = steps[1:]
    activation = "" if not steps or steps[0] in EPILOGUE_STEPS else steps[0]
    steps = steps[1:] if activation else steps
    result = convolve(node, data, filter, Epilogue(bias, side, activation, rounds and not steps), prologue)
    return _follow(node, result, rest, steps, first=first, rounds=rounds)


def _follow(
    node: Node, result: Tensor, args: list[Tensor], steps: tuple[str, ...], *, first: bool, rounds: bool = False
) -> Tensor:
    """Runs the fused ops one by one on the product; `args` holds their inputs, `first` says that channels are in axis 1, `rounds` that
    what the last one gives is rounded to TF32."""
    for step in steps:
        if step == "BiasAdd":
            bias = args.pop(0)
            result = result + (bias.reshape(-1, 1, 1) if first else bias)
        elif step == "Add":
            result = result + args.pop(0)
        elif step == "FusedBatchNorm":
            scale, offset, mean, variance = args[:_BATCH_NORM_INPUTS]
            del args[:_BATCH_NORM_INPUTS]
            result = normalize(result, scale, offset, mean, variance, node.get("epsilon", EPSILON), first)
        else:
            result = activate(step, node.get("leakyrelu_alpha", LEAKY_ALPHA))(result)
    return windows.to_tf32(result) if rounds and steps else result


def _steps(node: Node) -> tuple[str, ...]:
    """The node's fused ops.

    Raises:
        Unsupported: One of them is not known.
    """
    steps = tuple(str(step) for step in node.get("fused_ops", ()))
    for step in steps:
        if step in EPILOGUE_STEPS:
            continue
        try:
            activate(step)
        except KeyError:
            raise Unsupported(f"{node.op} {node.name}: fused op {step} is not supported") from None
    return steps


@lowering(windows.TO_TF32, own=True)
def rounded(node: Node, x: Tensor) -> Tensor:
    """Float32 rounded to TF32."""
    return windows.to_tf32(x)


@lowering("_GroupedMatMul", own=True)
def grouped_matmul(node: Node, x: Tensor, weights: Tensor, *args: Tensor) -> Tensor:
    """Products of alike dense layers, each with its bias and activation: what `--group` makes of MatMul and _FusedMatMul."""
    own_attribute(node, "count")
    result = batched_matmul.run(batched_matmul.grouped(node.attrs, x, weights, *args), node.attrs)
    return result[0] if node.get("single") else result


@lowering("_GroupedLookup", own=True)
def grouped_lookup(node: Node, table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """Rows of several tables below each other: what `--group` makes of lookups. An id outside of its own table is out of range."""
    count = int(own_attribute(node, "count"))
    shape = (*(ids.shape if node.get("single") else (count, *ids.shape[1:])), *table.shape[1:])
    flat = ids.reshape(count, -1)
    if table.element_size() <= 8 and can_launch(table.device):
        return grouped_gather(table, flat.contiguous(), starts, sizes).reshape(shape)
    inside = (flat >= 0) & (flat < sizes.unsqueeze(1))
    if table.device.type == "cpu" and not bool(inside.all()):
        raise IndexError("index out of range in a lookup")
    rows = torch.where(inside, flat.to(torch.int64) + starts.unsqueeze(1), 0).reshape(-1)
    taken = table.index_select(0, rows)
    if table.device.type != "cpu":
        taken = or_zeros(inside.reshape(-1, *[1] * (table.dim() - 1)), taken)
    return taken.reshape(shape)


@lowering("_SiblingConv2D", own=True)
def sibling_convolutions(node: Node, data: Tensor, filter: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Convolutions of the same data with windows of one kind, bias and activation included: an output for each.

    Their filters and biases lie side by side along the output channels; the attribute `_siblings` says how many each has.
    """
    sizes = own_attribute(node, windows.SIBLINGS)
    activation = "Relu" if "Relu" in node.get("fused_ops", ()) else ""
    tiles, rounds = node.get(windows.TILES), node.get(windows.ROUNDS, ())
    if tiles is not None and can_launch(data.device):
        frames = convolution_windows(node, spatial_sizes(node, data.shape), filter.shape[:-2])
        if conv.fits(data, filter, frames):
            rooms = {number: room for number, room in node.room.items() if conv.fits_in(room)}
            behind, rounded = Epilogue(bias, activation=activation), bool(node.get(windows.ROUNDED))
            found = conv.convolve_siblings(
                data, filter, frames, tiles, sizes, behind, rooms=rooms, rounded=rounded, rounds=rounds
            )
            return tuple(found)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return tuple(
        convolve(node, data, weights, Epilogue(one, activation=activation, rounds=number in rounds))
        for number, (weights, one) in enumerate(zip(filter.split(sizes, 3), biases, strict=True))
    )


@lowering(MLP, own=True)
def mlp(node: Node, data: Tensor, *args: Tensor) -> Tensor:
    """Two dense layers with their biases and activations; of NHWC data their mean over height and width is what the first one reads."""
    layers = _layers(node, args)
    pooled, tiles = data.dim() > layers.matrices[0].dim(), node.get(windows.TILES)
    if tiles is not None and can_launch(data.device):
        found = layers_behind.mlp(
            data.flatten(1, 2) if pooled else data.unsqueeze(1), layers, tiles, _result(node, data)
        )
        if found is not None:
            return found
    return layers.of(data.mean((1, 2)) if pooled else data).to(_result(node, data))


@lowering(CLASSIFIER, own=True)
def classifier(node: Node, data: Tensor, weights: Tensor, *args: Tensor) -> Tensor:
    """A dense layer with bias and activation, perhaps a softmax behind it; of NHWC data it reads their mean over height and width."""
    softmax = bool(own_attribute(node, CLASSIFIER_SOFTMAX))
    (activation,), (biased,) = node.attrs[MLP_ACTIVATIONS], node.attrs[MLP_BIASED]
    prologue = _prologue(node.get(windows.PROLOGUE, ()), args[biased:])
    dense = Dense(weights, args[0] if biased else None, activation, softmax, _result(node, data), prologue)
    data, tiles = data.flatten(1, 2) if data.dim() > weights.dim() else data.unsqueeze(1), node.get(windows.TILES)
    if tiles is not None and can_launch(data.device):
        found = classify(data, dense, tiles)
        if found is not None:
            return found
    return dense.of(data)


def _result(node: Node, data: Tensor) -> torch.dtype:
    """Type of the result of an op that computes in float32 in any case."""
    return torch_dtype(str(node.attrs[RESULT])) if RESULT in node.attrs else data.dtype


@lowering(SQUEEZE, own=True)
def convolution_and_squeeze(node: Node, data: Tensor, filter: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution of each channel by itself, and two dense layers of the mean of its result: both results."""
    count = 2 + sum(own_attribute(node, MLP_BIASED))
    args, layers = args[:-count], _layers(node, args[-count:])
    tiles = node.get(windows.TILES)
    if tiles is not None and can_launch(data.device):
        frames = convolution_windows(node, spatial_sizes(node, data.shape), filter.shape[:-2])
        results = data.shape[0] * frames[0].outputs * frames[1].outputs * data.shape[-1]
        if channelwise.fits(data, filter, results):
            behind = Epilogue(args[0] if args else None, activation="".join(_steps(node)[len(args) :]))
            found = channelwise.convolve_and_squeeze(data, filter, frames, tiles, behind, layers)
            if found is not None:
                return found
    result = _convolved(node, data, filter, args)
    return result, layers.of(result.mean((1, 2)))


def _layers(node: Node, args: tuple[Tensor, ...]) -> Layers:
    """Two dense layers of an op's last inputs: both matrices, then the biases that there are."""
    activations, biased = own_attribute(node, MLP_ACTIVATIONS), node.attrs[MLP_BIASED]
    first, second, *rest = args
    biases = iter(rest)
    one, two = (next(biases) if there else None for there in biased)
    return Layers((first, second), (one, two), activations)


@lowering("_FusedPointwise", own=True)
def fused_pointwise(node: Node, *inputs: Tensor) -> tuple[Any, ...]:
    """Runs a group of pointwise ops: its compiled kernel, or its ops one by one where there is none."""
    return tuple(own_attribute(node, "kernel", "body")(*inputs))


ATTENTION = "_Attention"

EQUATION = "equation"
"""Attribute: as for Einsum, axes of queries, keys, values and result: ``ABqd,ABkd,ABkv->AqBv``."""

KERNEL = "_kernel"
"""Attribute: what runs it, one of `kernels.matmul.ATTENTION_TILES` or of the library's kernels (`SDPBackend`). Else the library
chooses."""

_CHOOSING = threading.Lock()
"""The library has one choice of kernels for the whole process."""


@lowering(ATTENTION, own=True)
def attention(node: Node, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """Attention as one kernel, as `passes.attention` finds it.

    `bias` is laid as scores are: axes that are in capitals in the equation, in the order of the alphabet, then those of queries and of
    keys; each of size one where it is the same for all. Where there is one query, it has no axis anywhere.
    """
    operands, _, result = str(own_attribute(node, EQUATION)).partition("->")
    terms = operands.split(",")
    size = {
        letter: length
        for term, tensor in zip(terms, (query, key, value), strict=True)
        for letter, length in zip(term, tensor.shape, strict=True)
    }
    if "q" not in result:  # one query
        size["q"] = 1
        bias = None if bias is None else bias.unsqueeze(-2)
    batch = "".join(sorted(letter for letter in result if letter.isupper()))
    query, key, value = (
        _by_head(_ordered(tensor, term, batch + wanted, size), [size[letter] for letter in batch])
        for tensor, term, wanted in zip((query, key, value), terms, ("qd", "kd", "kv"), strict=True)
    )
    mask = None if bias is None else _by_head(bias, [size[letter] for letter in batch])
    made = _attend(node, query, key, value, mask)
    order = batch + "qv" if "q" in result else batch + "v"
    made = made.reshape([size[letter] for letter in order])
    return made.permute([order.index(letter) for letter in result])


def _attend(node: Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    scale, causal, kernel = float(node.get("scale", 1.0)), bool(node.get("causal")), node.get(KERNEL)
    if kernel in ATTENTION_TILES and can_launch(query.device):
        tf32, rounded, rounds = (
            torch.backends.cuda.matmul.allow_tf32,
            bool(node.get(windows.ROUNDED)),
            bool(node.get(windows.ROUNDS)),
        )
        return kernels.attention(
            query,
            key,
            value,
            mask,
            ATTENTION_TILES[kernel],
            scale=scale,
            causal=causal,
            tf32=tf32,
            rounded=rounded,
            rounds=rounds,
        )
    with _one_kernel(None if kernel in ATTENTION_TILES else kernel):
        return windows.for_products(
            node, scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
        )


def _ordered(tensor: Tensor, term: str, order: str, size: Mapping[str, int]) -> Tensor:
    """A tensor with its axes in some order, repeated along those that it has not. The last lies in one piece, as all kernels want it."""
    laid = tensor.permute([term.index(letter) for letter in order if letter in term])
    for place, letter in enumerate(order):
        if letter not in term:
            laid = laid.unsqueeze(place)
    laid = laid.expand([size[letter] for letter in order])
    return laid if laid.stride(-1) == 1 else laid.contiguous()


def _by_head(tensor: Tensor, batch: Sequence[int]) -> Tensor:
    """A tensor with two axes in front of the last two, which is what kernels take: the last of some batch axes, and all others as one.

    An axis of a mask may be of size one instead, and stays so where all that become one are.
    """
    rank = len(batch)
    if rank < 2:
        return tensor.reshape(*tensor.shape[:rank], *([1] * (2 - rank)), *tensor.shape[rank:])
    front = tensor.shape[: rank - 1]
    if tuple(front) != tuple(batch[:-1]) and max(front) > 1:
        tensor = tensor.expand(*batch[:-1], *tensor.shape[rank - 1 :])
    return tensor.reshape(-1, *tensor.shape[rank - 1 :])


@contextlib.contextmanager
def _one_kernel(name: str | None) -> Iterator[None]:
    """Has the library run this kernel, or say that it can not."""
    if name is None:
        yield
        return
    with _CHOOSING, sdpa_kernel(getattr(SDPBackend, name)):
        yield
