"""Activation functions that ride on other kernels, by the names that Grappler's fused ops have for them (and Swish, which it has none for).

A new one is a row of `ACTIVATIONS` and, where our own kernels are to have it, a branch of the functions in `code.epilogue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAKY_ALPHA = 0.20000000298023224
"""TensorFlow's default slope of LeakyRelu below zero, a float32."""


class Activation(NamedTuple):
    """A function of one number that may follow a product or a convolution in the same kernel.

    Attributes:
        function: PyTorch's, for where no kernel of ours has it.
        number: Number by which our own kernels of products know it; 0 where they have it not.
        convolves: True if our own kernels of convolutions know that number, too.
        composed: True if there is no op of that name: several ops compute it, which a pass finds (`composed_functions.match_gelu`).
    """

    function: Callable[[Tensor], Tensor]
    number: int = 0
    convolves: bool = False
    composed: bool = False


ACTIVATIONS: Mapping[str, Activation] = {
    "Relu": Activation(torch.relu, 1, convolves=True),
    "Relu6": Activation(lambda x: x.clamp(0, 6), 2, convolves=True),
    "Sigmoid": Activation(torch.sigmoid, 3, convolves=True),
    "Tanh": Activation(torch.tanh, 4),
    "GeluApproximate": Activation(lambda x: F.gelu(x, approximate="tanh"), 5, composed=True),
    "GeluExact": Activation(F.gelu, 6, composed=True),
    "Swish": Activation(F.silu, 7, convolves=True, composed=True),
    "Elu": Activation(F.elu),
}
"""Every activation but LeakyRelu, which has a slope; see `activate`. "" stands for none wherever one is named."""

NUMBERS = {"": 0, **{name: one.number for name, one in ACTIVATIONS.items() if one.number}}
"""Numbers by which our own kernels know those that they have."""

IN_CONVOLUTIONS = {"": 0, **{name: one.number for name, one in ACTIVATIONS.items() if one.convolves}}
"""Those that our own kernels of convolutions have."""

IN_LIBRARY = frozenset({"GeluApproximate"})
"""Those that cuBLASLt applies behind a product with a bias, as TensorFlow's op does. Not ReLU: on tensor cores it makes 0 of NaN, in TF32
behind every product that was tried, and cuDNN's does so behind some convolutions (CUDA 13.0, cuDNN 9.14, H200)."""


class Epilogue(NamedTuple):
    """Steps behind a convolution in the same kernel: ``activation(convolution + bias + side)``.

    Attributes:
        bias: One number per output channel.
        side: Addend of the result's shape.
        activation: Name of the function, as `fused_ops` has it; libraries know more of them than there are in `NUMBERS`.
        rounds: Set where the result is rounded to TF32 in the end.
    """

    bias: Tensor | None = None
    side: Tensor | None = None
    activation: str = ""
    rounds: bool = False


NO_EPILOGUE = Epilogue()


def activate(name: str, alpha: float = LEAKY_ALPHA) -> Callable[[Tensor], Tensor]:
    """The activation function that Grappler's fused ops call by this name.

    Args:
        name: Such as ``"Relu"`` or ``"GeluApproximate"``.
        alpha: The slope of LeakyRelu below zero.

    Raises:
        KeyError: There is none of that name.
    """
    if name == "LeakyRelu":
        return lambda x: F.leaky_relu(x, alpha)
    return ACTIVATIONS[name].function
