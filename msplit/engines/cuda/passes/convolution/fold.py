"""Folding into a convolution what stands beside it: scales and offsets per channel, and zeros around its data.

Scales and offsets per channel, behind a convolution or product with constant weights, become part of weights and bias.

Batch normalization at inference is one, as one op or taken apart; so is a division by a constant. Convolutions and products are
linear, hence ``(x * w) s + t = x * (w s) + t`` for every channel. So does a scale in front, such as that of images to numbers up to one:
``(s x) * w = x * (s w)``. An offset in front stays where it is: padding has none, and large numbers would have to cancel.

Zeros put around the data of a convolution or of a maximum become padding of it, and pixels that it is made to skip become its dilation.

TensorFlow's Python layers (`tf.nn.convolution`, `tf.nn.atrous_conv2d`) spell dilation with SpaceToBatchND and BatchToSpaceND: every b-th
pixel goes into an image of its own, those images are convolved side by side, and the results are interleaved again. The convolution
itself can skip pixels, which saves both copies, and lets the bias, the batch norm and the activation that follow ride on it. (The two
spellings are equal: L.-C. Chen et al., "Semantic Image Segmentation with Deep Convolutional Nets, Atrous Convolution, and Fully
Connected CRFs", 2016.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, Shape, known, proved, require
from msplit.engines.cuda.ops.nn import EPSILON
from msplit.engines.cuda.passes import pattern
from msplit.opset.traits import ADD, BATCH_NORMS, BIASES, CONVOLUTIONS, IMAGE_CONVOLUTIONS, PADS, RESHAPES, ops_with

_HEADS = CONVOLUTIONS | {"MatMul"}
_DIVISIONS = ops_with("divide")
Doubles = NDArray[np.float64]

Step = tuple[Doubles | float, Doubles | float]
"""A scale and an offset that an op applies, per channel or for all."""


@dataclass
class _Chain:
    """``scale * head + offset`` per channel, and the ops that compute it.

    Attributes:
        scale: Per channel.
        offset: Per channel.
        ops: Everything behind the head so far, reshapes included.
        absorbed: How many of `ops` the chain takes along: up to the last one that computes something.
        reshaped: Whether there is a reshape among them.
    """

    scale: Doubles
    offset: Doubles
    ops: list[Op] = field(default_factory=list)
    absorbed: int = 0
    reshaped: bool = False


def fold_affine(graph: OpGraph) -> bool:
    """Folds every such chain. What is left of it is at most one BiasAdd."""
    changed = False
    readers = pattern.Readers(graph)
    for head in list(graph.ops.values()):
        weights = graph.constants.get(head.inputs[1]) if head.op in _HEADS else None
        shape = graph.shapes.get(head.out)
        if weights is None or shape is None or weights.dtype.name not in pattern.FLOATS or not weights.size:
            continue
        given, weights = weights, _take_scale(graph, readers, head, weights)
        changed |= weights is not given
        chain = _follow(graph, readers, head, shape[pattern.channel_axis(head, len(shape))])
        changed |= chain.absorbed > 0 and _commit(graph, head, weights, chain)
    return changed


def _take_scale(graph: OpGraph, readers: pattern.Readers, head: Op, weights: NDArray[Any]) -> NDArray[Any]:
    """Takes what only scales a head's data, and is read by nothing else, into its weights: the new ones, or those given."""
    key, axis = head.inputs[0], -1 if head.attrs.get("transpose_b") else -2
    shape = graph.shapes.get(key, ())
    along = pattern.channel_axis(head, len(shape))
    if head.attrs.get("transpose_a") or weights.dtype.itemsize < 4 or shape[along:][:1] != weights.shape[axis:][:1]:
        return weights
    scale, offset = np.ones(shape[along]), np.zeros(shape[along])
    ops: list[Op] = []
    taken, data, factors = 0, key, scale
    while (op := readers.maker(key)) is not None:
        found = step_in_front(graph, readers, head, op, shape, along)
        if found is None:
            break
        key, (by, more) = found
        with np.errstate(all="ignore"):
            offset, scale = offset + scale * more, scale * by
        ops.append(op)
        if not offset.any():
            taken, data, factors = len(ops), key, scale
    with np.errstate(all="ignore"):
        wide = weights.astype(np.float64) * factors.reshape(-1, *[1] * (-1 - axis))
        scaled = wide.astype(weights.dtype)
    if not taken or not np.isfinite(scaled).all():
        return weights
    head.inputs = [data, graph.constant(scaled), *head.inputs[2:]]
    head.source_nodes = [*head.source_nodes, *(node for op in ops[:taken] for node in op.source_nodes)]
    graph.drop(ops[:taken])
    return scaled


