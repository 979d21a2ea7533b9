import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import sample, sampled

from .harness import FLOATS, check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "float64", "int32", "int64", "complex64", "bool"]
ALIGNMENTS = ["RIGHT_LEFT", "LEFT_RIGHT", "LEFT_LEFT", "RIGHT_RIGHT"]
BANDS = [(0, 0), (1, 1), (-2, -2), (-1, 1), (-2, 0), (0, 3), (1, 2), (-2, -1), (-2, 3)]


def _i(*numbers):
    return np.array(numbers, np.int32)


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
    k = _i(band[0]) if band[0] == band[1] else _i(*band)
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
    k = _i(*band)
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
        run_lowering("MatrixDiagPartV3", [values((3, 3)), _i(3), np.float32(0)])
    with pytest.raises(Unsupported, match="elements long"):
        run_lowering("MatrixDiagV3", [values((3,)), _i(0), np.int32(5), np.int32(5), np.float32(0)])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "complex64"])
def test_tensors_of_two_halves(dtype):
    for shape in [(3,), (2, 3)]:
        check("Diag", [values(shape, dtype)])
        check("DiagPart", [values((*shape, *shape), dtype)])
