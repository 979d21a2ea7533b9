"""Copies on the host: every byte arrives, and other processes that want the processors do not make them wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from msplit.engines.cuda import host_copy

LARGE = host_copy._SHARED_BYTES


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128", ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, LARGE + 17])
def test_every_byte_arrives(dtype, size):
    values = np.random.default_rng(size).integers(0, 200, size).astype(np.uint8)
    values = np.resize(values, size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize).view(np.uint8)
    source = (values & 1).view(bool) if dtype == "bool" else values.view(dtype)
    target = np.zeros_like(source)
    host_copy.copy(source, target)
    assert target.tobytes() == source.tobytes()
    found = host_copy.copy_of(source)
    assert found.tobytes() == source.tobytes()
    assert not np.shares_memory(found, source)
    assert found.flags.writeable


def test_large_arrays_that_are_turned_or_frozen_arrive():
    values = np.arange(LARGE // 4, dtype=np.float32).reshape(1024, -1)
    frozen = np.broadcast_to(values, values.shape)
    for source in (np.asfortranarray(values), frozen, frozen[::-1]):
        target = np.zeros_like(values)
        host_copy.copy(source, target)
        np.testing.assert_array_equal(target, source)


def test_threads_that_copy_at_once_do_not_mix_their_arrays():
    sources = [np.full(LARGE, number, np.uint8) for number in range(4)]
    targets = [np.zeros_like(source) for source in sources]
    threads = [
        threading.Thread(target=host_copy.copy, args=pair)
        for _ in range(3)
        for pair in zip(sources, targets, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((target == number).all() for number, target in enumerate(targets))


def copy_in_child():
    source = np.ones(LARGE, np.uint8)
    os._exit(0 if host_copy.copy_of(source).all() else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_copies_too():
    host_copy.copy_of(np.ones(LARGE, np.uint8))  # the helpers run
    child = multiprocessing.get_context("fork").Process(target=copy_in_child)
    child.start()
    child.join(30)
    assert child.exitcode == 0


def test_busy_processors_do_not_stretch_a_copy():
    """A slice of the scheduler's time is 3 ms or more; a copy of 1 MB takes a few hundredths of that, and must not wait for one."""
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.3)
        ours, plain = [], []
        for _ in range(200):
            for times, way in ((ours, host_copy.copy), (plain, lambda given, place: np.copyto(place, given))):
                start = time.perf_counter()
                way(source, target)
                times.append(time.perf_counter() - start)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert np.median(ours) < 3 * np.median(plain) + 100e-6
