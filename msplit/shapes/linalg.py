"""Products of matrices, Einsum, and linear algebra on the last two axes."""

from __future__ import annotations

from msplit.shapes.registry import (
    Node,
    Outputs,
    Shape,
    Sizes,
    broadcast,
    least,
    merge,
    merge_dim,
    shape_function,
    sure,
    unsized,
)


def matrix_sizes(node: Node) -> tuple[int | None, int | None, int | None]:
    """(rows, inner, columns) of a product, with the transposes taken into account."""
    a, b = node.shape(0), node.shape(1)
    flip_a = bool(node.attr("transpose_a", False) or node.attr("adj_x", False))
    flip_b = bool(node.attr("transpose_b", False) or node.attr("adj_y", False))
    rows = inner = columns = None
    if a is not None:
        rows, inner = (a[-1], a[-2]) if flip_a else (a[-2], a[-1])
    if b is not None:
        inner_b, columns = (b[-1], b[-2]) if flip_b else (b[-2], b[-1])
        inner = merge_dim(inner, inner_b)
    return rows, inner, columns


@shape_function("MatMul", "_FusedMatMul", "SparseMatMul")
def matmul(node: Node) -> Outputs:
    """A product of two matrices."""
    rows, _, columns = matrix_sizes(node)
    return ((rows, columns),) + ((None,) if node.outputs > 1 else ())


@shape_function("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedBatchMatMulV2")
def batch_matmul(node: Node) -> Outputs:
    """A batch of products; the leading axes broadcast."""
    rows, _, columns = matrix_sizes(node)
    lead = broadcast(node.ranked(0)[:-2], node.ranked(1)[:-2])
    return (None if lead is None else (*lead, rows, columns),)


def einsum_sizes(equation: str, inputs: list[Shape]) -> tuple[dict[str, int | None], Shape, str] | None:
    """Size of each label, shape of the broadcast part, and the labels of the output with "." for that part.

    Returns:
        None where an operand's rank is unknown.

    Raises:
        ValueError: The equation does not fit its operands.
    """
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    sizes: dict[str, int | None] = {}
    lead: Shape = ()
    for term, shape in zip(terms, inputs, strict=True):
        if shape is None:
            return None
        before, dots, after = term.partition("...")
        middle = len(shape) - len(before) - len(after)
        if middle < 0 or (middle and not dots):
            raise ValueError("operand and equation differ in rank")
        for label, size in zip(before + after, shape[: len(before)] + shape[len(before) + middle :], strict=True):
            sizes[label] = merge_dim(sizes.get(label), size)
        lead = broadcast(lead, shape[len(before) : len(before) + middle])
    return sizes, lead, right.replace("...", ".")


@shape_function("Einsum", "XlaEinsum")
def einsum(node: Node) -> Outputs:
    """Einstein summation, with `...` for broadcast axes."""
    found = einsum_sizes(str(node.attr("equation", "")), node.inputs)
    if found is None:
        right = str(node.attr("equation", "")).partition("->")[2]
        return (unsized(None if "." in right else len(right.strip())),)
    sizes, lead, right = found
    result: list[int | None] = []
    for label in right:
        if label == ".":
            result.extend(sure(lead))
        else:
            result.append(sizes[label])
    return (tuple(result),)


# The last axis on a diagonal, and the diagonal of the last two axes:
shape_function("MatrixDiag", "BatchMatrixDiag")(lambda node: ((*node.ranked(0), node.ranked(0)[-1]),))
shape_function("MatrixDiagPart", "BatchMatrixDiagPart")(
    lambda node: ((*node.ranked(0)[:-2], least(*node.ranked(0)[-2:])),)
)


def _diagonals(node: Node) -> tuple[int, int]:
    """(lowest, highest) of the diagonals that the second input names."""
    numbers = node.whole(1)
    return numbers[0], numbers[-1]


