"""Fourier transforms over the last one, two or three axes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node
from msplit.engines.cuda.ops.axes import integers


def _axes(node: Node) -> tuple[int, ...]:
    """The transformed axes, from the op's name: FFT, FFT2D, FFT3D."""
    count = int(node.op[-2]) if node.op.endswith("D") else 1
    return tuple(range(-count, 0))


@lowering("FFT", "FFT2D", "FFT3D")
def fourier(node: Node, x: Tensor) -> Tensor:
    """Transform of complex numbers."""
    return torch.fft.fftn(x, dim=_axes(node))


@lowering("IFFT", "IFFT2D", "IFFT3D")
def inverse_fourier(node: Node, x: Tensor) -> Tensor:
    """Inverse transform of complex numbers, divided by their count."""
    return torch.fft.ifftn(x, dim=_axes(node))


@lowering("RFFT", "RFFT2D", "RFFT3D", static=(1,))
def real_fourier(node: Node, x: Tensor, length: np.ndarray) -> Tensor:
    """Non-negative frequencies of real numbers, which are cut or filled up with zeros to the lengths first."""
    return torch.fft.rfftn(x, integers(length), _axes(node))


@lowering("IRFFT", "IRFFT2D", "IRFFT3D", static=(1,))
def inverse_real_fourier(node: Node, x: Tensor, length: np.ndarray) -> Tensor:
    """Real numbers of the lengths from their non-negative frequencies."""
    return torch.fft.irfftn(x, integers(length), _axes(node))
