"""An LSTM that TensorFlow has as one op: one turn of it, and all turns of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_FORGET_BIAS, _CELL_CLIP = 1.0, 3.0
"""Defaults of attributes."""


@lowering("LSTMBlockCell")
def lstm_cell(node: Node, x: Tensor, cs: Tensor, h: Tensor, w: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """One turn of an LSTM: input gate, cell, forget gate, output gate, cell input, cell output and output.

    `parameters` are the peepholes of input, forgetting and output, and the bias.
    """
    *peepholes, b = parameters
    clip, bias = node.get("cell_clip", _CELL_CLIP), node.get("forget_bias", _FORGET_BIAS)
    return _turn(node, torch.addmm(b, torch.cat([x, h], 1), w).chunk(4, 1), cs, peepholes, bias, clip)


@lowering("BlockLSTM", "BlockLSTMV2")
def block_lstm(node: Node, seq_len_max: Tensor, x: Tensor, cs: Tensor, h: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """An LSTM over the turns of a sequence, [time, batch, inputs]: what each turn of `LSTMBlockCell` gives, zeros from `seq_len_max` on.

    V2 has its gates in another order (the forget gate before the cell input), adds nothing to the forget gate and does not clip.
    """
    w, *peepholes, b = rest
    second, width = node.op.endswith("V2"), x.shape[2]
    clip = node.get("cell_clip", 0.0 if second else _CELL_CLIP)
    bias = 0.0 if second else node.get("forget_bias", _FORGET_BIAS)
    given = torch.addmm(b, x.flatten(0, 1), w[:width]).unflatten(0, x.shape[:2])  # of all turns at once
    turns = []
    for now in given.unbind():
        first, *middle, last = torch.addmm(now, h, w[width:]).chunk(4, 1)
        made = _turn(node, (first, *(reversed(middle) if second else middle), last), cs, peepholes, bias, clip)
        cs, h = made[1], made[6]
        turns.append(made)
    if not turns:
        return (x.new_empty((0, *cs.shape)),) * 7
    inside = (torch.arange(len(turns), device=x.device) < seq_len_max).reshape(-1, 1, 1)
    return tuple(torch.where(inside, torch.stack(each), 0) for each in zip(*turns, strict=True))


def _turn(
    node: Node, gates: Sequence[Tensor], before: Tensor, peepholes: Sequence[Tensor], forget_bias: float, clip: float
) -> tuple[Tensor, ...]:
    """The seven results of a turn; `gates` are those of input, cell input, forgetting and output before their functions."""
    i, ci, f, o = gates
    wci, wcf, wco = peepholes
    peeps = node.get("use_peephole", False)
    i = torch.sigmoid(i + before * wci if peeps else i)
    f = torch.sigmoid((f + forget_bias if forget_bias else f) + (before * wcf if peeps else 0))
    ci = torch.tanh(ci)
    cs = ci * i + before * f
    if clip > 0:
        cs = cs.clamp(-clip, clip)
    o = torch.sigmoid(o + cs * wco if peeps else o)
    co = torch.tanh(cs)
    return i, cs, f, o, ci, co, co * o
