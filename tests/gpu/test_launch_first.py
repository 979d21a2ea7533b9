"""Graphs that are launched before their inputs are copied, on a real GPU: every step has its own inputs, and nothing waits for ever."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.device.device import check, holding
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.dtypes import to_torch
from msplit.engines.cuda.kernels import memory
from msplit.engines.cuda.options import Torture
from msplit.engines.cuda.runtime import input_staging
from msplit.engines.cuda.runtime.executable import CudaExecutable
from msplit.engines.cuda.runtime.memcpy import CAN_POLL
from tests.engines.cuda.cases import flat_of, options_of, scattered, step_then
from tests.engines.cuda.random_graphs import FLOAT, INT32, _Graph
from tests.training_graphs import BATCH, stored

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not CAN_POLL, reason="inputs are copied first"),
]

ROOT = Path(__file__).parents[2]
COLUMNS = 250
ROWS = [530, 588, 1500, 4100]
"""Of 1000 bytes: just above what is copied first, an image of 224 by 224, two of them and some, and just below what goes ahead."""


def net(rows, drawing=False):
    """A large input, one of a row and ids; random numbers on request."""
    made = _Graph(lambda strategy: 0)
    x = made.placeholder("x", [rows, COLUMNS])
    y = made.placeholder("y", [1, COLUMNS])
    ids = made.placeholder("ids", [100], INT32)
    outputs = [
        made.node("Neg", [x], T=FLOAT),
        made.node("Mul", [x, y], T=FLOAT),
        made.node("AddV2", [ids, ids], T=INT32),
    ]
    if drawing:
        shape = made.constant(np.array([7], np.int32))
        outputs.append(made.node("RandomUniform", [shape], T=INT32, dtype=FLOAT, seed=3, seed2=5))
    return flat_of(made.graph_def, outputs=outputs), outputs


def values(rows, number):
    rng = np.random.default_rng(number)
    return {
        "x": rng.standard_normal((rows, COLUMNS)).astype(np.float32),
        "y": rng.standard_normal((1, COLUMNS)).astype(np.float32),
        "ids": rng.integers(0, 99, 100).astype(np.int32),
    }


def assert_gives(outputs, names, feeds, message=""):
    wanted = -feeds["x"], feeds["x"] * feeds["y"], feeds["ids"] * 2
    for name, value in zip(names, wanted, strict=False):
        np.testing.assert_array_equal(outputs[name], value, err_msg=f"{name} {message}")


@pytest.fixture
def build():
    """Makes executables; all are closed at the end."""
    engine, made = CudaEngine(), []

    def one(flat, feeds, streams=1, state=None, **options):
        ids = scattered(flat, streams, streams)
        own = options_of("cuda", **options)
        made.append(
            engine.build(Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=own, state=state or {}))
        )
        return made[-1]

    yield one
    for executable in made:
        executable.close()


def net_of(build, rows=588, **options):
    flat, names = net(rows)
    made = build(flat, values(rows, 0), **options)
    assert made._inputs.input_copy is not None
    return made, names


def captured(made):
    """What replays the graph, below what counts steps."""
    return made if isinstance(made, CudaExecutable) else captured(made.device)


def late(monkeypatch, made, meanwhile):
    """Has something happen once, when the first piece is announced."""
    waiting = made._inputs.input_copy
    announce, todo = waiting.announce, [meanwhile]

    def announcing(last):
        if todo:
            todo.pop()()
        announce(last)

    monkeypatch.setattr(waiting, "announce", announcing)


@pytest.mark.parametrize("size", [256, 8192, 8448, 65_536, 602_112, (1 << 22) - 256])
def test_the_kernel_copies_what_is_announced_and_waits_for_the_rest(size):
    """Launched before, with all, some and nothing of it announced, one launch behind the other."""
    gpu = torch.device("cuda")
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(size, dtype=torch.uint8, device=gpu)
    one = memory.InputCopy(memory.seen_by(gpu, host), target)
    one.issue()  # compiles it
    torch.cuda.synchronize()
    rng = np.random.default_rng(size)
    for step in range(50):
        wanted = rng.integers(0, 256, size).astype(np.uint8)
        host.fill_(step)
        if step % 3 == 0:
            one.announce_all()
            host.numpy()[:] = wanted
            one.issue()
        else:
            one.hold()
            one.issue()
            for first in range(0, size, -(-size // 8)):
                last = min(first + -(-size // 8), size)
                host.numpy()[first:last] = wanted[first:last]
                one.announce(last)
        torch.cuda.synchronize()
        assert not one.gave_up()
        np.testing.assert_array_equal(target.cpu().numpy(), wanted, err_msg=f"launch {step}")
        assert one._counters.tolist() == [0, 0]


def test_the_kernel_gives_up_in_time_says_so_once_and_works_again():
    gpu = torch.device("cuda")
    host = torch.ones(602_112, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(602_112, dtype=torch.uint8, device=gpu)
    one = memory.InputCopy(memory.seen_by(gpu, host), target)
    one.issue()
    torch.cuda.synchronize()
    for announced in (0, 8192, 100_000):
        target.zero_()
        one.hold()
        one.announce(announced)
        torch.cuda.synchronize()
        began = time.perf_counter()
        one.issue()
        torch.cuda.synchronize()
        waited = time.perf_counter() - began
        assert 2e-3 < waited < 0.5, f"{1e3 * waited:.1f} ms"
        assert one.gave_up()
        assert not one.gave_up()
        assert target.eq(1).all()
    one.announce_all()
    one.issue()
    torch.cuda.synchronize()
    assert not one.gave_up()


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_every_step_has_its_own_inputs(build, rows, streams):
    """Arrays, an executable's own buffers, what is not contiguous, tensors and announced batches come one after the other. What was fed is
    written over as soon as its step has returned."""
    torture = Torture(poison=True, delay_cycles=2000, seed=1) if streams > 1 else None
    made, names = net_of(build, rows, streams=streams, torture=torture)
    chance = np.random.default_rng(rows)
    for number in range(150):
        feeds = values(rows, number)
        wanted = {name: value.copy() for name, value in feeds.items()}
        match int(chance.integers(8)):
            case 0:
                for name, value in feeds.items():
                    made.buffers()[name][...] = value
                outputs = made.step(made.buffers())
            case 1:
                outputs = made.step({**feeds, "x": np.asfortranarray(feeds["x"])})
            case 2:
                outputs = made.step({**feeds, "x": to_torch(feeds["x"].copy(), "cuda")})
            case 3:
                outputs = step_then(made, feeds, values(rows, 1000 + number))
            case 4:
                with torch.cuda.stream(torch.cuda.Stream()):
                    outputs = made.step(feeds)
            case _:
                outputs = made.step(feeds)
        for value in feeds.values():
            value[...] = 7
        assert_gives(outputs, names, wanted, f"of step {number}")
    assert made._inputs._given_up < input_staging._MOST_GIVEN_UP, "steps are launched first to the end"


def test_inputs_that_come_slowly_are_waited_for(build, monkeypatch):
    made, names = net_of(build)
    announce = made._inputs.input_copy.announce

    def slowly(last):
        end = time.perf_counter() + 0.3e-3
        while time.perf_counter() < end:
            pass
        announce(last)

    monkeypatch.setattr(made._inputs.input_copy, "announce", slowly)
    for number in range(30):
        feeds = values(588, number)
        assert_gives(made.step(feeds), names, feeds, f"of step {number}")
    assert made._inputs._given_up < 5


def test_a_step_whose_host_was_stopped_is_run_once_more(build, monkeypatch):
    made, names = net_of(build)
    for number in range(3):
        with monkeypatch.context() as patch:
            late(patch, made, lambda: time.sleep(0.3))
            feeds = values(588, number)
            assert_gives(made.step(feeds), names, feeds, f"of step {number}")
        assert made._inputs._given_up == number + 1
    feeds = values(588, 9)
    assert_gives(made.step(feeds), names, feeds)


def test_the_repeated_step_draws_the_same_numbers(build, monkeypatch):
    flat, names = net(588, drawing=True)
    plain, repeated = (build(flat, values(588, 0)) for _ in range(2))
    assert captured(repeated)._inputs.input_copy is not None
    for number in range(4):
        feeds = values(588, number)
        wanted = plain.step(feeds)[names[-1]]
        with monkeypatch.context() as patch:
            late(patch, captured(repeated), lambda: time.sleep(0.3))
            np.testing.assert_array_equal(repeated.step(feeds)[names[-1]], wanted)
    assert captured(repeated)._inputs._given_up == 4


def test_a_thread_that_waits_for_the_gpu_and_holds_the_interpreters_lock_does_not_stop_it(build, monkeypatch):
    """It would wait for the GPU, the GPU for the copy, and the copy for the lock."""
    made, names = net_of(build)
    library = holding()
    assert isinstance(library, ctypes.PyDLL)
    for number in range(3):
        comes = threading.Event()

        def waits(comes=comes):
            with torch.cuda.device(0):
                comes.set()
                check(library.cudaDeviceSynchronize())

        thread = threading.Thread(target=waits)

        def meanwhile(thread=thread, comes=comes):
            thread.start()
            comes.wait()  # lets go of the lock; it is there again when the GPU has done all that was launched

        began = time.perf_counter()
        with monkeypatch.context() as patch:
            late(patch, made, meanwhile)
            feeds = values(588, number)
            assert_gives(made.step(feeds), names, feeds, f"of step {number}")
        thread.join()
        assert time.perf_counter() - began < 5


def test_a_busy_thread_is_no_danger(build):
    """Python's own: it takes the lock wherever it may."""
    made, names = net_of(build)
    stop = threading.Event()

    def works():
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=works) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(50):
            feeds = values(588, number)
            assert_gives(made.step(feeds), names, feeds, f"of step {number}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("lost", [False, True])
def test_ctrl_c_between_launch_and_copy_leaves_it_usable(build, monkeypatch, lost):
    """With `lost` it comes once more, at the announcement in the end: then the GPU gives up by itself."""
    made, names = net_of(build)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for number in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(input_staging, "copy_holding", interrupted)
            if lost:
                patch.setattr(made._inputs.input_copy, "announce_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.step(values(588, 100 + number))
        if number % 2:
            began = time.perf_counter()
            torch.cuda.synchronize()
            assert time.perf_counter() - began < 1
        feeds = values(588, number)
        outputs = step_then(made, feeds, feeds) if number == 4 else made.step(feeds)
        assert_gives(outputs, names, feeds, f"of step {number}")


def test_what_is_refused_launches_nothing(build):
    made, names = net_of(build)
    number = made._outputs._output_copy.number
    before = number[0]
    for wrong in ({"x": np.zeros((1, COLUMNS), np.float32)}, {"ids": np.zeros(100)}, {"y": None}):
        with pytest.raises(Exception, match="input"):
            made.step({**values(588, 0), **wrong})
    torch.cuda.synchronize()
    assert number[0] == before
    feeds = values(588, 1)
    assert_gives(made.step(feeds), names, feeds)


def test_several_executables_wait_at_once(build):
    every = [net_of(build, rows, streams=2) for rows in (530, 588, 588, 1500)]

    def steps(at):
        made, names = every[at]
        rows = (530, 588, 588, 1500)[at]
        with torch.cuda.stream(torch.cuda.Stream()):
            for number in range(100):
                feeds = values(rows, 1000 * at + number)
                assert_gives(made.step(feeds), names, feeds, f"of step {number}")

    with ThreadPoolExecutor(len(every)) as pool:
        list(pool.map(steps, range(len(every))))


def test_one_thread_begins_several_and_then_ends_them(build):
    every = [net_of(build, rows) for rows in (588, 1500)]
    for number in range(30):
        feeds = [values(rows, number) for rows in (588, 1500)]
        streams = [torch.cuda.Stream() for _ in every]
        for (made, _), fed, stream in zip(every, feeds, streams, strict=True):
            with torch.cuda.stream(stream):
                assert made.begin(fed)
        for (made, names), fed, stream in zip(every, feeds, streams, strict=True):
            with torch.cuda.stream(stream):
                assert_gives(made.end(), names, fed)


def test_who_writes_variables_copies_first(build, monkeypatch):
    """A step that is run once more would write them twice."""
    monkeypatch.setattr(input_staging, "_FIRST_BYTES", 1)
    monkeypatch.setattr(input_staging, "_ENGINE_BYTES", 0)
    flat, training = stored("deepfm", "Adam", "resource")
    made = build(flat, training.feeds(BATCH, 0), state=training.state())
    assert captured(made)._inputs.input_copy is None
    other, _ = net_of(build, 1)
    assert other._inputs.input_copy is not None


def test_without_capture_or_own_kernels_inputs_are_copied_first(build):
    flat, names = net(588)
    for options in ({"capture": False}, {"measure": False}):
        made = build(flat, values(588, 0), **options)
        assert made._inputs.input_copy is None
        feeds = values(588, 1)
        assert_gives(made.step(feeds), names, feeds)


def test_the_switch_for_benchmarks(build, monkeypatch):
    monkeypatch.setattr(input_staging, "LAUNCH_FIRST", False)
    flat, names = net(588)
    made = build(flat, values(588, 0))
    assert made._inputs.input_copy is None
    for number in range(3):
        feeds = values(588, number)
        assert_gives(made.step(feeds), names, feeds)


OPEN = """
import gc, json, sys
import numpy as np
import msplit
from msplit.engines.cuda.runtime.executable import CudaExecutable

with msplit.open(sys.argv[1]) as runner:
    feeds = dict(np.load(sys.argv[2]))
    first = runner.step(feeds)
    for number in range(20):
        other = {name: np.roll(value, number, axis=0) for name, value in feeds.items()}
        for name, value in runner.step(other).items():
            np.testing.assert_allclose(value, np.roll(first[name], number, axis=0), rtol=1e-2, atol=1e-3)
    again = runner.step(feeds)
    assert all(np.array_equal(again[name], value) for name, value in first.items())
    made = [one for one in gc.get_objects() if isinstance(one, CudaExecutable)]
    print(json.dumps(["triton" in sys.modules, any(one._inputs.input_copy is not None for one in made)]))
"""


def test_an_opened_build_launches_first_without_a_compiler(tmp_path):
    import msplit

    # Tests keep no choices and no kernels; a build has those that it was made with.
    request = {"streams": (4,), "engine": "cuda", "batch": 4096}
    msplit.build(ROOT / "sample_graphs" / "mmoe_small.pb", tmp_path / "build", **request)
    with msplit.open(tmp_path / "build") as runner:
        rng = np.random.default_rng(0)
        feeds = {name: rng.standard_normal(value.shape).astype(value.dtype) for name, value in runner.buffers.items()}
    assert sum(value.nbytes for value in feeds.values()) >= input_staging._FIRST_BYTES
    np.savez(tmp_path / "feeds.npz", **feeds)
    hidden = tmp_path / "hidden" / "triton"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join([str(hidden.parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CC": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    command = [sys.executable, "-c", OPEN, str(tmp_path / "build"), str(tmp_path / "feeds.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False, True]
