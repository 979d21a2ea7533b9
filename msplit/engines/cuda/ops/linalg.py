"""Linear algebra on the last two axes: decompositions, diagonals and bands; and Fourier transforms.

They are PyTorch's functions without checks: a matrix that has no inverse gives infinities, NaN or numbers without meaning where
TensorFlow's CPU kernel stops, since looking would stop the device. Eigenvalues and singular values are not here: PyTorch has them only
with that check.

Diagonal number 0 is the main one, positive numbers lie above it. A band of diagonals [lower, upper] is packed into rows, the uppermost
first, all as long as the longest; the attribute `align` says at which end shorter ones are filled up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import integer, integers


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
        raise Unsupported(f"{node.name}: {node.op} of {dtype_name(matrices.dtype)}")
    return matrices.mH if node.get("adjoint", False) else matrices


@dataclass(frozen=True)
class _Diagonal:
    """One diagonal of a band: its number, the row that packs it, and its place in that row."""

    number: int
    row: int
    start: int
    length: int


def _bounds(k: np.ndarray) -> tuple[int, int]:
    numbers = integers(k)
    return numbers[0], numbers[-1]


def _longest(lower: int, upper: int, rows: int, columns: int) -> int:
    return min(rows + min(upper, 0), columns - max(lower, 0))


def _band(node: Node, lower: int, upper: int, rows: int, columns: int) -> list[_Diagonal]:
    """The diagonals of the band in a matrix of the size, uppermost first."""
    if not -rows < lower <= upper < columns and not (lower == upper == 0):
        raise Unsupported(f"{node.name}: diagonals {lower} to {upper} are outside of a matrix of {rows} x {columns}")
    # The second versions of these ops have no attribute: they align to the left.
    align = node.get("align", "RIGHT_LEFT") if node.op.endswith("V3") else "LEFT_LEFT"
    above, below = align.split("_")
    width = _longest(lower, upper, rows, columns)
    band = []
    for row, number in enumerate(range(upper, lower - 1, -1)):
        length = _longest(number, number, rows, columns)
        to_left = (number >= 0 and above == "LEFT") or (number <= 0 and below == "LEFT")
        band.append(_Diagonal(number, row, 0 if to_left else width - length, length))
    return band


def _with_diagonals(target: Tensor, band: list[_Diagonal], packed: Tensor) -> Tensor:
    """Writes packed diagonals to a matrix in place. A single one lacks the axis of rows."""
    for item in band:
        row = packed if len(band) == 1 else packed.select(-2, item.row)
        target.diagonal(item.number, -2, -1).copy_(row.narrow(-1, item.start, item.length))
    return target


@lowering("MatrixBandPart", static=(1, 2))
def matrix_band_part(node: Node, x: Tensor, num_lower: np.ndarray, num_upper: np.ndarray) -> Tensor:
    """Matrices with zeros outside of a band of so many diagonals below and above; a negative number keeps all."""
    lower, upper = integer(num_lower), integer(num_upper)
    if upper >= 0:
        x = torch.tril(x, upper)
    return torch.triu(x, -lower) if lower >= 0 else x


@lowering("MatrixDiag")
def matrix_diag(node: Node, diagonal: Tensor) -> Tensor:
    """Square matrices with the given main diagonals, zeros elsewhere."""
    return torch.diag_embed(diagonal)


@lowering("MatrixDiagV2", "MatrixDiagV3", static=(1, 2, 3))
def matrix_diag_band(
    node: Node, diagonal: Tensor, k: np.ndarray, num_rows: np.ndarray, num_cols: np.ndarray, padding: Tensor
) -> Tensor:
    """Matrices with the given diagonals, the padding elsewhere; a size of -1 is as small as the diagonals allow."""
    lower, upper = _bounds(k)
    width = diagonal.shape[-1]
    least_rows, least_columns = width - min(upper, 0), width + max(lower, 0)
    rows, columns = integer(num_rows), integer(num_cols)
    if rows == -1 and columns == -1:
        rows = columns = max(least_rows, least_columns)
    rows, columns = (least_rows if rows == -1 else rows), (least_columns if columns == -1 else columns)
    band = _band(node, lower, upper, rows, columns)
    if width != _longest(lower, upper, rows, columns):
        raise Unsupported(
            f"{node.name}: diagonals {lower} to {upper} of {rows} x {columns} are not {width} elements long"
        )
    batch = diagonal.shape[:-1] if lower == upper else diagonal.shape[:-2]
    result = padding.reshape(()).expand(*batch, rows, columns).clone(memory_format=torch.contiguous_format)
    return _with_diagonals(result, band, diagonal)


@lowering("MatrixDiagPart")
def matrix_diag_part(node: Node, x: Tensor) -> Tensor:
    """The main diagonals, as a view."""
    return x.diagonal(0, -2, -1)


@lowering("MatrixDiagPartV2", "MatrixDiagPartV3", static=(1,))
def matrix_diag_part_band(node: Node, x: Tensor, k: np.ndarray, padding: Tensor) -> Tensor:
    """One diagonal as a view, or a band of them, shorter ones filled up with the padding."""
    lower, upper = _bounds(k)
    rows, columns = x.shape[-2:]
    band = _band(node, lower, upper, rows, columns)
    if lower == upper:
        return x.diagonal(lower, -2, -1)
    shape = (*x.shape[:-2], len(band), _longest(lower, upper, rows, columns))
    result = padding.reshape(()).expand(shape).clone(memory_format=torch.contiguous_format)
    for item in band:
        result.select(-2, item.row).narrow(-1, item.start, item.length).copy_(x.diagonal(item.number, -2, -1))
    return result


@lowering("MatrixSetDiag")
def matrix_set_diag(node: Node, x: Tensor, diagonal: Tensor) -> Tensor:
    """A copy of the matrices with other main diagonals."""
    result = x.clone()
    result.diagonal(0, -2, -1).copy_(diagonal)
    return result


@lowering("MatrixSetDiagV2", "MatrixSetDiagV3", static=(2,))
def matrix_set_diag_band(node: Node, x: Tensor, diagonal: Tensor, k: np.ndarray) -> Tensor:
    """A copy of the matrices with other diagonals of a band."""
    band = _band(node, *_bounds(k), *x.shape[-2:])
    return _with_diagonals(x.clone(memory_format=torch.contiguous_format), band, diagonal)


@lowering("Diag")
def diag(node: Node, diagonal: Tensor) -> Tensor:
    """A tensor of shape [s, s] for an input of shape s, with the input where both halves of the index agree."""
    return torch.diag_embed(diagonal.reshape(-1)).reshape(*diagonal.shape, *diagonal.shape)


@lowering("DiagPart")
def diag_part(node: Node, x: Tensor) -> Tensor:
    """The elements of a tensor of shape [s, s] where both halves of the index agree."""
    half = x.shape[: x.dim() // 2]
    size = half.numel()
    return x.reshape(size, size).diagonal().reshape(half)


@lowering("FFT", "FFT2D", "FFT3D", "IFFT", "IFFT2D", "IFFT3D")
@lowering("RFFT", "RFFT2D", "RFFT3D", "IRFFT", "IRFFT2D", "IRFFT3D", static=(1,))
def fourier(node: Node, x: Tensor, *length: np.ndarray) -> Tensor:
    """Transform of complex numbers, or its inverse, divided by their count; R for real numbers, of which half of the frequencies are kept.

    Real numbers are cut or filled up with zeros to the lengths first, or come out in these.
    """
    kind, axes = (node.op[:-2], int(node.op[-2])) if node.op.endswith("D") else (node.op, 1)
    transform = getattr(torch.fft, f"{kind.lower()}n")
    return transform(x, integers(length[0]) if length else None, tuple(range(-axes, 0)))
