"""Tensors that are on the GPU already do not come through the host, and outputs stay there when asked."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import msplit
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.dtypes import numpy_dtype, to_numpy, to_torch
from msplit.errors import EngineError
from msplit.inputs.make import make_inputs
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of, job

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
SLOW = 40_000_000
"""Cycles, about 20 ms."""


def on_gpu(feeds):
    return {name: to_torch(np.array(value), "cuda") for name, value in feeds.items()}


def built(name="mmoe_small.pb", batch=16, **options):
    flat = msplit.load(SAMPLES / name)
    feeds = make_inputs(flat, {}, batch=batch, seed=0)
    return flat, ENGINE.build(job(flat, feeds, device="cuda", streams=1, **options))


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("sample", ["mmoe_small.pb", "towers_small.pb"])
def test_tensors_give_what_arrays_give(sample, capture):
    flat, executable = built(sample, capture=capture)
    for seed in range(5):
        feeds = make_inputs(flat, {}, batch=16, seed=seed)
        there = on_gpu(feeds)
        some = {name: there[name] if number % 2 else value for number, (name, value) in enumerate(feeds.items())}
        wanted = executable.step(feeds)
        for fed in (there, some):
            found, stayed = executable.step(fed), executable.step_on_device(fed)
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
                assert stayed[name].is_cuda
                np.testing.assert_array_equal(to_numpy(stayed[name]), value, err_msg=name)
        for name, value in executable.step_on_device(feeds).items():
            np.testing.assert_array_equal(to_numpy(value), wanted[name], err_msg=name)
        for name, value in feeds.items():
            np.testing.assert_array_equal(to_numpy(there[name]), value, err_msg="inputs stay the caller's")
    executable.close()


@pytest.mark.alone
def test_tensors_take_little_longer_than_arrays_by_the_hosts_clock():
    """Of the towers' 40 inputs each was asked what an array is asked: 621 µs with outputs on the GPU, too, where arrays took 44."""
    flat, executable = built("towers_small.pb")
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    there, medians = on_gpu(feeds), {}
    ways = {"arrays": lambda: executable.step(feeds), "tensors": lambda: executable.step_on_device(there)}
    for name in ("arrays", "tensors") * 2:
        times = []
        for _ in range(100):
            began = time.perf_counter()
            ways[name]()
            times.append(time.perf_counter() - began)
        medians[name] = float(np.median(times))
    assert medians["tensors"] < 3 * medians["arrays"], medians
    executable.close()


def test_nothing_is_copied_from_or_to_the_host():
    flat, executable = built()
    feeds = make_inputs(flat, {}, batch=16, seed=3)
    there, wanted = on_gpu(feeds), executable.step(feeds)
    executable.step_on_device(there)
    inputs, outputs = executable._inputs.block.host, executable._outputs._block.host
    inputs.fill_(77)
    outputs.fill_(77)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        found = executable.step_on_device(there)
    copies = [one.key for one in seen.key_averages() if "HtoD" in one.key or "DtoH" in one.key]
    assert copies == []
    assert inputs.eq(77).all()
    assert outputs.eq(77).all()
    for name, value in wanted.items():
        np.testing.assert_array_equal(to_numpy(found[name]), value, err_msg=name)
    executable.close()


@pytest.mark.parametrize("capture", [True, False])
def test_a_step_waits_for_what_the_callers_stream_still_computes(capture):
    flat, executable = built(capture=capture)
    feeds = make_inputs(flat, {}, batch=16, seed=4)
    wanted = executable.step(feeds)
    sources = on_gpu(feeds)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for way in ("on its stream", "waited for"):
            late = {name: torch.zeros_like(value) for name, value in sources.items()}
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLOW)
                for name, value in sources.items():
                    late[name].copy_(value)
                found = executable.step_on_device(late) if way == "on its stream" else None
            if found is None:
                torch.cuda.current_stream().wait_stream(stream)
                found = executable.step_on_device(late)
            for name, value in found.items():
                value = value + 0  # by whatever stream: the step is over
                np.testing.assert_array_equal(to_numpy(value), wanted[name], err_msg=f"{name} {way}")
    executable.close()


class Producer:
    """A library's tensor that is still computed on a stream that only the library knows, as DLPack has it."""

    def __init__(self, source):
        self.stream, self.tensor = torch.cuda.Stream(), torch.zeros_like(source)
        self.shape, self.dtype = tuple(source.shape), np.dtype(str(source.dtype)[6:])
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(SLOW)
            self.tensor.copy_(source)

    def __dlpack__(self, *, stream=None, **asked):
        assert stream is not None, "the consumer says where it will read"
        consumer = torch.cuda.default_stream() if stream in (0, 1) else torch.cuda.ExternalStream(stream)
        consumer.wait_stream(self.stream)
        return torch.utils.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("capture", [True, False])
def test_another_library_is_told_the_stream_that_reads(capture):
    flat, executable = built(capture=capture)
    feeds = make_inputs(flat, {}, batch=16, seed=5)
    wanted, sources = executable.step(feeds), on_gpu(feeds)
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            found = executable.step({name: Producer(value) for name, value in sources.items()})
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    executable.close()


def test_outputs_are_the_callers_own():
    flat, executable = built()
    there = on_gpu(make_inputs(flat, {}, batch=16, seed=6))
    first = executable.step_on_device(there)
    kept = {name: value.clone() for name, value in first.items()}
    executable.step_on_device(on_gpu(make_inputs(flat, {}, batch=16, seed=7)))
    for name, value in first.items():
        assert torch.equal(value, kept[name])
        value.zero_()
    for name, value in executable.step_on_device(there).items():
        assert torch.equal(value, kept[name])
    executable.close()


