"""Ops of elements give TensorFlow's results for special values. `python -m tests.fuzz --kind values` tries more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from msplit.engines.cuda.ir import lowering
from msplit.engines.cuda.ir.lowering import table
from tests.fuzz import values

pytestmark = pytest.mark.tf


# Type -> how many ops of elements both have a kernel of, at least.
LEAST = {
    "float32": 120,
    "float64": 115,
    "float16": 95,
    "bfloat16": 90,
    "int8": 40,
    "int32": 45,
    "int64": 45,
    "uint8": 40,
}
LEAST |= {"int16": 40, "uint16": 35, "uint32": 35, "uint64": 25, "bool": 15, "complex64": 55, "complex128": 55}


@pytest.mark.parametrize("dtype", values.DTYPES)
def test_special_values(dtype: str) -> None:
    tried = [values.differences(op, dtype) for op in values.ops()]
    assert sum(both for both, _ in tried) >= LEAST[dtype]
    assert not [told for _, told in tried if told]


def test_cases_of_every_type() -> None:
    for seed in range(len(values.DTYPES)):
        assert values.run(values.make(seed), Path()).problem == "", f"python -m tests.fuzz --case values:{seed}"


def at_zero(node: object, gradients: Tensor, outputs: Tensor) -> Tensor:
    return torch.ops.aten.elu_backward(gradients, 1.6732632423543772, 1.0507009873554805, 1, True, outputs)


FAULTS: dict[str, Callable[..., Tensor]] = {
    "SeluGrad": at_zero,
    "SqrtGrad": lambda node, y, dy: dy * 0.5 / y,
    "ReluGrad": lambda node, gradients, features: torch.ops.aten.threshold_backward(gradients, features, 0),
    "TruncateMod": lambda node, x, y: torch.fmod(x, y),
    "BesselK0": lambda node, x: torch.special.modified_bessel_k0(x),
    "DivNoNan": lambda node, x, y: x / y,
}


@pytest.mark.parametrize("op", FAULTS)
def test_a_fault_is_noticed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values.differences(op, "float32") == (True, "")
    monkeypatch.setitem(lowering._TABLE, op, replace(table()[op], function=FAULTS[op]))
    assert " differ: " in values.differences(op, "float32")[1]
