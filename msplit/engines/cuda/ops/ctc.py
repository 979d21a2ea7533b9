"""The loss of connectionist temporal classification (Graves et al., 2006), and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported


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
    logarithms = torch.log_softmax(inputs, -1)
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
