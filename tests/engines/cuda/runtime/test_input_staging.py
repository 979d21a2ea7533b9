"""Inputs side by side in one block: values arrive, wrong ones are refused by name."""

from __future__ import annotations

import functools
import itertools
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import to_numpy, to_torch
from msplit.engines.cuda.runtime import input_staging, memcpy
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.engines.cuda.runtime.memcpy import HostMemory
from msplit.engines.cuda.runtime.output_staging import OutputStaging
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


def prepared():
    return InputStaging({name: to_torch(np.array(value)) for name, value in arrays().items()}, Device.of(CPU))


def fed():
    return {name: np.asarray(value) for name, value in arrays().items()}


def test_every_value_arrives_and_tensors_do_not_overlap():
    found = prepared()
    found.fill(fed())
    found.to_device()
    for name, value in arrays().items():
        np.testing.assert_array_equal(found.block.arrays[name], value)
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value)


def test_large_inputs_go_ahead_and_the_rest_follows(monkeypatch):
    """What is sent while arrays are copied, and what is copied at last, are together the whole block."""
    monkeypatch.setattr(input_staging, "_AHEAD_BYTES", 1 << 19)
    monkeypatch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 19)
    monkeypatch.setattr(memcpy, "_SHARED_BYTES", 1 << 20)
    values = {
        "ids": np.arange(12, dtype=np.int32),
        "picture": np.random.default_rng(0).standard_normal((700, 300)).astype(np.float32),
        "middle": np.arange(9000, dtype=np.float64),
        "pictures": np.random.default_rng(1).standard_normal((1, 900, 301)).astype(np.float32),
        "turned": np.random.default_rng(2).standard_normal((400, 500)).astype(np.float32).T,
    }
    found = InputStaging({name: to_torch(np.array(value)) for name, value in values.items()}, Device.of(CPU))
    large = {"picture", "pictures", "turned"}
    found.fill(values, ahead=True)
    for name, value in values.items():
        arrived = to_numpy(found.on_device[name])
        assert np.array_equal(arrived, value) if name in large else not arrived.any(), name
    for name in large:  # they are there, and are not copied again
        found.block.arrays[name][...] = 0
    found.rest_to_device()
    for name, value in values.items():
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value, err_msg=name)


def own_buffers(monkeypatch):
    """Inputs of all kinds, their values, and their places in the block, which hold something else."""
    monkeypatch.setattr(input_staging, "_AHEAD_BYTES", 1 << 19)
    monkeypatch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 19)
    rng = np.random.default_rng(3)
    values = {f"ids_{n}": rng.integers(0, 99, n) for n in (3, 50, 7)}
    values |= {"middle": rng.standard_normal(9000), "other": rng.standard_normal(9000)}
    values["picture"] = rng.standard_normal((700, 300)).astype(np.float32)
    found = InputStaging({name: to_torch(np.zeros_like(value)) for name, value in values.items()}, Device.of(CPU))
    return found, values, found.block.arrays


@pytest.mark.parametrize("theirs", [[], ["ids_50"], ["middle"], ["picture"], ["ids_3", "other", "picture"]])
def test_what_is_in_its_place_already_arrives_beside_what_is_not(monkeypatch, theirs):
    found, values, places = own_buffers(monkeypatch)
    for name in values.keys() - set(theirs):
        places[name][...] = values[name]
    if not theirs:
        monkeypatch.setattr(memcpy.Memcpy, "copy", None)  # nothing is copied on the host
    found.fill({name: values[name] if name in theirs else places[name] for name in values}, ahead=True)
    found.rest_to_device()
    for name, value in values.items():
        np.testing.assert_array_equal(to_numpy(found.on_device[name]), value, err_msg=name)


def test_views_of_an_inputs_own_place_are_as_good_as_any_array(monkeypatch):
    found, values, places = own_buffers(monkeypatch)
    for name, value in values.items():
        places[name][...] = value
    found.fill({name: place[::-1] if place.ndim == 1 else place[...] for name, place in places.items()})
    for name, value in values.items():
        np.testing.assert_array_equal(places[name], value[::-1] if value.ndim == 1 else value)


