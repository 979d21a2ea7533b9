"""Bias, normalization and the L2 loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import channels_first

# Defaults of attributes, as the float32 numbers that they are.
_EPSILON = 9.999999747378752e-05


@lowering("BiasAdd", "BiasAddV1")
def bias_add(node: Node, value: Tensor, bias: Tensor) -> Tensor:
    """Adds one number per channel, whatever the rank."""
    if channels_first(node) and value.dim() > 2:
        bias = bias.reshape(-1, *(1,) * (value.dim() - 2))
    return value + bias


@lowering("FusedBatchNorm", "FusedBatchNormV2")
def fused_batch_norm(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...]:
    """Batch normalization with given or with the batch's own mean and variance."""
    return batch_norm(node, x, scale, offset, mean, variance)


@lowering("FusedBatchNormV3")
def fused_batch_norm_v3(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, ...]:
    """As FusedBatchNorm, also over five axes, with a third reserve that is empty."""
    return (*batch_norm(node, x, scale, offset, mean, variance), _reserve(scale))


@lowering("_FusedBatchNormEx")
def fused_batch_norm_activation(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, *side: Tensor
) -> tuple[Tensor, ...]:
    """Batch normalization, then a sum with a side input, then an activation."""
    y, *statistics = batch_norm(node, x, scale, offset, mean, variance)
    for other in side:
        y = y + other
    mode = node.get("activation_mode", "Identity")
    if mode == "Relu":
        y = y.relu()
    elif mode != "Identity":
        raise Unsupported(f"{node.op} {node.name}: activation_mode {mode} is not supported, only Identity and Relu")
    return (y, *statistics, _reserve(scale))


def batch_norm(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """FusedBatchNorm's five outputs: y, the mean and the variance to go on with, and those that normalized y.

    In training, the variance to go on with is the unbiased one, and both are mixed with the inputs by
    `exponential_avg_factor`.
    """
    epsilon = node.get("epsilon", _EPSILON)
    first = channels_first(node)
    if not x.numel():  # TensorFlow knows no statistics of nothing, the given ones neither.
        unknown = torch.full_like(scale, torch.nan)
        return x, unknown, unknown, unknown, unknown
    if not node.get("is_training", True):
        return normalize(x, scale, offset, mean, variance, epsilon, first), mean, variance, mean, variance
    axes = tuple(axis for axis in range(x.dim()) if axis != (1 if first else x.dim() - 1))
    batch_variance, batch_mean = torch.var_mean(x.to(scale.dtype), axes, correction=0)
    y = normalize(x, scale, offset, batch_mean, batch_variance, epsilon, first)
    count = x.numel() // scale.numel()
    new_mean, new_variance = batch_mean, batch_variance * (count / max(count - 1, 1))
    factor = node.get("exponential_avg_factor", 1.0)
    if factor != 1.0:
        new_mean, new_variance = torch.lerp(mean, new_mean, factor), torch.lerp(variance, new_variance, factor)
    return y, new_mean, new_variance, batch_mean, batch_variance


def normalize(
    x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, epsilon: float, first: bool
) -> Tensor:
    """``(x - mean) / sqrt(variance + epsilon) * scale + offset`` per channel, in one kernel.

    Args:
        x: The data; channels in axis 1 if `first`, in the last axis otherwise.
        scale: One number per channel, as are offset, mean and variance.
        offset: See scale.
        mean: See scale.
        variance: See scale.
        epsilon: Added to the variance.
        first: See x.
    """
    y = F.batch_norm(x if first else x.movedim(-1, 1), mean, variance, scale, offset, False, 0.0, epsilon)
    return y if first else y.movedim(1, -1)


@lowering("_LayerNorm", own=True)
def layer_norm(node: Node, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Normalization of each row along the last axis, as `passes.layer_norm` finds it."""
    return F.layer_norm(x, (x.shape[-1],), gamma, beta, node.attrs["epsilon"])


@lowering("LRN")
def local_response_normalization(node: Node, data: Tensor) -> Tensor:
    """Divides by a power of the sum of squares of the neighboring channels."""
    radius = int(node.get("depth_radius", 5))
    # A sum over a window of channels: an average pool over the last axis that divides by one.
    sums = F.avg_pool2d(data.square(), (1, 2 * radius + 1), 1, (0, radius), divisor_override=1)
    bias, alpha, beta = node.get("bias", 1.0), node.get("alpha", 1.0), node.get("beta", 0.5)
    return data * torch.rsub(sums, bias, alpha=-alpha).pow_(-beta)


@lowering("L2Loss")
def l2_loss(node: Node, t: Tensor) -> Tensor:
    """Half the sum of squares."""
    flat = t.reshape(-1)
    return torch.dot(flat, flat) * 0.5


def _reserve(scale: Tensor) -> Tensor:
    """The reserve space of a GPU kernel that only its own gradient reads."""
    return scale.new_empty(0)
