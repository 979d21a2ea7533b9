import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported

from .harness import FLOATS, check, run_lowering, run_tensorflow, values

pytestmark = pytest.mark.tf


def _i(*numbers):
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "int64", "bool", "uint16", "complex64"], ids=str)
def test_slice(dtype):
    for shape, begin, size in [
        ((5, 4), (1, 0), (2, 3)),
        ((5, 4), (0, 1), (-1, -1)),
        ((5,), (5,), (-1,)),
        ((5,), (2,), (0,)),
        ((), (), ()),
        ((0, 3), (0, 1), (0, 1)),
    ]:
        check("Slice", [values(shape, dtype), np.array(begin, np.int32), np.array(size, np.int32)])
        check("Slice", [values(shape, dtype), np.array(begin, np.int64), np.array(size, np.int64)])


@pytest.mark.parametrize(("begin", "size"), [((6,), (0,)), ((3,), (3,)), ((-1,), (1,)), ((0,), (-2,))])
def test_slice_refuses_what_lies_outside(begin, size):
    with pytest.raises(Unsupported, match="outside"):
        run_lowering("Slice", [values((5,)), _i(*begin), _i(*size)])


CASES = [
    # shape, begin, end, strides, masks
    ((7,), (1,), (6,), (2,), {}),
    ((7,), (6,), (0,), (-2,), {}),
    ((7,), (-1,), (-9,), (-1,), {}),
    ((7,), (0,), (0,), (-1,), {"begin_mask": 1, "end_mask": 1}),
    ((7,), (-100,), (100,), (3,), {}),
    ((7,), (5,), (2,), (1,), {}),
    ((5, 6), (1, 2), (4, 5), (1, 2), {}),
    ((5, 6), (3, 5), (0, 0), (-1, -2), {}),
    ((5, 6), (2, 0), (0, 3), (1, 1), {"shrink_axis_mask": 1}),
    ((5, 6), (-2, -1), (0, 0), (1, 1), {"shrink_axis_mask": 3}),
    ((5, 6), (0, 1), (0, 3), (1, 1), {"begin_mask": 1, "end_mask": 1}),
    ((5, 6), (0, 0, 2), (0, 0, 4), (1, 1, 1), {"new_axis_mask": 1, "begin_mask": 2, "end_mask": 2}),
    ((5, 6), (0, 1), (0, 3), (1, 1), {"ellipsis_mask": 1}),
    ((2, 3, 4, 5), (1, 0, 2), (2, 0, 4), (1, 1, 1), {"ellipsis_mask": 2}),
    ((2, 3, 4, 5), (1, 0, 2), (2, 0, 4), (1, 1, 1), {"ellipsis_mask": 2, "shrink_axis_mask": 5}),
    ((2, 3, 4), (0, 0, 0, 1), (0, 0, 0, 3), (1, 1, 1, 1), {"ellipsis_mask": 1, "new_axis_mask": 6}),
    (
        (2, 3, 4),
        (0, 0, 1, 0),
        (0, 0, 2, 0),
        (1, 1, 1, 1),
        {"new_axis_mask": 9, "ellipsis_mask": 2, "shrink_axis_mask": 4},
    ),
    ((2, 3, 4), (1,), (2,), (1,), {"shrink_axis_mask": 1}),
    ((2, 3), (0, 0, 0), (2, 3, 0), (1, 1, 1), {"ellipsis_mask": 4}),
    ((), (), (), (), {}),
    ((), (0,), (0,), (1,), {"new_axis_mask": 1}),
    ((), (0,), (0,), (1,), {"ellipsis_mask": 1}),
    ((0, 3), (0, 0), (5, 2), (1, 1), {}),
    ((3, 0), (2,), (0,), (-1,), {}),
    ((4,), (1,), (2,), (1,), {"shrink_axis_mask": 1, "new_axis_mask": 1}),
    ((4,), (3,), (1,), (1,), {"begin_mask": 1, "shrink_axis_mask": 1}),
]


@pytest.mark.parametrize(("shape", "begin", "end", "strides", "masks"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_strided_slice(shape, begin, end, strides, masks, dtype):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    check("StridedSlice", [array, *(np.array(part, np.int32) for part in (begin, end, strides))], masks, exact=True)


@st.composite
def _slices(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=4)))
    entries = draw(st.integers(0, 5))
    number = st.integers(-6, 6)
    begin, end = (draw(st.lists(number, min_size=entries, max_size=entries)) for _ in range(2))
    strides = draw(st.lists(st.sampled_from([1, 1, 2, -1, -2, 3]), min_size=entries, max_size=entries))
    mask = st.integers(0, 2**entries - 1)
    ellipsis = draw(st.sampled_from([0, 0, *(1 << bit for bit in range(entries))]))
    masks = {"begin_mask": draw(mask), "end_mask": draw(mask), "ellipsis_mask": ellipsis}
    return shape, begin, end, strides, {**masks, "new_axis_mask": draw(mask), "shrink_axis_mask": draw(mask)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_slices())
def test_any_strided_slice_agrees_or_both_refuse(case):
    import tensorflow as tf

    shape, begin, end, strides, masks = case
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float32)
    inputs = [array, *(np.array(part, np.int32) for part in (begin, end, strides))]
    try:
        wanted = run_tensorflow("StridedSlice", inputs, masks)
    except (tf.errors.InvalidArgumentError, ValueError):
        with pytest.raises(Unsupported):
            run_lowering("StridedSlice", inputs, masks)
        return
    check("StridedSlice", inputs, masks, expected=wanted, exact=True)


def test_a_slice_with_positive_strides_is_a_view():
    tensor = torch.arange(24.0).reshape(4, 6)
    result = table()["StridedSlice"].function(Node("n", "StridedSlice"), tensor, _i(1, 0), _i(3, 6), _i(1, 2))
    assert result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


UPDATES = [case for case in CASES if case[0] not in ((),)]


@pytest.mark.parametrize(("shape", "begin", "end", "strides", "masks"), UPDATES)
def test_updates_and_gradients_of_slices(shape, begin, end, strides, masks):
    array = values(shape)
    bounds = [np.array(part, np.int32) for part in (begin, end, strides)]
    (taken,) = run_tensorflow("StridedSlice", [array, *bounds], masks)
    value = values(taken.shape, seed=1)
    check("TensorStridedSliceUpdate", [array, *bounds, value], masks)
    check("StridedSliceGrad", [np.array(shape, np.int32), *bounds, value], masks)
