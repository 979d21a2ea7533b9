import pytest

from .harness import FLOATS, check, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul_transposes_either_side(dtype, transpose_a, transpose_b):
    a = values((5, 3) if transpose_a else (3, 5), dtype, seed=1)
    b = values((4, 5) if transpose_b else (5, 4), dtype, seed=2)
    check("MatMul", [a, b], {"transpose_a": transpose_a, "transpose_b": transpose_b})