def test_views_of_an_inputs_own_place_are_sent_ahead_as_they_were(monkeypatch):
    """In pieces they would be read where they have been written over."""
    found, values, places = own_buffers(monkeypatch)
    places["picture"][...] = values["picture"]
    found.fill({**values, "picture": places["picture"][::-1]}, ahead=True)
    np.testing.assert_array_equal(to_numpy(found.on_device["picture"]), values["picture"][::-1])


def test_what_is_refused_leaves_the_block_as_it_is(monkeypatch):
    found, values, places = own_buffers(monkeypatch)
    for wrong in ({**values, "picture": values["picture"][1:]}, {**values, "other": places["middle"]}):
        for give in (found.fill, functools.partial(found.fill, ahead=True), found.send_all):
            with pytest.raises(EngineError):
                give(wrong)
    assert not found.block.host.any()
    assert not found.memory.any()


def test_an_input_without_elements_beside_one_that_goes_ahead_is_no_piece(monkeypatch):
    monkeypatch.setattr(input_staging, "_AHEAD_BYTES", 1 << 15)
    monkeypatch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 15)
    values = {"full": np.ones(64, np.float32), "none": np.zeros((0, 3)), "large": np.arange(9000, dtype=np.float32)}
    found = InputStaging({name: to_torch(np.zeros_like(value)) for name, value in values.items()}, Device.of(CPU))
    assert found.block.starts["none"] == found.block.starts["large"]
    found.fill(values, ahead=True)
    np.testing.assert_array_equal(to_numpy(found.on_device["large"]), values["large"])


def test_the_place_of_another_input_is_refused(monkeypatch):
    found, _, places = own_buffers(monkeypatch)
    for swapped in (places["other"], places["other"][::-1]):
        with pytest.raises(EngineError, match="input middle is given memory of another input's buffer"):
            found.fill({**places, "middle": swapped})
    found.fill({**places, "middle": places["other"].copy()})


