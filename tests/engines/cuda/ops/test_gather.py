import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.gather import _masked

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "bool", "uint8", "complex64"]
INDICES = [(), (5,), (2, 3), (0,), (1, 1)]


def _indices(shape, size, dtype="int32", seed=7):
    return np.random.default_rng(seed).integers(0, size, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_rows(dtype, index):
    for table_shape in [(6,), (6, 3), (6, 2, 3), (6, 0)]:
        for shape in INDICES:
            inputs = [values(table_shape, dtype), _indices(shape, 6, index)]
            check("Gather", inputs, exact=True)
            check("GatherV2", [*inputs, np.int32(0)], exact=True)


@pytest.mark.parametrize("index", ["int16", "int32", "int64"])
def test_any_axis(index):
    for axis in range(-3, 3):
        for shape in INDICES:
            array = values((4, 5, 6))
            check("GatherV2", [array, _indices(shape, array.shape[axis], index), np.int64(axis)], exact=True)


def test_batches():
    params = values((2, 3, 4, 5))
    for batch_dims, axis, shape in [
        (1, 1, (2, 7)),
        (1, 2, (2,)),
        (2, 2, (2, 3, 2, 2)),
        (2, 3, (2, 3, 4)),
        (1, 3, (2, 0)),
        (1, -1, (2, 6)),
        (2, 2, (2, 3)),
    ]:
        inputs = [params, _indices(shape, params.shape[axis]), np.int32(axis)]
        check("GatherV2", inputs, {"batch_dims": batch_dims}, exact=True)
    check("GatherV2", [params, _indices((2, 3), 4), np.int32(2)], {"batch_dims": -1}, exact=True)
    with pytest.raises(Unsupported, match="batch_dims"):
        run_lowering("GatherV2", [params, _indices((3, 2), 3), np.int32(1)], {"batch_dims": 1})


def test_variables():
    array, indices = values((6, 3)), _indices((4, 2), 6)
    expected = [array[indices]]  # the real input is a handle
    node = Node("n", "ResourceGather", {})
    result = table()["ResourceGather"].function(node, torch.from_numpy(array), torch.from_numpy(indices))
    np.testing.assert_array_equal(result.numpy(), expected[0])
    batched = table()["ResourceGather"].function(
        Node("n", "ResourceGather", {"batch_dims": 1}), torch.from_numpy(array), torch.from_numpy(_indices((6, 2), 3))
    )
    np.testing.assert_array_equal(batched.numpy(), np.take_along_axis(array, _indices((6, 2), 3), 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_coordinates(dtype, index):
    params = values((3, 4, 5), dtype)
    for depth in (0, 1, 2, 3):
        for shape in [(), (4,), (2, 3), (0,)]:
            parts = [_indices(shape, params.shape[axis], index, seed=axis) for axis in range(depth)]
            indices = np.stack(parts, -1) if parts else np.zeros((*shape, 0), index)
            check("GatherNd", [params, indices], exact=True)


def test_wrong_coordinates_may_be_ignored():
    indices = np.array([[0, 0], [2, 4], [-1, 0], [1, 3], [3, 0]], np.int32)
    check("GatherNd", [values((3, 4)), indices], {"bad_indices_policy": "IGNORE"})


@pytest.mark.parametrize("index", [-1, 6, 100])
def test_an_index_out_of_range_is_an_error_on_the_cpu(index):
    with pytest.raises(IndexError):
        run_lowering("GatherV2", [values((6, 3)), np.array([0, index]), np.int32(0)])
    with pytest.raises(IndexError):
        run_lowering("GatherNd", [values((6, 3)), np.array([[0, 0], [index, 0]])])


def test_without_triton_a_wrong_index_gives_zeros():
    array = torch.from_numpy(values((4, 3)))
    result = _masked(array, torch.tensor([0, -1, 3, 4, 2]), 0)
    assert result[[1, 3]].eq(0).all()
    torch.testing.assert_close(result[[0, 2, 4]], array[[0, 3, 2]])
    assert _masked(torch.empty(2, 0), torch.tensor([0, 1]), 1).eq(0).all()
