import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.ir.node import Node

from .harness import FLOATS, check, run_lowering, values

pytestmark = pytest.mark.tf

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
