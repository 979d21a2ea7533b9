import numpy as np
import pytest

from .harness import check, values

pytestmark = pytest.mark.tf

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
