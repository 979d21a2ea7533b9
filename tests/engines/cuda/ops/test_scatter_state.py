"""What changes rows of variables, against TensorFlow's kernels on resources."""

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.ops.variables import _divisors
from tests.campaign import sampled

from .harness import DEVICE, FLOATS, compare, values
from .state_harness import check_steps, run_in_place

pytestmark = pytest.mark.tf

INDICES = ["int32", "int64"]


def _settled(rows, updates):
    """On a GPU any of several updates of one row may stay: there they are equal. Rows are the first axis."""
    if DEVICE == "cpu" or not len(rows):
        return updates
    _, first, places = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return updates.reshape(len(rows), -1)[first[places.reshape(-1)]].reshape(updates.shape)


SHAPES = [(7,), (7, 3), (7, 2, 3)]
"""Of variables: one number per row, a vector, a matrix."""


@sampled(
    16, op=["Add", "Sub", "Mul", "Div", "Min", "Max", "Update"], index=INDICES, shape=SHAPES, dtype=[*FLOATS, "int32"]
)
@pytest.mark.parametrize("rows", [[4, 0, 6], [[5, 1], [2, 3]], [3, 3, 1, 3], []], ids=str)
def test_rows_change_in_place(op, index, shape, dtype, rows):
    rows = np.array(rows, index)
    steps = [[rows, values((*rows.shape, *shape[1:]), dtype, seed=seed, low=1, high=5)] for seed in range(2)]
    if op == "Update":
        steps = [[rows, _settled(rows.reshape(-1), updates)] for rows, updates in steps]
    check_steps(f"ResourceScatter{op}", [values(shape, dtype, low=-9, high=9)], steps)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Min", "Max", "Update"])
def test_one_number_is_for_all_rows(op):
    steps = [[np.array([4, 0, 4]), np.float32(3)]]
    if op == "Update":  # TensorFlow takes it from a resource only where the variable is a vector
        steps = [[np.array([4, 0]), values((2,))]]
    check_steps(f"ResourceScatter{op}", [values((7,) if op == "Update" else (7, 2))], steps)


@sampled(12, op=["Add", "Sub", "Min", "Max", "Update"], index=INDICES, dtype=["float32", "float64", "int64"])
@pytest.mark.parametrize(
    ("shape", "at"),
    [((7,), [[4], [0]]), ((3, 4), [[0, 1], [2, 3], [1, 0]]), ((3, 4, 2), [[2, 0], [0, 3]]), ((3, 4), [[2], [0]])],
    ids=str,
)
def test_slices_change_at_coordinates(op, index, dtype, shape, at):
    at = np.array(at, index)
    steps = [[at, values((at.shape[0], *shape[at.shape[1] :]), dtype, seed=seed)] for seed in range(2)]
    check_steps(f"ResourceScatterNd{op}", [values(shape, dtype, seed=9)], steps)


@pytest.mark.parametrize("op", ["ScatterNdAdd", "ScatterNdUpdate"])
def test_coordinates_may_come_twice(op):
    at = np.array([[1, 1], [0, 2], [1, 1]])
    updates = values((3,), seed=1)
    check_steps(
        f"Resource{op}", [values((3, 4))], [[at, _settled(at, updates) if op == "ScatterNdUpdate" else updates]]
    )


def test_the_last_update_of_a_row_stays_and_on_a_gpu_any():
    rows, updates = np.array([3, 3, 1, 3]), values((4, 2), seed=1)
    (found,) = run_in_place("ScatterUpdate", [values((7, 2))], [rows, updates])
    assert np.array_equal(
        found[[0, 1, 2, 4, 5, 6]], np.stack([*values((7, 2))[:1], updates[2], *values((7, 2))[[2, 4, 5, 6]]])
    )
    assert (found[3] == (updates[3:] if DEVICE == "cpu" else updates[[0, 1, 3]])).any(0).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int8"])
def test_on_a_gpu_a_row_is_divided_by_the_product_of_its_divisors(dtype):
    """Which is what dividing by one after the other gives, however often integers drop what is left, and wherever the product ends."""
    rows = np.array([3, -1, 3, 1, 3, 3, 3, 3, 3])
    old = values((7, 2), dtype, low=-100, high=100)
    for low, high in ((1, 5), (50, 100)):
        updates = values((9, 2), dtype, seed=1, low=low, high=high)
        ids, divisors = _divisors(Node("node", "ScatterDiv"), *map(to_torch, (old.copy(), rows, updates)))
        (found,) = run_in_place("ScatterDiv", [old], [to_numpy(ids), to_numpy(divisors)])
        (expected,) = run_in_place("ScatterDiv", [old], [rows, updates])
        compare(found, expected)


def test_what_float64_does_not_hold_is_not_divided_on_a_gpu():
    with pytest.raises(Unsupported, match="rows of int64 are not divided on a GPU"):
        _divisors(
            Node("node", "ScatterDiv"), *map(to_torch, (np.zeros(3, np.int64), np.array([1]), np.ones(1, np.int64)))
        )


