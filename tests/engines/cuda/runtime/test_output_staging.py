"""Outputs by one kernel, and the number that says that they are there. In Triton's interpreter, on the CPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.output_staging import OutputStaging
from tests.engines.cuda.interpreted import run_interpreted

# A process of its own: Triton decides at import whether it interprets its kernels, on the CPU, or compiles them.
SCRIPT = """
import os, subprocess, sys, threading, time
import numpy as np, torch
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.kernels import memory as copy_kernel
from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.runtime import output_staging

CPU = torch.device("cpu")
rng = np.random.default_rng(0)


def outputs(tensors):
    found = output_staging.OutputStaging(tensors, Device.of(CPU), captured=True)
    arrays, base = found._block.arrays, found._block.host.data_ptr()
    targets = [base + found._block.starts[name] for name in arrays]
    sizes = [array.nbytes for array in arrays.values()]
    found._output_copy = copy_kernel.OutputCopy(sizes, targets, CPU, tables=output_staging.GRAPHS)
    found.to_host(tensors)  # as when it is compiled
    for graph in (0, 1):
        found.to_host({name: tensor.clone() for name, tensor in tensors.items()} if graph else tensors, graph)
    found.aim()
    found.settle()
    return found


def replay(found, graph=0):
    found._output_copy.issue([source.data_ptr() for source in found._sources[graph]], graph)


def values(scale):
    floats = torch.from_numpy(rng.standard_normal((70, 50))) * scale
    return {
        "turned": floats.float().T, "flags": floats[0] > 0, "bytes": floats[:1].byte()[0, 1:], "half": floats[1, :3].half(),
        "wide": floats[:9].to(torch.complex128), "none": floats[:0], "one": floats[3, 3].float(),
    }


for names in (
    ["turned"], ["one"], ["none"], [], ["flags", "bytes", "half"], ["none", "flags", "turned"],
    ["turned", "one", "wide", "half", "none"], list(values(1)),
):
    tensors = {name: tensor for name, tensor in values(1).items() if name in names}
    found = outputs(tensors)
    for step in range(6):
        graph = step % 2  # both know where theirs are
        for name, tensor in values(step).items():
            if name in tensors:
                tensors[name].copy_(tensor)
        for source, tensor in zip(found._sources[graph], tensors.values()):
            source.copy_(tensor)  # where it had to be made contiguous, a graph would do that again
        found.expect()
        replay(found, graph)
        assert found.arrived(), (names, step)
        for name, array in found.read().items():
            np.testing.assert_array_equal(array, to_numpy(tensors[name]), err_msg=name)
            places = {"one": np.zeros((), np.float32), "half": np.zeros(3, np.float32), "flags": np.zeros(49, bool), "other": array}
            for one, value in found.read(places).items():
                np.testing.assert_array_equal(value, to_numpy(tensors[one]), err_msg=one)
                assert (value is places.get(one)) == (one == "one")

# A replay that was announced and never came is not waited for for ever, and the next one is not mistaken for it.
output_staging._PATIENCE = 0.01
found.expect()
assert not found.arrived()
found.settle()
found.expect()
replay(found)
assert found.arrived()

# Waiting beside processes that want the same processor takes as long as it is meant to: it is not given to them.
found.settle()
output_staging._PATIENCE = 0.2e-3
processors = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(processors)})
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
times = []
try:
    time.sleep(0.3)
    for _ in range(100):
        start = time.perf_counter()
        found.expect()
        assert not found.arrived()
        found.settle()
        times.append(time.perf_counter() - start)
finally:
    for process in busy:
        process.kill()
os.sched_setaffinity(0, processors)
assert np.median(times) < 2e-3, np.median(times)

# While the host looks, other threads run: one of them may be what makes the work.
output_staging._PATIENCE = 60
found.expect()
threading.Timer(0.05, replay, (found,)).start()
assert found.arrived()
"""


@pytest.mark.idle
@pytest.mark.needs_triton
def test_one_kernel_brings_all_outputs_and_then_raises_the_number():
    run_interpreted(SCRIPT)


@pytest.mark.parametrize(("shapes", "delivers"), [([], False), ([(0, 3)], False), ([(0, 3), (2,)], True)])
def test_whether_there_is_anything_to_deliver(shapes, delivers):
    """Without a kernel of our own, a graph that delivers nothing would be empty, which CUDA does not run."""
    tensors = {str(number): torch.zeros(shape) for number, shape in enumerate(shapes)}
    assert OutputStaging(tensors, Device.of(torch.device("cpu")), captured=True).has_any == delivers


def test_cuda_is_asked_at_each_look_where_no_kernel_tells_the_end() -> None:
    staging = OutputStaging({"y": torch.zeros(2)}, Device.of(torch.device("cpu")), captured=False)
    assert staging.seen is None
    executable, asked = object.__new__(CudaExecutable), []
    executable._outputs, executable._seen = staging, staging.seen
    executable._origin = SimpleNamespace(query=lambda: asked.append(1) or len(asked) > 2)
    assert [executable.over() for _ in range(3)] == [False, False, True]

    executable._seen, executable._looks = (lambda: len(asked) > 3), 0  # CUDA is asked rarely, for faults
    assert [executable.over() for _ in range(100)] == [False] * 100
    assert len(asked) == 3


def test_outputs_are_read_into_arrays_that_fit():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4), "c": torch.ones(())}
    found = OutputStaging(tensors, Device.of(torch.device("cpu")), captured=False)
    found.copy(tensors)
    places = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros(4, np.int32),
        "c": np.zeros(1, np.float32),
        "d": np.zeros(2),
    }
    for given in (places, {"a": places["a"]}, {}, None):
        outputs = found.read(given)
        assert {name: value.tolist() for name, value in outputs.items()} == {
            name: one.tolist() for name, one in tensors.items()
        }
        assert (outputs["a"] is places["a"]) == bool(given)
        assert all(value is not places[name] for name, value in outputs.items() if name != "a")
        assert not np.shares_memory(outputs["b"], found._block.arrays["b"])
