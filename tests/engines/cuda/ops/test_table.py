"""The whole table against TensorFlow's own list of ops."""

import inspect

import pytest

from msplit.engines.cuda.ir.lowering import table

pytestmark = pytest.mark.tf


def _definition(op):
    """What changes variables is known by the op on references, also where TensorFlow has it on resources alone."""
    import tensorflow as tf  # registers the ops
    from tensorflow.python.framework import op_def_registry

    assert tf.__version__
    return op_def_registry.get(op) or op_def_registry.get(f"Resource{op}")


def _fits(op, lowering):
    """Whether a lowering takes what TensorFlow gives its op: so many inputs, and lists of them where it has lists."""
    definition = _definition(op)
    if definition is None:
        return False
    parameters = list(inspect.signature(lowering.function).parameters.values())[1:]
    plain = sum(item.kind is not inspect.Parameter.VAR_POSITIONAL for item in parameters)
    inputs = len(definition.input_arg)
    lists = sum(bool(arg.number_attr or arg.type_list_attr) for arg in definition.input_arg)
    if lists:
        return plain < len(parameters) and plain <= inputs - lists
    all_of_them = plain < len(parameters) or plain == inputs
    return plain <= inputs and all_of_them and all(-inputs <= slot < inputs for slot in lowering.static)


def test_every_lowering_takes_the_inputs_of_its_op():
    """One test for all: a test each takes longer to start than to run."""
    theirs = {op: lowering for op, lowering in table().items() if not lowering.own}
    assert len(theirs) > 400
    assert [op for op, lowering in sorted(theirs.items()) if not _fits(op, lowering)] == []
    assert not _fits("MatMul", theirs["Relu"])
    assert not _fits("Relu", theirs["MatMul"])
    assert not _fits("NoSuchOp", theirs["Relu"])


def test_every_lowering_says_in_one_line_what_it_computes():
    assert [op for op, lowering in sorted(table().items()) if not lowering.summary.endswith(".")] == []


def test_values_never_decide_what_is_known_before_the_run():
    assert not [op for op, lowering in table().items() if lowering.shape_only and lowering.dynamic]


def test_the_engines_own_ops_are_no_ops_of_tensorflow():
    own = [op for op, lowering in table().items() if lowering.own]
    assert own
    assert not [op for op in own if _definition(op) is not None or not op.startswith("_")]
