"""What a process keeps for the next one, and what it does not do at all with little effort, on a real GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

READY = """
import json, sys
from msplit import api
from msplit.engines.cuda.passes.pointwise_fusion.workers import Workers
from msplit.engines.cuda.autotune.timer import CudaTimer

timed = []
replay = CudaTimer.replay_ms
CudaTimer.replay_ms = lambda self, lanes, *, cold: timed.append(1) or replay(self, lanes, cold=cold)
workers = []
start = Workers.start
Workers.start = lambda self, groups: (start(self, groups), workers.append(len(self)))[0]
with api.prepare(sys.argv[1], streams=4, engine="cuda", batch=16, effort=sys.argv[2]) as runner:
    runner.step(dict(runner.buffers))
    facts = {key: value for key, value in runner.facts.items() if isinstance(value, int | str)}
    phases = {one.phase: one.seconds for one in runner.preparation.phases}
    facts |= {"workers": max(workers, default=0), "listed": phases.get("compiling kernels to choose from", 0.0)}
    print(json.dumps([len(timed), "torch._inductor" in sys.modules, runner.label, facts]))
"""


def ready(sample: str, effort: str, cache: Path, **environment: str) -> Any:
    """What a process of its own says of getting a sample ready."""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", READY, str(ROOT / "sample_graphs" / sample), effort]
    every = {**os.environ, "MSPLIT_KEEP_CHOICES": "1", **own, **environment}
    done = subprocess.run(command, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception"])
def test_the_second_process_times_no_kernel_and_runs_the_same(sample: str, tmp_path: Path) -> None:
    timed, _, label, facts = ready(sample, "full", tmp_path)
    again, _, same, others = ready(sample, "full", tmp_path)
    assert timed > 0
    assert again == 0
    # On how many streams is measured anew, and may be noise where they gain nothing.
    assert same.rsplit(", ", 1)[-1] == label.rsplit(", ", 1)[-1]
    assert (others["kernels"], others["layout"]) == (facts["kernels"], facts["layout"])
    anew, *_ = ready(sample, "full", tmp_path, MSPLIT_KEEP_CHOICES="0")
    assert anew > 0


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception", "towers_small.pb"])
def test_with_little_effort_nothing_is_timed_and_no_compiler_is_loaded(sample: str, tmp_path: Path) -> None:
    timed, compiler, label, _ = ready(sample, "fast", tmp_path)
    assert timed == 0
    assert not compiler
    assert "fused" not in label
    assert not list(tmp_path.rglob("choices-*"))


def outputs(sample: str, cache: Path, **environment: str) -> Any:
    """The label and the facts that a process of its own gives."""
    *_, label, facts = ready(sample, "full", cache, **environment)
    return label, facts


SHARED = """
import json, sys, time
import numpy as np
import torch
from msplit.engines.cuda.device import Device
from msplit.engines.cuda.device.device import precision
from msplit.engines.cuda.passes.pointwise_fusion.outline import Body, Call
from msplit.engines.cuda.passes.pointwise_fusion.fuse import Compiler, layout, packed_layouts
from msplit.engines.cuda.passes.pointwise_fusion.workers import BUSY, Workers

X, Y = (-1, 0), (-1, 1)
device = Device.of(torch.device("cuda"))
wanted = []
for number, op in enumerate(["Exp", "Neg", "Softplus", "Tanh", "Sigmoid", "Relu", "Abs", "Floor"]):
    calls = [Call("AddV2", {}, (X, Y)), Call(op, {}, ((0, 0),)), Call("Mul", {}, ((1, 0), Y))]
    outputs = [(2, 0)]
    if number % 2:
        calls.append(Call("Sum", {"keep_dims": True}, ((2, 0), np.array([1], np.int32))))
        outputs.append((3, 0))
    x = torch.randn(4 + number, 6, 5, 8, device="cuda")
    x = x.permute(0, 2, 3, 1) if number % 3 else x
    wanted.append((Body(tuple(calls), 2, tuple(outputs)), (x, torch.randn_like(x))))
workers = Workers(device)
with precision(sys.argv[1] == "ieee"):
    workers.start(len(wanted))
    tasks = [[body.packed(), packed_layouts(tuple(map(layout, inputs)))] for body, inputs in wanted]
    left, said = dict(enumerate(tasks)), []
    while left:  # as long as they start, they leave all to who asks
        numbers = list(left)
        for place, answer in workers.each(list(left.values()), 120):
            if answer != BUSY:
                said.append((numbers[place], answer))
                del left[numbers[place]]
        time.sleep(0.05)
    answers = sorted(said)
    workers.stop()
    compiler = Compiler(device.place)
    worst = 0.0
    for body, inputs in wanted:
        kernel = compiler.kernel(body, tuple(map(layout, inputs)))
        for found, right in zip(kernel(*inputs), body(*inputs)):
            assert found.stride() == right.stride()
            worst = max(worst, float((found - right).abs().max() / right.abs().max()))
