"""Linear algebra on the last two axes.

PyTorch's functions without checks: a matrix that has no inverse gives infinities, NaN or numbers without meaning where TensorFlow's CPU
kernel stops, since looking would stop the device. Eigenvalues and singular values are not here: PyTorch has them only with that check.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported


@lowering("Cholesky")
def cholesky(node: Node, matrices: Tensor) -> Tensor:
    """The lower triangular factor; the upper triangle is not read."""
    lower = matrices.tril()
    whole = lower + matrices.tril(-1).mH
    return torch.linalg.cholesky_ex(whole).L


@lowering("MatrixInverse")
def inverse(node: Node, matrices: Tensor) -> Tensor:
    """The inverse, of the adjoint if the node says so."""
    return torch.linalg.inv_ex(_adjoint(node, matrices)).inverse


@lowering("MatrixSolve")
def solve(node: Node, matrices: Tensor, rhs: Tensor) -> Tensor:
    """X with A X = B, or with the adjoint of A if the node says so. TensorFlow stops at an A that has no inverse; this does not."""
    return torch.linalg.solve_ex(_adjoint(node, matrices), rhs).result


@lowering("MatrixTriangularSolve")
def triangular_solve(node: Node, matrices: Tensor, rhs: Tensor) -> Tensor:
    """X with A X = B where A is triangular; batch axes broadcast. The other triangle is not read.

    A zero on the diagonal gives infinities and NaN, as in TensorFlow.
    """
    lower, adjoint = bool(node.get("lower", True)), bool(node.get("adjoint", False))
    return torch.linalg.solve_triangular(_adjoint(node, matrices), rhs, upper=lower == adjoint)


@lowering("MatrixDeterminant")
def determinant(node: Node, matrices: Tensor) -> Tensor:
    """The determinant; 1 of an empty matrix, 0 of one that has no inverse."""
    return torch.linalg.det(matrices)


@lowering("LogMatrixDeterminant")
def log_determinant(node: Node, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Sign of the determinant and the logarithm of its magnitude: 0 and -inf of a matrix that has no inverse."""
    sign, logarithm = torch.linalg.slogdet(matrices)
    return sign, logarithm.to(matrices.dtype)


@lowering("Lu")
def lu(node: Node, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Both triangular factors in one matrix, and the rows' order. TensorFlow stops at a matrix that has no inverse; this does not."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrices)
    swaps, _, _ = torch.lu_unpack(factors, pivots, unpack_data=False)
    order = torch.arange(matrices.shape[-1], dtype=torch.float32, device=matrices.device)
    # Row i of the product is row p[i] of the matrix: p is what the permutation makes of 0, 1, 2, ...
    rows = (swaps.real if swaps.is_complex() else swaps).mT.to(torch.float32) * order
    return factors, rows.sum(-1).to(torch_dtype(node.get("output_idx_type", "int32")))


@lowering("Qr")
def qr(node: Node, matrices: Tensor) -> tuple[Tensor, Tensor]:
    """An orthogonal and an upper triangular factor, by Householder's reflections."""
    mode = "complete" if node.get("full_matrices", False) else "reduced"
    q, r = torch.linalg.qr(matrices, mode)
    return q, r


@lowering("TridiagonalMatMul")
def tridiagonal_product(node: Node, above: Tensor, diagonal: Tensor, below: Tensor, rhs: Tensor) -> Tensor:
    """A tridiagonal matrix, given by its diagonals as [..., 1, n], times B. The last of `above` and the first of `below` are not read."""
    result = diagonal.mT * rhs
    if rhs.shape[-2] > 1:
        upper = above.mT[..., :-1, :] * rhs[..., 1:, :]
        lower = below.mT[..., 1:, :] * rhs[..., :-1, :]
        result[..., :-1, :] += upper
        result[..., 1:, :] += lower
    return result


def _adjoint(node: Node, matrices: Tensor) -> Tensor:
    if matrices.dtype in (torch.float16, torch.bfloat16):
        raise Unsupported(f"{node.name}: {node.op} of {str(matrices.dtype).removeprefix('torch.')}")
    return matrices.mH if node.get("adjoint", False) else matrices
