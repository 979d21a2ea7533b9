"""Commands and the library where PyTorch is not installed, as after a plain `pip install .`: what needs it says so, and how to get it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import msplit
from tests.cli.runner import ROOT, SAMPLES
from tests.training.models import regression

pytestmark = pytest.mark.tf

RUN = """
import contextlib, importlib.machinery as machinery, importlib.util, io, json, sys

real = machinery.PathFinder.find_spec
hidden = ("torch", "triton")
machinery.PathFinder.find_spec = staticmethod(lambda name, *rest: None if name.partition(".")[0] in hidden else real(name, *rest))
assert not any(map(importlib.util.find_spec, hidden))

import numpy as np
import msplit
from msplit.cli import main

model, meta, build, commands = json.loads(sys.argv[1])
found = {}
for arguments in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    found[" ".join(arguments)] = [code, err.getvalue()]
simulated = {"engine": "cuda", "device": "cpu"}
feeds = {"x": np.ones((2, 4), "f4"), "label": np.ones(2, "f4")}
calls = {
    "prepare": lambda: msplit.prepare(model, **simulated),
    "prepare on a GPU": lambda: msplit.prepare(model, engine="cuda"),
    "bench": lambda: msplit.bench(model, **simulated),
    "build": lambda: msplit.build(model, build + "2", **simulated),
    "open": lambda: msplit.open(build),
    "pool": lambda: msplit.pool(model, **simulated),
    "pool of a build": lambda: msplit.pool(build),
    "Trainer": lambda: msplit.Trainer(meta, "train_op", ["loss"], **simulated).step(feeds),
}
for name, call in calls.items():
    try:
        call()
        found[name] = [0, ""]
    except msplit.MsplitError as problem:
        found[name] = [2, str(problem)]
print(json.dumps(found))
"""


def test_what_needs_pytorch_says_how_to_get_it(tmp_path: Path) -> None:
    model, build, meta = str(SAMPLES / "towers_small.pb"), str(tmp_path / "build"), str(tmp_path / "model.meta")
    regression(Path(meta))
    data = str(tmp_path / "data.npz")
    np.savez(data, x=np.ones((8, 4), np.float32), label=np.ones(8, np.float32))
    msplit.build(model, build, engine="cuda", device="cpu", effort="fast")
    commands = [
        ["build", model, "-o", str(tmp_path / "other")],
        ["build", model, "-o", str(tmp_path / "other"), "--device", "cpu"],
        ["bench", build],
        ["bench", model, "--engine", "cuda"],
        ["serve", build, "--port", "0"],
        ["serve", model, "--device", "cpu", "--port", "0"],
        ["load", build],
        ["load", model, "--device", "cpu"],
        ["profile", model, "-o", str(tmp_path / "profile.json")],
        ["train", meta, "--target", "train_op", "--fetch", "loss", "--data", data, "--batch", "4", "--device", "cpu"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([model, meta, build, commands])],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env={**os.environ, "COLUMNS": "80", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(commands) + 8
    for what, (code, said) in found.items():
        assert (code, "PyTorch" in said, "pip install '.[cuda]'" in said) == (2, True, True), (what, said)
        assert "internal error" not in said, what
