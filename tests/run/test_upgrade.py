"""What was made ready in a hurry runs at once; what was prepared in full takes over between two steps, or nothing changes."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import msplit
from msplit.core.arguments import Precision
from msplit.engines.base import Executable
from msplit.engines.tensors import as_tensors
from msplit.errors import EngineError, MsplitError
from msplit.progress import phase
from msplit.run import prepare as execution
from msplit.run import upgrade
from msplit.run.runner import FairLock, Runner
from msplit.run.upgrade import Inputs, start_improving
from msplit.verify.results import Settings
from tests import forked
from tests.leftovers import Leftovers

ROOT = Path(__file__).parents[2]
SIMULATED = {"streams": (1, 4), "engine": "cuda", "device": "cpu", "batch": 8}
LONG = 120
"""Seconds after which something hangs."""


class Adds(Executable):
    """Stands in for an executable: counts its steps, as random ops do, and can be too slow or wrong."""

    keeps_state = True

    def __init__(self, amount=1.0, seconds=None, check=lambda: None):
        self.amount, self.seconds, self.check = amount, seconds, check
        self.count, self.closed = 0, False

    def step(self, feeds):
        self.check()
        assert not self.closed
        self.count += 1
        return {"y": np.asarray(feeds["x"]) + self.amount, "count": np.asarray(self.count)}

    def device_times(self, count):
        self.check()
        assert not self.closed
        return None if self.seconds is None else [self.seconds] * count

    def save_state(self):
        return {"count": np.asarray(self.count)}

    def load_state(self, state):
        self.count = int(state["count"])

    def close(self):
        self.closed = True


X = {"x": np.zeros(3)}
INPUTS = Inputs(lambda seed: {"x": np.arange(3.0) + seed}, Settings(verify_inputs=3), Precision.IEEE, {}, "cpu")


def ready(label, executable):
    feeds = {"x": np.zeros(3)}
    return Runner(label, "cuda", "", {"x": ("float64", (3,))}, feeds, ("y",), (), (), {"label": label}, executable)


def runner_of(fast, prepare):
    found = ready("fast", fast)
    start_improving(found, prepare)
    return found


def test_what_is_faster_takes_over_between_two_steps_and_goes_on_where_the_first_was():
    inside = []

    def check():  # nobody else is in a step of the same runner
        inside.append(1)
        time.sleep(1e-4)
        assert len(inside) == 1
        inside.pop()

    go = threading.Event()
    fast, better = Adds(1.0, 4e-3, check), Adds(1.0, 1e-3)

    def prepare():
        assert go.wait(LONG)
        return ready("better", better), INPUTS

    runner = runner_of(fast, prepare)
    counts = [runner.step(X)["count"].item() for _ in range(5)]
    assert (runner.label, runner.improved.done()) == ("fast", False)
    go.set()
    while not runner.improved.done():
        counts.append(runner.step(X)["count"].item())
    found = runner.improved.result(LONG)
    counts += [runner.step(X)["count"].item() for _ in range(5)]
    assert counts == list(range(1, len(counts) + 1)), "every step once, whoever ran it"
    assert (found.label, found.taken, found.gain) == ("better", True, 4.0)
    assert (runner.label, runner.facts, runner.executable) == ("better", {"label": "better"}, better)
    assert [(one.against, one.inputs, one.passed) for one in runner.checks] == [("fast, with effort fast", 3, True)]
    assert fast.closed
    runner.close()
    assert better.closed


@pytest.mark.parametrize("slower", [4e-3, 1e-3])
def test_what_is_no_faster_is_closed_and_the_first_goes_on(slower):
    fast, better = Adds(1.0, 1e-3), Adds(1.0, slower)
    runner = runner_of(fast, lambda: (ready("better", better), INPUTS))
    found = runner.improved.result(LONG)
    taken = slower == 1e-3
    assert (found.taken, found.label, runner.label) == (taken, *(["better" if taken else "fast"] * 2))
    assert (fast.closed, better.closed) == (taken, not taken)
    runner.close()


def test_without_a_device_nothing_is_timed_and_it_takes_over():
    runner = runner_of(Adds(), lambda: (ready("better", Adds()), INPUTS))
    found = runner.improved.result(LONG)
    assert (found.taken, found.before_us, found.gain, runner.label) == (True, None, None, "better")
    runner.close()


def test_other_outputs_than_the_firsts_are_refused_with_one_warning():
    fast, wrong = Adds(1.0, 4e-3), Adds(1.5, 1e-3)
    runner = runner_of(fast, lambda: (ready("better\x1b[2J", wrong), INPUTS))
    problem = runner.improved.exception(LONG)
    assert isinstance(problem, EngineError)
    assert "gives other outputs than fast" in str(problem)
    assert wrong.closed
    assert not fast.closed
    with pytest.warns(RuntimeWarning, match="fast goes on, prepared with effort fast") as said:
        assert runner.step(X)["y"].tolist() == [1, 1, 1]
    (text,) = [str(one.message) for one in said]
    assert "\x1b" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.step(X)
    runner.close()
    assert fast.closed


def test_whatever_goes_wrong_the_first_goes_on():
    def prepare():
        raise KeyError("a bug")

    runner = runner_of(Adds(), prepare)
    assert isinstance(runner.improved.exception(LONG), KeyError)
    with pytest.warns(RuntimeWarning, match="a bug"):
        runner.step(X)
    runner.close()


def test_an_error_holds_nothing_that_was_made():
    class Large:
        pass

    held = []

    def fails():
        one = Large()
        held.append(weakref.ref(one))
        raise KeyError("a bug")

    def prepare():
        try:
            fails()
        except KeyError as problem:
            raise EngineError("no memory") from problem

    def wrong():
        one = ready("better", Adds(2.0))
        held.append(weakref.ref(one.executable))
        return one, INPUTS

    fast = Adds()
    runner = runner_of(fast, prepare)
    assert isinstance(runner.improved.exception(LONG), EngineError)
    runner._thread.join(LONG)
    other = runner_of(fast, wrong)
    assert isinstance(other.improved.exception(LONG), EngineError)
    other._thread.join(LONG)
    gc.collect()
    assert [one() for one in held] == [None, None]
    runner.close()
    other.close()


def test_what_is_compared_is_given_where_steps_run():
    """Tensors of the host would be copied into the buffers, which the caller may just have filled: steps gave others' outputs."""
    pytest.importorskip("torch")
    found = as_tensors({"x": np.ones(3), "word": np.array(["a"])}, "meta")
    assert found["x"].is_meta
    assert isinstance(found["word"], np.ndarray)


