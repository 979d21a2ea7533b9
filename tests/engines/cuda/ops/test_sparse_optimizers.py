"""Optimizers on rows, against TensorFlow's kernels on resources."""

import numpy as np
import pytest

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table as ops_table
from msplit.engines.cuda.ir.node import Node, Unsupported
from msplit.engines.cuda.kernels.optimizers import ROW_OPTIONS
from tests.campaign import sampled
from tests.engines.cuda.interpreted import run_interpreted

from .harness import BFLOAT16, DEVICE, values
from .state_harness import check_steps, run_in_place

pytestmark = pytest.mark.tf

# Per op: how many slots, numbers in front of the gradient and behind the indices, attributes to try.
OPS = {
    "ProximalGradientDescent": (0, [0.1, 0.02, 0.3], [], {}),
    "Momentum": (1, [0.1], [0.9], {"use_nesterov": [False, True]}),
    "KerasMomentum": (1, [0.1], [0.9], {"use_nesterov": [False, True]}),
    "Adagrad": (1, [0.1], [], {"update_slots": [True, False]}),
    "AdagradV2": (1, [0.1, 0.01], [], {"update_slots": [True, False]}),
    "AdagradDA": (2, [], [0.1, 0.02, 0.3, np.int64(5)], {}),
    "ProximalAdagrad": (1, [0.1, 0.02, 0.3], [], {}),
    "Adadelta": (2, [0.1, 0.9, 0.01], [], {}),
    "RMSProp": (2, [0.1, 0.9, 0.5, 0.01], [], {}),
    "CenteredRMSProp": (3, [0.1, 0.9, 0.5, 0.01], [], {}),
    "Ftrl": (2, [], [0.1, 0.02, 0.3, -0.5], {"multiply_linear_by_lr": [False, True]}),
    "FtrlV2": (2, [], [0.1, 0.02, 0.3, 0.05, -0.5], {"multiply_linear_by_lr": [False, True]}),
}
LR = np.array(0.1, np.float32)
DTYPES = ["float32", "float64", "float16", BFLOAT16]


def _numbers(numbers, dtype):
    return [number if isinstance(number, np.integer) else np.asarray(number, dtype) for number in numbers]


def _state(slots, shape, dtype):
    """A variable and slots that are not negative; a mean (of CenteredRMSProp) whose square is less than that of squares."""
    return [values(shape, dtype)] + [values(shape, dtype, seed=slot + 1, low=0.5, high=1.5) for slot in range(slots)]


def _check(op, rows, dtype="float32", shape=(7, 3), attrs=None, changed=None, steps=3):
    slots, before, behind, _ = OPS[op]
    before, behind = (changed or {}).get("before", before), (changed or {}).get("behind", behind)
    state = _state(slots, shape, dtype)
    if op == "CenteredRMSProp":
        state[1] *= np.asarray(0.1, dtype)
    given = [
        [
            *_numbers(before, dtype),
            values((len(rows), *shape[1:]), dtype, seed=10 + step),
            rows,
            *_numbers(behind, dtype),
        ]
        for step in range(steps)
    ]
    check_steps(f"ResourceSparseApply{op}", state, given, attrs)


def _attrs(op):
    name, choices = next(iter(OPS[op][3].items()), ("", [None]))
    return [{name: choice} if name else {} for choice in choices]


def _has_kernel(op, dtype):
    import tensorflow as tf
    from tensorflow.python.framework.kernels import get_registered_kernels_for_op

    wanted = tf.as_dtype(dtype).as_datatype_enum
    kernels = get_registered_kernels_for_op(f"ResourceSparseApply{op}").kernel
    on_cpu = [kernel for kernel in kernels if kernel.device_type == "CPU"]
    return any(wanted in one.allowed_values.list.type for kernel in on_cpu for one in kernel.constraint)


@sampled(20, op=OPS, index=["int32", "int64"], shape=[(7,), (7, 3), (7, 2, 3)], dtype=DTYPES)
def test_rows_take_steps(op, index, shape, dtype):
    dtype = dtype if _has_kernel(op, dtype) else "float64"
    for attrs in _attrs(op):
        _check(op, np.array([5, 0, 3], index), dtype, shape, attrs)


