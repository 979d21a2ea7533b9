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


def test_inputs_of_one_width_and_large_outputs_arrive():
    rng = np.random.default_rng(1)
    values = {f"ids_{n}": rng.integers(0, 9, (n, 1)) for n in (3, 1, 7)}
    values["picture"] = rng.standard_normal((300, 301)).astype(np.float32)
    found = Pack({name: to_torch(value) for name, value in values.items()}, CPU)
    found.fill(values)
    found.to_device()
    found.collect({name: found.on_device[name].flip(0) for name in values})
    for name, value in found.read().items():
        np.testing.assert_array_equal(value, values[name][::-1])
        assert not np.shares_memory(value, found.arrays[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float32", "int64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 300_000])
def test_a_gpu_gets_and_gives_every_byte(dtype, size):
    gpu = torch.device("cuda")
    rng = np.random.default_rng(size)
    values = {"a": (rng.standard_normal((size, 2)) * 9).astype(dtype), "b": np.asarray(rng.integers(0, 9), dtype)}
    found = Pack({name: to_torch(value) for name, value in values.items()}, gpu)
    found.fill(values)
    found.to_device()
    turned = {name: found.on_device[name].movedim(0, -1) if name == "a" else found.on_device[name] for name in values}
    given = Pack(turned, gpu)
    given.collect(turned)
    torch.cuda.synchronize()
    for name, value in given.read().items():
        np.testing.assert_array_equal(value, values[name].T)
