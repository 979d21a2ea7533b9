"""Inputs side by side in one block: values arrive, wrong ones are refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.staging import Pack
from msplit.engines.cuda.tensors import to_numpy, to_torch
from msplit.errors import EngineError

CPU = torch.device("cpu")


def arrays():
    rng = np.random.default_rng(0)
    small = {f"ids_{n}": rng.integers(0, 9, (3, n)).astype(np.int32) for n in range(5)}
    return {
        **small,
        "long": rng.integers(0, 9, 7),
        "flags": np.array([True, False]),
        "half": rng.standard_normal(3).astype(ml_dtypes.bfloat16),
        "scalar": np.float32(4),
        "large": rng.standard_normal((300, 1000)).astype(np.float32),
        "turned": rng.standard_normal((40, 50)).astype(np.float32).T,
    }


def pack():
    return Pack({name: to_torch(np.array(value)) for name, value in arrays().items()}, CPU)


def test_every_value_arrives_and_tensors_do_not_overlap():
    found = pack()
    wanted = arrays()
    found.fill({name: np.asarray(value) for name, value in wanted.items()})
    for name, value in wanted.items():
        np.testing.assert_array_equal(to_numpy(found.on_host[name]), value)
        np.testing.assert_array_equal(found.read()[name], value)


@pytest.mark.parametrize("name", ["ids_3", "large"])
def test_a_wrong_shape_or_type_is_refused_by_name(name):
    values = {key: np.asarray(value) for key, value in arrays().items()}
    with pytest.raises(EngineError, match=f"input {name} was prepared as"):
        pack().fill({**values, name: values[name][:1]})
    with pytest.raises(EngineError, match=f"input {name} was prepared as"):
        pack().fill({**values, name: values[name].astype(np.float64)})


def test_a_missing_input_is_named():
    values = {key: np.asarray(value) for key, value in arrays().items() if key != "flags"}
    with pytest.raises(EngineError, match="no value for input flags"):
        pack().fill(values)
