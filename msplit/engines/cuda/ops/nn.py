"""Activation functions, their gradients, softmax with its losses, bias and normalization.

Sigmoid, Tanh and their gradients are with the other functions of one number, in `elementwise`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import wider_type
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import channels_first
from msplit.engines.cuda.kernels.activations import LEAKY_ALPHA, activate

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946

# A default of an attribute, as the float32 number that it is: float64 data shows the difference.
EPSILON = 9.999999747378752e-05

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)

# Above this, softplus(x) and x are the same number in every float type.
_SOFTPLUS_IS_LINEAR = 40.0


@lowering("Relu")
def relu(node: Node, features: Tensor) -> Tensor:
    """The features, zero where negative."""
    return features if features.dtype in _UNSIGNED else torch.relu(features)


@lowering("Relu6", "LeakyRelu", "Elu")
def activation(node: Node, features: Tensor) -> Tensor:
    """The features, cut off below zero and above six (Relu6); where negative times `alpha` (LeakyRelu) or ``exp(x) - 1`` (Elu)."""
    return activate(node.op, node.get("alpha", LEAKY_ALPHA))(features)


@lowering("Selu")
def selu(node: Node, features: Tensor) -> Tensor:
    """The scaled exponential linear unit."""
    return F.selu(features)


@lowering("Softplus")
def softplus(node: Node, features: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""
    return F.softplus(features, threshold=_SOFTPLUS_IS_LINEAR)


@lowering("Softsign")
def softsign(node: Node, features: Tensor) -> Tensor:
    """``x / (1 + |x|)``."""
    return features / (features.abs() + 1)


@lowering("Softmax", "LogSoftmax")
def softmax(node: Node, logits: Tensor) -> Tensor:
    """The softmax along the last axis, or its logarithm."""
    function = torch.softmax if node.op == "Softmax" else torch.log_softmax
    dtype, result = wider_type(node, logits)
    return function(logits, -1, dtype=dtype).to(result)


@lowering("ReluGrad")
def relu_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients where the features (or Relu's result) are positive, else zero."""
    if not features.is_floating_point():
        return torch.ops.aten.threshold_backward(gradients, features, 0)
    return _where_positive(gradients, features)


def _where_positive(gradients: Tensor, features: Tensor) -> Tensor:
    """Gradients times one where features are positive, elsewhere (where they are NaN, too) times zero: the gradient of a leaky ReLU.

    PyTorch's own gradient of ReLU passes gradients on where features are NaN, and makes zeros of infinite ones.
    """
    return torch.ops.aten.leaky_relu_backward(gradients, features, 0, False)


@lowering("Relu6Grad")
def relu6_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients where the features are between zero and six, else zero."""
    if not features.is_floating_point():
        return torch.where((features > 0) & (features < 6), gradients, 0)
    return _where_positive(gradients, torch.ops.aten.hardtanh_backward(features, features, 0, 6))


@lowering("LeakyReluGrad")
def leaky_relu_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients, times `alpha` where the features are not positive."""
    return torch.ops.aten.leaky_relu_backward(gradients, features, node.get("alpha", LEAKY_ALPHA), False)


@lowering("EluGrad", "SeluGrad")
def elu_grad(node: Node, gradients: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of Elu (Selu), given its result: that of positive numbers where it is zero or NaN."""
    scale, at_zero = (1, 1) if node.op == "EluGrad" else (_SELU_SCALE, _SELU_SCALE * _SELU_ALPHA)
    return gradients * torch.where(outputs < 0, outputs + at_zero, scale)


@lowering("SoftplusGrad")
def softplus_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradient of Softplus, given its input."""
    return gradients * torch.sigmoid(features)


@lowering("SoftsignGrad")
def softsign_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradient of Softsign, given its input."""
    return gradients / (features.abs() + 1).square()


@lowering("SoftmaxCrossEntropyWithLogits")
def softmax_cross_entropy(node: Node, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy of each row and its gradient; features and labels broadcast."""
    features, labels = torch.broadcast_tensors(features, labels)
    logarithms = torch.log_softmax(features, -1)
    return -(labels * logarithms).sum(-1), logarithms.exp() - labels


@lowering("SparseSoftmaxCrossEntropyWithLogits")
def sparse_softmax_cross_entropy(node: Node, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy of each row for one label and its gradient; NaN for a label that is no class, as on a GPU."""
    classes = features.shape[-1]
    logarithms = torch.log_softmax(features, -1)
    column = labels.long().unsqueeze(-1)
    known = (column >= 0) & (column < classes)
    loss = -logarithms.gather(-1, column.clamp(0, max(classes - 1, 0)))
    hit = torch.arange(classes, device=features.device) == column
    gradient = logarithms.exp() - hit.to(features.dtype)
    return torch.where(known, loss, torch.nan).squeeze(-1), torch.where(known, gradient, torch.nan)


@lowering("BiasAdd", "BiasAddV1")
def bias_add(node: Node, value: Tensor, bias: Tensor) -> Tensor:
    """Adds one number per channel, whatever the rank."""
    if channels_first(node) and value.dim() > 2:
        bias = bias.reshape(-1, *(1,) * (value.dim() - 2))
    return value + bias


@lowering("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
def fused_batch_norm(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor, *side: Tensor
) -> tuple[Tensor, ...]:
    """Batch normalization with given or with the batch's own mean and variance; of Ex also a sum with a side input and an activation.

    Further outputs are the mean and the variance to go on with, and those that normalized the data. V3 and Ex have one more, empty: the
    reserve space of a GPU kernel, which only its own gradient reads.
    """
    y, *statistics = _batch_norm(node, x, scale, offset, mean, variance)
    for other in side:
        y = y + other
    mode = node.get("activation_mode", "Identity")
    if mode == "Relu":
        y = y.relu()
    elif mode != "Identity":
        raise Unsupported(f"{node.op} {node.name}: activation_mode {mode} is not supported, only Identity and Relu")
    return (y, *statistics, scale.new_empty(0)) if node.op.endswith(("V3", "Ex")) else (y, *statistics)


def _batch_norm(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """FusedBatchNorm's five outputs: y, the mean and the variance to go on with, and those that normalized y.

    In training, the variance to go on with is the unbiased one, and both are mixed with the inputs by
    `exponential_avg_factor`.
    """
    epsilon = node.get("epsilon", EPSILON)
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

    The channels of x are in axis 1 if `first`, in the last axis otherwise.
    """
    y = F.batch_norm(x if first else x.movedim(-1, 1), mean, variance, scale, offset, False, 0.0, epsilon)
    return y if first else y.movedim(1, -1)


@lowering("BatchNormWithGlobalNormalization")
def batch_norm_with_global_normalization(
    node: Node, t: Tensor, m: Tensor, v: Tensor, beta: Tensor, gamma: Tensor
) -> Tensor:
    """Batch normalization of NHWC data with a given mean and variance; `gamma` is looked at where `scale_after_normalization` is set."""
    scale = gamma if node.attrs["scale_after_normalization"] else torch.ones_like(gamma)
    return normalize(t, scale, beta, m, v, node.attrs["variance_epsilon"], False)


@lowering("_LayerNorm", own=True)
def layer_norm(node: Node, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Normalization of each row along the last axis, as `canonical.match_rows` finds it."""
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
