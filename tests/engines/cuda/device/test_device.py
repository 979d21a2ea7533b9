"""Two devices in one process share nothing: two objects of the CPU here, two GPUs where there are."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import msplit
from msplit.engines.cuda.autotune.conv import FAMILY
from msplit.engines.cuda.autotune.tuner import SECONDS, Tuner
from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.device import device as pools
from msplit.engines.cuda.device.capture import ScratchPool, capture
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.runtime import output_staging
from msplit.engines.cuda.runtime.memcpy import Memcpy
from msplit.engines.cuda.runtime.output_staging import GraphExec
from msplit.inputs.make import make_inputs
from tests.cli.runner import SAMPLES
from tests.engines.cuda.cases import job

CPU = torch.device("cpu")


@pytest.fixture
def pair():
    return Device(CPU), Device(CPU)


def test_there_is_one_object_of_each_device():
    assert Device.of(CPU) is Device.of(torch.device("cpu"))
    assert Device.of(CPU).owned(Tuner) is Tuner.of(CPU)


def test_streams_go_back_to_the_device_that_made_them(pair, monkeypatch):
    made = itertools.count()
    monkeypatch.setattr(
        pools, "new_stream", lambda place, priority: SimpleNamespace(cuda_stream=next(made), priority=priority)
    )
    one, other = pair
    first = one.streams.lease(3)
    one.streams.give_back(first)
    assert not numbers(other.streams.lease(3)) & numbers(first)
    assert numbers(one.streams.lease(4)) > numbers(first)
    urgent = one.streams.lease(2, -1)
    assert {stream.priority for stream in urgent} == {-1}
    one.streams.give_back(urgent)
    assert not numbers(one.streams.lease(3)) & numbers(urgent), "each priority has streams of its own"
    assert numbers(one.streams.lease(2, -1)) == numbers(urgent)


def numbers(streams):
    return {stream.cuda_stream for stream in streams}


def test_counters_of_a_graph_that_is_gone_are_handed_out_again(pair, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    counters = pair[0].semaphores
    counters.supply = torch.zeros(64, dtype=torch.int32)
    first, second = [], []
    with counters.noted(first):
        counters.take(5), counters.take(9)
    with counters.noted(second):
        counters.take(5)
    assert len({one.data_ptr() for one in first + second}) == 3, "as long as a graph is there, its counters are its own"
    before = counters.taken
    counters.give_back(first)
    again = []
    with counters.noted(again):
        counters.take(9), counters.take(5)
    assert {one.data_ptr() for one in again} == {one.data_ptr() for one in first}
    assert counters.taken == before


def test_counters_handed_out_by_one_are_free_on_the_other(pair, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    one, other = pair
    for device in pair:
        device.semaphores.supply = torch.zeros(64, dtype=torch.int32)
    first, second = one.semaphores.take(5), one.semaphores.take(5)
    assert second.storage_offset() == 8, "a multiple of 16 bytes"
    first += 1
    assert not other.semaphores.take(5).any()
    with other.semaphores.lent():
        lent = other.semaphores.take(5)
    assert other.semaphores.take(5).data_ptr() == lent.data_ptr()
    assert (one.semaphores.taken, other.semaphores.taken) == (16, 16)


def test_choices_and_the_time_that_they_take_are_each_devices_own(pair):
    one, other = (device.owned(Tuner) for device in pair)
    one.chosen(FAMILY)["shape"] = "tiles"
    one.spent = 2 * SECONDS
    assert one.is_spent
    assert not other.chosen(FAMILY)
    assert not other.is_spent


def test_what_a_device_owns_is_made_once_and_for_it_alone(pair):
    one, other = pair
    assert one.owned(Memcpy) is one.owned(Memcpy)
    assert one.owned(Memcpy) is not other.owned(Memcpy)


def test_what_is_compiled_of_a_graph_is_kept_by_each_device_until_all_forget_it(pair, monkeypatch):
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    wanted = job(flat, make_inputs(flat, {}, batch=2))
    one, other = pair
    made = []
    for device in (one, other, one):
        monkeypatch.setattr(devices, "_DEVICES", {CPU: device})
        made.append(ENGINE.compile(wanted))
    assert made[0] is made[2]
    assert made[0] is not made[1]
    monkeypatch.setattr(devices, "_DEVICES", {CPU: one, torch.device("cuda", 0): other})
    ENGINE.forget(flat)
    assert not one.compiled
    assert not other.compiled


@pytest.mark.gpu
@pytest.mark.needs_gpus(2)
def test_two_gpus_time_and_capture_on_their_own():
    one, other = (Device.of(torch.device("cuda", index)) for index in (0, 1))
    times = []
    for device in (one, other, one):
        data = torch.ones(1 << 20, device=device.place)
        times.append(device.owned(Tuner).milliseconds(lambda data=data: data + 1, 4))
    assert all(time > 0 for time in times)
    assert torch.cuda.current_device() == 0
    leased = [stream for device in (one, other) for stream in device.streams.lease(2)]
    assert [stream.device.index for stream in leased] == [0, 0, 1, 1]
    assert one.scratch.handle != other.scratch.handle


def test_threads_that_want_one_precision_are_inside_together_and_others_wait():
    """PyTorch has one setting for all of them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    both, seen, stop = threading.Barrier(2, timeout=60), [], threading.Event()

    def work(ieee, barrier=None):
        while not stop.is_set():
            with devices.precision(ieee):
                if barrier is not None:
                    barrier.wait()
                for _ in range(5):
                    with devices.precision(ieee):
                        time.sleep(1e-4)
                    seen.append((ieee, matmul.allow_tf32, cudnn.allow_tf32))
            if barrier is not None:
                return

    pair = [threading.Thread(target=work, args=(True, both)) for _ in range(2)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    assert not both.broken, "two that want the same met inside"
    threads = [threading.Thread(target=work, args=(ieee,)) for ieee in (True, False, True)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert {ieee for ieee, *_ in seen} == {True, False}
    assert all(tf32 == cudnn32 == (not ieee) for ieee, tf32, cudnn32 in seen)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_precision_is_restored_after_an_error_and_inside_of_another():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32

    @devices.precision(ieee=False)
    def fails():
        assert matmul.allow_tf32
        raise KeyError

    with devices.precision(ieee=True):
        with pytest.raises(KeyError):
            fails()
        assert not matmul.allow_tf32
    assert matmul.allow_tf32 == before


def test_who_stands_aside_lets_others_have_their_precision():
    matmul = torch.backends.cuda.matmul
    before, there, seen = matmul.allow_tf32, threading.Event(), []

    def other():
        with devices.precision(ieee=False):
            seen.append(matmul.allow_tf32)
        there.set()

    with devices.precision(ieee=True), devices.precision(ieee=True):
        thread = threading.Thread(target=other)
        thread.start()
        assert not there.wait(0.05)
        with devices.aside():
            assert there.wait(60)
            assert matmul.allow_tf32 == before
        assert not matmul.allow_tf32
    thread.join()
    assert seen == [True]
    assert matmul.allow_tf32 == before
    with devices.aside():
        assert matmul.allow_tf32 == before


def test_what_is_issued_for_a_gpu_that_is_not_the_current_one_goes_there(monkeypatch):
    """The current GPU is the thread's: a pool is driven by whatever thread waits."""
    entered, current = [], [0]

    @contextlib.contextmanager
    def enter(place):
        entered.append(place.index)
        before, current[0] = current[0], place.index
        yield
        current[0] = before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(output_staging, "check", lambda status: None)
    launched = []
    for index in (0, 1):
        device = Device(torch.device("cuda", index))
        assert device.is_current == (index == 0)
        with device.entered():
            assert current == [index]
            assert device.is_current
        graph = GraphExec.__new__(GraphExec)
        graph._device, graph._index, graph._executable = device.place, index, 7
        graph._current = torch._C._cuda_getDevice
        graph._launch_holding = lambda handle, stream: launched.append((current[0], handle, stream))
        graph.start_on(SimpleNamespace(cuda_stream=3))
    assert launched == [(0, 7, 3), (1, 7, 3)]
    assert entered == [1, 1]
    assert Device(torch.device("cpu")).is_current


@pytest.mark.parametrize("fails", ["capture_begin", "capture_end"])
def test_a_capture_that_fails_closes_its_pool(fails, monkeypatch):
    def fail(self, **named):
        raise RuntimeError("operation failed")

    stream, closed = SimpleNamespace(device="cpu", device_index=3), []
    graph = type("Graph", (), {"capture_begin": lambda self, **named: None, "capture_end": lambda self: None})
    setattr(graph, fails, fail)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *what: closed.append(what), raising=False)
    with pytest.raises(RuntimeError, match="operation failed"), capture([stream], (0, 7)):
        pass
    assert closed == [(3, (0, 7))]


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_its_memory_to_the_next():
    scratch, stream, data = ScratchPool(torch.device("cuda", 0)), torch.cuda.Stream(), torch.ones(4, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError), capture([stream], scratch.handle):
            (data + 1).cpu()  # no stream that is captured can be waited for
        with capture([stream], scratch.handle) as graph:
            found = data + 1
        graph.replay()
        torch.cuda.synchronize()
        assert found.tolist() == [2] * 4
