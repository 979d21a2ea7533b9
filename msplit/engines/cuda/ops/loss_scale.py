"""Loss scaling on the device: gradients are unscaled, and the scale follows what they were. See `frontend.loss_scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

GROWTH_STEPS = 2000
"""Steps with finite gradients after which the scale is doubled: what Keras and TensorFlow 1 have."""


@lowering("_Unscale", own=True)
def unscale(node: Node, scale: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Gradients divided by the scale, a power of two, and behind them whether all of them are finite."""
    by = scale.reciprocal()
    # PyTorch multiplies up to a hundred that have no gaps by one kernel. Those with gaps, as gradients of what is joined have, are joined
    # by shape before, and then are parts again, since a block has a part to itself.
    gaps: dict[Any, list[int]] = {}
    for place, one in enumerate(gradients):
        if not one.is_contiguous():
            gaps.setdefault((one.shape, one.dtype), []).append(place)
    dense = dict(enumerate(gradients))
    for places in gaps.values():
        dense.update(zip(places, torch.stack([gradients[place] for place in places]).unbind(), strict=True))
    found = torch._foreach_mul([*dense.values()] or [by], by)[: len(dense)]
    infinite = torch.zeros_like(by)
    if scale.device.type != "meta":
        torch._amp_foreach_non_finite_check_and_unscale_(found, infinite, torch.ones_like(by))
    return *found, infinite == 0


@lowering("_AllTrue", own=True)
def all_true(node: Node, *flags: Tensor) -> Tensor:
    """Returns whether all of several are true."""
    return torch.stack(flags).all()


@lowering("_UpdateLossScale", own=True)
def update_loss_scale(node: Node, scale: Tensor, steps: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Halves the scale, to 1 at least, where gradients were not finite, and doubles it after so many steps with finite ones."""
    if scale.device.type != "meta":
        counted = steps.clamp(max=GROWTH_STEPS - 1).to(torch.int32)
        torch._amp_update_scale_(scale, counted, (~finite).to(torch.float32), 2.0, 0.5, GROWTH_STEPS)
        scale.clamp_(min=1)
        steps.copy_(counted)
    return scale, steps


def keep(finite: Tensor, variables: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Gives variables the values that they had before, where gradients were not finite."""
    for variable, value in zip(variables, before, strict=True):
        variable.copy_(torch.where(finite, variable, value))
