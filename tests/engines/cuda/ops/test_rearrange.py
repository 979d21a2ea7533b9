import itertools

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported

from .harness import FLOATS, check, ints, run_lowering, values

pytestmark = pytest.mark.tf

DTYPES = [*FLOATS, "int32", "int64", "bool", "uint8", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transpose(dtype):
    for shape in [(), (3,), (2, 3), (2, 3, 4), (0, 2)]:
        for perm in itertools.permutations(range(len(shape))):
            check("Transpose", [values(shape, dtype), np.array(perm, np.int32)])
    check("Transpose", [values((2, 3), dtype), np.array([1, 0], np.int64)])


def test_conjugate_transpose():
    check("ConjugateTranspose", [values((2, 3, 4), "complex64"), ints(2, 0, 1)])
    check("ConjugateTranspose", [values((2, 3)), ints(1, 0)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tile(dtype):
    for shape, multiples in [
        ((3,), (2,)),
        ((2, 3), (1, 1)),
        ((2, 3), (3, 2)),
        ((1, 3), (4, 1)),
        ((2, 3), (0, 2)),
        ((), ()),
        ((0, 2), (2, 2)),
        ((1, 1, 2), (2, 3, 2)),
    ]:
        check("Tile", [values(shape, dtype), np.array(multiples, np.int32)])


def test_repeating_axes_of_size_one_copies_nothing():
    tensor = torch.arange(3.0).reshape(1, 3)
    result = table()["Tile"].function(Node("n", "Tile"), tensor, ints(5, 1))
    assert result.shape == (5, 3)
    assert result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reverse(dtype):
    for axes in [(), (0,), (-1,), (0, 2), (1, -1)]:
        check("ReverseV2", [values((2, 3, 4), dtype), np.array(axes, np.int32)])
    for flags in itertools.product([False, True], repeat=2):
        check("Reverse", [values((3, 4), dtype), np.array(flags)])
    check("ReverseV2", [values((0, 3), dtype), ints(0)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64"])
@pytest.mark.parametrize("lengths_dtype", ["int32", "int64"])
def test_reverse_sequence(dtype, lengths_dtype):
    lengths = np.array([0, 1, 5, 3], lengths_dtype)
    check("ReverseSequence", [values((4, 5), dtype), lengths], {"seq_dim": 1})
    check("ReverseSequence", [values((5, 4), dtype), lengths], {"seq_dim": 0, "batch_dim": 1})
    check("ReverseSequence", [values((4, 2, 5, 3), dtype), lengths], {"seq_dim": 2, "batch_dim": 0})
    check("ReverseSequence", [values((2, 5, 3, 4), dtype), lengths], {"seq_dim": 1, "batch_dim": 3})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_roll(dtype):
    for shift, axis in [
        ((2,), (0,)),
        ((-1,), (1,)),
        ((1, -2), (0, 1)),
        ((7,), (0,)),
        ((1, 2), (0, 0)),
        ((0,), (0,)),
        ((3,), (-1,)),
    ]:
        check("Roll", [values((3, 4), dtype), np.array(shift, np.int32), np.array(axis, np.int64)])
    check("Roll", [values((5,), dtype), np.int32(2), np.int32(0)])
    check("Roll", [values((0, 2), dtype), np.int32(1), np.int32(0)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "uint8"])
def test_space_and_depth(dtype):
    for block in (2, 3):
        image = values((2, 2 * block, 3 * block, 5), dtype)
        check("SpaceToDepth", [image], {"block_size": block})
        deep = values((2, 2, 3, 5 * block * block), dtype)
        check("DepthToSpace", [deep], {"block_size": block})
        for op, array in [("SpaceToDepth", image), ("DepthToSpace", deep)]:
            (nhwc,) = run_lowering(op, [array], {"block_size": block})
            attrs = {"block_size": block, "data_format": "NCHW"}  # only GPUs have a kernel
            check(op, [array.transpose(0, 3, 1, 2)], attrs, expected=[to_numpy(nhwc).transpose(0, 3, 1, 2)])


def test_other_formats_are_refused():
    with pytest.raises(Unsupported, match="NCHW_VECT_C"):
        run_lowering("DepthToSpace", [values((1, 4, 2, 2, 4), "int8")], {"block_size": 2, "data_format": "NCHW_VECT_C"})


SPACE = [
    ((2, 4, 6, 3), (2, 3), ((0, 0), (0, 0))),
    ((2, 4, 6, 3), (2, 2), ((1, 1), (0, 2))),
    ((1, 6), (3,), ((0, 3),)),
    ((2, 4, 6, 3), (2,), ((2, 0),)),
    ((1, 2, 2, 2, 2), (2, 1, 2), ((0, 0), (1, 0), (0, 0))),
]


@pytest.mark.parametrize(("shape", "block", "paddings"), SPACE)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_space_and_batch(shape, block, paddings, dtype):
    import tensorflow as tf

    bounds = [np.array(block, np.int32), np.array(paddings, np.int32)]
    array = values(shape, dtype)
    # Not through the harness: TensorFlow refuses this op where shapes are unknown while the graph is built.
    raw = tf.raw_ops.SpaceToBatchND(input=array, block_shape=bounds[0], paddings=bounds[1]).numpy()
    moved = to_numpy(check("SpaceToBatchND", [array, *bounds], expected=[raw])[0])
    raw = tf.raw_ops.BatchToSpaceND(input=moved, block_shape=bounds[0], crops=bounds[1]).numpy()
    check("BatchToSpaceND", [moved, *bounds], expected=[raw])


def test_space_and_batch_of_images():
    paddings = np.array([[1, 1], [0, 2]], np.int32)
    (moved,) = check("SpaceToBatch", [values((2, 4, 6, 3)), paddings], {"block_size": 2})
    check("BatchToSpace", [to_numpy(moved), paddings], {"block_size": 2})
