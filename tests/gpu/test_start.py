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
from msplit.engines.cuda.autotune.timer import CudaTimer

timed = []
replay = CudaTimer.replay_ms
CudaTimer.replay_ms = lambda self, lanes, *, cold: timed.append(1) or replay(self, lanes, cold=cold)
request = api.BenchRequest(streams=(4,), engine="cuda", batch=16, effort=sys.argv[2], compare_tensorflow=False)
with api.prepare(sys.argv[1], request) as runner:
    runner.step(dict(runner.buffers))
    facts = {key: value for key, value in runner.facts.items() if isinstance(value, int | str)}
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
    assert (same, others["kernels"], others["layout"]) == (label, facts["kernels"], facts["layout"])
    anew, *_ = ready(sample, "full", tmp_path, MSPLIT_KEEP_CHOICES="0")
    assert anew > 0


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception", "towers_small.pb"])
def test_with_little_effort_nothing_is_timed_and_no_compiler_is_loaded(sample: str, tmp_path: Path) -> None:
    timed, compiler, label, _ = ready(sample, "fast", tmp_path)
    assert timed == 0
    assert not compiler
    assert "fused" not in label
    assert not list(tmp_path.rglob("choices-*"))
