"""Ops of neural networks, and their gradients.

Activation functions, their gradients, softmax with its losses, bias and normalization.

Sigmoid, Tanh and their gradients are with the other functions of one number, in `elementwise`.

Gradients that models compute at inference: forces of an energy, saliency maps.

Those of activation functions are with them, in `nn`; of roots, reciprocals, Sigmoid and Tanh in `elementwise`; of convolutions with respect
to their data in `conv`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from msplit.engines.cuda.ir import windows
from msplit.engines.cuda.ir.dtypes import wider_type
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.activations import ACTIVATIONS, LEAKY_ALPHA, activate
from msplit.engines.cuda.ops.conv import convolution_windows, pool_windows, spatial_sizes
from msplit.engines.cuda.ops.image import cubic_weights, linear_weights, nearest_pixels
from msplit.engines.cuda.ops.shape import integers

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946

# A default of an attribute, as the float32 number that it is: float64 data shows the difference.
EPSILON = 9.999999747378752e-05

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)

_BY_THEMSELVES = ("Relu", "Sigmoid", "Tanh")  # which integers or complex numbers may be, too

# Above this, softplus(x) and x are the same number in every float type.
_SOFTPLUS_IS_LINEAR = 40.0


@lowering("Relu")
def relu(node: Node, features: Tensor) -> Tensor:
    """The features, zero where negative."""
    return features if features.dtype in _UNSIGNED else torch.relu(features)


@lowering("LeakyRelu", *(name for name, one in ACTIVATIONS.items() if not one.composed and name not in _BY_THEMSELVES))
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
    if windows.channels_first(node) and value.dim() > 2:
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
    first = windows.channels_first(node)
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
    """Normalization of each row along the last axis, as `canonical.composed_functions` finds it."""
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


@lowering("BiasAddGrad")
def bias_add_grad(node: Node, gradients: Tensor) -> Tensor:
    """The sum over all axes but the channels'."""
    channel = 1 if windows.channels_first(node) and gradients.dim() > 2 else gradients.dim() - 1
    axes = [axis for axis in range(gradients.dim()) if axis != channel]
    return gradients.sum(axes, dtype=gradients.dtype) if axes else gradients


@lowering("BroadcastGradientArgs", static=(0, 1))
def broadcast_gradient_args(node: Node, first: np.ndarray, second: np.ndarray) -> tuple[Tensor, Tensor]:
    """For two shapes that broadcast, the axes over which each one's gradient is to be summed, on the CPU."""
    shapes = (integers(first), integers(second))
    rank = max(map(len, shapes))
    full = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    if any(a not in (1, b) and b != 1 for a, b in zip(*full, strict=True)):
        raise Unsupported(f"{node.name}: shapes {shapes[0]} and {shapes[1]} do not broadcast")
    found = []
    for sizes in full:
        axes = [] if shapes[0] == shapes[1] else [axis for axis, size in enumerate(sizes) if size == 1]
        found.append(torch.from_numpy(np.asarray(axes, first.dtype)))
    return found[0], found[1]


_MAX_POOL = {2: F.max_pool2d, 3: F.max_pool3d}
_MAX_POOL_GRAD = {
    2: torch.ops.aten.max_pool2d_with_indices_backward,
    3: torch.ops.aten.max_pool3d_with_indices_backward,
}
_AVERAGE_POOL_GRAD = {2: torch.ops.aten.avg_pool2d_backward, 3: torch.ops.aten.avg_pool3d_backward}


@lowering("MaxPoolGrad", "MaxPool3DGrad")
def max_pool_grad(node: Node, data: Tensor, result: Tensor, gradients: Tensor) -> Tensor:
    """Each window's gradient at its first maximum."""
    frames = pool_windows(node, data.shape, node.get("ksize"), node.get("strides"))
    data, gradients = (windows.to_channels_first(node, part) for part in (data, gradients))
    padding, pads = _padding(frames)
    data = F.pad(data, pads, value=-torch.inf) if pads else data
    kernel, strides = [frame.kernel for frame in frames], [frame.stride for frame in frames]
    _, places = _MAX_POOL[len(frames)](data, kernel, strides, padding, return_indices=True)
    ones = [1] * len(frames)
    found = _MAX_POOL_GRAD[len(frames)](gradients, data, kernel, strides, padding, ones, False, places)
    return windows.from_channels_first(node, F.pad(found, [-pad for pad in pads]) if pads else found)


