"""Linear algebra on the last two axes, where the result has not the shape of the first input."""

from __future__ import annotations

from collections.abc import Callable

from msplit.shapes.registry import Node, Outputs, Shape, broadcast, merge, merge_dim, shape_function


def _square(shape: Shape) -> tuple[tuple[int | None, ...], int | None] | None:
    """Batch axes and size of square matrices; None where the rank is unknown."""
    return None if shape is None else (shape[:-2], merge_dim(shape[-2], shape[-1]))


def _solution(node: Node, join: Callable[[Shape, Shape], Shape]) -> Outputs:
    """Rows of the square matrix, columns of the right side, and the batch axes of both, joined."""
    found, rhs = _square(node.shape(0)), node.shape(1)
    if found is None or rhs is None:
        return (None,)
    batch, size = found
    lead = join(batch, rhs[:-2])
    return (None if lead is None else (*lead, merge_dim(size, rhs[-2]), rhs[-1]),)


@shape_function("MatrixSolve", "BatchMatrixSolve")
def solve(node: Node) -> Outputs:
    """Of equations whose two sides have the same batch axes."""
    return _solution(node, merge)


@shape_function("MatrixTriangularSolve", "BatchMatrixTriangularSolve")
def triangular_solve(node: Node) -> Outputs:
    """Of equations whose batch axes broadcast."""
    return _solution(node, broadcast)


@shape_function("MatrixDeterminant", "BatchMatrixDeterminant")
def determinant(node: Node) -> Outputs:
    """The batch axes."""
    shape = node.shape(0)
    return (None if shape is None else shape[:-2],)


@shape_function("LogMatrixDeterminant")
def log_determinant(node: Node) -> Outputs:
    """The batch axes, for the sign and for the logarithm."""
    shape = node.shape(0)
    return (None if shape is None else shape[:-2],) * 2


@shape_function("Lu")
def lu(node: Node) -> Outputs:
    """The factors, and one position per row."""
    found = _square(node.shape(0))
    if found is None:
        return (None, None)
    lead, size = found
    return ((*lead, size, size), (*lead, size))


@shape_function("Qr")
def qr(node: Node) -> Outputs:
    """[.., m, p] and [.., p, n]: p is the smaller of m and n, or m with `full_matrices`."""
    shape = node.shape(0)
    if shape is None:
        return (None, None)
    rows, columns = shape[-2:]
    if node.attr("full_matrices", False):
        inner = rows
    else:
        inner = None if rows is None or columns is None else min(rows, columns)
    return ((*shape[:-2], rows, inner), (*shape[:-2], inner, columns))


@shape_function("TridiagonalMatMul")
def tridiagonal_product(node: Node) -> Outputs:
    """As the right side."""
    return (node.shape(3),)


@shape_function("SelfAdjointEigV2", "Eig")
def eigenvalues(node: Node) -> Outputs:
    """One value per row; and the vectors. Of those that are not asked for TensorFlow says two things: nobody reads them."""
    found = _square(node.shape(0))
    if found is None:
        return (None, None)
    lead, size = found
    return ((*lead, size), (*lead, size, size) if node.attr("compute_v", True) else None)


@shape_function("Svd")
def singular_values(node: Node) -> Outputs:
    """The values; and left and right vectors, of which there may be as many as rows and columns."""
    shape = node.shape(0)
    if shape is None:
        return (None, None, None)
    lead, (rows, columns) = shape[:-2], shape[-2:]
    inner = None if rows is None or columns is None else min(rows, columns)
    if not node.attr("compute_uv", True):
        return ((*lead, inner), None, None)
    if node.attr("full_matrices", False):
        return ((*lead, inner), (*lead, rows, rows), (*lead, columns, columns))
    return ((*lead, inner), (*lead, rows, inner), (*lead, columns, inner))
