"""Zeros put around the data of a convolution become padding of the convolution."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.program import Key, Op, Source
from msplit.engines.cuda.rewrites.pattern import Readers, channels_last

_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
_RANK = 4


def absorb_padding(source: Source) -> None:
    """Lets each convolution that alone reads padded data pad it itself."""
    readers = Readers(source)
    names: dict[Key, Key] = {}
    for pad in list(source.ops.values()):
        convolution = readers.only((pad.node, 0)) if pad.op in ("Pad", "PadV2") else None
        if convolution is None or convolution.op not in _CONVOLUTIONS or convolution.inputs[0] != (pad.node, 0):
            continue
        pairs = _zeros_around(source, pad, convolution)
        if pairs is None:
            continue
        convolution.attrs = {**convolution.attrs, "padding": "EXPLICIT", "explicit_paddings": pairs}
        convolution.covers = [*convolution.covers, *pad.covers]
        names[pad.node, 0] = pad.inputs[0]
        del source.ops[pad.node]
    source.rename(names)


def _zeros_around(source: Source, pad: Op, convolution: Op) -> tuple[int, ...] | None:
    """The padding of both together, as `explicit_paddings` has it, or None where a convolution can not pad so."""
    paddings = source.constants.get(pad.inputs[1])
    if paddings is None or paddings.shape != (_RANK, 2) or (paddings < 0).any():
        return None
    if pad.op == "PadV2":
        value = source.constants.get(pad.inputs[2])
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
    return tuple(int(size) for size in paddings.reshape(-1) + own)
