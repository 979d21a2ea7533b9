"""Starting TensorFlow on a machine with a GPU, played by a stand-in: no machine of the tests needs one."""

import subprocess
from types import SimpleNamespace

import pytest

from msplit.engines.base import TensorFlowOptions
from msplit.engines.tensorflow import runtime
from msplit.errors import EngineError


class Gpu:
    """TensorFlow's configuration calls on a machine with some GPUs."""

    def __init__(self, gpus=1, started=False, hidden=False):
        self.hidden = hidden
        self.calls, self.started, self.gpus = [], started, [f"gpu{i}" for i in range(gpus)]
        experimental = SimpleNamespace(set_memory_growth=self.note("growth"))
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind=None: self.gpus,
            get_visible_devices=lambda kind=None: [] if self.hidden else self.gpus,
            list_logical_devices=lambda kind: ["only one"],
            set_visible_devices=self.note("visible"),
            set_logical_device_configuration=self.note("logical"),
            LogicalDeviceConfiguration=lambda memory_limit, **more: (memory_limit, more) if more else memory_limit,
            experimental=experimental,
        )

    def note(self, name):
        def call(*arguments):
            if self.started:
                raise RuntimeError("cannot be modified after being initialized")
            self.calls.append((name, *arguments))

        return call


@pytest.fixture
def machine(monkeypatch):
    def make(**more):
        gpu = Gpu(**more)
        monkeypatch.setattr(runtime, "tensorflow", lambda: gpu)
        for name, value in (("gpu_memory", None), ("gpus", 1), ("priorities", ())):
            monkeypatch.setitem(runtime._configured, name, value)
        monkeypatch.setattr(runtime, "_free_gpu_megabytes", lambda: 80_000.0)
        return gpu

    return make


def test_a_gpu_that_was_hidden_stays_so(machine):
    gpu = machine(hidden=True, started=True)
    runtime.configure(4)
    assert not gpu.calls
    assert runtime.devices(2) == ["/device:CPU:0", "/device:CPU:1"]


def test_streams_share_less_than_half_of_the_first_gpu(machine):
    gpu = machine(gpus=2)
    runtime.configure(4)
    (visible, logical) = gpu.calls
    assert visible == ("visible", ["gpu0"], "GPU"), (
        "the others are hidden: their logical devices would have to be given too"
    )
    assert logical == ("logical", "gpu0", [9000] * 4)
    assert runtime.devices(4) == [f"/device:GPU:{i}" for i in range(4)]
    assert runtime.devices(2, cpu_only=True) == ["/device:CPU:0", "/device:CPU:1"]


def test_whole_gpus_where_there_are_as_many_as_a_function_names(machine):
    gpu = machine(gpus=3)
    runtime.configure(2, spread=True)
    assert gpu.calls == [("visible", ["gpu0", "gpu1"], "GPU"), ("growth", "gpu0", True), ("growth", "gpu1", True)]
    runtime.configure(2)
    assert len(gpu.calls) == 3
    fewer = machine(gpus=2)
    runtime.configure(3, spread=True)
    assert fewer.calls == [("visible", ["gpu0"], "GPU"), ("logical", "gpu0", [12000] * 3)]


@pytest.mark.parametrize(
    ("streams", "options", "logical"),
    [
        (1, {"memory": 0.5}, [40_000]),
        (2, {"memory": 0.5}, [20_000, 20_000]),
        (2, {"limits": (100, 200)}, [100, 200]),
        (2, {"priorities": (-1, 0)}, [(18_000, {"experimental_priority": -1}), (18_000, {"experimental_priority": 0})]),
    ],
)
def test_memory_and_priorities_of_logical_devices(machine, streams, options, logical):
    gpu = machine()
    runtime.configure(streams, options=TensorFlowOptions(**options))
    assert gpu.calls[-1] == ("logical", "gpu0", logical)
    assert runtime._configured["priorities"] == options.get("priorities", ())


@pytest.mark.parametrize("options", [{"limits": (100, 200)}, {"priorities": (0,)}])
def test_switches_for_another_number_of_devices_are_refused(machine, options):
    machine()
    with pytest.raises(EngineError, match="for 3 logical devices"):
        runtime.configure(3, options=TensorFlowOptions(**options))


def test_fewer_streams_later_change_nothing_and_more_are_an_error(machine):
    gpu = machine()
    runtime.configure(4)
    runtime.configure(2)
    assert len(gpu.calls) == 2
    gpu.started = True
    with pytest.raises(
        EngineError, match=r"with 1 logical GPU device, 8 are needed(.|\n)*largest number of streams first"
    ):
        runtime.configure(8)


def test_one_stream_takes_memory_as_it_needs_it(machine):
    gpu = machine()
    runtime.configure(1)
    assert ("growth", "gpu0", True) in gpu.calls


def test_without_a_gpu_nothing_is_fixed(machine):
    gpu = machine(gpus=0)
    runtime.configure(8)
    assert gpu.calls == []
    assert runtime.devices(2) == ["/device:CPU:0", "/device:CPU:1"]


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 100.0), ("1", 200.0), ("GPU-b", 200.0), ("1,0", 200.0), ("7", 100.0)]
)
def test_free_memory_is_that_of_the_visible_gpu(monkeypatch, visible, expected):
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="GPU-a1, 100\nGPU-b1, 200\n")
    )
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert runtime._free_gpu_megabytes() == expected


def test_without_nvidia_smi_the_way_out_is_told(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(EngineError, match="--streams 1"):
        runtime._free_gpu_megabytes()