ROWS_OP = [f"Scatter{op}" for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update")]


@pytest.mark.parametrize("op", ROWS_OP)
@pytest.mark.parametrize("bad", [[-1, 2, 7, 0], [-1, 7, -5, 1 << 40]], ids=["some", "all"])
def test_rows_that_are_not_there_are_passed_over(op, bad):
    """As TensorFlow's GPU kernels do; those that are there change as they do alone. Signs of zeros stay."""
    bad, table = np.array(bad), values((7, 2))
    table[0] = -0.0
    updates = values((4, 2), seed=1)
    updates[[0, 2]] = np.nan
    (found,) = run_in_place(op, [table], [bad, updates])
    there = (bad >= 0) & (bad < 7)
    (expected,) = run_in_place(op, [table], [bad[there], updates[there]])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("op", ["ScatterNdAdd", "ScatterNdUpdate", "ScatterNdMax"])
def test_coordinates_that_are_not_there_are_passed_over(op):
    (found,) = run_in_place(op, [values((2, 3))], [np.array([[0, 3], [1, 1], [-1, 0]]), values((3,), seed=1)])
    (expected,) = run_in_place(op, [values((2, 3))], [np.array([[1, 1]]), values((3,), seed=1)[1:2]])
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("op", ["ScatterAdd", "ScatterUpdate"])
def test_a_variable_without_rows_stays(op):
    (found,) = run_in_place(op, [values((0, 2))], [np.array([0, -1]), values((2, 2))])
    assert found.shape == (0, 2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int16"])
def test_integers_wrap_around(dtype):
    table = np.array([np.iinfo(dtype).max, 5, 7], dtype)
    rows, updates = np.array([0, 1, 0]), np.array([3, 2, 1], dtype)
    for op, function in [("ScatterAdd", np.add), ("ScatterSub", np.subtract), ("ScatterMul", np.multiply)]:
        (found,) = run_in_place(op, [table], [rows, updates])
        expected = table.copy()
        with np.errstate(over="ignore"):
            function.at(expected, rows, updates)
        np.testing.assert_array_equal(found, expected)
    (found,) = run_in_place("ScatterUpdate", [table], [rows, updates])
    assert found.tolist() in ([[1, 2, 7]] if DEVICE == "cpu" else [[1, 2, 7], [3, 2, 7]])


def test_a_type_without_a_kernel_is_refused():
    """And not computed on a copy, which would leave the variable as it was."""
    with pytest.raises(Unsupported, match="no kernel"):
        run_in_place("ScatterMax", [np.zeros(3, np.uint32)], [np.array([1]), np.array([2], np.uint32)])


def test_updates_must_fit():
    with pytest.raises(Unsupported, match="updates of shape"):
        run_in_place("ScatterAdd", [values((7, 2))], [np.array([1, 2]), values((2, 3))])
    with pytest.raises(Unsupported, match="updates of shape"):
        run_in_place("ScatterNdAdd", [values((7, 2))], [np.array([[1], [2]]), values((2, 3))])


@pytest.mark.parametrize(
    ("begin", "end", "strides", "attrs"),
    [
        ([1, 0], [4, 2], [2, 1], {}),
        ([4], [1], [-1], {}),
        ([2, 1], [3, 2], [1, 1], {"shrink_axis_mask": 3}),
        ([0, 0], [0, 1], [1, 1], {"begin_mask": 3, "end_mask": 1}),
        ([0, 1], [0, 2], [1, 1], {"ellipsis_mask": 1}),
    ],
)
def test_a_slice_is_replaced(begin, end, strides, attrs):
    import tensorflow as tf

    table = values((5, 3))
    shape = tf.raw_ops.StridedSlice(input=table, begin=begin, end=end, strides=strides, **attrs).shape
    steps = [[*(np.array(one, np.int32) for one in (begin, end, strides)), values(shape, seed=1)]]
    check_steps("ResourceStridedSliceAssign", [table], steps, attrs)


STATES = [[5, 6, 7], [-1, 3, 9], [-300, -1, 2]]
"""Counters, of which some carry over, and keys."""


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_generator_is_moved_on(state):
    state, steps = np.array(state, np.int64), [[np.int32(1), np.uint64(3)], [np.int32(1), np.uint64(0)]]
    check_steps("RngReadAndSkip", [state], steps)
    check_steps("RngSkip", [state], [[np.int64(1), np.int64(delta)] for delta in (1, 0, 700)])


def test_only_philox_is_moved_on():
    with pytest.raises(Unsupported, match="only Philox"):
        run_in_place("RngSkip", [np.zeros(2, np.int64)], [np.int64(2), np.int64(1)])


@pytest.mark.parametrize("op", ["ScatterAdd", "ScatterUpdate", "ScatterMax"])
def test_nothing_as_large_as_the_variable_is_made(op):
    """A table has gigabytes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from msplit.engines.cuda.ir.lowering import table

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, tuple) else (result,):
                if isinstance(one, torch.Tensor) and one.data_ptr() != variable.data_ptr():
                    largest = max(largest, one.untyped_storage().nbytes())
            return result

    variable, rows = torch.zeros(10_000, 4), torch.tensor([3, -1, 5, 3])
    with Watch():
        table()[op].function(Node("node", op), variable, rows, torch.ones(4, 4))
    assert 0 < largest < 1000


@pytest.mark.parametrize(
    "op", ["ResourceScatterMax", "ResourceScatterMin", "ResourceScatterNdMax", "ResourceScatterNdMin"]
)
def test_an_extreme_passes_over_nan(op):
    variable = np.array([[1], [np.nan], [3], [-np.inf]], np.float32).repeat(9, 1)
    updates = np.array([[np.nan], [2], [5], [np.nan], [9], [np.nan]], np.float32).repeat(9, 1)
    rows = np.array([0, 1, 2, 2, 3, 3])
    check_steps(op, [variable], [[rows[:, None] if "Nd" in op else rows, updates]])
