"""Division by multiplying, as our own convolution does it."""

from hypothesis import example, given
from hypothesis import strategies as st

from msplit.engines.cuda.kernels.tiles import reciprocal

LARGEST = 2**31 - 1


@given(st.integers(0, LARGEST), st.integers(1, LARGEST))
@example(LARGEST, 1)
@example(LARGEST, LARGEST)
@example(LARGEST - 1, LARGEST)
@example(LARGEST, 3)
@example(288, 17)
@example(2**30, 2**30)
def test_a_product_and_a_shift_divide(number, divisor):
    by, shift = reciprocal(divisor)
    assert -(2**31) <= by < 0
    assert 0 <= shift < 32
    high = (2 * number * (by + 2**32)) >> 32  # what a GPU gives of a product of two numbers of 32 bits without sign
    assert high >> shift == number // divisor
