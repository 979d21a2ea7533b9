import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.node import Unsupported

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool", "uint16", "complex64"], ids=str)
def test_constants(dtype):
    for shape in [(), (0,), (2, 3)]:
        array = values(shape, dtype)
        (result,) = run_lowering("Const", [], {"value": array, "dtype": array.dtype.name})
        found = to_numpy(result)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, shape, array.tobytes())


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool", "complex64"], ids=str)
def test_fill(dtype):
    for dims in [(), (0,), (3,), (2, 3)]:
        check("Fill", [np.array(dims, np.int32), values((), dtype)])
        check("Fill", [np.array(dims, np.int64), values((), dtype)])


def test_empty_is_zeros_where_it_is_promised():
    check("Empty", [np.array([2, 3], np.int32)], {"dtype": "float32", "init": True})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ranges_of_integers(dtype):
    for start, limit, delta in [(0, 5, 1), (3, 18, 4), (10, 0, -3), (0, 0, 1), (-4, 5, 2)]:
        check("Range", [np.array(part, dtype) for part in (start, limit, delta)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ranges_of_floats(dtype):
    for start, limit, delta in [(0, 5, 1), (0.1, 3, 0.3), (3, -1, -0.7), (0, 1, 0.1), (2, 2, 0.5)]:
        check("Range", [np.array(part, dtype) for part in (start, limit, delta)], rtol=1e-6)


def test_a_range_needs_a_step():
    with pytest.raises(Unsupported, match="delta 0"):
        run_lowering("Range", [np.int32(0), np.int32(5), np.int32(0)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_distances(dtype):
    for start, stop, num in [(0, 1, 5), (0.1, 0.7, 7), (3, -2, 4), (2, 9, 1), (0, 1, 2), (5, 5, 3)]:
        for index in (np.int32, np.int64):
            check("LinSpace", [np.array(start, dtype), np.array(stop, dtype), index(num)])
    with pytest.raises(Unsupported, match="of 0 numbers"):
        run_lowering("LinSpace", [np.float32(0), np.float32(1), np.int32(0)])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool"], ids=str)
@pytest.mark.parametrize("index", ["int32", "int64", "uint8"])
def test_one_hot(dtype, index):
    on, off = values((), dtype, low=2, high=4, seed=3), values((), dtype, low=-3, high=0, seed=4)
    for shape in [(), (4,), (2, 3), (0,), (2, 1, 3)]:
        indices = values(shape, index, low=-1, high=6)  # -1 and 5 are outside
        for axis in range(-1, len(shape) + 1):
            check("OneHot", [indices, np.int32(5), on, off], {"axis": axis})
    check("OneHot", [np.array([0, 1], index), np.int32(0), on, off])
