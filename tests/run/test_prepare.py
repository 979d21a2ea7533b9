"""A model made ready to run gives the model's outputs, step after step, and is refused where it does not."""

from __future__ import annotations

import itertools
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import msplit
from msplit import api
from msplit.engines.base import Executable
from msplit.engines.cuda import compile as compilation
from msplit.engines.cuda.autotune.tuner import Tuner
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE as CUDA
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.passes import pipeline
from msplit.engines.cuda.passes.measured import MeasuredFusion
from msplit.engines.cuda.runtime.executables import SimulatedExecutable
from msplit.engines.tensorflow.engine import reference
from msplit.errors import EngineError, LoadError, MsplitError
from msplit.inputs.make import make_inputs
from msplit.inputs.reference import Reference, save_reference
from msplit.run import variants
from msplit.run.request import RunRequest
from tests.assignments import assign_once  # noqa: F401

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
SIMULATED = {"streams": (1, 4), "engine": "cuda", "device": "cpu", "batch": 8}

pytestmark = [pytest.mark.tf, pytest.mark.usefixtures("assign_once")]


@pytest.fixture(scope="module")
def mmoe():
    return msplit.load(SAMPLES / "mmoe_small.pb")


def feeds_of(flat, seed, batch=8):
    return make_inputs(flat, {}, batch=batch, seed=seed)


def check(runner, flat, seeds=(11, 12, 13)):
    for seed in seeds:
        feeds = feeds_of(flat, seed)
        found, wanted = runner.step(feeds), reference(flat, feeds)
        assert found.keys() == wanted.keys() == set(runner.outputs)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-5)


def test_every_step_gives_the_models_outputs(mmoe):
    with msplit.prepare(mmoe, **SIMULATED) as runner:
        assert isinstance(runner, msplit.Runner)
        assert runner.engine == "cuda"
        assert runner.inputs == {name: (value.dtype.name, value.shape) for name, value in feeds_of(mmoe, 0).items()}
        assert runner.checks
        assert all(one.passed for one in runner.checks)
        check(runner, mmoe)


def test_it_says_where_the_time_of_its_preparation_went(mmoe):
    start = time.perf_counter()
    with msplit.prepare(mmoe, **SIMULATED) as runner:
        wall = time.perf_counter() - start
        found = runner.preparation
        stages = {
            "running the reference in TensorFlow", "importing the graph", "fixing shapes", "rewriting the graph", "grouping alike branches",
            "merging convolutions", "tracing and choosing kernels", "fusing pointwise ops", "planning", "simulating", "arranging steps",
            "verifying outputs",
        }  # fmt: skip
        assert stages <= {one.phase for one in found.phases}
        assert 0 < sum(one.seconds for one in found.phases) <= found.seconds <= wall
        assert [one.seconds for one in found.phases] == sorted((one.seconds for one in found.phases), reverse=True)
        assert not any("msplit" in one.phase or any(map(str.isdigit, one.phase)) for one in found.phases)
        assert "preparation" not in repr(runner)
        check(runner, mmoe)


def test_the_layer_that_should_be_the_fastest_runs(mmoe):
    """Grouped experts need fewer kernels than experts on streams; without larger kernels, streams are what is left."""
    with msplit.prepare(mmoe, **SIMULATED) as runner:
        assert runner.label.endswith("fused and grouped")
    plain = {"streams": (2, 4), "engine": "cuda", "device": "cpu", "batch": 8, "fuse": False, "group": False}
    with msplit.prepare(mmoe, **plain) as runner:
        assert runner.label == "msplit, 4 streams, CUDA graph"
        assert runner.facts["streams"] == 4
        assert {one.against for one in runner.checks} == {"TensorFlow on the CPU", "msplit, 1 stream, CUDA graph"}
        check(runner, mmoe)


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize(
    ("streams_us", "label"),
    [
        ([50.0], "4 streams"),
        ([120.0], "1 stream"),
        ([100.0], "1 stream"),
        ([99.0, 101.0], "1 stream"),
        ([98.0] * 11 + [101.0], "4 streams"),
    ],
    ids=["faster", "slower", "tie", "noise", "faster but for once"],
)
def test_several_streams_run_only_where_they_measure_faster_than_one(mmoe, monkeypatch, streams_us, label, larger):
    """By a clock that takes 100 µs for a step on one stream. What the simulator says of these kernels, streams gain."""
    rounds = itertools.cycle(streams_us)

    def device_times(self, count):
        return [(100.0 if self.facts()["streams"] == 1 else next(rounds)) * 1e-6] * count

    monkeypatch.setattr(SimulatedExecutable, "device_times", device_times)
    monkeypatch.setattr("msplit.engines.base._burst", lambda executable: 4)
    request = {"streams": (1, 4), "engine": "cuda", "device": "cpu", "batch": 8, "fuse": larger, "group": False}
    with msplit.prepare(mmoe, **request) as runner:
        assert runner.label == f"msplit, {label}, {'fused' if larger else 'CUDA graph'}"
        assert runner.facts["streams"] == int(label[0])
        assert any("as fast as one stream" in note for note in runner.notes) is (label == "1 stream")
        assert all(one.passed for one in runner.checks)
        assert any(one.against == "TensorFlow on the CPU" for one in runner.checks)
        check(runner, mmoe)