def test_who_fills_the_buffers_is_not_disturbed_by_what_is_compared():
    pytest.importorskip("torch")

    class Pinned(Adds):
        """Arrays are copied to a place that the caller fills, too, as a real executable does."""

        def step(self, feeds):
            if isinstance(feeds["x"], np.ndarray):
                buffers["x"][...] = feeds["x"]
                feeds = buffers
            return super().step({"x": np.asarray(feeds["x"])})

    buffers = {"x": np.full(3, 7.0)}
    runner = runner_of(Pinned(1.0, 4e-3), lambda: (ready("better", Adds(1.0, 1e-3)), INPUTS))
    assert runner.improved.result(LONG).taken
    assert runner.step(buffers)["y"].tolist() == [8, 8, 8]
    runner.close()


@pytest.mark.parametrize("how", ["close", "cancel"])
@pytest.mark.parametrize("when", ["waiting", "preparing", "comparing"])
def test_it_is_given_up_at_the_next_phase_and_nothing_is_left(how, when):
    begun, gone = threading.Event(), []
    fast, better = Adds(), Adds(check=begun.set)

    def prepare():
        if when == "preparing":
            begun.set()
            try:
                while True:
                    with phase("something"):
                        time.sleep(1e-3)
            finally:
                gone.append("preparing")
        return ready("better", better), replace(INPUTS, settings=Settings(verify_inputs=10**9))

    with upgrade.one_at_a_time() if when == "waiting" else nothing():
        runner = runner_of(fast, prepare)
        if when != "waiting":
            assert begun.wait(LONG)
        assert not runner.improved.done()
        if how == "cancel":
            assert runner.improved.cancel()
            assert runner.step(X)["y"].tolist() == [1, 1, 1]
            runner._thread.join(LONG)
            assert not fast.closed
        runner.close()
    assert fast.closed
    assert not runner._thread.is_alive()
    assert gone == (["preparing"] if when == "preparing" else [])
    assert better.closed == (when == "comparing")
    with pytest.raises(CancelledError):
        runner.improved.result(LONG)
    assert sys.getswitchinterval() == pytest.approx(5e-3)


