"""Ops of elements give TensorFlow's results for special values. `python -m tests.fuzz --kind values` tries more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from msplit.engines.cuda.ir import lowering
from msplit.engines.cuda.ir.lowering import table
from tests.engines.cuda.ops.harness import check
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


@pytest.mark.parametrize("case", [1847, 21706])
def test_what_tensorflow_loses_to_a_narrow_type_is_not_asked_for(case: int) -> None:
    assert values.run(values.make(case), Path()).problem == ""


def special_rows(dtype: str) -> np.ndarray:
    """Rows with NaN, infinities and largest numbers, one, some or all of them."""
    chance = np.random.default_rng(0)
    most = float(ml_dtypes.finfo(np.dtype(dtype)).max) / 16
    rows = chance.standard_normal((48, 7))
    some = chance.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, most, -most], rows.shape)
    rows[20:] = np.where(chance.random(rows[20:].shape) < 0.5, some[20:], rows[20:])
    for number, value in enumerate((np.nan, np.inf, -np.inf, most, -most)):
        rows[number], rows[5 + number, 3], rows[10 + number, 0] = value, value, value
    rows[15, :] = rows[16, :] = rows[17, 1:] = -np.inf
    rows[16, -1] = rows[17, 0] = np.nan
    return rows.astype(dtype)


@pytest.mark.parametrize("dtype", values.FLOATS)
def test_special_values_in_rows(dtype: str) -> None:
    rows = special_rows(dtype)
    for op in ("Max", "Min", "ArgMax", "ArgMin"):
        check(op, [rows, np.int32(1)])
    check("LogSoftmax", [rows])
    labels = np.eye(7)[np.arange(48) % 7].astype(dtype)
    check("SoftmaxCrossEntropyWithLogits", [rows, labels])
    check("SparseSoftmaxCrossEntropyWithLogits", [rows, np.arange(48) % 7])
    hidden = np.where(np.isfinite(rows.astype(np.float64)), rows, -np.inf).astype(dtype)  # oneDNN has zeros beside NaN
    check("Softmax", [hidden])


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