def step_in_front(
    graph: OpGraph, readers: pattern.Readers, head: Op, op: Op, shape: Shape, along: int
) -> tuple[Key, Step] | None:
    """The value that an op in front of a head reads, and the scale and offset that it applies to it; None if it does anything else."""
    for data in op.inputs[:2]:
        alone = data not in graph.constants and graph.shapes.get(data) == shape and op.inputs.count(data) == 1
        step = proved(_affine, graph, readers, head, op, data, shape, (along,)) if alone else None
        if step is not None:
            return data, step
    return None


def _follow(graph: OpGraph, readers: pattern.Readers, head: Op, channels: int) -> _Chain:
    """The longest chain of ops behind a head that only scale and shift its channels."""
    chain = _Chain(np.ones(channels), np.zeros(channels))
    key, shape = head.out, graph.shapes[head.out]
    axes: tuple[int, ...] = (pattern.channel_axis(head, len(shape)),)
    last, reshaped = axes[0] == len(shape) - 1, False
    while True:
        op = readers.only(key)
        if op is None or op.out not in graph.shapes or (op.inputs[0] != key and pattern.other_input(op, key) is None):
            return chain
        result = graph.shapes[op.out]
        if op.op in RESHAPES and op.inputs[0] == key and last:
            suffix = pattern.trailing(result, channels)
            if suffix is None:
                return chain
            axes = tuple(range(len(result) - len(suffix), len(result)))
            reshaped = True
        else:
            step = proved(_affine, graph, readers, head, op, key, shape, axes) if result == shape else None
            if step is None:
                return chain
            with np.errstate(all="ignore"):
                scale, offset = chain.scale * step[0], chain.offset * step[0] + step[1]
            if not (np.isfinite(scale).all() and np.isfinite(offset).all()):
                return chain
            chain.scale, chain.offset = scale, offset
            chain.absorbed, chain.reshaped = len(chain.ops) + 1, reshaped
        chain.ops.append(op)
        key, shape = op.out, result


def _affine(
    graph: OpGraph, readers: pattern.Readers, head: Op, op: Op, key: Key, shape: Shape, axes: tuple[int, ...]
) -> Step:
    """Scale and offset that an op applies to its input `key`, if it does nothing else."""
    if op.op in BATCH_NORMS:
        return _batch_norm(graph, readers, head, op, key)
    first, last = op.inputs[0] == key, axes[-1] == len(shape) - 1
    if op.op in BIASES:
        require(first and (len(shape) <= 2 or pattern.channels_last(op) == last))
        value = known(graph.constants.get(op.inputs[1]))
        along = value if last else value.reshape(-1, *(1,) * (len(shape) - 2))
        return 1.0, known(pattern.per_channel(along, shape, axes))
    constant = known(graph.constants.get(known(pattern.other_input(op, key))))
    require(constant.dtype.name in pattern.FLOATS)
    value = known(pattern.per_channel(constant, shape, axes))
    if op.op == "Mul":
        return value, 0.0
    if op.op in ADD:
        return 1.0, value
    if op.op == "Sub":
        return (1.0, -value) if first else (-1.0, value)
    require(op.op in _DIVISIONS and first and (value != 0).all())
    return 1.0 / value, 0.0