@contextmanager
def nothing():
    yield


def test_a_process_ends_although_something_is_improved():
    code = """
import time
from msplit.progress import phase
from tests.run.test_upgrade import *
def prepare():
    while True:
        with phase("something"):
            time.sleep(1e-3)
runner_of(Adds(), prepare).step(X)
print("over")
"""
    command = [sys.executable, "-c", code]
    done = forked.run(command, server=forked.TENSORFLOW, capture_output=True, text=True, cwd=ROOT, timeout=LONG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_who_takes_a_lock_again_and_again_keeps_nobody_from_it():
    lock, order = FairLock(), []

    def waits():
        with lock:
            order.append("who waited")

    for _ in range(20):
        with lock:
            thread = threading.Thread(target=waits)
            thread.start()
            end = time.monotonic() + 5
            while not lock._gate.locked() and time.monotonic() < end:
                time.sleep(1e-4)
        with lock:
            order.append("who had it")
        thread.join()
    assert order == ["who waited", "who had it"] * 20
    assert lock.count == 60


def test_threads_that_prepare_in_full_take_turns():
    inside, most = [], []

    def prepare():
        with upgrade.one_at_a_time():
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


def test_who_is_in_a_hurry_goes_first():
    done = [0]

    def prepare():
        while True:
            with phase("something"):
                done[0] += 1

    runner = runner_of(Adds(), prepare)
    for _ in range(3):
        with upgrade.hurrying():
            time.sleep(0.05)  # a phase may have begun
            before = done[0]
            time.sleep(0.05)
            assert done[0] <= before + 1
            assert runner.step(X)["y"].tolist() == [1, 1, 1]
        end = time.monotonic() + LONG
        while done[0] == before and time.monotonic() < end:
            time.sleep(1e-3)
        assert done[0] > before
    with upgrade.hurrying():
        runner.close()
    assert not runner._thread.is_alive()


def test_steps_in_between_are_told_to_what_is_measured():
    tuner = pytest.importorskip("msplit.engines.cuda.autotune.tuner")
    begun, go, seen = threading.Semaphore(0), threading.Semaphore(0), []

    def prepare():
        for _ in range(2):
            before = tuner._busy.get()()
            begun.release()
            assert go.acquire(timeout=LONG)
            seen.append(tuner._busy.get()() == before)
        raise KeyError

    runner = runner_of(Adds(), prepare)
    assert begun.acquire(timeout=LONG)
    go.release()
    assert begun.acquire(timeout=LONG)
    runner.step(X)
    go.release()
    runner._thread.join(LONG)
    runner.close()
    assert seen == [True, False]


@pytest.fixture(scope="module")
def mmoe():
    return msplit.load(ROOT / "sample_graphs" / "mmoe_small.pb")


def feeds_of(flat, seed):
    from msplit.inputs.make import make_inputs

    return make_inputs(flat, {}, batch=8, seed=seed)


def check(runner, flat, seeds=(11, 12)):
    from msplit.engines.tensorflow.engine import reference

    for seed in seeds:
        feeds = feeds_of(flat, seed)
        for found in (runner.step(feeds), filled(runner.buffers, feeds, runner)):
            for name, value in reference(flat, feeds).items():
                np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-5)


def filled(buffers, feeds, runner):
    for name, value in feeds.items():
        buffers[name][...] = value
    return runner.step(buffers)


@pytest.mark.tf
def test_a_model_is_ready_with_little_effort_and_better_later(mmoe):
    pytest.importorskip("torch")
    with upgrade.one_at_a_time():  # it waits until all that is below was seen
        runner = msplit.prepare(mmoe, **SIMULATED, improve=True)
        assert "fused" not in runner.label
        assert any("effort fast" in note for note in runner.notes)
        assert not runner.improved.done()
        first, buffers = runner.label, runner.buffers
        check(runner, mmoe)
    assert runner.improved.result(LONG).taken
    assert runner.label == runner.improved.result().label
    assert runner.label.endswith("fused and grouped")
    assert not any("effort fast" in note for note in runner.notes)
    assert {"TensorFlow on the CPU", f"{first}, with effort fast"} <= {one.against for one in runner.checks}
    assert all(one.passed for one in runner.checks)
    assert runner.buffers is buffers
    check(runner, mmoe)
    assert {one.phase for one in runner.preparation.phases} > {"fusing pointwise ops"}
    runner.close()


