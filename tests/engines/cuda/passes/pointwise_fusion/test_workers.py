"""Processes that compile ahead: every group is compiled once, whatever becomes of them, and nothing of them is left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msplit.engines.cuda.device import device as devices
from msplit.engines.cuda.device.device import Device, precision
from msplit.engines.cuda.passes.pointwise_fusion import fuse, workers
from msplit.engines.cuda.passes.pointwise_fusion.fuse import Compiler, Kernel, layout
from msplit.engines.cuda.passes.pointwise_fusion.outline import Body, Call
from msplit.engines.cuda.passes.pointwise_fusion.workers import BUSY, DONE, Workers
from tests import forked
from tests.campaign import CAMPAIGN, campaign
from tests.engines.cuda.cases import CPU, run
from tests.engines.cuda.passes.pointwise_fusion.test_inductor import X, call, cell, fused

numbers = st.integers() | st.floats(allow_nan=True)
attrs = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
arrays = st.lists(st.integers(-9, 9), max_size=4).flatmap(
    lambda values: st.sampled_from(["int32", "int64", "float32", "bool"]).map(lambda name: np.array(values, name))
)
references = st.tuples(st.integers(-1, 3), st.integers(0, 3))
calls = st.builds(
    Call,
    st.sampled_from(["Neg", "Sum", "Reshape"]),
    st.dictionaries(st.text(max_size=4), attrs, max_size=3),
    st.lists(references | arrays, max_size=3).map(tuple),
)


@given(st.builds(Body, st.lists(calls, max_size=3).map(tuple), st.integers(0, 4), st.lists(references).map(tuple)))
def test_a_group_is_the_same_after_its_way_through_a_pipe(body):
    again = Body.unpacked(json.loads(json.dumps(body.packed())))
    assert again.key == body.key


def test_what_has_no_form_as_plain_data_is_not_sent():
    with pytest.raises(TypeError, match="complex"):
        Body((Call("Neg", {"alpha": 1j}, (X,)),), 1, ((0, 0),)).packed()


@pytest.mark.parametrize(
    ("cores", "limit", "groups", "gpu", "count"),
    [
        (16, "", 62, True, 8),
        (16, "", 10, True, 5),
        (4, "", 62, True, 3),
        (1, "", 62, True, 0),
        (16, "", 3, True, 0),
        (16, "", 62, False, 0),
        (16, "0", 62, True, 0),
        (16, "12", 62, True, 12),
        (2, "2", 3, False, 2),
        (16, "4", 1, True, 1),
        (16, "all", 62, True, 8),
    ],
)
def test_how_many_are_started(monkeypatch, cores, limit, groups, gpu, count):
    monkeypatch.setenv(workers.LIMIT, limit)
    monkeypatch.setattr(workers, "cores", lambda: cores)
    assert workers.how_many(groups, gpu=gpu) == count


STAND_IN = """
import os, signal, sys, time
rest = list(sys.argv[1])
sys.stdin.buffer.readline()
if rest[:1] == ["s"]:
    time.sleep(60)
os.write(1, b"\\n")
for line in sys.stdin.buffer:
    what = rest.pop(0) if rest else "."
    if what == "x":
        sys.exit(1)
    if what == "c":
        os.kill(os.getppid(), signal.SIGINT)
    if what in "-c":
        time.sleep(60)
    os.write(1, b"\\n" if what == "." else b"ValueError: no\\n")
