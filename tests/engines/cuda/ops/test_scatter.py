import numpy as np
import pytest

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "uint8", "complex64"]


def _coordinates(count, sizes, dtype="int32", *, distinct=False):
    """Coordinates in a tensor of the sizes, with repetitions unless they are to be distinct."""
    generator = np.random.default_rng(5)
    total = int(np.prod(sizes))
    flat = generator.permutation(total)[:count] if distinct else generator.integers(0, total, count)
    return np.stack(np.unravel_index(flat, sizes), -1).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_scatter_adds_what_meets(dtype, index):
    for count, depth, shape in [
        (9, 1, (6,)),
        (9, 1, (6, 3)),
        (9, 2, (4, 5)),
        (9, 2, (4, 5, 3)),
        (0, 1, (6, 3)),
        (1, 1, (1,)),
    ]:
        updates = values((count, *shape[depth:]), dtype, low=-9, high=9)
        check("ScatterNd", [_coordinates(count, shape[:depth], index), updates, np.array(shape, index)])


def test_scatter_of_flags():
    check("ScatterNd", [np.array([[1], [3]], np.int32), np.array([True, False]), np.array([5], np.int32)])


@pytest.mark.parametrize("op", ["TensorScatterAdd", "TensorScatterSub", "ScatterNdNonAliasingAdd"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_additions(op, dtype):
    for count, depth, shape in [(9, 1, (6,)), (9, 1, (6, 3)), (9, 2, (4, 5, 3)), (0, 1, (6, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1)
        check(op, [values(shape, dtype), _coordinates(count, shape[:depth]), updates])


@pytest.mark.parametrize("op", ["TensorScatterMax", "TensorScatterMin"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64"])
def test_extremes(op, dtype):
    for count, depth, shape in [(9, 1, (6,)), (9, 1, (6, 3)), (9, 2, (4, 5, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1, low=-9, high=9)
        check(op, [values(shape, dtype, low=-9, high=9), _coordinates(count, shape[:depth]), updates])


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"], ids=str)
def test_updates(dtype):
    for count, depth, shape in [(4, 1, (6,)), (4, 1, (6, 3)), (9, 2, (4, 5, 3)), (0, 1, (6, 3))]:
        updates = values((count, *shape[depth:]), dtype, seed=1)
        check("TensorScatterUpdate", [values(shape, dtype), _coordinates(count, shape[:depth], distinct=True), updates])


def test_wrong_coordinates_are_passed_over():
    indices = np.array([[0, 0], [1, 3], [-1, 0], [1, 4], [2, 0]], np.int32)
    updates = values((5,), seed=1)
    inside = indices[:2]
    array = values((2, 4))
    for op, inputs in [
        ("ScatterNd", lambda rows, new: [rows, new, np.array([2, 4], np.int32)]),
        ("TensorScatterUpdate", lambda rows, new: [array, rows, new]),
        ("TensorScatterAdd", lambda rows, new: [array, rows, new]),
        ("TensorScatterMax", lambda rows, new: [array, rows, new]),
    ]:
        (result,) = run_lowering(op, inputs(indices, updates))
        check(op, inputs(inside, updates[:2]), expected=[result.numpy()])