@lowering("AvgPoolGrad", "AvgPool3DGrad", static=(0,))
def average_pool_grad(node: Node, shape: np.ndarray, gradients: Tensor) -> Tensor:
    """Each window's gradient in equal shares to its elements, padding left out."""
    frames = pool_windows(node, integers(shape), node.get("ksize"), node.get("strides"))
    moved = windows.to_channels_first(node, gradients)
    counts = [
        _elements(frame, moved).reshape(-1, *(1,) * behind)
        for behind, frame in enumerate(reversed(frames))
        if frame.before or frame.after
    ]
    if counts:
        moved = moved / math.prod(counts[1:], start=counts[0])
    # Of data as long as its windows reach: what PyTorch does with padding where channels lie last takes the wrong windows on a GPU
    # (github.com/pytorch/pytorch/issues/188344).
    kernel, strides = [frame.kernel for frame in frames], [frame.stride for frame in frames]
    reach = [(frame.outputs - 1) * frame.stride + frame.kernel for frame in frames]
    # Nobody reads the numbers in it.
    data = windows.empty_in_layout(moved, (*moved.shape[:2], *reach), windows.keeps_channels_last(node))
    none, whole = [0] * len(frames), math.prod(frame.kernel for frame in frames if not (frame.before or frame.after))
    found = _AVERAGE_POOL_GRAD[len(frames)](moved, data, kernel, strides, none, False, True, whole)
    pads = [-pad for pad in _pads(frames)]
    return windows.from_channels_first(node, F.pad(found, pads) if any(pads) else found)


def _elements(frame: windows.Window, like: Tensor) -> Tensor:
    """Number of elements in each window along an axis, padding left out."""
    begins = torch.arange(frame.outputs, device=like.device) * frame.stride - frame.before
    return ((begins + frame.kernel).clamp(max=frame.size) - begins.clamp(min=0)).to(like.dtype)


@lowering("DepthwiseConv2dNativeBackpropFilter", "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", static=(1,))
def convolution_filter_grad(node: Node, data: Tensor, shape: np.ndarray, gradients: Tensor) -> Tensor:
    """The gradient of a convolution with respect to its filter."""
    sizes = integers(shape)
    rank = len(sizes) - 2
    frames = convolution_windows(node, spatial_sizes(node, data.shape), sizes[:rank])
    data, gradients = (windows.to_channels_first(node, part) for part in (data, gradients))
    depthwise = node.op.startswith("Depthwise")
    groups = sizes[-2] if depthwise else data.shape[1] // sizes[-2]
    outer = (sizes[-2] * sizes[-1], 1) if depthwise else (sizes[-1], sizes[-2])
    weight = data.new_empty((*outer, *sizes[:rank]))
    padding, pads = _padding(frames)
    strides, dilations = [frame.stride for frame in frames], [frame.dilation for frame in frames]
    data = windows.in_layout(F.pad(data, pads), windows.keeps_channels_last(node)) if pads else data
    wanted = [False, True, False]  # of data, weight and bias
    _, found, _ = torch.ops.aten.convolution_backward(
        gradients, data, weight, None, strides, padding, dilations, False, [0] * rank, groups, wanted
    )
    space = range(2, rank + 2)
    if depthwise:
        return found.reshape(sizes[-2], sizes[-1], *sizes[:rank]).permute(*space, 0, 1)
    return found.permute(*space, 1, 0)


