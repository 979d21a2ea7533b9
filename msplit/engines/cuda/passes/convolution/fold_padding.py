"""Zeros put around the data of a convolution or of a maximum become padding of it, and pixels that it is made to skip become its dilation.

TensorFlow's Python layers (`tf.nn.convolution`, `tf.nn.atrous_conv2d`) spell dilation with SpaceToBatchND and BatchToSpaceND: every b-th
pixel goes into an image of its own, those images are convolved side by side, and the results are interleaved again. The convolution
itself can skip pixels, which saves both copies, and lets the bias, the batch norm and the activation that follow ride on it. (The two
spellings are equal: L.-C. Chen et al., "Semantic Image Segmentation with Deep Convolutional Nets, Atrous Convolution, and Fully
Connected CRFs", 2016.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.passes.pattern import Readers, become_reshape, channels_last, inserted_axis, offered, with_axis
from msplit.opset.traits import IMAGE_CONVOLUTIONS, PADS, RESHAPES

_RANK = 4


def fold_padding(graph: OpGraph) -> bool:
    """Lets the convolutions and pools that read padded data pad it themselves, where nothing else reads it."""
    readers = Readers(graph)
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
        adds = view is None or axis is not None
        pairs = [_zeros_around(graph, pad, taker, last, axis) if adds else None for taker in takers]
        if None in pairs:
            continue
        for taker, around in zip(takers, pairs, strict=True):
            taker.attrs = {**taker.attrs, **_explicit(around or ())}
            taker.source_nodes = [*taker.source_nodes, *pad.source_nodes]
        if view is None or axis is None:
            names[key] = pad.inputs[0]
        else:
            graph.shapes[view.out] = wide = with_axis(graph.shapes[pad.inputs[0]], axis)
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
    kernel = graph.shape(convolution.inputs[1])
    if padded is None or wide is None or kernel is None or pad.inputs[0] not in graph.shapes:
        return None
    return inserted_axis(padded, wide, kernel) if channels_last(convolution) else None


def _zeros_around(graph: OpGraph, pad: Op, convolution: Op, key: Key, axis: int | None) -> tuple[int, ...] | None:
    """The padding of both together, as `explicit_paddings` has it, or None where a convolution, or a pool, can not pad so.

    The axis is one that was added behind the padding; `key` is the padded value.
    """
    pools = convolution.op == "MaxPool" and axis is None
    if convolution.op not in IMAGE_CONVOLUTIONS and not pools:
        return None
    if convolution.inputs[0] != key or convolution.inputs.count(key) > 1:
        return None
    paddings = graph.constants.get(pad.inputs[1])
    if paddings is None or paddings.shape != (_RANK - (axis is not None), 2) or (paddings < 0).any():
        return None
    if axis is not None:
        paddings = np.insert(paddings, axis, 0, axis=0)
    if pad.op == "PadV2":
        value = graph.constants.get(pad.inputs[2])
        if value is None or (value != 0).any():
            return None
    channel = _RANK - 1 if channels_last(convolution) else 1
    if paddings[[0, channel]].any():
        return None
    own = np.zeros(2 * _RANK, np.int64)
    mode = convolution.attrs.get("padding")
    if mode == "EXPLICIT":
        own = np.asarray(convolution.attrs.get("explicit_paddings"), np.int64)
    elif mode != "VALID":
        return None  # what SAME adds depends on the padded size
    if pools and not _keeps_maximum(graph, pad, convolution, paddings):
        return None
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
    readers, names = Readers(graph), dict[Key, Key]()

    def fold(split: Op) -> bool:
        found = _follow(graph, readers, split) if split.op == "SpaceToBatchND" else None
        return found is not None and _respell(graph, *found, names)

    changed = offered(graph, fold)
    graph.rename(names)
    return changed


def _follow(graph: OpGraph, readers: Readers, split: Op) -> tuple[list[Op], int | None] | None:
    """A SpaceToBatchND and what reads it, up to the BatchToSpaceND, if nothing else reads anything on the way.

    In the middle is the convolution. Data with only one spatial axis get another one by a view before it and lose that by one behind: the
    axis comes along.
    """
    chain = [split]
    while len(chain) < 5 and chain[-1].op != "BatchToSpaceND":
        reader = readers.only(chain[-1].out)
        if reader is None or reader.inputs[0] != chain[-1].out or reader.op not in _BETWEEN:
            return None
        chain.append(reader)
    # A convolution alone between the two, or with a view before it and one behind.
    convolution, convolutions = chain[len(chain) // 2], [op for op in chain if op.op in IMAGE_CONVOLUTIONS]
    if chain[-1].op != "BatchToSpaceND" or len(chain) not in (3, 5) or convolutions != [convolution]:
        return None
    plain = all(tuple(convolution.attrs.get(name, _PLAIN)) == _PLAIN for name in ("strides", "dilations"))
    if not plain or convolution.attrs.get("padding") != "VALID" or not channels_last(convolution):
        return None
    if len(chain) == 3:
        return chain, None
    result, narrow = (graph.shapes.get(op.out) for op in (convolution, chain[3]))
    axis = _added_axis(graph, split, chain[1], convolution)
    if result is None or axis is None or narrow != result[:axis] + result[axis + 1 :]:
        return None
    return chain, axis


def _respell(graph: OpGraph, chain: list[Op], axis: int | None, names: dict[Key, Key]) -> bool:
    """Puts one convolution in the place of all, if what is cut off at the end is no more than what was put around before."""
    split, convolution, join = chain[0], chain[len(chain) // 2], chain[-1]
    views = [op for op in chain[1:-1] if op is not convolution]
    blocks = [graph.constants.get(op.inputs[1]) for op in (split, join)]
    pads, crops = (graph.constants.get(op.inputs[2]) for op in (split, join))
    data, whole = graph.shape(split.inputs[0]), graph.shapes.get(join.out)
    kernel = graph.shape(convolution.inputs[1])
    if blocks[0] is None or blocks[1] is None or pads is None or crops is None:
        return False
    if data is None or whole is None or kernel is None or not np.array_equal(blocks[0], blocks[1]):
        return False
    # Zeros that were put around and are not cut off again stay, as padding.
    left = np.asarray(pads, np.int64) - np.asarray(crops, np.int64)
    if (left < 0).any() or len(data) != _RANK - (axis is not None) or len(blocks[0]) > len(data) - 2:
        return False
    steps, sides = [1] * _RANK, [(0, 0)] * _RANK
    axes = [one for one in (1, 2) if one != axis]
    for place, step, pair in zip(axes, blocks[0].tolist(), left.tolist(), strict=False):
        steps[place], sides[place] = int(step), (int(pair[0]), int(pair[1]))
    wide, result = with_axis(data, axis), with_axis(whole, axis)
    # What the convolution alone gives, with gaps of these steps, must be as large as what is left of all.
    sizes = [wide[place] + sum(sides[place]) - steps[place] * (kernel[place - 1] - 1) for place in (1, 2)]
    if list(result[1:3]) != sizes:
        return False
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
        become_reshape(graph, join, convolution.out)
        graph.drop([split, *views])
    return True
