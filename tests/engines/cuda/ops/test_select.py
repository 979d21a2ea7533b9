import numpy as np
import pytest

from .harness import FLOATS, check, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int8", "int32", "int64", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select(dtype):
    for condition, shape in [
        ((), ()),
        ((3, 4), (3, 4)),
        ((3,), (3, 4)),
        ((2,), (2, 3, 4)),
        ((), (3, 4)),
        ((4,), (4,)),
        ((0,), (0, 2)),
    ]:
        check("Select", [values(condition, bool), values(shape, dtype, seed=1), values(shape, dtype, seed=2)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_with_broadcasting(dtype):
    for condition, left, right in [
        ((), (), ()),
        ((3, 1), (1, 4), (3, 4)),
        ((4,), (), (3, 4)),
        ((2, 1, 3), (5, 1), ()),
        ((0, 1), (1,), (3,)),
    ]:
        check("SelectV2", [values(condition, bool), values(left, dtype, seed=1), values(right, dtype, seed=2)])


def test_select_passes_over_nan():
    nan = np.full((3,), np.nan, np.float32)
    check("SelectV2", [np.array([True, False, True]), nan, np.ones(3, np.float32)])


@pytest.mark.parametrize("dtype", ["bool", "float32", "int32", "int64", "uint8", "complex64"])
def test_where(dtype):
    for shape in [(5,), (3, 4), (2, 3, 4), (0,), (2, 0)]:
        check("Where", [values(shape, dtype, low=-1, high=2)])


def test_where_finds_nan():
    check("Where", [np.array([0, np.nan, -0.0, 1], np.float32)])


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "uint8"], ids=str)
def test_clip(dtype):
    for shape in [(), (0,), (3, 4)]:
        array = values(shape, dtype, low=-9, high=9)
        check("ClipByValue", [array, np.array(1, array.dtype), np.array(3, array.dtype)])
        check(
            "ClipByValue",
            [array, values(shape, dtype, low=-3, high=0, seed=1), values(shape, dtype, low=1, high=3, seed=2)],
        )


def test_the_lower_bound_wins_when_clipping():
    array = np.array([np.nan, 0, 1.5, 5, np.inf, -np.inf], np.float32)
    (result,) = check("ClipByValue", [array, np.float32(2), np.float32(1)])
    assert result[1:].tolist() == [2.0] * 5
