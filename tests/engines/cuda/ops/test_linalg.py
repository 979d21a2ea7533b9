import numpy as np
import pytest

from .harness import check, values

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
