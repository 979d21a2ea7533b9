"""Ops of linear algebra: decompositions, diagonals, Fourier transforms and matrix products.

Linear algebra on the last two axes: decompositions, diagonals and bands; and Fourier transforms.

They are PyTorch's functions without checks: a matrix that has no inverse gives infinities, NaN or numbers without meaning where
TensorFlow's CPU kernel stops, since looking would stop the device. Eigenvalues and singular values are not here: PyTorch has them only
with that check.

Diagonal number 0 is the main one, positive numbers lie above it. A band of diagonals [lower, upper] is packed into rows, the uppermost
first, all as long as the longest; the attribute `align` says at which end shorter ones are filled up.

Matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.autotune import batched_matmul
from msplit.engines.cuda.ir.dtypes import SIGNED, dtype_name, torch_dtype, wider_type
from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ir.windows import for_products
from msplit.engines.cuda.ops.shape import integer, integers


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


_HALF = (torch.float16, torch.bfloat16)


@lowering("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices, each transposed first where the node says so."""
    a = a.t() if node.get("transpose_a") else a
    b = b.t() if node.get("transpose_b") else b
    if batched_matmul.TILE in node.attrs:
        return product_in_tiles(node, a, b, (), ())
    return for_products(node, product(a, b, wider_type(node, a)[1]))


def product_in_tiles(node: Node, a: Tensor, b: Tensor, steps: tuple[str, ...], rest: tuple[Tensor, ...]) -> Tensor:
    """A product and what follows it in our own kernel, which an engine chose for this node (`batched_matmul.TILE`)."""
    work = batched_matmul.dense(a, b, steps, rest)
    assert work is not None, "internal error: a kernel was chosen that can not do this"
    work = batched_matmul.with_rounding(work, node.attrs)
    return batched_matmul.by_kernel(work, node.attrs[batched_matmul.TILE], wider_type(node, a)[1])[0]


