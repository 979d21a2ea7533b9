"""On a real GPU, a graph that was made in a hurry runs while another is timed, compiled and captured beside it, and gives way to it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import msplit
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.inputs.make import make_inputs
from msplit.run import upgrade

pytestmark = pytest.mark.gpu

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
LONG = 280


def tell(text):
    """For who runs the tests with -s."""
    sys.stderr.write(f"{text}\n")


def request_of(**more):
    return {"streams": (4,), "engine": "cuda", "batch": 16, "precision": "ieee", **more}


@pytest.mark.parametrize(("sample", "batch"), [("mmoe_small.pb", 16), ("keras_inception", 4)])
def test_steps_are_right_before_while_and_after(sample, batch):
    """The caller steps without a pause, from arrays, from the buffers and from tensors, on a stream of its own in the second half."""
    flat = msplit.load(SAMPLES / sample)
    seeds = range(4)
    feeds = [make_inputs(flat, {}, batch=batch, seed=seed) for seed in seeds]
    with msplit.prepare(flat, **request_of(batch=batch, effort="fast")) as plain:
        wanted = [plain.step(one) for one in feeds]
    runner = msplit.prepare(flat, **request_of(batch=batch), improve=True)
    try:
        first, buffers = runner.label, runner.buffers
        there = [{name: torch.from_numpy(value).cuda() for name, value in one.items()} for one in feeds]
        side, count, longest, end = torch.cuda.Stream(), 0, 0.0, time.monotonic() + LONG
        side.wait_stream(torch.cuda.current_stream())

        def check(number):
            seed = number % len(feeds)
            for name, value in feeds[seed].items():
                buffers[name][...] = value
            time.sleep(2e-3)  # what is compared meanwhile leaves them alone
            began = time.perf_counter()
            found = [runner.step(buffers), runner.step(feeds[seed]), runner.step(there[seed])]
            with torch.cuda.stream(side if number % 2 else torch.cuda.current_stream()):
                found.append(
                    {name: value.cpu().numpy() for name, value in runner.step(there[seed], on_device=True).items()}
                )
            took = time.perf_counter() - began
            for one in found:
                for name, value in wanted[seed].items():
                    np.testing.assert_allclose(
                        one[name], value, rtol=1e-3, atol=1e-4, err_msg=f"{name}, {runner.label}"
                    )
            return took

        while not runner.improved.done() and time.monotonic() < end:
            longest, count = max(longest, check(count)), count + 1
        found = runner.improved.result(1)
        for number in range(8):
            check(number)
        tell(
            f"{sample}: {count} rounds of four steps meanwhile, the longest {longest * 1e3:.1f} ms; {first} -> {found}, {found.gain:.2f}x"
        )
        assert count > 3
        assert runner.label == found.label
        assert any("with effort fast" in one.against for one in runner.checks) == found.taken
        assert found.before_us > 0
        assert found.after_us > 0
        assert runner.buffers is buffers
    finally:
        runner.close()


def held():
    """Executables that nobody has closed."""
    gc.collect()
    return sum(isinstance(one, CudaExecutable) and bool(one._streams) for one in gc.get_objects())


@pytest.mark.parametrize("seconds", [0.1, 0.5, 1.5])
def test_it_is_given_up_and_leaves_nothing(seconds):
    flat, before = msplit.load(SAMPLES / "mmoe_small.pb"), held()
    runner = msplit.prepare(flat, **request_of(), improve=True)
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    wanted, end = runner.step(feeds), time.monotonic() + seconds
    while time.monotonic() < end:
        for name, value in runner.step(feeds).items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-3, atol=1e-4)
    began = time.perf_counter()
    runner.close()
    tell(f"closed after {seconds} s in {time.perf_counter() - began:.2f} s")
    assert not runner._thread.is_alive()
    assert held() == before


def test_another_model_is_made_ready_while_one_is_improved():
    """Both capture, and want other precisions: the one in a hurry goes first."""
    one, other = (msplit.load(SAMPLES / name) for name in ("keras_inception", "mmoe_small.pb"))
    feeds = make_inputs(other, {}, batch=16, seed=0)
    with msplit.prepare(one, **request_of(batch=4), improve=True) as runner:
        for precision in ("tf32", "ieee", "tf32"):
            began = time.perf_counter()
            with msplit.prepare(other, **request_of(precision=precision, effort="fast")) as second:
                tell(f"ready after {time.perf_counter() - began:.2f} s; improved meanwhile: {runner.improved.done()}")
                assert all(check.passed for check in second.checks)
                second.step(feeds)
            runner.step(make_inputs(one, {}, batch=4, seed=0))
        assert not runner.improved.done() or runner.improved.exception() is None


def test_a_thread_that_waits_for_the_whole_device_meanwhile():
    """What the caller's own code may do beside it: allocate, launch, and wait for the device. CUDA may refuse the last while a stream is
    captured; then steps go on, and what is being improved is either finished or failed with a warning."""
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    runner = msplit.prepare(flat, **request_of(), improve=True)
    refused, count = [], 0
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    wanted = runner.step(feeds)
    end = time.monotonic() + LONG
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        while not runner.improved.done() and time.monotonic() < end:
            torch.ones(1 << 16, device="cuda").mul_(2)
            try:
                torch.cuda.synchronize()
            except RuntimeError as problem:
                refused.append(str(problem).splitlines()[0])
            count += 1
        for name, value in runner.step(feeds).items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-3, atol=1e-4)
    problem = runner.improved.exception(1)
    tell(
        f"{count} waits for the device, {len(refused)} refused {refused[:1]}; improvement: {problem or runner.improved.result()}"
    )
    assert (problem is not None) == any("goes on, prepared with effort fast" in str(one.message) for one in said)
    runner.close()


def test_a_greedy_caller_keeps_nothing_from_taking_over():
    flat = msplit.load(SAMPLES / "towers_small.pb")
    feeds = make_inputs(flat, {}, batch=16, seed=0)
    with msplit.prepare(flat, **request_of(), improve=True) as runner:
        stop = threading.Event()

        def steps():
            while not stop.is_set():
                runner.step(feeds)

        threads = [threading.Thread(target=steps) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            found = runner.improved.result(LONG)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert found.before_us > 0
        assert not upgrade._alone.locked()
