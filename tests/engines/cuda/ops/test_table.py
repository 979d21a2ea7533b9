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


@pytest.mark.parametrize("op", sorted(op for op, lowering in table().items() if not lowering.own))
def test_every_lowering_takes_the_inputs_of_its_op(op):
    definition = _definition(op) or _definition(f"Resource{op}")
    assert definition is not None, f"TensorFlow has no op {op}"
    lowering = table()[op]
    parameters = list(inspect.signature(lowering.function).parameters.values())[1:]
    plain = [item for item in parameters if item.kind is not inspect.Parameter.VAR_POSITIONAL]
    lists = [arg for arg in definition.input_arg if arg.number_attr or arg.type_list_attr]
    if lists:
        assert len(plain) < len(parameters), f"{op} takes a list of inputs"
        assert len(plain) <= len(definition.input_arg) - len(lists)
    else:
        assert len(plain) <= len(definition.input_arg), f"{op}: {definition.input_arg}"
        assert len(parameters) > len(plain) or len(plain) == len(definition.input_arg), f"{op}: {definition.input_arg}"
        assert all(-len(definition.input_arg) <= slot < len(definition.input_arg) for slot in lowering.static)


@pytest.mark.parametrize("op", sorted(table()))
def test_every_lowering_says_in_one_line_what_it_computes(op):
    assert table()[op].summary.endswith(".")


def test_values_never_decide_what_is_known_before_the_run():
    assert not [op for op, lowering in table().items() if lowering.shape_only and lowering.dynamic]


def test_the_engines_own_ops_are_no_ops_of_tensorflow():
    own = [op for op, lowering in table().items() if lowering.own]
    assert own
    assert not [op for op in own if _definition(op) is not None or not op.startswith("_")]