"""


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Starts so many workers that answer as they are told: ``.`` done, ``!`` failed; ``x``: they end, ``-``: they say nothing, ``s``: they
    do not start, ``c``: somebody presses Ctrl-C.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started: list[Workers] = []

    def start(count: int, answers: str) -> Workers:
        monkeypatch.setenv(workers.LIMIT, str(count))
        monkeypatch.setattr(workers, "COMMAND", [sys.executable, "-S", "-c", STAND_IN, answers])
        started.append(Workers(Device(CPU)))
        started[-1].start(count)
        for worker in started[-1]._running if not answers.startswith("s") else ():
            assert worker.stdout.readline() == b"\n"
            started[-1]._started.add(worker)
        return started[-1]

    yield start
    for one in started:
        one.stop()
    assert not list(tmp_path.glob("msplit-workers-*"))


def all_of(own: Workers, tasks: list, seconds: float = 30, patience: float = 30) -> list[tuple[int, str]]:
    """What becomes of tasks that nobody but workers does."""
    found, left, stop = [], list(range(len(tasks))), time.monotonic() + patience
    while left and len(own) and time.monotonic() < stop:
        told = [(left[place], said) for place, said in own.each([tasks[number] for number in left], seconds)]
        found += [(number, said) for number, said in told if said != BUSY]
        left = sorted(number for number, said in told if said == BUSY)
        time.sleep(0.02)
    return sorted(found) + [(number, BUSY) for number in left]


@pytest.mark.parametrize("answers", ["", "...", "!", "!!!!!!!!!!", "x", ".x", "..!x"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_task_is_given_back_once_whatever_becomes_of_workers(stand_in, answers, count):
    found = all_of(stand_in(count, answers), [[number] for number in range(10)])
    assert sorted(number for number, _ in found) == list(range(10))
    said = {what for _, what in found}
    assert said <= {DONE, BUSY, "the worker ended", "ValueError: no"}
    if "x" not in answers:
        assert BUSY not in said
        assert [what for _, what in found].count("ValueError: no") == min(count * answers.count("!"), 10)
    elif count == 1:
        assert "the worker ended" in said


def test_what_is_not_done_in_time_is_given_up(stand_in):
    own = stand_in(2, "----")
    began = time.monotonic()
    found = list(own.each(list(range(6)), 0.5))
    assert sorted(found) == [(number, "the worker took too long" if number < 4 else BUSY) for number in range(6)]
    assert time.monotonic() - began < 20
    assert len(own) == 0, "what they say later is no answer to what comes next"
    assert list(own.each([7], 1)) == [(0, BUSY)]


def test_while_workers_are_busy_the_last_tasks_are_left_to_who_asks(stand_in):
    found = stand_in(1, "----").each(list(range(5)), 0.5)
    assert [next(found) for _ in range(3)] == [(4, BUSY), (3, BUSY), (2, BUSY)]


def test_workers_that_have_not_started_are_not_waited_for(stand_in):
    began = time.monotonic()
    assert list(stand_in(2, "s").each([0, 1, 2], 60)) == [(2, BUSY), (1, BUSY), (0, BUSY)]
    assert time.monotonic() - began < 20


def test_workers_that_say_nothing_are_not_waited_for_for_long(stand_in, monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE", 0.3)
    own = stand_in(1, ".-")
    assert list(own.each([0, 1], 60)) == [(0, DONE), (1, "the worker took too long")]


def test_what_a_worker_fails_at_is_compiled_here_and_told(stand_in, monkeypatch):
    own = stand_in(1, "!")
    compiled = []
    monkeypatch.setattr(fuse, "compile_group", lambda body, inputs: (compiled.append(body) or body, 1, False))
    monkeypatch.setattr(devices, "_DEVICES", {})
    monkeypatch.setattr(devices.Device, "owned", lambda self, kind: own if kind is Workers else kind(self))
    done, _ = fused(*cell())
    assert len(compiled) == 1
    assert done.facts()["workers_failed"] == {"ValueError: no": 1}
    assert "compiled_by_workers" not in done.facts()


def ended(pid: int, seconds: float = 10) -> bool:
    """Whether a process that is none of ours ends."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_ctrl_c_leaves_no_worker_behind(stand_in, monkeypatch):
    monkeypatch.setattr(devices, "_DEVICES", {})
    own = stand_in(2, "c")
    monkeypatch.setattr(devices.Device, "owned", lambda self, kind: own if kind is Workers else kind(self))
    # What this process compiles meanwhile takes longer than a loaded machine keeps the signal back.
    monkeypatch.setattr(fuse, "compile_group", lambda body, inputs: time.sleep(20))
    pids = [worker.pid for worker in own._running]
    flat, feeds = cell()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which the test runner's processes ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            run(flat, feeds, fuse=True, compile=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(own) == 0
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)  # not even as a zombie


