import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported

from .harness import check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

TYPES = [np.float32, np.float64, np.complex64]


def regular(shape, dtype, seed=0):
    """Matrices that have an inverse."""
    return (values(shape, dtype, seed=seed, low=-0.5, high=0.5) + 3 * np.eye(shape[-1])).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 4, 4), (1, 1), (2, 0, 0)], ids=str)
def test_of_one_matrix(shape, dtype):
    matrices = regular(shape, dtype)
    check("Cholesky", [(matrices @ np.conj(np.swapaxes(matrices, -1, -2))).astype(dtype)], rtol=1e-4)
    for adjoint in (False, True):
        check("MatrixInverse", [matrices], {"adjoint": adjoint}, rtol=1e-4)


def test_cholesky_reads_the_lower_triangle():
    matrices = regular((4, 4), np.float32) @ regular((4, 4), np.float32).T
    matrices[0, 3] = 17
    check("Cholesky", [matrices], rtol=1e-4)


@pytest.mark.parametrize("dtype", [*TYPES, np.complex128])
@pytest.mark.parametrize(
    ("shape", "columns"), [((3, 3), 2), ((2, 3, 4, 4), 1), ((1, 1), 3), ((2, 0, 0), 2), ((0, 3, 3), 2), ((3, 3), 0)]
)
def test_solve(shape, columns, dtype):
    matrices, rhs = regular(shape, dtype), values((*shape[:-1], columns), dtype, seed=1)
    for adjoint in (False, True):
        check("MatrixSolve", [matrices, rhs], {"adjoint": adjoint}, rtol=1e-4)
        for lower in (False, True):
            check("MatrixTriangularSolve", [matrices, rhs], {"adjoint": adjoint, "lower": lower}, rtol=1e-4)


@pytest.mark.parametrize(("left", "right"), [((3,), ()), ((), (2,)), ((2, 1), (3,)), ((1,), (4,))], ids=str)
def test_batches_of_a_triangular_solve_broadcast(left, right):
    check("MatrixTriangularSolve", [regular((*left, 3, 3), np.float32), values((*right, 3, 2))], rtol=1e-4)


def test_a_triangular_matrix_with_a_zero_on_its_diagonal_gives_what_tensorflow_gives():
    matrices = np.array([[1, 0], [2, 0]], np.float32)
    check("MatrixTriangularSolve", [matrices, np.ones((2, 1), np.float32)])


@pytest.mark.parametrize("dtype", [*TYPES, np.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 2, 4, 4), (1, 1), (2, 0, 0), (0, 3, 3)], ids=str)
def test_determinants(shape, dtype):
    matrices = values(shape, dtype)
    check("MatrixDeterminant", [matrices], rtol=1e-4)
    check("LogMatrixDeterminant", [matrices], rtol=1e-4)
    check("Lu", [matrices], rtol=1e-4)
    check("Lu", [matrices], {"output_idx_type": "int64"}, rtol=1e-4)


def test_determinants_of_a_matrix_without_an_inverse():
    matrices = np.zeros((2, 3, 3), np.float32)
    check("MatrixDeterminant", [matrices])
    check("LogMatrixDeterminant", [matrices])


def test_solving_with_a_matrix_without_an_inverse_gives_no_number_where_tensorflow_stops():
    zeros, ones = np.zeros((3, 3), np.float32), np.ones((3, 1), np.float32)
    with pytest.raises(Exception, match="not invertible"):
        run_tensorflow("MatrixSolve", [zeros, ones])
    assert not np.isfinite(run_lowering("MatrixSolve", [zeros, ones])[0].numpy()).all()


def test_half_precision_is_refused_as_tensorflow_has_no_kernel_for_it():
    with pytest.raises(Unsupported, match="MatrixSolve of float16"):
        run_lowering("MatrixSolve", [regular((3, 3), np.float16), values((3, 1), np.float16)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (3, 5), (1, 1)], ids=str)
def test_qr(shape, dtype):
    for full in (False, True):
        check("Qr", [values(shape, dtype)], {"full_matrices": full}, rtol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("batch", "size", "columns"), [((), 4, 2), ((2, 3), 5, 1), ((), 1, 3), ((2,), 2, 2)])
def test_product_with_a_tridiagonal_matrix(batch, size, columns, dtype):
    diagonals = [values((*batch, 1, size), dtype, seed=seed) for seed in range(3)]
    check("TridiagonalMatMul", [*diagonals, values((*batch, size, columns), dtype, seed=3)])