@pytest.mark.tf
def test_what_it_made_is_closed_when_it_is_given_up(mmoe, monkeypatch):
    pytest.importorskip("torch")
    from msplit.engines.cuda.engine import ENGINE as CUDA

    made, closed, begun, leftovers = [], [], threading.Event(), Leftovers()
    build = CUDA.build

    def watched(job):
        executable = build(job)
        close = executable.close
        monkeypatch.setattr(executable, "close", lambda: closed.append(executable) or close(), raising=False)
        made.append(executable)
        if len(made) > 2:
            begun.set()
        return executable

    monkeypatch.setattr(CUDA, "build", watched)
    runner = msplit.prepare(mmoe, **SIMULATED, improve=True)
    assert begun.wait(LONG)
    runner.close()
    assert set(map(id, made)) == set(map(id, closed))
    assert "msplit-improve" not in leftovers.threads()


@pytest.mark.tf
def test_numbers_drawn_go_on_where_they_were():
    pytest.importorskip("torch")
    from tests.engines.cuda.cases import graph_of

    def model(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        tf.add(x, v1.random_uniform(tf.shape(x), seed=3), name="y")

    flat, feeds = graph_of(model, outputs=["y"]), {"x": np.ones((8, 2), np.float32)}
    request = dict(SIMULATED, streams=(1,))
    with msplit.prepare(flat, **dict(request, effort="fast")) as plain:
        wanted = [plain.step(feeds)["y"] for _ in range(4)]
    with upgrade.one_at_a_time():
        runner = msplit.prepare(flat, **request, improve=True)
        found = [runner.step(feeds)["y"] for _ in range(2)]
    assert runner.improved.result(LONG).taken
    found += [runner.step(feeds)["y"] for _ in range(2)]
    runner.close()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.tf
def test_tensorflow_is_not_improved_and_says_so(mmoe):
    leftovers = Leftovers()
    with msplit.prepare(mmoe, **dict(SIMULATED, engine="tensorflow"), improve=True) as runner:
        assert runner.improved is None
        assert any("improve is for the cuda engine" in note for note in runner.notes)
        assert leftovers.threads() == []
        check(runner, mmoe)


def test_what_it_can_not_improve_is_refused(mmoe):
    with pytest.raises(MsplitError, match="improve excludes variant: it chooses what runs"):
        msplit.prepare(mmoe, **SIMULATED, improve=True, variant="msplit, 1 stream, CUDA graph")
    with pytest.raises(MsplitError, match="improve excludes capture=False"):
        msplit.prepare(mmoe, **dict(SIMULATED, capture=False), improve=True)


@pytest.mark.tf
def test_a_compiled_function_is_improved_and_its_folder_goes_last(monkeypatch):
    pytest.importorskip("torch")
    from msplit.run import function

    folders, leftovers = [], Leftovers()
    make = function.export

    def watched(*arguments, **options):
        folders.append(arguments[-1])
        return make(*arguments, **options)

    monkeypatch.setattr(function, "export", watched)
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    request = {"engine": "cuda", "device": "cpu"}
    x = np.ones((2, 3), np.float32)
    with msplit.compile(lambda x: np.float32(2) * (x @ weight), **request, improve=True) as fast:
        np.testing.assert_allclose(fast(x), 2 * (x @ weight), rtol=1e-5)
        (runner,) = fast.runners
        assert runner.improved.result(LONG).taken
        np.testing.assert_allclose(fast(x), 2 * (x @ weight), rtol=1e-5)
        fast(x[:1])
        assert all(folder.exists() for folder in folders)
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    assert "msplit-improve" not in leftovers.threads()


def test_only_who_prepares_in_full_waits(monkeypatch):
    """Little effort times nothing, and is ready at once although others are at it."""
    held = []

    def made(*arguments, **named):
        held.append(upgrade._alone.locked())
        return SimpleNamespace(runner=None, setup=SimpleNamespace(job=SimpleNamespace(flat=None)))

    monkeypatch.setattr(execution, "make_ready", made)
    monkeypatch.setattr(execution.CUDA, "forget", lambda flat: None, raising=False)
    monkeypatch.setattr(execution, "_with_rows", lambda ready: ready.runner)
    with upgrade.one_at_a_time():
        msplit.prepare("model.pb", effort="fast")
    msplit.prepare("model.pb")
    msplit.prepare("model.pb", effort="fast")
    assert held == [True, True, False]
