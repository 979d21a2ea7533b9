"""Loss scaling on the device: gradients are unscaled, and the scale follows what they were. See `frontend.loss_scale`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

GROWTH_STEPS = 2000
"""Steps with finite gradients after which the scale is doubled: what Keras and TensorFlow 1 have."""


@lowering("_Unscale", own=True)
def unscale(node: Node, scale: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
    """Gradients divided by the scale, a power of two, and behind them whether all of them are finite."""
    del node
    by = scale.reciprocal()
    # One kernel for up to a hundred of them. One that has gaps would have all multiplied one by one, so it is left out.
    together = iter(torch._foreach_mul([one for one in gradients if one.is_contiguous()] or [by], by))
    found = [next(together) if one.is_contiguous() else one * by for one in gradients]
    infinite = torch.zeros_like(by)
    if scale.device.type != "meta":
        torch._amp_foreach_non_finite_check_and_unscale_(found, infinite, torch.ones_like(by))
    return *found, infinite == 0


@lowering("_AllTrue", own=True)
def all_true(node: Node, *flags: Tensor) -> Tensor:
    """Whether all of several are true."""
    del node
    return torch.stack(flags).all()


@lowering("_UpdateLossScale", own=True)
def update_loss_scale(node: Node, scale: Tensor, steps: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Halves the scale, to 1 at least, where gradients were not finite, and doubles it after so many steps with finite ones."""
    del node
    counted, doubled = steps + 1, scale * 2
    grows = counted >= GROWTH_STEPS
    larger = torch.where(grows & doubled.isfinite(), doubled, scale)
    scale.copy_(torch.where(finite, larger, (scale / 2).clamp(min=1)))
    steps.copy_(torch.where(finite & ~grows, counted, torch.zeros_like(steps)))
    return scale, steps


def keep(finite: Tensor, variables: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Gives variables the values that they had before, where gradients were not finite."""
    for variable, value in zip(variables, before, strict=True):
        variable.copy_(torch.where(finite, variable, value))
