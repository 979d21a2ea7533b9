"""Joining, taking apart, slicing and padding tensors along axes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.shape import lies_nchw
from tests.campaign import examples

from .harness import FLOATS, check, ints, run_lowering, run_tensorflow, values

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
        run_lowering("Slice", [values((5,)), ints(*begin), ints(*size)])


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


@settings(max_examples=examples(50, 150), deadline=None, derandomize=True)
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
    result = table()["StridedSlice"].function(Node("n", "StridedSlice"), tensor, ints(1, 0), ints(3, 6), ints(1, 2))
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


DTYPES_PAD = [*FLOATS, "int32", "int64", "uint8", "complex64"]
CASES_PAD = [
    ((3,), ((1, 2),)),
    ((3, 4), ((0, 0), (0, 0))),
    ((3, 4), ((1, 0), (2, 3))),
    ((2, 3, 4), ((0, 0), (1, 1), (0, 2))),
]
CASES_PAD += [((2, 4, 5, 3), ((0, 0), (1, 2), (2, 1), (0, 0))), ((2, 4, 5, 3), ((1, 0), (0, 0), (0, 0), (0, 1)))]
EDGES = [((0, 2), ((1, 1), (0, 0))), ((0,), ((0, 0),)), ((1, 1), ((2, 2), (0, 1)))]


@pytest.mark.parametrize("dtype", DTYPES_PAD, ids=str)
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_pad(dtype, index):
    for shape, paddings in [*CASES_PAD, *EDGES]:
        array, widths = values(shape, dtype), np.array(paddings, index)
        check("Pad", [array, widths])
        check("PadV2", [array, widths, np.array(7, array.dtype)])


def test_pad_of_a_scalar():
    check("Pad", [values(()), np.zeros((0, 2), np.int32)])


def test_wrong_paddings_are_refused():
    for paddings in ([[1, 1]], [[-1, 0], [0, 0]]):
        with pytest.raises(Unsupported, match="paddings"):
            run_lowering("Pad", [values((3, 4)), np.array(paddings, np.int32)])


@pytest.mark.parametrize("mode", ["REFLECT", "SYMMETRIC"])
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "uint8"], ids=str)
def test_mirror_pad(mode, dtype):
    for shape, paddings in CASES_PAD[:-1]:
        check("MirrorPad", [values(shape, dtype), np.array(paddings, np.int32)], {"mode": mode}, exact=True)
    most = 2 if mode == "REFLECT" else 3
    check("MirrorPad", [values((3,), dtype), np.array([[most, most]], np.int64)], {"mode": mode})
    with pytest.raises(Unsupported, match="wider"):
        run_lowering("MirrorPad", [values((3,), dtype), np.array([[most + 1, 0]])], {"mode": mode})


@pytest.mark.parametrize("op", ["Pad", "PadV2"])
def test_images_that_lie_as_nchw_keep_their_layout(op):
    array = values((2, 3, 4, 5))
    image = torch.from_numpy(array).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    paddings = np.array([[0, 0], [1, 2], [2, 1], [0, 3]])
    constant = [torch.tensor(0.5)] if op == "PadV2" else []
    result = table()[op].function(Node("n", op), image, paddings, *constant)
    assert lies_nchw(result)
    np.testing.assert_array_equal(result.numpy(), np.pad(array, paddings, constant_values=0.5 if constant else 0))
