import numpy as np
import pytest

from .harness import check, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 4)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("rate", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_windows(kernel, stride, rate, padding):
    sizes = {"strides": (1, *stride, 1), "rates": (1, *rate, 1), "padding": padding}
    images = values((2, 7, 8, 3))
    check("ExtractImagePatches", [images], {"ksizes": (1, *kernel, 1), **sizes}, exact=True)
    check("Dilation2D", [images, values((*kernel, 3), seed=1)], sizes)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float64])
def test_patches_of_other_types(dtype):
    sizes = {"ksizes": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "rates": (1, 1, 1, 1), "padding": "SAME"}
    check("ExtractImagePatches", [values((1, 5, 5, 2), dtype)], sizes, exact=True)
