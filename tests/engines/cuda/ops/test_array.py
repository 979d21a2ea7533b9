import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.axes import lies_nchw

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "bool", "uint8", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concat(dtype):
    for shapes, axis in [
        ([(3, 4), (2, 4)], 0),
        ([(3, 4), (3, 1), (3, 2)], -1),
        ([(2, 3, 4), (2, 5, 4)], 1),
        ([(3,)], 0),
        ([(0, 2), (3, 2), (0, 2)], 0),
    ]:
        inputs = [values(shape, dtype, seed=seed) for seed, shape in enumerate(shapes)]
        if len(inputs) > 1:  # TensorFlow wants two at least
            check("ConcatV2", [*inputs, np.int32(axis)])
            check("ConcatV2", [*inputs, np.int64(axis)])
            check("Concat", [np.int32(axis), *inputs])
        else:
            (result,) = run_lowering("ConcatV2", [*inputs, np.int32(axis)])
            assert result.shape == shapes[0]


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_concat_of_images_that_lie_as_nchw_keeps_their_layout(axis):
    arrays = [values((2, 3, 4, 5), seed=seed) for seed in range(3)]
    images = [torch.from_numpy(array).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1) for array in arrays]
    result = table()["ConcatV2"].function(Node("n", "ConcatV2"), *images, np.int32(axis))
    assert lies_nchw(result)
    np.testing.assert_array_equal(result.numpy(), np.concatenate(arrays, axis))
    mixed = table()["ConcatV2"].function(Node("n", "ConcatV2"), images[0], torch.from_numpy(arrays[1]), np.int32(axis))
    np.testing.assert_array_equal(mixed.numpy(), np.concatenate(arrays[:2], axis))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pack_and_unpack(dtype):
    for shape in [(), (3,), (2, 3), (0, 2)]:
        for axis in range(-len(shape) - 1, len(shape) + 1):
            inputs = [values(shape, dtype, seed=seed) for seed in range(3)]
            check("Pack", inputs, {"axis": axis})
            check("Unpack", [np.stack(inputs, axis)], {"axis": axis, "num": 3})
    check("Pack", [values((2, 3), dtype)], {"axis": 1})


def test_unpack_of_nothing():
    check("Unpack", [values((0, 3))], {"num": 0})
    with pytest.raises(Unsupported, match="parts"):
        run_lowering("Unpack", [values((2, 3))], {"num": 3})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split(dtype):
    for shape, axis, count in [
        ((6, 4), 0, 3),
        ((6, 4), -1, 2),
        ((2, 3, 4), 1, 3),
        ((6,), 0, 1),
        ((0, 3), 0, 2),
        ((4,), 0, 4),
    ]:
        check("Split", [np.int32(axis), values(shape, dtype)], {"num_split": count})
    with pytest.raises(Unsupported, match="equal parts"):
        run_lowering("Split", [np.int32(0), values((5,), dtype)], {"num_split": 2})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_by_sizes(dtype):
    for shape, axis, sizes in [
        ((6, 4), 0, [1, 2, 3]),
        ((6, 4), -1, [-1, 1]),
        ((5,), 0, [5]),
        ((5,), 0, [0, 5, 0]),
        ((2, 3, 4), 1, [2, -1]),
    ]:
        attrs = {"num_split": len(sizes)}
        check("SplitV", [values(shape, dtype), np.array(sizes, np.int32), np.int32(axis)], attrs)
        check("SplitV", [values(shape, dtype), np.array(sizes, np.int64), np.int32(axis)], attrs)
    with pytest.raises(Unsupported, match="can not be split"):
        run_lowering("SplitV", [values((5,), dtype), np.array([2, 2]), np.int32(0)], {"num_split": 2})


def test_parts_are_views():
    tensor = torch.arange(12.0).reshape(3, 4)
    parts = table()["Split"].function(Node("n", "Split", {"num_split": 2}), np.int32(1), tensor)
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)


def test_parallel_concat():
    inputs = [values((1, 3), seed=seed) for seed in range(3)]
    # TensorFlow rewrites this op before it runs.
    check("ParallelConcat", inputs, {"shape": (3, 3)}, expected=[np.concatenate(inputs)])
