"""Host ops that move values of any type beside TensorFlow's kernels, on strings and on numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.campaign import examples
from tests.engines.host.kernels import REFUSED, agree, refuses, texts

pytestmark = pytest.mark.tf

WORDS = texts(*(f"w{number}".encode() for number in range(12)), b"").reshape(-1)[:12].reshape(3, 4)
NUMBERS = np.arange(12, dtype=np.int64).reshape(3, 4)
BOTH = pytest.mark.parametrize("x", [WORDS, NUMBERS], ids=["strings", "numbers"])


@BOTH
def test_shapes(x):
    for dtype in (np.int32, np.int64):
        agree("Shape", input=x, out_type=dtype)
        agree("Size", input=x, out_type=dtype)
    agree("Rank", input=x)
    agree("Identity", input=x)
    agree("Reshape", tensor=x, shape=np.array([2, -1]))
    agree("Reshape", tensor=x[:0], shape=np.array([-1, 4]))
    agree("ExpandDims", input=x, axis=np.array(-1))
    agree("ExpandDims", input=x, axis=np.array([1]))
    agree("Squeeze", input=x[:1], axis=[0])
    agree("Squeeze", input=x[:1, :, None])


@BOTH
def test_pieces_and_copies(x):
    agree("GatherV2", params=x, indices=np.array([[2, 0], [1, 1]]), axis=np.array(0))
    agree("GatherV2", params=x, indices=np.array(3), axis=np.array(1))
    for wrong in (-1, 3):
        assert agree("GatherV2", params=x, indices=np.array([wrong]), axis=np.array(0)) == REFUSED
    agree("ConcatV2", values=[x, x[:1]], axis=np.array(0))
    agree("Pack", values=[x, x], axis=-1)
    agree("Tile", input=x, multiples=np.array([2, 0]))
    agree("Slice", input=x, begin=np.array([1, 0]), size=np.array([-1, 2]))
    agree("Fill", dims=np.array([2, 3]), value=np.array(x[1, 1], x.dtype))
    agree("Fill", dims=np.array([2]), value=np.array(b"\0a\0", object))  # of which NumPy's own strings lose the end


@settings(max_examples=examples(25, 100), deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.integers(-4, 4), st.integers(-4, 5), st.sampled_from([-2, -1, 1, 2])), min_size=1, max_size=2
    ),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_slices(strings, bounds, begin, end):
    first, last, steps = (np.array(part) for part in zip(*bounds, strict=True))
    x = WORDS if strings else NUMBERS
    agree("StridedSlice", input=x, begin=first, end=last, strides=steps, begin_mask=begin, end_mask=end)


@BOTH
def test_slices_with_other_masks(x):
    some = {"begin": np.array([1, 0]), "end": np.array([2, 1]), "strides": np.array([1, 1])}
    for mask in ("shrink_axis_mask", "new_axis_mask", "ellipsis_mask"):
        for bits in (1, 2):
            agree("StridedSlice", input=x, **some, **{mask: bits})
    one = {"begin": np.array([1]), "end": np.array([2]), "strides": np.array([1])}
    agree("StridedSlice", input=np.array([5, 6]), **one, shrink_axis_mask=1)
    assert refuses("StridedSlice", x, np.array([7]), np.array([8]), np.array([1]), shrink_axis_mask=1)


@BOTH
def test_choices(x):
    agree("SelectV2", condition=np.array([[True], [False], [True]]), t=x, e=x[::-1].copy())
    agree("Select", condition=np.array([True, False, True]), x=x, y=x[::-1].copy())
    agree("Equal", x=x, y=x[0])
    agree("NotEqual", x=x, y=np.roll(x, 1, 0))
    agree("Equal", x=x[:0], y=x[:1])


def test_arithmetic():
    big = np.array([2**31 - 1, -5, 0, 7], np.int32)
    for op in ("AddV2", "Sub", "Mul", "Less", "LessEqual", "Greater", "GreaterEqual", "Maximum", "Minimum"):
        agree(op, x=big, y=big[::-1].copy())
    agree("Mul", x=np.array([np.nan, np.inf], np.float32), y=np.array(0, np.float32))
    for op in ("LogicalAnd", "LogicalOr"):
        agree(op, x=np.array([True, False]), y=np.array(True))
    agree("LogicalNot", x=np.array(True))
    for keep in (False, True):
        for op in ("Sum", "Prod"):
            agree(op, input=NUMBERS.astype(np.int32), axis=np.array([0]), keep_dims=keep)
        agree("All", input=NUMBERS > 3, axis=np.array(1), keep_dims=keep)
        agree("Any", input=NUMBERS > 3, axis=np.array([0, 1]), keep_dims=keep)
    agree("Sum", input=NUMBERS[:0], axis=np.array([], np.int32))
    agree("ZerosLike", x=NUMBERS)
    agree("OnesLike", x=NUMBERS.astype(np.float32))


def test_types_and_rows():
    agree("Cast", x=np.array([True, False]), DstT=np.float32)
    agree("Cast", x=np.array([2**40 + 5, -1]), DstT=np.int32)
    agree("Cast", x=np.array([3, -1], np.int32), DstT=np.bool_)
    agree("Cast", x=np.array([0.1, np.inf]), DstT=np.float32)
    ids = np.array([[1, -1], [5, 2]])
    agree(
        "OneHot",
        indices=ids,
        depth=np.array(3, np.int32),
        on_value=np.array(2.5, np.float32),
        off_value=np.array(-1, np.float32),
    )
