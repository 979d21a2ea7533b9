"""Activation functions that ride on other kernels, by the names that Grappler gives them (and Swish, which it has none for)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LEAKY_ALPHA = 0.20000000298023224
"""TensorFlow's default slope of LeakyRelu below zero, a float32."""


NUMBERS = {
    "": 0,
    "Relu": 1,
    "Relu6": 2,
    "Sigmoid": 3,
    "Tanh": 4,
    "GeluApproximate": 5,
    "GeluExact": 6,
    "Swish": 7,
}
"""Numbers by which our own kernels know them; not each kernel has each."""


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
    return _ACTIVATIONS[name]


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu,
    "Relu6": lambda x: x.clamp(0, 6),
    "Elu": F.elu,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Swish": F.silu,
    "GeluApproximate": lambda x: F.gelu(x, approximate="tanh"),
    "GeluExact": F.gelu,
}