@pytest.mark.parametrize("op", OPS)
def test_rows_that_come_twice_take_two_steps(op):
    """One after the other, as they come. On a GPU an optimizer that our kernel does not know takes any one of them, element by element."""
    rows = np.array([4, 1, 4, 4, 2, 1])
    if DEVICE == "cpu" or f"SparseApply{op}" in ROW_OPTIONS:
        _check(op, rows)
        return
    slots, before, behind, _ = OPS[op]
    before, behind = _numbers(before, "float32"), _numbers(behind, "float32")
    state, grad = _state(slots, (7, 3), "float32"), values((6, 3), seed=10)

    def step(some):
        return run_in_place(f"SparseApply{op}", state, [*before, grad[some], rows[some], *behind])

    found, alone = step(np.arange(6)), [step([place]) for place in range(6)]
    for slot, one in enumerate(found):
        for row in range(7):
            choices = [alone[place][slot][row] for place in np.flatnonzero(rows == row)] or [state[slot][row]]
            assert np.isclose(one[row], choices, rtol=1e-6).any(0).all()


@pytest.mark.parametrize("op", OPS)
def test_no_rows(op):
    _check(op, np.array([], np.int32))


@pytest.mark.parametrize("op", ["ProximalGradientDescent", "ProximalAdagrad", "AdagradDA"])
@pytest.mark.parametrize("l1", [0.0, 5.0])
def test_without_and_with_much_l1(op, l1):
    """Without, TensorFlow computes in another way; with much, all becomes zero."""
    _, before, behind, _ = OPS[op]
    changed = {"before": before and [before[0], l1, before[2]], "behind": behind and [behind[0], l1, *behind[2:]]}
    _check(op, np.array([5, 0]), changed=changed)


@pytest.mark.parametrize("op", ["Ftrl", "FtrlV2"])
@pytest.mark.parametrize("power", [0.0, -0.7])
@pytest.mark.parametrize("shape", [(7,), (7, 3)])
def test_powers_of_the_learning_rate(op, power, shape):
    for attrs in _attrs(op):
        _check(op, np.array([5, 0]), shape=shape, attrs=attrs, changed={"behind": [*OPS[op][2][:-1], power]})


@pytest.mark.parametrize("op", OPS)
def test_rows_that_are_not_there_are_passed_over(op):
    slots, before, behind, _ = OPS[op]
    rows, grad = np.array([-1, 3, 7, 0, -1]), values((5, 2), seed=20)
    grad[[0, 2, 4]] = np.nan
    state, there = _state(slots, (7, 2), "float32"), np.array([1, 3])
    before, behind = _numbers(before, "float32"), _numbers(behind, "float32")
    found = run_in_place(f"SparseApply{op}", state, [*before, grad, rows, *behind])
    expected = run_in_place(f"SparseApply{op}", state, [*before, grad[there], rows[there], *behind])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    nothing = run_in_place(f"SparseApply{op}", state, [*before, grad[[0, 2]], rows[[0, 2]], *behind])
    for one, other in zip(nothing, state, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rows_must_fit():
    """Not even one that could be spread over a row."""
    with pytest.raises(Unsupported, match="do not go into variables"):
        run_in_place("SparseApplyAdagrad", _state(1, (7, 2), "float32"), [LR, values((2, 1)), np.array([1, 2])])


@pytest.mark.parametrize("rows", [[1, 1], [2, 1]], ids=str)
def test_a_gradient_may_lie_in_the_variable(rows):
    inputs = [LR, values((4, 2))[1:3], np.array(rows), LR]
    expected = run_in_place("SparseApplyMomentum", [values((4, 2))] * 2, inputs)
    table, accum, rate, ids = (
        to_torch(one, DEVICE) for one in (values((4, 2)), values((4, 2)), LR.copy(), np.array(rows))
    )
    run = ops_table()["SparseApplyMomentum"].function
    run(Node("node", "SparseApplyMomentum"), table, accum, rate, table[1:3], ids, rate)
    np.testing.assert_array_equal(to_numpy(table), expected[0])


# Runs in a process of its own: Triton decides at import whether it interprets its kernels, on the CPU, or compiles them.
SCRIPT = """
from tests.engines.cuda.kernels.sparse_cases import check_distinct, check_segments, check_updates
from msplit.engines.cuda.kernels import optimizers as kernel

kernel._CHUNK, kernel._LARGEST_BLOCK = 4, 4
check_updates("cpu")
check_updates("cpu", hosted=frozenset([0, 2]))
check_distinct("cpu")
check_segments("cpu")
"""


@pytest.mark.needs_triton
def test_the_kernels_compute_the_same():
    run_interpreted(SCRIPT)