def _batch_norm(graph: OpGraph, readers: pattern.Readers, head: Op, op: Op, key: Key) -> tuple[Doubles, Doubles]:
    """Scale and offset of a normalization. With s = gamma / sqrt(variance + epsilon): (y - mean) s + beta = y s + (beta - mean s)."""
    require(not op.attrs.get("is_training", True) and op.inputs[0] == key and head.op != "MatMul")
    require(pattern.channels_last(op) == pattern.channels_last(head))
    require(all(readers.unread((op.node, port)) for port in range(1, 6)))  # or somebody wants the statistics
    gamma, beta, mean, variance = (known(graph.constants.get(one)).astype(np.float64) for one in op.inputs[1:5])
    with np.errstate(all="ignore"):
        scale = gamma / np.sqrt(variance + float(op.attrs.get("epsilon", EPSILON)))
        return scale, beta - mean * scale


def _commit(graph: OpGraph, head: Op, weights: NDArray[Any], chain: _Chain) -> bool:
    """Puts scale and offset into weights and bias, unless the weights' dtype can not hold them."""
    with np.errstate(all="ignore"):
        scaled = (weights.astype(np.float64) * _along(head, weights, chain.scale)).astype(weights.dtype)
        offset = chain.offset.astype(weights.dtype)
    lost = ~np.isfinite(scaled.astype(np.float64)) & np.isfinite(weights.astype(np.float64))
    if lost.any() or not np.isfinite(offset.astype(np.float64)).all():
        return False
    absorbed = chain.ops[: chain.absorbed]
    last = absorbed[-1]
    if (chain.scale != 1).any():
        head.inputs[1] = graph.constant(scaled)
    source_nodes = [node for op in absorbed for node in op.source_nodes]
    graph.drop(absorbed[:-1])
    adds = bool((chain.offset != 0).any())
    if not adds:
        head.source_nodes = [*head.source_nodes, *source_nodes]
    if adds and not chain.reshaped:
        _bias(last, head, graph.constant(offset))
        last.source_nodes = source_nodes
        return True
    key = head.out
    if adds:
        bias = graph.add("BiasAdd", last, {}, [], graph.shapes[key])
        _bias(bias, head, graph.constant(offset))
        bias.source_nodes = source_nodes
        key = bias.out
    pattern.become_reshape(graph, last, key)
    return True


def _bias(op: Op, head: Op, bias: Key) -> None:
    op.op, op.inputs = "BiasAdd", [head.out, bias]
    last = head.op == "MatMul" or pattern.channels_last(head)
    op.attrs = {"T": head.attrs.get("T"), "data_format": "NHWC" if last else "NCHW"}


def _along(head: Op, weights: NDArray[Any], scale: Doubles) -> Doubles:
    """The scale in a shape that broadcasts against the weights, along their output channels."""
    if head.op == "DepthwiseConv2dNative":
        return scale.reshape(weights.shape[2:])  # output channel = input channel × multiplier
    if head.op == "MatMul" and head.attrs.get("transpose_b"):
        return scale.reshape(-1, 1)
    return scale


_RANK = 4


def fold_padding(graph: OpGraph) -> bool:
    """Lets the convolutions and pools that read padded data pad it themselves, where nothing else reads it."""
    readers = pattern.Readers(graph)
    names: dict[Key, Key] = {}
    before = len(graph.ops)
    for pad in list(graph.ops.values()):
        if pad.op not in PADS:
            continue
        key = pad.out
        view = reader if (reader := readers.only(key)) is not None and reader.op in RESHAPES else None
        last = key if view is None else view.out
        takers = [graph.ops[number] for number in readers.of.get(last, ())]
        if not takers or {key, last} & readers.fetched:
            continue
        axis = None if view is None else _added_axis(graph, pad, view, takers[0])
        pairs = [proved(_zeros_around, graph, pad, taker, last, axis) for taker in takers]
        if None in pairs or (axis is None) != (view is None):
            continue
        for taker, around in zip(takers, pairs, strict=True):
            taker.attrs = {**taker.attrs, **_explicit(around or ())}
            taker.source_nodes = [*taker.source_nodes, *pad.source_nodes]
        if view is None or axis is None:
            names[key] = pad.inputs[0]
        else:
            graph.shapes[view.out] = wide = pattern.with_axis(graph.shapes[pad.inputs[0]], axis)
            view.op, view.attrs, view.inputs = "Reshape", {}, [pad.inputs[0], graph.sizes(wide)]
        del graph.ops[pad.node]
    graph.rename(names)
    return len(graph.ops) < before