def test_streams_that_are_asked_for_run_and_nothing_is_measured_in_a_hurry(mmoe, monkeypatch, tmp_path):
    monkeypatch.setattr(SimulatedExecutable, "device_times", lambda self, count: pytest.fail("timed"))
    request = dict(SIMULATED, fuse=False, group=False)
    with msplit.prepare(mmoe, **request, variant="msplit, 4 streams, CUDA graph") as runner:
        assert runner.facts["streams"] == 4
    with msplit.prepare(mmoe, **dict(request, effort="fast")) as runner:
        assert runner.facts["streams"] == 4


def test_only_what_is_chosen_gets_kernels_that_are_timed_and_compiled(mmoe, monkeypatch):
    made = []
    fused, traced = pipeline.fuse, compilation.trace

    def fuse(*arguments, **options):
        made.append(("compiled", options["compile"], options["measure"]))
        return fused(*arguments, **options)

    def trace(*arguments, **options):
        made.append(("traced", options["measure"]))
        return traced(*arguments, **options)

    monkeypatch.setattr(pipeline, "fuse", fuse)
    monkeypatch.setattr(compilation, "trace", trace)
    monkeypatch.setattr(CudaEngine, "device", lambda engine, job: "GPU")  # where it is verified in both precisions
    with msplit.prepare(mmoe, **SIMULATED) as runner:
        assert runner.label.endswith("fused and grouped")
    assert made.count(("compiled", False, False)) == 3, "fused; fused and grouped; what is chosen, in IEEE precision"
    assert [one for one in made if one[-1]] == [("traced", True), ("compiled", False, True), ("traced", True)]