@shape_function("MatrixDiagV2", "MatrixDiagV3")
def matrix_diag_v2(node: Node) -> Outputs:
    """Puts the last axis (or the last two, for several diagonals) on diagonals; rows and columns may be given."""
    shape, (low, high), rows, columns = node.ranked(0), _diagonals(node), node.scalar(2), node.scalar(3)
    lead = shape[: -1 if low == high else -2]
    length = shape[-1]
    if rows is None or columns is None or length is None:
        return ((*lead, None, None),)
    least_rows, least_columns = length - min(high, 0), length + max(low, 0)
    if rows == -1 and columns == -1:
        rows = columns = max(least_rows, least_columns)
    return ((*lead, least_rows if rows == -1 else rows, least_columns if columns == -1 else columns),)


@shape_function("MatrixDiagPartV2", "MatrixDiagPartV3")
def matrix_diag_part_v2(node: Node) -> Outputs:
    """Takes diagonals of the last two axes, each as long as the longest."""
    shape, (low, high) = node.ranked(0), _diagonals(node)
    rows, columns = shape[-2:]
    length = None if rows is None or columns is None else min(rows + min(high, 0), columns - max(low, 0))
    return ((*shape[:-2], *(() if low == high else (high - low + 1,)), length),)


@shape_function("DiagPart")
def diag_part(node: Node) -> Outputs:
    """Half of the shape."""
    shape = node.ranked(0)
    return (merge(shape[: len(shape) // 2], shape[len(shape) // 2 :]),)


@shape_function("SparseTensorDenseMatMul")
def sparse_dense_matmul(node: Node) -> Outputs:
    """Rows of the sparse matrix by columns of the dense one."""
    sizes = node.ints(2)
    dense = node.shape(3)
    rows = sizes[1 if node.attr("adjoint_a", False) else 0] if sizes else None
    columns = None if dense is None else dense[-2 if node.attr("adjoint_b", False) else -1]
    return ((rows, columns),)


def _square(shape: Sizes) -> tuple[Sizes, int | None]:
    """Batch axes and size of square matrices."""
    return shape[:-2], merge_dim(shape[-2], shape[-1])


@shape_function("MatrixSolve", "BatchMatrixSolve", "MatrixTriangularSolve", "BatchMatrixTriangularSolve")
def solve(node: Node) -> Outputs:
    """Rows of the square matrix, columns of the right side, and the batch axes of both; those of a triangular one broadcast."""
    (batch, size), rhs = _square(node.ranked(0)), node.ranked(1)
    lead = (broadcast if "Triangular" in node.op else merge)(batch, rhs[:-2])
    return (None if lead is None else (*lead, merge_dim(size, rhs[-2]), rhs[-1]),)


# The batch axes, for the sign and for the logarithm.
shape_function("LogMatrixDeterminant")(lambda node: (node.ranked(0)[:-2],) * 2)


@shape_function("Lu")
def lu(node: Node) -> Outputs:
    """The factors, and one position per row."""
    lead, size = _square(node.ranked(0))
    return ((*lead, size, size), (*lead, size))


@shape_function("Qr")
def qr(node: Node) -> Outputs:
    """[.., m, p] and [.., p, n]: p is the smaller of m and n, or m with `full_matrices`."""
    shape = node.ranked(0)
    rows, columns = shape[-2:]
    inner = rows if node.attr("full_matrices", False) else least(rows, columns)
    return ((*shape[:-2], rows, inner), (*shape[:-2], inner, columns))


@shape_function("SelfAdjointEigV2", "Eig")
def eigenvalues(node: Node) -> Outputs:
    """One value per row; and the vectors. Of those that are not asked for TensorFlow says two things: nobody reads them."""
    lead, size = _square(node.ranked(0))
    return ((*lead, size), (*lead, size, size) if node.attr("compute_v", True) else None)


@shape_function("Svd")
def singular_values(node: Node) -> Outputs:
    """The values; and left and right vectors, of which there may be as many as rows and columns."""
    shape = node.ranked(0)
    lead, (rows, columns) = shape[:-2], shape[-2:]
    inner = least(rows, columns)
    if not node.attr("compute_uv", True):
        return ((*lead, inner), None, None)
    full = node.attr("full_matrices", False)
    return ((*lead, inner), (*lead, rows, rows if full else inner), (*lead, columns, columns if full else inner))
