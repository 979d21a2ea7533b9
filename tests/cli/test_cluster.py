"""Clusters of real processes from the command line: what is lost is told once, with exit code 2, and nothing waits for it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from msplit.engines.base import ClusterOptions
from msplit.engines.tensorflow import cluster as clusters
from msplit.engines.tensorflow import cluster_session
from msplit.errors import EngineError
from msplit.formats.cluster import read
from msplit.training import checkpoint
from msplit.training.trainer import to_train
from tests.cli.runner import SAMPLES, Done, fine, msplit
from tests.engines.tensorflow.clusters import Process, described, here, processes, start, write
from tests.engines.tensorflow.test_cluster import scattered
from tests.report.test_schemas import validate
from tests.training.models import arrays, batches, regression

pytestmark = pytest.mark.tf

SOON = 10.0
"""Seconds in which a loss is told, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data for it, and a cluster of two processes."""
    folder = tmp_path_factory.mktemp("cluster")
    regression(folder / "model.meta")
    np.savez(folder / "data.npz", **arrays())
    np.savez(folder / "long.npz", **arrays(400_000))
    return folder


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[dict[str, Process]]:
    """A worker and a parameter server."""
    cluster = described(1, 1)
    with processes(cluster, write(cluster, folder / "cluster.yaml")) as found:
        yield found


def train(folder: Path, *further: object, data: str = "data.npz") -> Done:
    given = (
        "--fetch",
        "loss",
        "--data",
        folder / data,
        "--batch",
        8,
        "--tensorflow",
        f"cluster={folder / 'cluster.yaml'}",
    )
    return msplit("train", folder / "model.meta", *given, *further, columns=200)


def test_bench_and_train_run_over_a_cluster(tmp_path: Path, folder: Path) -> None:
    path = write(here(2, 2), tmp_path / "cluster.yaml")
    how = (
        "--streams",
        3,
        "--measure",
        "duration=0.1",
        "--measure",
        "builds=1",
        "--measure",
        "warmup=0",
        "--format",
        "json",
    )
    told = fine("bench", SAMPLES / "mmoe_small.pb", "--tensorflow", f"cluster={path}", *how).json
    validate("bench", told)
    variants = told["result"]["variants"]
    assert [one["label"] for one in variants] == [
        "TensorFlow, 1 stream",
        "TensorFlow on the cluster, 1 stream",
        "TensorFlow on the cluster, 3 streams",
    ]
    assert all(one["checks"] and not one["failed"] for one in variants[1:])
    done = msplit(
        "train",
        folder / "model.meta",
        "--fetch",
        "loss",
        "--data",
        folder / "data.npz",
        "--tensorflow",
        f"cluster={path}",
    )
    assert (done.code, done.err) == (0, "")
    assert "TensorFlow on the cluster, 3 streams" in done.out


def test_a_second_worker_of_the_same_task_is_refused(folder: Path, running: dict[str, Process]) -> None:
    done = msplit("worker", "--cluster", folder / "cluster.yaml", "--job", "ps")
    assert (done.code, done.out) == (2, "")
    assert "/job:ps/task:0 can not listen on port" in done.err
    assert "Traceback" not in done.err


def test_a_task_that_dies_ends_a_training_which_goes_on_from_its_checkpoint(
    folder: Path, running: dict[str, Process], tmp_path: Path
) -> None:
    """First the parameter server, then the worker, which the client talks to."""
    saved = tmp_path / "saved"
    before = 0
    for lost in ("/job:ps/task:0", "/job:worker/task:0"):
        ended: list[float] = []

        def kill(lost: str = lost, before: int = before, ended: list[float] = ended) -> None:
            until = time.monotonic() + 60
            while steps(saved) <= before and time.monotonic() < until:
                time.sleep(0.02)
            running[lost].kill()
            ended.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        done = train(folder, "--save", saved, "--save", "every=20", "--resume", data="long.npz")
        now = time.monotonic()
        killer.join()
        assert done.code == 2
        assert done.err.count("error: ") == 1
        assert f"{lost} at 127.0.0.1:" in done.err
        assert "was lost: Connection refused" in done.err
        assert "Traceback" not in done.err
        assert now - ended[0] < SOON
        before = steps(saved)
        running[lost] = start(folder / "cluster.yaml", lost)
        assert running[lost].said().startswith("ready: ")
    done = train(folder, "--save", saved, "--resume", "--steps", before + 5, "--format", "json", data="long.npz")
    assert (done.code, done.err) == (0, "")
    assert (done.json["steps_before"], done.json["steps"]) == (before, before + 5)


def steps(saved: Path) -> int:
    """Those of the last checkpoint."""
    last = checkpoint.listed(saved).latest
    return 0 if last is None else int(last.name.rpartition("-")[2])


def test_a_task_that_does_not_answer_is_waited_for_as_long_as_a_step_may_take(
    folder: Path, running: dict[str, Process]
) -> None:
    flat = to_train(folder / "model.meta", None, ["loss"])
    executable = cluster_session.build(
        scattered(flat, 1, batches(1)[0]), ClusterOptions(read(folder / "cluster.yaml"), limit_s=0.5)
    )
    executable.step(batches(1)[0])
    stopped = running["/job:ps/task:0"]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"was not done within 0\.5 s, though all of its tasks listen"):
            executable.step(batches(1)[0])
        executable.close()
        assert time.monotonic() - began < SOON
    finally:
        os.kill(stopped.pid, signal.SIGCONT)


def test_a_task_ends_when_it_is_told_to(folder: Path, running: dict[str, Process], tmp_path: Path) -> None:
    """A client that begins then says which one is not there."""
    ended = running["/job:worker/task:0"]
    os.kill(ended.pid, signal.SIGTERM)
    assert (ended.said("terminated"), ended.ended()) == ("terminated\n", 143)
    with mock.patch.object(clusters, "COMING", 0.2):
        done = train(folder, "--save", tmp_path / "saved")
    assert done.code == 2
    assert "/job:worker/task:0 at 127.0.0.1:" in done.err
    assert "can not be reached: Connection refused" in done.err


def test_what_is_asked_wrong(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("worker: ['a:1']\n\x1b: 3\n")
    environment = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 7}})
    model = SAMPLES / "towers_small.pb"
    for arguments, variables, said in (
        (("worker",), {"TF_CONFIG": ""}, "Which cluster? Give --cluster FILE, or set TF_CONFIG."),
        (("worker",), {"TF_CONFIG": environment}, "the cluster has no task 7 of job 'worker'"),
        (("worker", "--job", "ps"), {"TF_CONFIG": '{"worker": ["a:1"]}'}, "the cluster has no task 0 of job 'ps'"),
        (("worker", "--cluster", tmp_path / "nothing"), {}, "the cluster can not be read"),
        (
            ("bench", model, "--tensorflow", f"cluster={tmp_path / 'cluster.yaml'}"),
            {},
            "control characters are not allowed",
        ),
        (("bench", model, "--tensorflow", "cluster=TF_CONFIG"), {"TF_CONFIG": ""}, "TF_CONFIG is not set"),
        (("train", model, "--fetch", "a", "--data", "b", "--tensorflow", "container=c"), {}, "give cluster=, too"),
    ):
        done = msplit(*arguments, columns=200, **variables)
        assert (done.code, done.out) == (2, ""), arguments
        assert said in done.err
        assert "\x1b" not in done.err