TYPES = {"float32": 1, "float64": 2, "uint8": 4, "int64": 9, "bool": 10, "bfloat16": 14, "float16": 19}


def twice(dtype, rows, device="cuda", outputs=("y", "x")):
    """An executable that gives its input as it is, and two of it, one below the other."""
    made = schema.graph_pb2.GraphDef()
    x = made.node.add(op="Placeholder", name="x")
    x.attr["dtype"].type = TYPES[dtype]
    x.attr["shape"].shape.dim.add(size=rows)
    y = made.node.add(op="Pack", name="y", input=["x", "x"])
    y.attr["T"].type, y.attr["N"].i = TYPES[dtype], 2
    flat = flat_of(made, outputs=list(outputs))
    return ENGINE.build(job(flat, {"x": np.zeros(rows, numpy_dtype(dtype))}, device=device))


def check_types(dtype, device):
    """Large ones would be sent ahead from the host."""
    for rows in (3, 3 << 20):
        x = torch.arange(rows, device=device).remainder(2).to(getattr(torch, dtype))
        executable = twice(dtype, rows, device)
        out = executable.step_on_device({"x": x})
        assert out["y"].dtype == out["x"].dtype == x.dtype
        assert torch.equal(out["y"], torch.stack([x, x]))
        assert torch.equal(out["x"], x)
        out["x"].zero_()
        found = executable.step({"x": x})
        assert found["y"].dtype == numpy_dtype(dtype)
        np.testing.assert_array_equal(found["y"], np.stack([to_numpy(x)] * 2))
        np.testing.assert_array_equal(found["x"], to_numpy(x))
        executable.close()


@pytest.mark.parametrize("dtype", TYPES)
def test_types_arrive(dtype):
    check_types(dtype, "cuda")


def test_many_tensors_of_few_types_arrive():
    """Several of one type are copied by one kernel, wherever else they lie in memory and whatever their bits stand for."""
    made = schema.graph_pb2.GraphDef()
    shapes = {f"x{number}_{dtype}": (dtype, (number, 3)) for dtype in TYPES for number in range(5)}
    for name, (dtype, shape) in shapes.items():
        node = made.node.add(op="Placeholder", name=name)
        node.attr["dtype"].type = TYPES[dtype]
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
        made.node.add(op="Identity", name=f"y{name}", input=[name]).attr["T"].type = TYPES[dtype]
    zeros = {name: np.zeros(shape, numpy_dtype(dtype)) for name, (dtype, shape) in shapes.items()}
    executable = ENGINE.build(job(flat_of(made, outputs=[f"y{name}" for name in shapes]), zeros, device="cuda"))
    for seed in range(3):
        feeds = {
            name: torch.randint(0, 2 if dtype == "bool" else 99, shape, device="cuda").to(getattr(torch, dtype))
            for name, (dtype, shape) in shapes.items()
        }
        feeds["x3_float32"] = torch.arange(9.0, device="cuda").reshape(3, 3).T
        feeds["x4_float32"] = torch.imag(torch.full((4, 3), 1 + 2j, device="cuda").conj()).float()
        feeds["x2_float32"] = torch.imag(torch.full((2, 3), 1 + 2j, dtype=torch.complex64, device="cuda").conj())
        assert feeds["x2_float32"].is_neg()
        if seed:
            feeds["x1_int64"], feeds["x4_uint8"] = to_numpy(feeds["x1_int64"]), to_numpy(feeds["x4_uint8"])
        found, there = executable.step(feeds), executable.step_on_device(feeds)
        for name, value in feeds.items():
            value = value if isinstance(value, np.ndarray) else to_numpy(value)
            np.testing.assert_array_equal(found[f"y{name}"], value, err_msg=name)
            np.testing.assert_array_equal(to_numpy(there[f"y{name}"]), value, err_msg=name)
    executable.close()


def test_where_nothing_runs_inputs_are_outputs():
    executable = twice("float32", 5, outputs=["x"])
    x = torch.arange(5.0, device="cuda")
    out = executable.step_on_device({"x": x})["x"]
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()
    np.testing.assert_array_equal(executable.step({"x": x + 1})["x"], np.arange(5) + 1)
    executable.close()


def test_wrong_tensors_are_refused_and_the_next_step_is_right():
    flat, executable = built()
    feeds = make_inputs(flat, {}, batch=16, seed=8)
    there, wanted = on_gpu(feeds), executable.step(feeds)
    name = next(name for name, value in there.items() if value.dim())
    for wrong in (there[name][:-1], there[name].to(torch.float64)):
        with pytest.raises(EngineError, match=f"input {name} was prepared as"):
            executable.step({**there, name: wrong})
    with pytest.raises(EngineError, match="no value for input"):
        executable.step({key: value for key, value in there.items() if key != name})
    for key, value in executable.step(there).items():
        np.testing.assert_array_equal(value, wanted[key], err_msg=key)
    executable.close()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy():
    import cupy

    flat, executable = built()
    feeds = make_inputs(flat, {}, batch=16, seed=9)
    wanted = executable.step(feeds)
    found = executable.step_on_device({name: cupy.asarray(value) for name, value in feeds.items()})
    for name, value in found.items():
        np.testing.assert_array_equal(cupy.asnumpy(cupy.from_dlpack(value)), wanted[name], err_msg=name)
    executable.close()
