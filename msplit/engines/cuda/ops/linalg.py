"""Linear algebra on the last two axes.

PyTorch's functions without checks: a matrix that has no inverse gives infinities, NaN or numbers without meaning where TensorFlow's CPU
kernel stops, since looking would stop the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.registry import Node, lowering


@lowering("Cholesky")
def cholesky(node: Node, matrices: Tensor) -> Tensor:
    """The lower triangular factor; the upper triangle is not read."""
    lower = matrices.tril()
    whole = lower + matrices.tril(-1).mH
    return torch.linalg.cholesky_ex(whole).L


@lowering("MatrixInverse")
def inverse(node: Node, matrices: Tensor) -> Tensor:
    """The inverse, of the adjoint if the node says so."""
    return torch.linalg.inv_ex(matrices.mH if node.get("adjoint", False) else matrices).inverse