def test_without_large_inputs_all_is_the_rest_and_with_nothing_else_nothing_is():
    small = InputStaging({"x": torch.zeros(3)}, Device.of(CPU))
    assert small.rest == small.block.host.numel()
    assert InputStaging({"x": torch.zeros(input_staging._AHEAD_BYTES // 4)}, Device.of(CPU)).rest == 0


def test_arrays_that_are_not_contiguous_or_not_writeable_arrive():
    found = prepared()
    wanted = fed()
    spread = {name: np.repeat(value, 2, axis=-1)[..., ::2] if value.ndim else value for name, value in wanted.items()}
    turned = {name: np.array(value, order="F") for name, value in wanted.items()}
    frozen = {name: np.broadcast_to(value, value.shape) for name, value in wanted.items()}
    for given in (spread, turned, frozen):
        for place in found.block.arrays.values():
            place[...] = 0
        found.fill(given)
        for name, value in wanted.items():
            np.testing.assert_array_equal(found.block.arrays[name], value)


def test_scalars_of_numpy_are_arrays_too():
    found = InputStaging(
        {"rate": to_torch(np.array(1, np.float32)), "bias": to_torch(np.array(1, np.float32))}, Device.of(CPU)
    )
    found.fill({"rate": np.float32(3), "bias": np.array(4, np.float32)})
    assert found.on_device["rate"].shape == ()
    assert found.block.arrays["rate"] == 3
    assert found.block.arrays["bias"] == 4


@pytest.mark.parametrize("name", ["ids_3", "large"])
def test_a_wrong_shape_or_type_is_refused_by_name(name):
    values = fed()
    other_types = [values[name].astype(np.float64), values[name].astype(values[name].dtype.newbyteorder())]
    for wrong in [values[name][:1], values[name][..., None], *other_types]:
        with pytest.raises(EngineError, match=f"input {name} was prepared as"):
            prepared().fill({**values, name: wrong})


def test_a_missing_input_is_named():
    for name in ("flags", "ids_2"):
        values = fed()
        del values[name]
        with pytest.raises(EngineError, match=f"no value for input {name}"):
            prepared().fill(values)


def test_outputs_arrive_as_arrays_of_the_users_own():
    rng = np.random.default_rng(1)
    values = {f"ids_{n}": rng.integers(0, 9, (n, 1)) for n in (3, 1, 7)}
    values |= {"flag": np.array(True), "none": np.zeros((0, 3), np.float16), "half": np.ones(3, ml_dtypes.bfloat16)}
    values["picture"] = rng.standard_normal((300, 301)).astype(np.float32)
    tensors = {name: to_torch(value) for name, value in values.items()}
    found = OutputStaging(tensors, Device.of(CPU), captured=False)
    found.copy({name: tensor.flip(0) if tensor.ndim else tensor for name, tensor in tensors.items()})
    first = found.read()
    kept = {name: value.copy() for name, value in first.items()}
    found.copy({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    for name, value in found.read().items():
        np.testing.assert_array_equal(first[name], values[name][::-1] if values[name].ndim else values[name])
        np.testing.assert_array_equal(first[name], kept[name])
        assert first[name].flags.writeable
        assert first[name].dtype == values[name].dtype
        assert not value.astype(bool).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float32", "int64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 1023, 1025, 300_000])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_gpu_gets_and_gives_every_byte(monkeypatch, dtype, size, ahead):
    monkeypatch.setattr(input_staging, "_AHEAD_BYTES", 1 << 19)
    monkeypatch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 19)
    gpu = torch.device("cuda")
    rng = np.random.default_rng(size)
    values = {"a": (rng.standard_normal((size, 2)) * 9).astype(dtype), "b": np.asarray(rng.integers(0, 9), dtype)}
    found = InputStaging({name: to_torch(value) for name, value in values.items()}, Device.of(gpu))
    if ahead:
        found.fill(values, ahead=True)
        found.rest_to_device()
    else:
        found.fill(values)
        found.to_device()
    turned = {name: found.on_device[name].movedim(0, -1) if name == "a" else found.on_device[name] for name in values}
    given = OutputStaging(turned, Device.of(gpu), captured=False)
    given.copy(turned)
    torch.cuda.synchronize()
    for name, value in given.read().items():
        np.testing.assert_array_equal(value, values[name].T)


def registered(monkeypatch, size=1 << 15):
    """Inputs of which one is large, on a device of their own, and memory that it reads."""
    for name in ("_AHEAD_BYTES", "_AHEAD_ALONE_BYTES"):
        monkeypatch.setattr(input_staging, name, size)
    device = Device(CPU)
    found = InputStaging({"x": torch.zeros(300, 100), "ids": torch.zeros(30, dtype=torch.int32)}, device)
    memory = np.zeros(300 * 100 + 64, np.float32)
    device.owned(HostMemory).register(memory.ctypes.data, memory.nbytes)
    return found, memory[16 : 16 + 300 * 100].reshape(300, 100), device.owned(HostMemory)


def test_a_large_array_is_read_where_it_lies_if_the_gpu_reads_it_there(monkeypatch):
    found, x, memory = registered(monkeypatch)
    ids = np.arange(30, dtype=np.int32)
    x[...] = np.arange(x.size).reshape(x.shape)
    for one, direct in (
        (x, True),
        (x.copy(), False),
        (x[::-1], False),
        (np.asfortranarray(x), False),
        (x.view(type("Other", (np.ndarray,), {})), False),
        (found.block.arrays["x"], False),
    ):
        for fill in (functools.partial(found.fill, ahead=True), found.send_all):
            value = np.array(one)
            found.block.host.zero_()
            found.memory.zero_()
            if one is found.block.arrays["x"]:
                one[...] = value
            assert fill({"x": one, "ids": ids}, direct=True)
            assert found.reads_callers == direct
            assert found.block.arrays["x"].any() != direct
            np.testing.assert_array_equal(to_numpy(found.on_device["x"]), value)
            np.testing.assert_array_equal(found.block.arrays["ids"], ids)
    found.block.host.zero_()
    found.send_all({"x": x, "ids": ids})  # somebody may change it before it is over
    assert found.block.arrays["x"].any()
    memory.release(x.ctypes.data - 64)
    found.send_all({"x": x, "ids": ids}, direct=True)
    assert not found.reads_callers


@pytest.mark.parametrize("rows", [(300,), (200,), (100, 100, 100), (100, 150), (290, 10), ()])
@pytest.mark.parametrize("where", ["all", "some", "none", "otherwise"])
def test_rows_of_requests_are_joined_from_memory_that_the_gpu_reads(monkeypatch, rows, where):
    """Of another byte order, they are converted by the host."""
    monkeypatch.setattr(input_staging, "_DIRECT_BYTES", 1 << 14)
    found, x, _ = registered(monkeypatch)
    found.fill({"x": np.full_like(x, 7), "ids": np.zeros(30, np.int32)})
    found.to_device()
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    ends = np.cumsum((0, *rows))
    parts = [x[first:last] for first, last in itertools.pairwise(ends)] or [x[:300]]
    if where != "all":
        parts = [part.copy() if where != "some" or number else part for number, part in enumerate(parts)]
    if where == "otherwise":
        parts = [part.astype(">f4") for part in parts]
    found.join([{"x": part, "ids": np.arange(30, dtype=np.int32)} for part in parts], {"x": 1 if rows else 0, "ids": 0})
    found.rest_to_device()
    count = ends[-1] or 300
    direct = (where == "all" or (where == "some" and len(parts) == 1)) and min(len(part) for part in parts) >= 41
    assert (found.block.arrays["x"] == 7).all() == direct
    np.testing.assert_array_equal(to_numpy(found.on_device["x"])[:count], x[:count])
    assert (to_numpy(found.on_device["x"])[count:] == 7).all()
    np.testing.assert_array_equal(to_numpy(found.on_device["ids"]), np.arange(30))


def test_what_cuda_refuses_the_host_copies(monkeypatch, caplog):
    """The log says so once, and the error is nobody else's."""
    said, asked = [], []
    library = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 304 if size.value > 99 else 0,
        cudaHostUnregister=lambda address: said.append(address.value),
        cudaGetLastError=lambda: asked.append(1),
    )
    monkeypatch.setattr(memcpy, "runtime", lambda: library)
    memory = HostMemory(SimpleNamespace(is_gpu=True, entered=nullcontext))
    assert memory.register(4096, 50)
    assert [memory.register(8192, 100), memory.register(8192, 50)] == [False, False]
    for address in (4096, 8192, 4096):
        memory.release(address)
    assert said == [4096]
    assert len(asked) == 3
    assert caplog.text.count("refuses to register") == 1


def test_a_copy_that_cuda_refuses_comes_by_way_of_the_block(monkeypatch):
    found, x, _ = registered(monkeypatch)
    monkeypatch.setattr(memcpy.AsyncCopy, "send_from", lambda *_: False)
    x[...] = 3
    found.send_all({"x": x, "ids": np.zeros(30, np.int32)}, direct=True)
    assert to_numpy(found.on_device["x"]).min() == found.block.arrays["x"].min() == 3


@pytest.mark.gpu
def test_a_gpu_reads_pinned_and_registered_memory_where_it_lies(monkeypatch):
    monkeypatch.setattr(input_staging, "_AHEAD_ALONE_BYTES", 1 << 20)
    device = Device.of(torch.device("cuda"))
    memory, size = device.owned(HostMemory), 1 << 21
    with mmap.mmap(-1, size) as shared:
        plain, large = np.arange(size // 4, dtype=np.float32), np.frombuffer(shared, np.float32)
        pinned = torch.from_numpy(plain).pin_memory()
        assert [memory.has(one) for one in (plain, large, pinned.numpy())] == [False, False, True]
        assert memory.register(large.ctypes.data, size)
        large[...] = plain[::-1]
        found = InputStaging({"x": torch.zeros(size // 4), "ids": torch.zeros(30, dtype=torch.int32)}, device)
        ids = np.arange(30, dtype=np.int32)
        for value in (large, pinned.numpy(), pinned):
            assert found.send_all({"x": value, "ids": ids}, direct=True)
            torch.cuda.synchronize()
            assert found.reads_callers
            assert not found.block.arrays["x"].any()
            np.testing.assert_array_equal(to_numpy(found.on_device["x"]), value)
            np.testing.assert_array_equal(to_numpy(found.on_device["ids"]), ids)
        memory.release(large.ctypes.data)
        assert not memory.has(large)
        assert memory.register(0, 4096) is False  # and the error is nobody else's
        assert torch.ones(3, device="cuda").sum() == 3
        memory._refused = False
        del large