@lowering("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def batch_norm_grad(
    node: Node, gradients: Tensor, x: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, *reserve: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of batch normalization: of its data, its scale and its offset, and two that are always empty."""
    factor = torch.rsqrt(variance + node.get("epsilon", EPSILON))
    if node.get("is_training", True) and x.numel() and x.dtype == scale.dtype:
        gradients, x = windows.to_channels_first(node, gradients), windows.to_channels_first(node, x)
        found, scale_grad, offset_grad = torch.ops.aten.native_batch_norm_backward(
            gradients, x, scale, None, None, mean, factor, True, 0.0, [True] * 3
        )
        return windows.from_channels_first(node, found), scale_grad, offset_grad, scale.new_empty(0), scale.new_empty(0)
    channel = 1 if windows.channels_first(node) else x.dim() - 1
    axes = [axis for axis in range(x.dim()) if axis != channel]

    def wide(number: Tensor) -> Tensor:
        return number.reshape(-1, *(1,) * (x.dim() - 1 - channel))

    dy = gradients.to(scale.dtype)
    normal = (x.to(scale.dtype) - wide(mean)) * wide(factor)
    offset_grad = dy.sum(axes)
    scale_grad = (dy * normal).sum(axes)
    if node.get("is_training", True):
        count = x.numel() // scale.numel()
        dy = dy - wide(offset_grad / count) - normal * wide(scale_grad / count)
        left = (scale.new_empty(0), scale.new_empty(0))
    else:
        left = (torch.zeros_like(scale), torch.zeros_like(scale)) if "V" not in node.op else (scale.new_empty(0),) * 2
    return (dy * wide(scale * factor)).to(x.dtype), scale_grad, offset_grad, *left


@lowering("MirrorPadGrad", static=(1,))
def mirror_pad_grad(node: Node, gradients: Tensor, paddings: np.ndarray) -> Tensor:
    """The gradient of MirrorPad: what was mirrored is added to where it came from."""
    skipped = {"REFLECT": 1, "SYMMETRIC": 0}[node.attrs["mode"]]
    for axis, (low, high) in enumerate(paddings.tolist()):
        size = gradients.shape[axis] - low - high
        if max(low, high) > size - skipped:
            raise Unsupported(f"{node.name}: padding {low}, {high} is wider than axis {axis} of length {size}")
        if low or high:
            inner = gradients.narrow(axis, low, size).clone()
            inner.narrow(axis, skipped, low).add_(gradients.narrow(axis, 0, low).flip(axis))
            inner.narrow(axis, size - skipped - high, high).add_(gradients.narrow(axis, low + size, high).flip(axis))
            gradients = inner
    return gradients


@lowering("ResizeBilinearGrad", "ResizeBicubicGrad")
def resize_grad(node: Node, gradients: Tensor, original: Tensor) -> Tensor:
    """The gradient of interpolating: each pixel's share of what was made of it."""
    weights = linear_weights if "Bilinear" in node.op else cubic_weights
    down = weights(node, original.shape[1], gradients.shape[1], gradients.device).to(original.dtype)
    across = weights(node, original.shape[2], gradients.shape[2], gradients.device).to(original.dtype)
    return torch.einsum("oh,bopc,pw->bhwc", down, gradients.to(original.dtype), across)


@lowering("ResizeNearestNeighborGrad", static=(1,))
def resize_nearest_grad(node: Node, gradients: Tensor, size: np.ndarray) -> Tensor:
    """The gradient of taking the nearest pixel: the sum of what took it."""
    for axis, length in enumerate(integers(size), 1):
        places = nearest_pixels(node, length, gradients.shape[axis], gradients.device)
        room = list(gradients.shape)
        room[axis] = length
        gradients = gradients.new_zeros(room).index_add_(axis, places, gradients)
    return gradients


@lowering("LRNGrad")
def local_response_normalization_grad(node: Node, gradients: Tensor, data: Tensor, result: Tensor) -> Tensor:
    """The gradient of LRN, whose sum of squares every neighboring channel is part of."""
    radius = int(node.get("depth_radius", 5))
    bias, alpha, beta = node.get("bias", 1.0), node.get("alpha", 1.0), node.get("beta", 0.5)

    def neighbors(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, (1, 2 * radius + 1), 1, (0, radius), divisor_override=1)

    norm = bias + alpha * neighbors(data.square())
    return gradients * norm.pow(-beta) - 2 * alpha * beta * data * neighbors(gradients * result / norm)


def _padding(frames: Sequence[windows.Window]) -> tuple[list[int], list[int]]:
    """Padding of data for its windows: so many elements at both ends of each axis, by the kernel, or else none and pads for `F.pad`."""
    both = [frame.before for frame in frames]
    alike = all((frame.size + 2 * frame.before - frame.reach) // frame.stride + 1 == frame.outputs for frame in frames)
    if alike and all(2 * frame.before <= frame.reach for frame in frames):
        return both, []
    return [0] * len(frames), _pads(frames)


def _pads(frames: Sequence[windows.Window]) -> list[int]:
    """For `F.pad`: what makes an axis as long as its windows reach. Elements that no window has are cut off."""
    pads: list[int] = []
    for frame in reversed(frames):
        pads += [frame.before, (frame.outputs - 1) * frame.stride + frame.reach - frame.size - frame.before]
    return pads
