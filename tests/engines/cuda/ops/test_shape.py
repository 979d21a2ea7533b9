"""Shapes as values, changes of shape that move nothing, new tensors, and ops that hand on their inputs."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported

from .harness import FLOATS, check, ints, run_lowering, values

pytestmark = pytest.mark.tf

SHAPES = [(), (0,), (3, 4), (2, 1, 3)]


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
        run_lowering("Reshape", [values((3, 4)), ints(*new)])


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
        run_lowering("BroadcastTo", [values((3,), dtype), ints(4)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_broadcast_args(dtype):
    for left, right in [((2, 1), (3,)), ((), (3, 4)), ((5,), (5,)), ((1, 4), (3, 1)), ((0,), (1,)), ((), ())]:
        check("BroadcastArgs", [np.array(left, dtype), np.array(right, dtype)])
    with pytest.raises(Unsupported, match="do not broadcast"):
        run_lowering("BroadcastArgs", [ints(2), ints(3)])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_invert_permutation(dtype):
    check("InvertPermutation", [np.array([3, 0, 2, 4, 1], dtype)])
    check("InvertPermutation", [np.array([], dtype)])


def test_concat_offset():
    shapes = [ints(2, 3, 5), ints(2, 7, 5), ints(2, 1, 5)]
    for axis in (1, -2):
        check("ConcatOffset", [np.int32(axis), *shapes])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_unravel_index(dtype):
    check("UnravelIndex", [np.array([0, 5, 23, 7], dtype), np.array([2, 3, 4], dtype)])


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


SAME = [
    "Identity",
    "Snapshot",
    "StopGradient",
    "PreventGradient",
    "DebugGradientIdentity",
    "GuaranteeConst",
    "DeepCopy",
]


@pytest.mark.parametrize("op", SAME)
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool", "complex64"], ids=str)
def test_the_input_comes_out(op, dtype):
    for shape in [(), (0,), (3, 4)]:
        check(op, [values(shape, dtype)], exact=True)


def test_placeholder_with_default():
    check("PlaceholderWithDefault", [values((3, 4))], {"shape": (None, 4)})


def test_several_inputs_come_out():
    check("IdentityN", [values((3, 4)), values((), "int32"), values((2,), bool)])


def test_checked_numbers_come_out():
    check("CheckNumerics", [values((3, 4))], {"message": "here"})


def test_checks_let_nan_through():
    (result,) = run_lowering("CheckNumerics", [np.array([np.nan], np.float32)], {"message": "here"})
    assert result.isnan().all()


def test_nothing_is_copied():
    tensor = torch.ones(3)
    assert table()["Identity"].function(Node("n", "Identity"), tensor) is tensor


@pytest.mark.parametrize("op", ["NoOp", "ControlTrigger"])
def test_nothing_comes_out_of_nothing(op):
    assert run_lowering(op, []) == ()


def test_assertions_are_passed_over():
    assert run_lowering("Assert", [np.array(False), values((3,))]) == ()