def _explicit(around: tuple[int, ...]) -> dict[str, Any]:
    """Attributes of padding before and behind each axis."""
    return {"padding": "EXPLICIT", "explicit_paddings": around}


def _added_axis(graph: OpGraph, pad: Op, view: Op, convolution: Op) -> int | None:
    """The axis that a view adds to sequences, such as padded ones, for a convolution of images."""
    padded, wide = (graph.shapes.get(op.out) for op in (pad, view))
    kernel = graph.shape(convolution.inputs[1]) if convolution.op in IMAGE_CONVOLUTIONS else None  # pools have none
    if padded is None or wide is None or kernel is None or pad.inputs[0] not in graph.shapes:
        return None
    return pattern.inserted_axis(padded, wide, kernel) if pattern.channels_last(convolution) else None


def _zeros_around(graph: OpGraph, pad: Op, convolution: Op, key: Key, axis: int | None) -> tuple[int, ...]:
    """The padding of both together, as `explicit_paddings` has it, if a convolution, or a pool, can pad so.

    The axis is one that was added behind the padding; `key` is the padded value.
    """
    pools = convolution.op == "MaxPool" and axis is None
    require(convolution.op in IMAGE_CONVOLUTIONS or pools)
    require(convolution.inputs[0] == key and convolution.inputs.count(key) == 1)
    paddings = known(graph.constants.get(pad.inputs[1]))
    require(paddings.shape == (_RANK - (axis is not None), 2) and not (paddings < 0).any())
    if axis is not None:
        paddings = np.insert(paddings, axis, 0, axis=0)
    require(pad.op != "PadV2" or not known(graph.constants.get(pad.inputs[2])).any())
    require(not paddings[[0, _RANK - 1 if pattern.channels_last(convolution) else 1]].any())
    mode, own = convolution.attrs.get("padding"), np.zeros(2 * _RANK, np.int64)
    require(mode in ("EXPLICIT", "VALID"))  # what SAME adds depends on the padded size
    if mode == "EXPLICIT":
        own = np.asarray(convolution.attrs.get("explicit_paddings"), np.int64)
    require(not pools or _keeps_maximum(graph, pad, convolution, paddings))
    return tuple(int(size) for size in paddings.reshape(-1) + own)


def _keeps_maximum(graph: OpGraph, pad: Op, pool: Op, paddings: NDArray[Any]) -> bool:
    """Returns whether zeros around the data change no maximum: a pool leaves its own padding out, so that what they are around must not be
    negative, and each window must hold some of it."""
    maker = graph.ops.get(pad.inputs[0][0])
    sizes = np.asarray(pool.attrs.get("ksize"), np.int64)
    return maker is not None and maker.op == "Relu" and bool((paddings.max(1) < sizes)[paddings.any(1)].all())


_PLAIN = (1, 1, 1, 1)
_BETWEEN = RESHAPES | IMAGE_CONVOLUTIONS | {"BatchToSpaceND"}


def fold_dilation(graph: OpGraph) -> bool:
    """Lets such convolutions skip pixels by themselves."""
    readers, names = pattern.Readers(graph), dict[Key, Key]()

    def fold(split: Op) -> bool:
        require(split.op == "SpaceToBatchND")
        _respell(graph, *_follow_padding(graph, readers, split), names)
        return True

    changed = pattern.offered(graph, fold)
    graph.rename(names)
    return changed