def test_with_little_effort_nothing_is_compiled_and_no_reference_is_run(mmoe, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("that takes seconds")

    for place, name in (
        (pipeline, "fuse"),
        (variants, "_by_tensorflow"),
        (Tuner, "choose"),
        (MeasuredFusion, "choice"),
    ):
        monkeypatch.setattr(place, name, never)
    with msplit.prepare(mmoe, **dict(SIMULATED, effort="fast")) as runner:
        assert runner.label.endswith("grouped")
        assert "fused" not in runner.label
        assert runner.checks
        assert any("effort fast" in note for note in runner.notes)
        monkeypatch.undo()
        check(runner, mmoe)


def test_with_little_effort_a_reference_that_is_given_counts(mmoe, tmp_path):
    feeds = feeds_of(mmoe, 3)
    outputs = reference(mmoe, feeds)
    save_reference(tmp_path / "r.npz", Reference(feeds, outputs, "a file"))
    with msplit.prepare(mmoe, **dict(SIMULATED, effort="fast", reference=tmp_path / "r.npz")) as runner:
        assert any(one.against == "a file" for one in runner.checks)
        assert not any("effort fast" in note for note in runner.notes)
    wrong = {name: value + 1 for name, value in outputs.items()}
    save_reference(tmp_path / "w.npz", Reference(feeds, wrong, "a file"))
    with pytest.raises(EngineError, match="gives other outputs"):
        msplit.prepare(mmoe, **dict(SIMULATED, effort="fast", reference=tmp_path / "w.npz"))


def test_an_effort_that_there_is_not_and_one_that_measures_nothing_and_tunes():
    with pytest.raises(MsplitError, match="no effort 'some'"):
        RunRequest.of(effort="some")
    with pytest.raises(MsplitError, match="to tune is to measure"):
        RunRequest.of(effort="fast", tune=api.TuneSettings())


def test_any_variant_of_the_bench_can_be_named(mmoe):
    with msplit.prepare(mmoe, **SIMULATED, variant="msplit, 1 stream, CUDA graph") as runner:
        assert runner.facts["streams"] == 1
        assert {one.against for one in runner.checks} == {"TensorFlow on the CPU"}
        check(runner, mmoe)
    with pytest.raises(MsplitError, match="there is no variant 'fast'") as caught:
        msplit.prepare(mmoe, **SIMULATED, variant="fast")
    assert "msplit, 4 streams, CUDA graph" in caught.value.fix


def test_a_plan_runs_as_it_stands(mmoe, tmp_path):
    path = tmp_path / "plan.json"
    api.emit(msplit.assign(mmoe, "default", streams=3), "plan", path)
    request = {"streams": (1,), "engine": "cuda", "device": "cpu", "batch": 8, "plan": path}
    with msplit.prepare(mmoe, **request) as runner:
        assert runner.label == f"msplit, {path}"
        assert runner.facts["streams"] == 3
        check(runner, mmoe)


def test_without_a_gpu_tensorflow_runs_it_on_one_stream(mmoe):
    request = {"streams": (1, 2), "engine": "tensorflow", "batch": 8}
    with msplit.prepare(mmoe, **request) as runner:
        assert (runner.engine, runner.label) == ("tensorflow", "TensorFlow, 1 stream")
        assert runner.notes == ("TensorFlow runs the model on one stream; several are for the cuda engine",)
        check(runner, mmoe)


@pytest.mark.parametrize("request_", [SIMULATED, {"streams": (1,), "engine": "tensorflow", "batch": 8}])
def test_buffers_that_the_caller_fills_are_inputs_like_any_others(mmoe, request_):
    with msplit.prepare(mmoe, **request_) as runner:
        assert {name: (value.dtype.name, value.shape) for name, value in runner.buffers.items()} == runner.inputs
        for seed in (21, 22):
            feeds = feeds_of(mmoe, seed)
            for name, value in feeds.items():
                runner.buffers[name][...] = value
            found, wanted = runner.step(runner.buffers), reference(mmoe, feeds)
            for name, value in wanted.items():
                np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("request_", [SIMULATED, {"streams": (1,), "engine": "tensorflow", "batch": 8}])
def test_who_changes_an_output_changes_nothing_of_the_model(request_):
    # Not above: it needs PyTorch, which not every environment has that collects these tests.
    from tests.engines.cuda.cases import graph_of

    def model(tf, v1):
        x = v1.placeholder(tf.float32, [None, 2], name="x")
        three = tf.constant(np.arange(3.0, dtype=np.float32), name="three")
        tf.cond(tf.reduce_all(x > 0), lambda: three, lambda: -three, name="chosen")
        tf.add(x, three[:2], name="more")

    flat = graph_of(model, outputs=["three", "chosen", "more"])
    with msplit.prepare(flat, **request_) as runner:
        feeds = {"x": np.ones((8, 2), np.float32)}
        wanted = {name: value.copy() for name, value in runner.step(feeds).items()}
        for value in runner.step(feeds).values():
            value[...] = 7
        for name, value in runner.step(feeds).items():
            np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def test_threads_take_turns(mmoe):
    class Watched(Executable):
        inside, together = 0, 0

        def step(self, feeds):
            self.inside += 1
            self.together = max(self.together, self.inside)
            time.sleep(0.01)
            self.inside -= 1
            return {"y": feeds["x"] + 1}

    with msplit.prepare(mmoe, **SIMULATED) as runner, ThreadPoolExecutor(4) as pool:
        watched = Watched()
        other = replace(runner, executable=watched)
        found = list(pool.map(lambda number: other.step({"x": np.array(number)})["y"], range(8)))
    assert found == list(range(1, 9))
    assert watched.together == 1


def test_inputs_that_do_not_fit_are_refused_and_the_next_step_is_right(mmoe):
    with msplit.prepare(mmoe, **SIMULATED) as runner:
        with pytest.raises(EngineError, match="was prepared as"):
            runner.step({name: value[:, 1:] for name, value in feeds_of(mmoe, 0).items()})
        with pytest.raises(EngineError, match="no value for input"):
            runner.step({})
        check(runner, mmoe, seeds=(5,))


@pytest.mark.tf
@pytest.mark.parametrize("engine", ["cuda", "tensorflow"])
def test_masked_values_are_refused_and_so_is_a_step_after_the_end(mmoe, engine):
    runner = msplit.prepare(mmoe, **dict(SIMULATED, streams=(1,), engine=engine, effort="fast"))
    feeds = feeds_of(mmoe, 1)
    wanted = runner.step(feeds)
    for on_device in (False, True)[: 1 + (engine == "cuda")]:
        with pytest.raises(EngineError, match="input x has masked values"):
            runner.step({"x": np.ma.array(feeds["x"], mask=feeds["x"] > 1)}, on_device=on_device)
    for given in (5, None, [feeds]):
        with pytest.raises(EngineError, match="inputs are given by name"):
            runner.step(given)
    found = runner.step({"x": np.ma.array(feeds["x"])})
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())
    runner.close()
    for on_device in (False, True)[: 1 + (engine == "cuda")]:
        with pytest.raises(msplit.errors.Closed, match="the model is closed"):
            runner.step(feeds, on_device=on_device)
    runner.close()


