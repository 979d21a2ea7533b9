"""Activation functions, their gradients, and softmax with its losses.

Sigmoid, Tanh and their gradients are with the other functions of one number, in `unary`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
_LEAKY_ALPHA = 0.20000000298023224  # 0.2 as the float32 that an attribute is: float64 data shows the difference.
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)

# Above this, softplus(x) and x are the same number in every float type.
_SOFTPLUS_IS_LINEAR = 40.0


@lowering("Relu")
def relu(node: Node, features: Tensor) -> Tensor:
    """The features, zero where negative."""
    return features if features.dtype in _UNSIGNED else torch.relu(features)


@lowering("Relu6")
def relu6(node: Node, features: Tensor) -> Tensor:
    """The features, cut off below zero and above six."""
    return features.clamp(0, 6)


@lowering("LeakyRelu")
def leaky_relu(node: Node, features: Tensor) -> Tensor:
    """The features, times `alpha` where negative."""
    return F.leaky_relu(features, node.get("alpha", _LEAKY_ALPHA))


@lowering("Elu")
def elu(node: Node, features: Tensor) -> Tensor:
    """The features, ``exp(x) - 1`` where negative."""
    return F.elu(features)


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


@lowering("Softmax")
def softmax(node: Node, logits: Tensor) -> Tensor:
    """The softmax along the last axis."""
    return torch.softmax(logits, -1)


@lowering("LogSoftmax")
def log_softmax(node: Node, logits: Tensor) -> Tensor:
    """The logarithm of the softmax along the last axis."""
    return torch.log_softmax(logits, -1)


@lowering("ReluGrad")
def relu_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients where the features (or Relu's result) are positive, else zero."""
    return torch.ops.aten.threshold_backward(gradients, features, 0)


@lowering("Relu6Grad")
def relu6_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients where the features are between zero and six, else zero."""
    if not features.is_floating_point():
        return torch.where((features > 0) & (features < 6), gradients, 0)
    return torch.ops.aten.hardtanh_backward(gradients, features, 0, 6)


@lowering("LeakyReluGrad")
def leaky_relu_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradients, times `alpha` where the features are not positive."""
    return torch.ops.aten.leaky_relu_backward(gradients, features, node.get("alpha", _LEAKY_ALPHA), False)


@lowering("EluGrad")
def elu_grad(node: Node, gradients: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of Elu, given its result."""
    return torch.ops.aten.elu_backward(gradients, 1, 1, 1, True, outputs)


@lowering("SeluGrad")
def selu_grad(node: Node, gradients: Tensor, outputs: Tensor) -> Tensor:
    """The gradient of Selu, given its result."""
    return torch.ops.aten.elu_backward(gradients, _SELU_ALPHA, _SELU_SCALE, 1, True, outputs)


@lowering("SoftplusGrad")
def softplus_grad(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    """The gradient of Softplus, given its input."""
    return torch.ops.aten.softplus_backward(gradients, features, 1, _SOFTPLUS_IS_LINEAR)


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
    nan = torch.nan
    return torch.where(known, loss, nan).squeeze(-1), torch.where(known, gradient, nan)