def _follow_padding(graph: OpGraph, readers: pattern.Readers, split: Op) -> tuple[list[Op], int | None]:
    """A SpaceToBatchND and what reads it, up to the BatchToSpaceND, if nothing else reads anything on the way.

    In the middle is the convolution. Data with only one spatial axis get another one by a view before it and lose that by one behind: the
    axis comes along.
    """
    chain = [split]
    while len(chain) < 5 and chain[-1].op != "BatchToSpaceND":
        reader = known(readers.only(chain[-1].out))
        require(reader.inputs[0] == chain[-1].out and reader.op in _BETWEEN)
        chain.append(reader)
    # A convolution alone between the two, or with a view before it and one behind.
    convolution, convolutions = chain[len(chain) // 2], [op for op in chain if op.op in IMAGE_CONVOLUTIONS]
    require(chain[-1].op == "BatchToSpaceND" and len(chain) in (3, 5) and convolutions == [convolution])
    require(all(tuple(convolution.attrs.get(name, _PLAIN)) == _PLAIN for name in ("strides", "dilations")))
    require(convolution.attrs.get("padding") == "VALID" and pattern.channels_last(convolution))
    if len(chain) == 3:
        return chain, None
    result, narrow = (known(graph.shapes.get(op.out)) for op in (convolution, chain[3]))
    axis = known(_added_axis(graph, split, chain[1], convolution))
    require(narrow == result[:axis] + result[axis + 1 :])
    return chain, axis


def _respell(graph: OpGraph, chain: list[Op], axis: int | None, names: dict[Key, Key]) -> None:
    """Puts one convolution in the place of all, if what is cut off at the end is no more than what was put around before."""
    split, convolution, join = chain[0], chain[len(chain) // 2], chain[-1]
    views = [op for op in chain[1:-1] if op is not convolution]
    block, back = (known(graph.constants.get(op.inputs[1])) for op in (split, join))
    pads, crops = (known(graph.constants.get(op.inputs[2])) for op in (split, join))
    data, whole = known(graph.shape(split.inputs[0])), known(graph.shapes.get(join.out))
    kernel = known(graph.shape(convolution.inputs[1]))
    # Zeros that were put around and are not cut off again stay, as padding.
    left = np.asarray(pads, np.int64) - np.asarray(crops, np.int64)
    require(np.array_equal(block, back) and not (left < 0).any())
    require(len(data) == _RANK - (axis is not None) and len(block) <= len(data) - 2)
    steps, sides = [1] * _RANK, [(0, 0)] * _RANK
    axes = [one for one in (1, 2) if one != axis]
    for place, step, pair in zip(axes, block.tolist(), left.tolist(), strict=False):
        steps[place], sides[place] = int(step), (int(pair[0]), int(pair[1]))
    wide, result = pattern.with_axis(data, axis), pattern.with_axis(whole, axis)
    # What the convolution alone gives, with gaps of these steps, must be as large as what is left of all.
    sizes = [wide[place] + sum(sides[place]) - steps[place] * (kernel[place - 1] - 1) for place in (1, 2)]
    require(list(result[1:3]) == sizes)
    around = tuple(size for pair in sides for size in pair)
    convolution.attrs = {**convolution.attrs, "dilations": tuple(steps), **_explicit(around)}
    # The convolution reads the data itself, through the view where there is an axis to add.
    convolution.source_nodes = [node for op in (convolution, split, join, *views) for node in op.source_nodes]
    graph.shapes[convolution.out] = result
    if axis is None:
        convolution.inputs = [split.inputs[0], *convolution.inputs[1:]]
        names[join.out] = convolution.out
        graph.drop([split, join])
    else:
        view = graph.add("Reshape", convolution, {}, [split.inputs[0], graph.sizes(wide)], wide)
        convolution.inputs = [view.out, *convolution.inputs[1:]]
        pattern.become_reshape(graph, join, convolution.out)
        graph.drop([split, *views])
