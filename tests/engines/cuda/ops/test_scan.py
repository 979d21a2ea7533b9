import numpy as np
import pytest

from msplit.engines.cuda.ir.node import Unsupported
from tests.campaign import sampled

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

CASES = [((5,), 0), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((1,), 0), ((0, 3), 0), ((2, 0), 1)]
DIRECTIONS = [{"exclusive": exclusive, "reverse": reverse} for exclusive in (False, True) for reverse in (False, True)]


@sampled(
    24, op=["Cumsum", "Cumprod"], dtype=[*FLOATS, "float64", "int8", "int32", "int64", "complex64"], attrs=DIRECTIONS
)
def test_running_sums_and_products(op, dtype, attrs):
    for shape, axis in CASES:
        check(
            op, [values(shape, dtype, low=-9, high=9), np.int32(axis)], attrs, rtol=3e-2 if dtype == "float16" else None
        )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("attrs", DIRECTIONS, ids=str)
def test_running_logsumexp(dtype, attrs):
    for shape, axis in CASES:
        check("CumulativeLogsumexp", [values(shape, dtype, low=-9, high=9), np.int64(axis)], attrs, rtol=1e-2)


@pytest.mark.parametrize("op", ["Cumsum", "Cumprod"])
def test_an_exclusive_sum_survives_infinity(op):
    array = np.array([1, np.inf, 2, 3], np.float32)
    (result,) = check(op, [array, np.int32(0)], {"exclusive": True})
    assert result[:2].isfinite().all()


@pytest.mark.parametrize("op", ["Cumsum", "Cumprod"])
def test_a_scalar_has_no_axis(op):
    with pytest.raises(Unsupported, match="rank 0"):
        run_lowering(op, [np.float32(3), np.int32(0)])