PARENT = """
import os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-m", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
worker.stdin.write(b'{"scratch": "' + sys.argv[2].encode() + b'"')
worker.stdin.write(b', "wait": true}\\n')
worker.stdin.flush()
print(worker.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_a_worker_ends_when_the_process_that_started_it_is_killed(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-S", "-c", PARENT, workers.COMMAND[-1], str(scratch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        alive = Path(f"/proc/{pid}").exists()
        parent.kill()
    assert alive
    assert ended(pid)
    assert not scratch.exists()


def test_workers_that_can_not_start_change_nothing(stand_in, monkeypatch):
    monkeypatch.setattr(workers.subprocess, "Popen", lambda *args, **options: (_ for _ in ()).throw(OSError("no")))
    assert len(stand_in(2, "")) == 0
    compiled = []
    monkeypatch.setattr(fuse, "compile_group", lambda body, inputs: (compiled.append(body) or body, 1, False))
    flat, feeds = cell()
    monkeypatch.setattr(devices, "_DEVICES", {})
    done, _ = fused(flat, feeds)
    assert done.facts()["fused_groups"] == len(compiled) == 1


@pytest.fixture(params=["as PyTorch has it", "TF32", "IEEE"])
def products(request):
    """How float32 and half precision are multiplied and added up: PyTorch's compiler finds what it has made by that, too."""
    with contextlib.nullcontext() if "PyTorch" in request.param else precision(request.param == "IEEE"):
        yield


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("builds", [1, pytest.param(2, marks=campaign)])
def test_what_workers_compile_is_found_on_the_disk_also_where_two_builds_run_at_once(builds, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(devices, "_DEVICES", {})
    monkeypatch.setenv(workers.LIMIT, "1")
    monkeypatch.setattr(workers, "PATIENCE", 200.0)  # on a busy machine
    if not CAMPAIGN:  # each new one would import PyTorch and its compiler anew
        start = functools.partial(forked.Popen, server=forked.COMPILER, quick=True)
        stand_in = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(workers, "subprocess", stand_in)
    # Not contiguous: PyTorch's key of a tensor that is has the name of the first module that imported it, and pytest loads some before.
    x = torch.linspace(-2, 2, 33).reshape(3, 11).t()
    body = Body((call("MatMul", X, X, transpose_a=True),), 1, ((0, 0),))  # for which no C++ has to be compiled
    running = [Workers(Device(CPU)) for _ in range(builds)]
    try:
        for one in running:
            one.start(1)
        task = [body.packed(), fuse.packed_layouts((layout(x),))]
        assert [all_of(one, [task], 200, 200) for one in running] == builds * [[(0, DONE)]]
    finally:
        for one in running:
            one.stop()
    compiler = Compiler(CPU)
    kernel = compiler.kernel(body, (layout(x),))
    assert isinstance(kernel, Kernel), kernel
    torch.testing.assert_close(kernel(x), body(x))
    assert (compiler.report.compiled, compiler.report.cached) == (1, 1)


def test_what_is_on_the_disk_already_starts_no_worker(stand_in, monkeypatch):
    monkeypatch.setattr(devices, "_DEVICES", {})
    monkeypatch.setattr(fuse, "compile_group", lambda body, inputs: (body, 1, False))
    asked = []
    monkeypatch.setattr(Workers, "start", lambda self, groups: asked.append(groups))
    run(*cell(), fuse=True, compile=True)
    assert set(asked) == {1}
    asked.clear()
    run(*cell(), fuse=True, compile=True)  # another model that is the same
    run(*cell(), fuse=True, compile=False)
    assert not asked
