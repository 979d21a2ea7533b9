"""Assignments to variables, against TensorFlow's kernels on references and on resources."""

import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node, Unsupported
from tests.engines.cuda.ops.harness import DEVICE

DTYPES = [
    "float32",
    "float64",
    "float16",
    ml_dtypes.bfloat16,
    "int32",
    "int64",
    "uint8",
    "uint32",
    "uint64",
    "complex64",
]

RESOURCE = {"Assign": "AssignVariableOp", "AssignAdd": "AssignAddVariableOp", "AssignSub": "AssignSubVariableOp"}


def lowered(op, variable, *inputs, **attrs):
    """Runs the lowering in place, and gives what the variable and the op's own outputs are."""
    tensor, *rest = (to_torch(np.array(value), DEVICE) for value in (variable, *inputs))
    address = tensor.data_ptr()
    results = table()[op].function(Node("node", op, attrs), tensor, *rest)
    first, *own = results if isinstance(results, tuple) else (results,)
    assert first.data_ptr() == tensor.data_ptr() == address
    return [to_numpy(tensor), *map(to_numpy, own)]


@pytest.mark.tf
@pytest.mark.parametrize("op", RESOURCE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_variable_is_assigned_as_by_tensorflow(op, dtype):
    import tensorflow as tf

    start, value = (np.array(numbers).astype(dtype) for numbers in ([[250, 3], [0, 7]], [[5, 1], [9, 2]]))
    variable = tf.Variable(start)
    getattr(tf.raw_ops, RESOURCE[op])(resource=variable.handle, value=value)
    np.testing.assert_array_equal(lowered(op, start, value)[0], variable.numpy())


@pytest.mark.tf
@pytest.mark.parametrize("op", ["AssignAdd", "CountUpTo"])
def test_a_reference_is_written_likewise(op):
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.Variable(np.int64(5), use_resource=False)
        made = tf.raw_ops.CountUpTo(ref=variable._ref(), limit=8) if op == "CountUpTo" else v1.assign_add(variable, 2)
        session.run(v1.global_variables_initializer())
        wanted = [session.run(made), session.run(variable)]
    if op == "CountUpTo":
        assert lowered(op, np.int64(5), limit=8) == wanted[::-1]
    else:
        assert lowered(op, np.int64(5), np.int64(2)) == wanted[:1] == wanted[1:]


def test_counting_stops_at_the_limit():
    assert [int(value) for value in lowered("CountUpTo", np.int32(8), limit=8)] == [8, 8]


@pytest.mark.parametrize("op", RESOURCE)
def test_another_shape_is_refused(op):
    with pytest.raises(Unsupported, match=r"keeps its shape .* has \(2,\) and is given \(1,\)"):
        lowered(op, np.ones(2), np.ones(1), validate_shape=False)


@pytest.mark.parametrize(
    ("op", "wanted"), [("Assign", [2, 3, 0]), ("AssignAdd", [3, 5, 3]), ("AssignSub", [-1, -1, 3])]
)
def test_a_value_that_lies_in_the_variable_is_read_before_it_is_written(op, wanted):
    memory = torch.tensor([1.0, 2.0, 3.0, 0.0])
    table()[op].function(Node("node", op), memory[:3], memory[1:])
    assert memory[:3].tolist() == wanted
