"""Ops over the steps of a sequence: LSTMs, and the loss of connectionist temporal classification.

An LSTM that TensorFlow has as one op: one turn of it, and all turns of a sequence.

The loss of connectionist temporal classification (Graves et al., 2006), and its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported

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


@lowering("CTCLoss")
def ctc_loss(
    node: Node, inputs: Tensor, labels_indices: Tensor, labels_values: Tensor, sequence_length: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each row of a batch of logits, [time, batch, classes], the last class blank; and the gradient of the logits.

    Labels are a sparse matrix. A row in which its labels find no path has an infinite loss, and its probabilities as gradient. One that is
    shorter than its labels has no gradient, and a loss of 0 where such rows are ignored: elsewhere TensorFlow ends the step.
    """
    if node.get("preprocess_collapse_repeated", False) or not node.get("ctc_merge_repeated", True):
        raise Unsupported(f"{node.op} {node.name}: repeated labels are merged in the paths only, not otherwise")
    times, batch, classes = inputs.shape
    if not times or not batch:
        return inputs.new_zeros(batch), torch.zeros_like(inputs)
    most, blank, never = len(labels_values), classes - 1, torch.finfo(inputs.dtype).min / 4
    row, place = labels_indices.unbind(1)
    counts = torch.zeros(batch, dtype=torch.int64, device=inputs.device).index_add_(0, row, torch.ones_like(row))
    # Blanks around all labels: states 0, 2, 4 … are blank.
    states = torch.full((batch, 2 * most + 1), blank, dtype=torch.int64, device=inputs.device)
    states[row, 2 * place + 1] = labels_values.long()
    number = torch.arange(2 * most + 1, device=inputs.device)
    ends = 2 * counts.unsqueeze(1)
    inside = number <= ends
    before = torch.nn.functional.pad(states, (2, 0), value=blank)[:, : states.shape[1]]
    skips = (states != blank) & (states != before)  # from a label to another one, without the blank between
    skipped_to = torch.nn.functional.pad(skips, (0, 2))[:, 2:]
    # As TensorFlow has it: a path over a probability that is zero in its type is none, where log_softmax knows better.
    logarithms = torch.softmax(inputs, -1).log()
    emitted = logarithms.gather(2, states.expand(times, -1, -1)).where(inside, never)
    alive = torch.arange(times, device=inputs.device).reshape(-1, 1, 1) < sequence_length.reshape(1, -1, 1)
    last = torch.arange(times, device=inputs.device).reshape(-1, 1, 1) == sequence_length.reshape(1, -1, 1) - 1

    def moved(value: Tensor, by: int) -> Tensor:
        """The states one or two further on (or back), nothing where there are none."""
        padded = torch.nn.functional.pad(value, (by, 0) if by > 0 else (0, -by), value=never)
        return padded[:, : value.shape[1]] if by > 0 else padded[:, -by:]

    alpha = torch.full_like(emitted[0], never).where(number > 1, emitted[0])
    forward = [alpha]
    for now in emitted[1:]:
        paths = torch.stack([alpha, moved(alpha, 1), moved(alpha, 2).where(skips, never)])
        alpha = torch.logsumexp(paths, 0) + now
        forward.append(alpha)
    finish = torch.zeros_like(alpha).where((number == ends) | (number == ends - 1), never)
    beta, backward = finish, list[Tensor]()
    for time in reversed(range(times)):
        if time + 1 < times:
            ahead = beta + emitted[time + 1]
            paths = torch.stack([ahead, moved(ahead, -1), moved(ahead, -2).where(skipped_to, never)])
            beta = torch.where(last[time], finish, torch.logsumexp(paths, 0))
        else:
            beta = finish
        backward.append(beta)
    both = torch.stack(forward) + torch.stack(backward[::-1])
    total = torch.logsumexp(both, 2)  # the same at every time of a row
    found = total.gather(0, (sequence_length.long() - 1).clamp(min=0).unsqueeze(0))[0]
    possible, longer = (found > never / 2) & (sequence_length > 0), counts > sequence_length
    share = (both - found.reshape(1, -1, 1)).exp().where(inside & possible.unsqueeze(1), 0)
    gradient = logarithms.exp().scatter_add(2, states.expand(times, -1, -1), -share)
    loss = torch.where(possible, -found, torch.inf)
    if node.get("ignore_longer_outputs_than_inputs", False):
        loss = loss.where(~longer, 0)
    return loss, gradient.where(alive & ~longer.reshape(1, -1, 1), 0)