@lowering("BatchMatMul", "BatchMatMulV2")
def batch_matmul(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """The product of the last two axes, over batch axes that broadcast; an operand may be adjoint."""
    x = x.mH if node.get("adj_x") else x
    y = y.mH if node.get("adj_y") else y
    _, result = wider_type(node, x)
    work = batched_matmul.members(x, y) if batched_matmul.TILE in node.attrs else None
    if work is None:
        return for_products(node, product(x, y, result))
    work = batched_matmul.with_rounding(work, node.attrs)
    return batched_matmul.by_kernel(work, node.attrs[batched_matmul.TILE], result).view(*x.shape[:-1], y.shape[-1])


@lowering("BatchMatMulV3")
def batch_matmul_to(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """The product as BatchMatMulV2 has it, with operands of narrower types than the result's `Tout`."""
    name = node.get("Tout")
    dtype = torch_dtype(name) if name is not None else x.dtype
    return batch_matmul(node, x.to(dtype), y.to(dtype))


@lowering("Einsum", "XlaEinsum")
def einsum(node: Node, *inputs: Tensor) -> Tensor:
    """Einstein summation, with ellipses and with labels repeated in an input or in the output."""
    operands, arrow, output = str(node.get("equation")).partition("->")
    if not arrow:
        raise Unsupported(f"Einsum {node.name}: equation {node.get('equation')!r} has no '->'")
    dtype = inputs[0].dtype
    # cuBLAS has no integer products, and PyTorch's sums of integers are int64.
    total = torch.einsum if dtype.is_floating_point or dtype.is_complex else _integer_einsum
    signed = SIGNED.get(dtype)
    if signed is not None:
        inputs = tuple(operand.view(signed) for operand in inputs)
    labels = output.replace("...", "")
    single = "".join(dict.fromkeys(labels))
    if single == labels:
        result = total(f"{operands}->{output}", *inputs)
    else:
        front = "..." if "..." in output else ""
        result = _spread(total(f"{operands}->{front}{single}", *inputs), single, output)
    return result if signed is None else result.view(dtype)


def _integer_einsum(equation: str, *inputs: Tensor) -> Tensor:
    """Einstein summation in the inputs' own integers, which wrap around: products of whole tensors, then one sum."""
    left, _, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    ranks = [tensor.dim() - len(term.replace("...", "")) for term, tensor in zip(terms, inputs, strict=True)]
    rank = max((ranks[slot] for slot, term in enumerate(terms) if "..." in term), default=0)
    # Axes of an ellipsis as labels of their own, counted from the last: they broadcast.
    hidden = [f"...{place}" for place in range(rank, 0, -1)]
    wanted = _labels(output, hidden if "..." in output else [])
    # Axes of the product of all operands: those of the result first, then those that are summed over.
    axes = list(dict.fromkeys([*wanted, *(label for term in terms for label in _labels(term, hidden))]))
    result: Tensor | None = None
    for term, tensor, own in zip(terms, inputs, ranks, strict=True):
        names = _labels(term, hidden[rank - own :] if "..." in term else [])
        # A label that an operand has twice stands for the diagonal of both axes, which comes last.
        for label in dict.fromkeys(names):
            while names.count(label) > 1:
                first, second = [place for place, name in enumerate(names) if name == label][:2]
                tensor = tensor.diagonal(dim1=first, dim2=second)
                del names[second], names[first]
                names.append(label)
        # Laid in the common order, with axes of size one for labels that it lacks, operands broadcast.
        order = [names.index(label) for label in axes if label in names]
        laid = tensor.permute(order)
        for place, label in enumerate(axes):
            if label not in names:
                laid = laid.unsqueeze(place)
        result = laid if result is None else result * laid
    assert result is not None
    summed = tuple(range(len(wanted), len(axes)))
    return result.sum(summed, dtype=result.dtype) if summed else result


def _labels(term: str, hidden: list[str]) -> list[str]:
    """The axes of a term by name, those of its ellipsis included."""
    before, dots, after = term.partition("...")
    return [*before, *(hidden if dots else []), *after]


def product(a: Tensor, b: Tensor, result: torch.dtype | None = None) -> Tensor:
    """The matrix product of the last two axes, with broadcasting, for every dtype and device, in another type if one is asked for."""
    if result is not None and result != a.dtype:
        by_cublas = a.device.type == "cuda" and torch.version.hip is None
        if by_cublas and result == torch.float32 and a.dtype in _HALF and min(a.dim(), b.dim()) > 1:
            return _product_in_float32(a, b)
        return product(a, b).to(result)
    signed = SIGNED.get(a.dtype)
    if signed is not None:
        return product(a.view(signed), b.view(signed)).view(a.dtype)
    if a.device.type == "cuda" and not (a.is_floating_point() or a.is_complex()):
        # cuBLAS has no integer products; these are small in practice (indices, counts).
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2, dtype=a.dtype)
    return torch.matmul(a, b)


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices in half precision, on a GPU: cuBLAS sums in float32, and need not round what it gives."""
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (one.expand(*batch, *one.shape[-2:]) for one in (a, b))
    found = torch.bmm(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), out_dtype=torch.float32)
    return found.view(*batch, *found.shape[-2:])


def _spread(result: Tensor, labels: str, output: str) -> Tensor:
    """Puts a result with axes ``...labels`` in the order of the output, repeated labels on a diagonal (`i->ii`)."""
    front = result.dim() - len(labels)
    before, _, after = output.partition("...") if "..." in output else ("", "", output)
    # Names of the axes that exist: a label with how often it came before.
    axes = [(label, 0) for label in labels]
    wanted: list[tuple[str, int]] = []
    for label in before + after:
        count = sum(name == label for name, _ in wanted)
        wanted.append((label, count))
        if count:
            source = front + axes.index((label, count - 1))
            result = torch.diag_embed(result.movedim(source, -1))
            axes.append(axes.pop(source - front))
            axes.append((label, count))
    order = [front + axes.index(name) for name in wanted]
    return result.permute(*order[: len(before)], *range(front), *order[len(before) :])
