"""Copies on the host: every byte arrives, and other processes that want the processors do not make them wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.runtime import memcpy
from tests import forked
from tests.campaign import sampled

LARGE = memcpy._SHARED_BYTES
MEMCPY = memcpy.Memcpy(Device(torch.device("cpu")))


@pytest.fixture(autouse=True, params=["native", "python"])
def threads(request, monkeypatch):
    """Both ways to copy by several threads: those of C, and Python's own, which copy where the others were not compiled."""
    if request.param == "python":
        monkeypatch.setattr(memcpy, "native_threads", lambda: None)
    elif memcpy.native_threads() is None:
        pytest.skip("no C compiler has made copy_threads.native: python hatch_build.py says why")
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, LARGE + 17])
def test_every_byte_arrives(dtype, size):
    values = np.random.default_rng(size).integers(0, 200, size).astype(np.uint8)
    values = np.resize(values, size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize).view(np.uint8)
    source = (values & 1).view(bool) if dtype == "bool" else values.view(dtype)
    target = np.zeros_like(source)
    MEMCPY.copy(source, target)
    assert target.tobytes() == source.tobytes()
    found = MEMCPY.copy_of(source)
    assert found.tobytes() == source.tobytes()
    assert not np.shares_memory(found, source)
    assert found.flags.writeable


@sampled(
    12,
    size=[16, 1 << 18, (1 << 18) + 48, 1 << 20, (1 << 20) + 16, 5 << 20, LARGE, LARGE + 112, 5 * LARGE],
    dtype=[np.uint8, np.complex128],
    processors=[1, 2, 16],
)
def test_each_piece_is_told_of_once_when_it_is_there_by_the_thread_that_asked(monkeypatch, dtype, size, processors):
    monkeypatch.setattr(memcpy, "cores", lambda: processors)
    source = np.random.default_rng(size).integers(0, 200, size).astype(np.uint8).view(dtype)
    target = np.zeros_like(source)
    wanted, seen = source.view(np.uint8), target.view(np.uint8)
    told = []

    def tell(first, last):
        assert threading.current_thread() is threading.main_thread()
        assert np.array_equal(wanted[first:last], seen[first:last])
        told.append((first, last))

    MEMCPY.copy(source, target, tell)
    told.sort()
    assert [first for first, _ in told] == [0, *(last for _, last in told[:-1])]
    assert told[-1][1] == size
    assert len(told) > 1 or size == target.itemsize
    assert max(last - first for first, last in told) <= memcpy._LARGEST_PIECE


@pytest.mark.parametrize(
    ("megabytes", "processors", "helpers"),
    [(8, 16, 1), (15, 16, 1), (16, 16, 2), (64, 16, 5), (64, 4, 3), (64, 1, 1), (600, 16, 11), (600, 64, 11)],
)
def test_larger_arrays_have_more_helpers_as_long_as_there_are_processors(monkeypatch, megabytes, processors, helpers):
    monkeypatch.setattr(memcpy, "cores", lambda: processors)
    assert memcpy._helpers(megabytes << 20) == helpers


@pytest.mark.parametrize("examples", [1, 3, 12])
def test_an_array_that_is_not_contiguous_comes_example_by_example(monkeypatch, examples):
    monkeypatch.setattr(memcpy, "cores", lambda: 16)
    images = np.random.default_rng(0).random((examples, 3, 512, 700), np.float32)
    source, target = np.moveaxis(images, 1, -1), np.zeros((examples, 512, 700, 3), np.float32)
    wanted, told = np.ascontiguousarray(source).view(np.uint8).reshape(-1), []

    def tell(first, last):
        assert np.array_equal(wanted[first:last], target.view(np.uint8).reshape(-1)[first:last])
        told.append((first, last))

    MEMCPY.copy(source, target, tell)
    told.sort()
    assert [first for first, _ in told] == [0, *(last for _, last in told[:-1])]
    assert told[-1][1] == target.nbytes
    assert len(told) == examples


def test_large_arrays_that_are_turned_or_frozen_arrive():
    values = np.arange(LARGE // 4, dtype=np.float32).reshape(1024, -1)
    frozen = np.broadcast_to(values, values.shape)
    for source in (np.asfortranarray(values), frozen, frozen[::-1]):
        target = np.zeros_like(values)
        MEMCPY.copy(source, target)
        np.testing.assert_array_equal(target, source)


def test_threads_that_copy_at_once_do_not_mix_their_arrays():
    sources = [np.full(LARGE, number, np.uint8) for number in range(4)]
    targets = [np.zeros_like(source) for source in sources]
    threads = [
        threading.Thread(target=MEMCPY.copy, args=pair) for _ in range(3) for pair in zip(sources, targets, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((target == number).all() for number, target in enumerate(targets))


def copy_in_child():
    source = np.ones(LARGE, np.uint8)
    os._exit(0 if MEMCPY.copy_of(source).all() else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_too():
    MEMCPY.copy_of(np.ones(LARGE, np.uint8))  # the helpers run
    child = multiprocessing.get_context("fork").Process(target=copy_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0


# The calling thread has a processor almost for itself; helpers, if there are any, start on another one that many processes want.
BUSY = """
import os, subprocess, sys, time
processors = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {processors[-1]})
import numpy as np
import torch
torch.set_num_threads(4)
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.runtime import memcpy
from tests.campaign import sampled

def times(way, size, count):
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    found = []
    for _ in range(count):
        start = time.perf_counter()
        way(source, target)
        found.append(time.perf_counter() - start)
    return np.quantile(found, 0.75)

def plain(source, target):
    np.copyto(target, source)

copier = memcpy.Memcpy(Device(torch.device("cpu")))
sizes = 1 << 20, memcpy._SHARED_BYTES
for size in sizes:
    times(copier.copy, size, 3)  # starts the helpers
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
os.sched_setaffinity(0, {processors[0]})
try:
    time.sleep(0.3)
    for size, count in zip(sizes, (200, 10)):
        print(times(copier.copy, size, count), times(plain, size, count))
finally:
    for process in busy:
        process.kill()
"""


@pytest.mark.idle
@pytest.mark.parametrize("threads", ["native"], indirect=True)
def test_busy_processors_do_not_stretch_a_copy():
    """A slice of the scheduler's time is 3 ms or more, and comes after those of four others; a copy of 1 MB does not wait for one."""
    done = forked.run([sys.executable, "-c", BUSY], server=forked.ENGINE, capture_output=True, text=True, check=True)
    (ours, plain), (ours_large, plain_large) = (
        [float(time) for time in line.split()] for line in done.stdout.splitlines()
    )
    assert ours < 3 * plain + 0.2e-3, done.stdout
    assert ours_large < 3 * plain_large + 100e-3, done.stdout