def test_tensorflow_in_its_place_refuses_what_the_cuda_engine_refuses(mmoe):
    for request in (SIMULATED, dict(SIMULATED, engine="tensorflow")):
        with msplit.prepare(mmoe, **request) as runner:
            right = feeds_of(mmoe, 0)
            (name, value), *_ = right.items()
            for wrong, words in (
                ({name: value[:, 1:]}, "was prepared as"),
                ({**right, name: value.astype(np.float64)}, "was prepared as"),
                ({**right, name: value.tolist()}, "not an array"),
                ({**right, "more": value}, "no input 'more'"),
                ({}, "no value for input"),
            ):
                with pytest.raises(EngineError, match=words):
                    runner.step(wrong)
            runner.step(right)


def test_other_outputs_than_the_references_are_refused(mmoe, tmp_path, monkeypatch):
    closed = []
    build = CUDA.build

    def watched(job):
        executable = build(job)
        close = executable.close
        monkeypatch.setattr(executable, "close", lambda: closed.append(executable) or close(), raising=False)
        made.append(executable)
        return executable

    made = []
    monkeypatch.setattr(CUDA, "build", watched)
    feeds = feeds_of(mmoe, 0)
    wrong = {name: value + 0.5 for name, value in reference(mmoe, feeds).items()}
    path = tmp_path / "wrong.npz"
    save_reference(path, Reference(feeds, wrong, "a file"))
    request = {"streams": (1, 2), "engine": "cuda", "device": "cpu", "reference": path}
    with pytest.raises(EngineError, match=r"gives other outputs than .*\n?.*elements differ") as caught:
        msplit.prepare(mmoe, **request)
    assert len(wrong) > 1
    assert "\\n" not in str(caught.value), "each output is on a line of its own"
    assert len(str(caught.value).splitlines()) == len(wrong) + 2
    assert made
    assert set(map(id, closed)) == set(map(id, made))


def test_only_what_runs_is_kept(mmoe):
    with msplit.prepare(mmoe, **SIMULATED):
        assert mmoe not in Device.of(torch.device("cpu")).compiled


def test_tuning_is_for_builds_and_benches(mmoe):
    with pytest.raises(MsplitError, match=r"msplit\.prepare has no keyword 'tune'"):
        msplit.prepare(mmoe, tune=api.TuneSettings(seconds=1))


@pytest.mark.parametrize(
    "request_",
    [SIMULATED, dict(SIMULATED, effort="fast"), {"engine": "tensorflow", "streams": (1,)}],
    ids=["full", "fast", "tensorflow"],
)
def test_a_model_whose_variables_are_damaged_is_refused(tmp_path: Path, request_: dict[str, Any]) -> None:
    model = shutil.copytree(SAMPLES / "gru_while", tmp_path / "model")
    place = model / "variables" / "variables.data-00000-of-00001"
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 0x40
    place.write_bytes(data)
    said = r"data-00000-of-00001: the checkpoint is damaged: '.*' does not fit its checksum"
    with pytest.raises(LoadError, match=said):
        msplit.prepare(model, **request_)
    if request_["engine"] == "cuda":
        with pytest.raises(LoadError, match=said):
            msplit.build(model, tmp_path / "built", **request_)
        assert not (tmp_path / "built").exists()
