"""Builds on a real GPU: opened by a process of its own, with neither Triton nor PyTorch's compiler, with the same kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msplit.engines.cuda.ir.dtypes import to_numpy
from msplit.engines.cuda.stored.program import tensor_of

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]

OPEN = """
import json, sys
import numpy as np
import msplit

with msplit.open(sys.argv[1]) as runner:
    feeds = dict(np.load(sys.argv[2]))
    outputs = runner.step(feeds)
    np.savez(sys.argv[3], **{str(n): outputs[name] for n, name in enumerate(sorted(outputs))})
    loaded = [name for name in ("triton", "torch._inductor.compile_fx", "tensorflow") if name in sys.modules]
    facts = {key: value for key, value in runner.facts.items() if isinstance(value, int | str)}
    print(json.dumps([loaded, facts, list(runner.notes), [check.passed for check in runner.checks]]))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    every = {**os.environ, "MSPLIT_KEEP_CHOICES": "1", "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *command], env=every, capture_output=True, text=True)


def opened(build: Path, feeds: dict[str, Any], tmp_path: Path, **environment: str) -> tuple[Any, list[Any]]:
    """What a process that opens a build says, and what a step of it gives."""
    np.savez(tmp_path / "feeds.npz", **feeds)
    done = run("-c", OPEN, str(build), str(tmp_path / "feeds.npz"), str(tmp_path / "outputs.npz"), **environment)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as found:
        outputs = [found[str(number)] for number in range(len(found.files))]
    return json.loads(done.stdout.splitlines()[-1]), outputs


@pytest.mark.parametrize("sample", ["mmoe_small.pb", "keras_inception", "towers_small.pb", "lstm_small.pb"])
def test_an_opened_build_runs_the_same_kernels_and_loads_no_compiler(sample: str, tmp_path: Path) -> None:
    import msplit

    request = {"streams": (4,), "engine": "cuda"}
    built = msplit.build(ROOT / "sample_graphs" / sample, tmp_path / "build", **request)
    with msplit.open(tmp_path / "build") as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        outputs, facts = runner.step(feeds), runner.facts
    (loaded, others, notes, checks), again = opened(
        tmp_path / "build",
        feeds,
        tmp_path,
        XDG_CACHE_HOME=str(tmp_path / "empty"),
        TRITON_CACHE_DIR=str(tmp_path / "t"),
    )
    assert loaded == []
    assert notes == list(built.manifest.notes)
    assert checks == [True]
    assert (others["kernels"], others["streams"], others["peak_bytes"]) == (
        facts["kernels"],
        facts["streams"],
        facts["peak_bytes"],
    )
    for name, value in zip(sorted(outputs), again, strict=True):
        np.testing.assert_array_equal(outputs[name], value)


def test_a_build_for_another_gpu_is_compiled_anew_or_refused(tmp_path: Path) -> None:
    import msplit

    request = {"streams": (4,), "engine": "cuda", "batch": 16}
    msplit.build(ROOT / "sample_graphs" / "mmoe_small.pb", tmp_path / "build", **request)
    manifest = json.loads((tmp_path / "build" / "manifest.json").read_text())
    manifest["made_for"] |= {"gpu": "NVIDIA A100", "architecture": "8.0"}
    (tmp_path / "build" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(msplit.MsplitError, match=r"architecture 8\.0, here"):
        msplit.open(tmp_path / "build", strict=True)
    with msplit.open(tmp_path / "build") as runner:
        assert any("compiled anew" in note for note in runner.notes)
        assert all(check.passed for check in runner.checks)


def test_a_kernel_that_was_changed_is_never_run(tmp_path: Path) -> None:
    import msplit

    request = {"streams": (4,), "engine": "cuda", "batch": 16}
    msplit.build(ROOT / "sample_graphs" / "mmoe_small.pb", tmp_path / "build", **request)
    kernels = sorted((tmp_path / "build" / "kernels").glob("*.kernel"))
    assert kernels
    for kernel in kernels[:3]:
        data = kernel.read_bytes()
        kernel.write_bytes(data[:-64] + bytes(64))
        done = run("-m", "msplit", "bench", str(tmp_path / "build"))
        assert done.returncode == 2
        assert "is not what was built" in done.stderr
        kernel.write_bytes(data)


def test_several_batches_share_weights_and_smaller_ones_are_filled_up(tmp_path: Path) -> None:
    import msplit

    model = ROOT / "sample_graphs" / "mmoe_small.pb"
    request = {"streams": (4,), "engine": "cuda"}
    three = msplit.build(model, tmp_path / "three", **request, batches=[1, 8, 32])
    # Which order of a weight suits a batch is measured, and they may differ. What they have alike is there once, and something is.
    memory = torch.from_numpy(np.fromfile(tmp_path / "three" / "weights.bin", np.uint8))
    programs = [json.loads((tmp_path / "three" / bucket.program).read_text()) for bucket in three.manifest.rungs]
    kept = [place for program in programs for *_, place in program["constants"]]
    most: Counter[tuple[str | bytes, ...]] = (
        Counter()
    )  # equal constants of one program lie apart, and those of several in one place
    for program in programs:
        places = {(str(place), place[3]): place for *_, place in program["constants"]}
        most |= Counter(
            (*map(str, place[:3]), to_numpy(tensor_of(place, memory)).tobytes()) for place in places.values()
        )
    assert most.total() == len({(*map(str, place[:3]), place[3]) for place in kept}) < len(kept)
    measured = run("-m", "msplit", "bench", str(tmp_path / "three"), "--measure", "duration=0.2")
    assert measured.returncode == 0, measured.stderr
    assert measured.stdout.count("1 stream of") >= 3
    with msplit.open(tmp_path / "three") as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        whole = runner.step(feeds)
        for rows in (1, 2, 8, 9, 31, 32):
            few = runner.step({name: value[:rows] for name, value in feeds.items()})
            for name, value in few.items():
                np.testing.assert_allclose(value, whole[name][:rows], rtol=1e-2, atol=1e-3)
        twice = runner.step({name: np.concatenate([value, value]) for name, value in feeds.items()})
        for name, value in twice.items():
            np.testing.assert_array_equal(value, np.concatenate([whole[name], whole[name]]))


def test_kept_kernels_run_through_the_driver_alone(tmp_path: Path) -> None:
    """The whole of a build's kernels once more without a C compiler and with Triton hidden."""
    import msplit

    request = {"streams": (4,), "engine": "cuda", "batch": 16}
    msplit.build(ROOT / "sample_graphs" / "mmoe_small.pb", tmp_path / "build", **request)
    with msplit.open(tmp_path / "build") as runner:
        feeds = {name: np.array(value) for name, value in runner.buffers.items()}
        outputs = runner.step(feeds)
    hidden = tmp_path / "hidden"
    (hidden / "triton").mkdir(parents=True)
    (hidden / "triton" / "__init__.py").write_text("raise ImportError('hidden')\n")
    path = os.pathsep.join([str(hidden), str(ROOT), os.environ.get("PYTHONPATH", "")])
    shutil.rmtree(tmp_path / "empty", ignore_errors=True)
    _, again = opened(
        tmp_path / "build", feeds, tmp_path, PYTHONPATH=path, CC="/nowhere", XDG_CACHE_HOME=str(tmp_path / "empty")
    )
    for name, value in zip(sorted(outputs), again, strict=True):
        np.testing.assert_array_equal(outputs[name], value)
