"""Linear algebra on the last two axes: decompositions, diagonals and bands; and Fourier transforms."""

import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import sample, sampled

from .harness import FLOATS, check, ints, run_lowering, run_tensorflow, values

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
    assert not np.isfinite(to_numpy(run_lowering("MatrixSolve", [zeros, ones])[0])).all()


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


DTYPES = [*FLOATS, "float64", "int32", "int64", "complex64", "bool"]
ALIGNMENTS = ["RIGHT_LEFT", "LEFT_RIGHT", "LEFT_LEFT", "RIGHT_RIGHT"]
BANDS = [(0, 0), (1, 1), (-2, -2), (-1, 1), (-2, 0), (0, 3), (1, 2), (-2, -1), (-2, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bands(dtype):
    shapes, widths = [(3, 4), (4, 3), (2, 3, 3), (1, 1), (0, 3, 3)], (-1, 0, 1)
    for shape, lower, upper in sample(12, shapes, widths, widths):
        check("MatrixBandPart", [values(shape, dtype), np.int64(lower), np.int64(upper)])


def test_a_band_keeps_no_nan_outside():
    check("MatrixBandPart", [np.full((3, 3), np.nan, np.float32), np.int32(0), np.int32(0)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_main_diagonals(dtype):
    for shape in [(3,), (2, 3), (2, 0), (1,)]:
        check("MatrixDiag", [values(shape, dtype)])
    for shape in [(3, 4), (4, 3), (2, 3, 3)]:
        array = values(shape, dtype)
        check("MatrixDiagPart", [array])
        check("MatrixSetDiag", [array, values((*shape[:-2], 3), dtype, seed=1)])


@sampled(18, band=BANDS, align=ALIGNMENTS)
def test_parts_and_replacements_of_bands(band, align):
    k = ints(band[0]) if band[0] == band[1] else ints(*band)
    for shape in [(3, 4), (2, 5, 4)]:
        array, padding = values(shape), np.float32(9)
        (packed,) = check("MatrixDiagPartV3", [array, k, padding], {"align": align})
        other = values(tuple(packed.shape), seed=1)
        check("MatrixSetDiagV3", [array, other, k], {"align": align})
        if align == "LEFT_LEFT":
            check("MatrixDiagPartV2", [array, k, padding])
            check("MatrixSetDiagV2", [array, other, k])


@sampled(18, band=BANDS, align=ALIGNMENTS)
def test_matrices_from_bands(band, align):
    k = ints(*band)
    for rows, columns in [(3, 4), (5, 4)]:
        (packed,) = run_tensorflow("MatrixDiagPartV3", [values((2, rows, columns)), k, np.float32(0)], {"align": align})
        check("MatrixDiagV3", [packed, k, np.int32(rows), np.int32(columns), np.float32(9)], {"align": align})
        if align == "LEFT_LEFT":
            check("MatrixDiagV2", [packed, k, np.int32(rows), np.int32(columns), np.float32(9)])


@pytest.mark.parametrize("k", [0, 2, -1])
def test_sizes_that_the_diagonals_decide(k):
    diagonal, one = values((2, 3)), np.int32(-1)
    check("MatrixDiagV3", [diagonal, np.int32(k), one, one, np.float32(0)])
    check("MatrixDiagV3", [diagonal, np.int32(k), np.int32(3 + max(-k, 0)), one, np.float32(0)])
    check("MatrixDiagV3", [diagonal, np.int32(k), one, np.int32(7), np.float32(0)])


def test_what_does_not_fit_is_refused():
    with pytest.raises(Unsupported, match="outside"):
        run_lowering("MatrixDiagPartV3", [values((3, 3)), ints(3), np.float32(0)])
    with pytest.raises(Unsupported, match="elements long"):
        run_lowering("MatrixDiagV3", [values((3,)), ints(0), np.int32(5), np.int32(5), np.float32(0)])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "complex64"])
def test_tensors_of_two_halves(dtype):
    for shape in [(3,), (2, 3)]:
        check("Diag", [values(shape, dtype)])
        check("DiagPart", [values((*shape, *shape), dtype)])


SHAPES = {"": (3, 8), "2D": (2, 6, 8), "3D": (2, 4, 6, 5)}


@pytest.mark.parametrize("suffix", list(SHAPES))
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(suffix, dtype):
    for op in ("FFT", "IFFT"):
        check(f"{op}{suffix}", [values(SHAPES[suffix], dtype)], rtol=1e-4)


@pytest.mark.parametrize("suffix", list(SHAPES))
@pytest.mark.parametrize("change", [0, 1, -1, 3])
@pytest.mark.parametrize(("real", "dtype"), [("float32", "complex64"), ("float64", "complex128")])
def test_real_numbers(suffix, change, real, dtype):
    shape = SHAPES[suffix]
    rank = int(suffix[0]) if suffix else 1
    lengths = np.array([size + change for size in shape[-rank:]], np.int32)
    array = np.zeros((shape[0], *np.maximum(lengths, shape[-rank:])), real)
    array[:] = values(array.shape, real)
    check(f"RFFT{suffix}", [array, lengths], {"Tcomplex": dtype}, rtol=1e-4)
    frequencies = values((shape[0], *lengths[:-1], lengths[-1] // 2 + 1), dtype)
    # The imaginary parts of the first frequency say nothing about real numbers.
    if rank == 1:
        frequencies[..., 0] = frequencies[..., 0].real
        frequencies[..., -1] = frequencies[..., -1].real
    check(f"IRFFT{suffix}", [frequencies, lengths], {"Treal": real}, rtol=1e-4, atol=1e-5 if rank == 1 else 1.0)