print(json.dumps([answers, compiler.report.compiled, compiler.report.cached, worst]))
"""


@pytest.mark.parametrize("how", ["ieee", "tf32"])
def test_what_workers_compile_without_a_gpu_is_what_this_process_finds(how: str, tmp_path: Path) -> None:
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", SHARED, how]
    every = {**os.environ, "MSPLIT_COMPILE_PROCESSES": "4", **own}
    done = subprocess.run(command, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers, compiled, cached, worst = json.loads(done.stdout.splitlines()[-1])
    assert answers == [[number, ""] for number in range(8)]
    assert (compiled, cached) == (8, 8)
    assert worst < 1e-5


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception"])
def test_with_workers_the_same_kernels_run_and_the_next_process_starts_none(sample: str, tmp_path: Path) -> None:
    label, facts = outputs(sample, tmp_path / "alone", MSPLIT_COMPILE_PROCESSES="0")
    assert facts["workers"] == 0
    assert "compiled_by_workers" not in facts
    again, others = outputs(sample, tmp_path / "workers", MSPLIT_COMPILE_PROCESSES="40")
    assert again == label
    if facts.get("compiled", 0):
        assert others["workers"] > 0
        assert "workers_failed" not in others
        assert others["compiled"] == facts["compiled"]
    _, second = outputs(sample, tmp_path / "workers")
    assert second["workers"] == 0, "all of it is on the disk"
    assert second.get("compiled_from_cache") == second.get("compiled")


def test_workers_take_no_memory_of_the_gpu_and_leave_no_process(tmp_path: Path) -> None:
    script = """
import json, subprocess, sys, threading, time
import torch
from msplit import api
from msplit.engines.cuda.passes.pointwise_fusion.workers import Workers

torch.ones(1, device="cuda")
seen, pids, stop = set(), [], Workers.stop

def stopped(self):
    pids.extend(worker.pid for worker in self._running)
    listed = subprocess.run(["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True, text=True)
    seen.update(listed.stdout.split())
    stop(self)

Workers.stop = stopped
with api.prepare(sys.argv[1], streams=4, engine="cuda", batch=16) as runner:
    runner.step(dict(runner.buffers))
import os
print(json.dumps([pids, [pid for pid in pids if str(pid) in seen], [pid for pid in pids if os.path.exists(f"/proc/{pid}")]]))
"""
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", script, str(ROOT / "sample_graphs" / "mmoe_small.pb")]
    every = {**os.environ, "MSPLIT_COMPILE_PROCESSES": "4", **own}
    done = subprocess.run(command, env=every, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pids, on_gpu, left = json.loads(done.stdout.splitlines()[-1])
    assert pids
    assert on_gpu == []
    assert left == []


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception"])
def test_the_kernels_of_all_choices_are_compiled_before_the_first_is_timed(sample: str, tmp_path: Path) -> None:
    script = """
import json, sys
import torch
from triton import knobs
from msplit import api
from msplit.engines.cuda.autotune.timer import CudaTimer
from msplit.engines.cuda.autotune.tuner import Tuner

log = []
ours = ("products", "convolve_tile")
knobs.compilation.listener = lambda *, src, cache_hit, **rest: log.append(src.name) if src.name in ours else None
replay, choose = CudaTimer.replay_ms, Tuner.choose
CudaTimer.replay_ms = lambda self, lanes, *, cold: log.append("timed") or replay(self, lanes, cold=cold)
with api.prepare(sys.argv[1], streams=4, engine="cuda", batch=16) as runner:
    runner.step(dict(runner.buffers))
print(json.dumps(log))
"""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    caches = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-c", script, str(ROOT / "sample_graphs" / sample)]
    done = subprocess.run(command, env={**os.environ, **own, **caches}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log = json.loads(done.stdout.splitlines()[-1])
    first = log.index("timed")
    compiled = [name for name in log if name != "timed"]
    assert len(compiled) > 3
    late = [name for name in log[first:] if name != "timed"]
    # What only a later stage asks for, such as a product whose weights lie otherwise by then.
    assert len(late) <= len(compiled) // 10
