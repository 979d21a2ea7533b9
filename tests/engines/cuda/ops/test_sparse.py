import numpy as np
import pytest

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf


def _i(numbers, dtype="int64"):
    return np.array(numbers, dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool"], ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_dense_from_sparse(dtype, index):
    default = values((), dtype, seed=3, low=2, high=4)
    check("SparseToDense", [_i([[0, 1], [1, 3], [2, 0]], index), _i([3, 4], index), values((3,), dtype), default])
    check("SparseToDense", [_i([[0, 1], [1, 3]], index), _i([3, 4], index), values((), dtype), default])
    check("SparseToDense", [_i([1, 3], index), _i([5], index), values((2,), dtype), default])
    check("SparseToDense", [_i(3, index), _i([5], index), values((), dtype), default])
    check("SparseToDense", [np.zeros((0, 2), index), _i([2, 3], index), values((0,), dtype), default])


@pytest.mark.parametrize(
    ("shape", "new"),
    [((4, 6), (3, 8)), ((4, 6), (-1,)), ((4, 6), (2, -1, 3)), ((24,), (4, -1)), ((2, 3, 4), (6, 4)), ((4, 6), (24, 1))],
)
def test_reshape(shape, new):
    flat = np.array([0, 5, 9, 17, 23])
    indices = np.stack(np.unravel_index(flat, shape), -1).astype(np.int64)
    check("SparseReshape", [indices, _i(shape), _i(new)])
    check("SparseReshape", [indices[:0], _i(shape), _i(new)])


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_empty_rows_are_filled(dtype):
    default = values((), dtype, seed=3)
    for indices, shape in [
        ([[0, 1], [2, 0], [2, 3]], [5, 4]),
        ([[0, 0], [1, 0]], [2, 1]),
        ([[3, 2], [1, 0], [3, 0]], [4, 4]),
        ([[4, 1]], [5, 4]),
    ]:
        rows = len(indices)
        check("SparseFillEmptyRows", [_i(indices), values((rows,), dtype), _i(shape), default])
    check("SparseFillEmptyRows", [np.zeros((0, 2), np.int64), values((0,), dtype), _i([3, 4]), default])


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_of_the_shape_are_refused(row):
    with pytest.raises(IndexError, match="outside of the 3 rows"):
        run_lowering("SparseFillEmptyRows", [_i([[row, 0]]), values((1,)), _i([3, 4]), np.float32(0)])


@pytest.mark.parametrize("adjoint_a", [False, True])
@pytest.mark.parametrize("adjoint_b", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_product_with_a_dense_matrix(adjoint_a, adjoint_b, dtype):
    indices = _i([[0, 1], [0, 3], [2, 0], [2, 1], [2, 1]])
    inner = 3 if adjoint_a else 4
    dense = values((5, inner) if adjoint_b else (inner, 5), dtype, seed=1)
    attrs = {"adjoint_a": adjoint_a, "adjoint_b": adjoint_b}
    check("SparseTensorDenseMatMul", [indices, values((5,), dtype), _i([3, 4]), dense], attrs)
    check("SparseTensorDenseMatMul", [indices[:0], values((0,), dtype), _i([3, 4]), dense], attrs)


def test_indices_outside_are_passed_over():
    indices = _i([[0, 1], [1, 9], [-1, 0]])
    (result,) = run_lowering("SparseToDense", [indices, _i([2, 3]), values((3,)), np.float32(0)])
    assert result.count_nonzero() == 1
