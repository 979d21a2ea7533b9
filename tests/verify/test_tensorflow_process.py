"""TensorFlow in a process of its own, and NVIDIA's switches, each of which is a row of a bench."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from msplit.api import load
from msplit.benchmark.benchmark import bench
from msplit.cost.profile import Workload
from msplit.engines.base import Job, TensorFlowOptions
from msplit.engines.tensorflow.engine import ENGINE
from msplit.engines.tensorflow.runtime import tensorflow
from msplit.errors import EngineError, MsplitError
from msplit.inputs.make import feeds_for
from msplit.verify import tensorflow_process
from msplit.verify.results import Settings
from msplit.verify.tensorflow_process import TensorFlowProcess
from tests import forked
from tests.cli.runner import SAMPLES, fine, msplit

pytestmark = pytest.mark.tf

TOWERS = SAMPLES / "towers_small.pb"
QUICK = Settings(duration=0, warmup=0, min_rounds=1, builds=1)


def job(**options: Any) -> Job:
    flat = load(TOWERS)
    ids = np.arange(len(flat), dtype=np.int32) % 2
    feeds = feeds_for(flat, Workload(batch=4), seed=0)
    return Job(flat, ids, 2, feeds, tensorflow=TensorFlowOptions(**options))


@pytest.fixture(scope="module")
def running() -> Iterator[TensorFlowProcess]:
    with mock.patch("msplit.engines.process.subprocess", forked.OWN):  # the process begins with its imports done
        made = TensorFlowProcess(job())
        yield made
        made.close()


def test_another_process_gives_the_same_and_measures_itself(running: TensorFlowProcess) -> None:
    here = ENGINE.build(job())
    feeds = feeds_for(load(TOWERS), Workload(batch=4), seed=5)
    expected, found = here.step(feeds), running.step(feeds)
    here.close()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)
    assert running.facts()["streams"] == 2
    times = running.times(3)
    assert len(times) == 3
    assert all(0 < one < 60 for one in times)


def test_what_goes_wrong_there_is_told_here_and_it_goes_on(running: TensorFlowProcess) -> None:
    with pytest.raises(EngineError, match="has no value") as told:
        running.step({})
    assert type(told.value) is EngineError
    assert "its inputs are" in told.value.fix
    assert running.times(1)


def test_a_process_that_ends_is_told(running: TensorFlowProcess) -> None:
    os.kill(running._process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"was ended by signal 9|was lost"):
        running.times(1)


def test_each_switch_is_a_row_and_without_a_gpu_it_says_so() -> None:
    if tensorflow().config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU, and the rows run")
    own = TensorFlowOptions(merge_streams=True, private_threads=2, priorities=(-1, 0), limits=(100, 200))
    request = {"streams": (1, 2), "engine": "tensorflow", "batch": 4, "settings": QUICK, "tensorflow": own}
    found = bench(TOWERS, **request)
    skipped = {one.label: one.skipped for one in found.result.variants if one.skipped}
    assert list(skipped) == [
        f"TensorFlow, 2 logical devices, {what}"
        for what in ("merged copy streams", "2 private threads", "priorities -1, 0", "memory 100, 200 MiB")
    ]
    assert set(skipped.values()) == {"NVIDIA's switches are for GPUs, and TensorFlow sees none"}
    assert sum(one.host is not None for one in found.result.variants) == 2
    with pytest.raises(EngineError, match="no row has as many") as told:
        bench(TOWERS, **dict(request, streams=(1,)))
    assert "--streams 2" in told.value.fix


def test_the_command_has_them() -> None:
    short = (
        "--measure",
        "duration=0",
        "--measure",
        "warmup=0",
        "--measure",
        "builds=1",
        "--measure",
        "min-iters=1",
        "--engine",
        "tensorflow",
    )
    switches = ("--tensorflow", "merge-streams", "--tensorflow", "private-threads=3", "--tensorflow", "gpu-memory=0.5")
    done = fine("bench", TOWERS, "--streams", "1", *switches, *short, "--format", "json").json
    labels = [one["label"] for one in done["result"]["variants"]]
    assert labels == [f"TensorFlow, 1 stream{more}" for more in ("", ", merged copy streams", ", 3 private threads")]
    wrong = msplit("bench", TOWERS, "--tensorflow", "device-memory=0,1", *short)
    assert (wrong.code, wrong.out) == (2, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": 0}, "the share of memory is 0"),
        ({"memory": 1.5}, "the share of memory is 1.5"),
        ({"limits": (1, 0)}, "the memory of a logical device is 0"),
        ({"private_threads": -1}, "the number of private threads is -1"),
    ],
)
def test_switches_that_make_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MsplitError, match=said):
        TensorFlowOptions(**options)


def test_threads_of_a_device_are_asked_for_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "global")
    monkeypatch.setenv("TF_GPU_THREAD_COUNT", "1")
    one = job(private_threads=3)
    model = one.flat.model
    given = {name: getattr(one, name) for name in tensorflow_process._SENT}
    executable = tensorflow_process.build(model.path, model.choice, {**given, "streams": 2})
    assert (os.environ["TF_GPU_THREAD_MODE"], os.environ["TF_GPU_THREAD_COUNT"]) == ("gpu_private", "3")
    assert executable.step(one.feeds)
    executable.close()
