import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported

from .harness import check, run_lowering, values

pytestmark = pytest.mark.tf

SHAPES = [(), (0,), (3, 4), (2, 1, 3)]


def _i(*numbers):
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("op", ["Shape", "Size"])
@pytest.mark.parametrize("out_type", ["int32", "int64"])
def test_shape_and_size(op, out_type):
    for shape in SHAPES:
        check(op, [values(shape)], {"out_type": out_type}, meta=False)


def test_rank():
    for shape in SHAPES:
        check("Rank", [values(shape)], meta=False)


@pytest.mark.parametrize("out_type", ["int32", "int64"])
def test_shapes_of_several(out_type):
    check("ShapeN", [values(shape) for shape in SHAPES], {"out_type": out_type}, meta=False)


@pytest.mark.parametrize("op", ["Shape", "Size", "Rank", "ShapeN"])
def test_shapes_are_known_without_data(op):
    (result,) = run_lowering(op, [values((2, 5))])
    known = table()[op].function(Node("n", op), torch.empty(2, 5, device="meta"))
    known = known[0] if isinstance(known, tuple) else known
    assert known.device.type == "cpu"
    assert known.tolist() == result.tolist()


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_reshape(dtype):
    for shape, new in [
        ((3, 4), (4, 3)),
        ((3, 4), (-1,)),
        ((3, 4), (2, -1, 3)),
        ((), ()),
        ((), (1, 1)),
        ((1,), ()),
        ((0, 3), (3, 0)),
        ((0, 3), (-1, 3)),
    ]:
        check("Reshape", [values(shape, dtype), np.array(new, np.int32)])
        check("Reshape", [values(shape, dtype), np.array(new, np.int64)])


@pytest.mark.parametrize("new", [(5, 2), (-1, 5), (-1, -1), (0, -1)])
def test_reshape_refuses_what_does_not_fit(new):
    with pytest.raises(Unsupported, match="can not be reshaped"):
        run_lowering("Reshape", [values((3, 4)), _i(*new)])


def test_expand_dims():
    for shape in SHAPES:
        for axis in range(-len(shape) - 1, len(shape) + 1):
            check("ExpandDims", [values(shape), np.int32(axis)])
            check("ExpandDims", [values(shape), np.array([axis], np.int64)])


def test_squeeze():
    for axes in [(), (0,), (2,), (0, 2), (-1,), (-2, 0)]:
        check("Squeeze", [values((1, 3, 1, 1))], {"squeeze_dims": axes})
    for shape in [(), (1,), (1, 1), (0, 1), (3, 4)]:
        check("Squeeze", [values(shape)])
    with pytest.raises(Unsupported, match="squeezed"):
        run_lowering("Squeeze", [values((3, 4))], {"squeeze_dims": (0,)})


def test_ensure_shape():
    for shape in [(3, 4), (None, 4), (None, None), None]:
        check("EnsureShape", [values((3, 4))], {"shape": shape})
    for shape in [(3,), (3, 5), (None, None, None)]:
        with pytest.raises(Unsupported, match="asks for"):
            run_lowering("EnsureShape", [values((3, 4))], {"shape": shape})


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_broadcast_to(dtype):
    for shape, new in [((), (3, 4)), ((4,), (3, 4)), ((3, 1), (3, 4)), ((1, 3, 1), (2, 3, 5)), ((1,), (0,)), ((), ())]:
        check("BroadcastTo", [values(shape, dtype), np.array(new, np.int64)])
    with pytest.raises(Unsupported, match="broadcast"):
        run_lowering("BroadcastTo", [values((3,), dtype), _i(4)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_broadcast_args(dtype):
    for left, right in [((2, 1), (3,)), ((), (3, 4)), ((5,), (5,)), ((1, 4), (3, 1)), ((0,), (1,)), ((), ())]:
        check("BroadcastArgs", [np.array(left, dtype), np.array(right, dtype)])
    with pytest.raises(Unsupported, match="do not broadcast"):
        run_lowering("BroadcastArgs", [_i(2), _i(3)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_invert_permutation(dtype):
    check("InvertPermutation", [np.array([3, 0, 2, 4, 1], dtype)])
    check("InvertPermutation", [np.array([], dtype)])


def test_concat_offset():
    shapes = [_i(2, 3, 5), _i(2, 7, 5), _i(2, 1, 5)]
    for axis in (1, -2):
        check("ConcatOffset", [np.int32(axis), *shapes])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_unravel_index(dtype):
    check("UnravelIndex", [np.array([0, 5, 23, 7], dtype), np.array([2, 3, 4], dtype)])
