"""Triton's library is loaded with names of its own where TensorFlow was there first: with TensorFlow's LLVM it ends the process."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msplit.engines.cuda.device.device import OWN_LLVM
from tests import forked

SCRIPT = """
import json, os, sys, types
if "{first}":
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
import torch
from msplit.engines.cuda.device import Device
before = sys.getdlopenflags()
Device(torch.device("cpu")), Device(torch.device("cpu"))
loaded = sys.modules.get("triton._C.libtriton")
print(json.dumps([loaded and loaded.COUNT, loaded and bool(loaded.FLAGS & os.RTLD_DEEPBIND), sys.getdlopenflags() == before]))
"""


@pytest.mark.parametrize(
    ("first", "version", "found"),
    [
        ("tensorflow", "3.7.1", [1, True, True]),
        ("tensorflow", "3.10.0+git1", [1, True, True]),
        ("tensorflow", "3.6.0", [None, None, True]),
        ("", "3.7.1", [None, None, True]),
        ("tensorflow", "", [None, None, True]),
    ],
)
def test_it_is_loaded_apart_where_it_has_to_be(tmp_path: Path, first: str, version: str, found: list[object]) -> None:
    if version:
        library, about = tmp_path / "triton" / "_C", tmp_path / f"triton-{version}.dist-info"
        library.mkdir(parents=True)
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
        for package in (library.parent, library):
            (package / "__init__.py").write_text("")
        (library / "libtriton.py").write_text("import sys\nFLAGS = sys.getdlopenflags()\nCOUNT = 1\n")
    elif importlib.util.find_spec("triton") is not None:
        pytest.skip("there is one")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    # Where there is one, the process that is forked may have it already.
    run = subprocess.run if importlib.util.find_spec("triton") else functools.partial(forked.run, server=forked.ENGINE)
    done = run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == found


@pytest.mark.tf
@pytest.mark.needs_triton
def test_both_live_in_one_process() -> None:
    """PyTorch loads Triton by itself when an op first asks for its compiler."""
    script = """
import tensorflow as tf, torch
from msplit.engines.cuda.device import Device
Device(torch.device("cpu"))
import torch._dynamo, triton
assert int(tf.constant(1) + 1) == 2
"""
    if tuple(map(int, importlib.metadata.version("triton").split(".")[:2])) < OWN_LLVM:
        pytest.skip("this one lives beside TensorFlow in any case")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
