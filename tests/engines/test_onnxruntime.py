"""ONNX Runtime as a row of `bench`: right where it runs a model, and a reason where it does not."""

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from msplit import api
from msplit.core.arguments import Precision
from msplit.cost.profile import Workload
from msplit.engines import onnxruntime as onnx
from msplit.engines.base import Job
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError
from msplit.inputs.make import feeds_for
from tests import forked
from tests.campaign import CAMPAIGN

pytestmark = [
    pytest.mark.tf,
    # Not imported here: it starts a thread, and workers are forked when tests are imported (`tests/preloaded.py`).
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"could not import '{name}'")
        for name in ("onnxruntime", "tf2onnx")
    ),
]

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


def job_of(path, **more):
    flat = api.load(path)
    feeds = feeds_for(flat, Workload(batch=4), seed=3)
    return Job(
        flat, np.zeros(len(flat), np.int32), 1, feeds, precision=Precision.IEEE, options=EngineOptions("cpu"), **more
    )


@pytest.mark.parametrize("name", ["mmoe_small.pb", "tf1_saved_model"])
def test_it_gives_what_tensorflow_gives(name, monkeypatch):
    if name != "mmoe_small.pb" and not CAMPAIGN:  # a process that has imported TensorFlow converts it
        run = functools.partial(forked.run, server=forked.TENSORFLOW)
        instead = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(onnx, "subprocess", instead)
    job = job_of(SAMPLES / name)
    expected = TENSORFLOW.build(job)
    wanted = expected.step(job.feeds)
    expected.close()
    for captured in (False, True):
        theirs = onnx.OnnxRuntime(captured).build(job)
        for _ in range(2):
            found = theirs.step(job.feeds)
            assert found.keys() == wanted.keys()
            for key in wanted:
                np.testing.assert_allclose(found[key], wanted[key], rtol=1e-4, atol=1e-5)
        theirs.launch()
        assert theirs.facts()["device"] == "cpu"
        theirs.close()


def test_a_graph_that_trains_is_refused_before_it_is_converted(monkeypatch):
    monkeypatch.setattr(onnx.subprocess, "run", lambda *_, **__: pytest.fail("it was converted"))
    with pytest.raises(EngineError, match="no variables"):
        onnx.OnnxRuntime().build(job_of(SAMPLES / "training.meta"))


def test_what_can_not_be_converted_is_told_in_a_line(monkeypatch):
    ended = subprocess.CompletedProcess([], 1, b"", b"Traceback\n  more\nValueError: no op\n")
    monkeypatch.setattr(onnx.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(EngineError) as told:
        onnx.OnnxRuntime().build(job_of(SAMPLES / "while_v1.pb"))
    assert told.value.what == "tf2onnx can not convert it: ValueError: no op"


def test_without_its_packages_it_says_which_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    monkeypatch.setattr(onnx.importlib.util, "find_spec", lambda name: None if name == "tf2onnx" else object())
    assert onnx.OnnxRuntime().unavailable() == "tf2onnx is not installed"
    assert not onnx.runs_on_gpu()
