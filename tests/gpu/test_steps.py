"""A user's steps on a real GPU: every replay's outputs are those of its own inputs, however the host learns that it is over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir import lowering
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.runtime import output_staging
from msplit.engines.cuda.runtime.output_staging import CapturedGraph
from msplit.errors import EngineError
from msplit.opset import schema
from tests.engines.cuda.cases import flat_of, options_of

pytestmark = pytest.mark.gpu

FLOAT, INT, BOOL, HALF = 1, 3, 10, 19
SIZES = {"a": (3, 5), "b": (1,), "c": (), "d": (700, 3), "e": (0, 4), "f": (300, 1000)}
HEAD_START_CYCLES = 100_000_000


def graph(outputs=()):
    """Outputs of many types and sizes, and one that is an input as it is; or some of them, and their inputs."""
    made = schema.graph_pb2.GraphDef()

    def add(op, name, inputs, **types):
        node = made.node.add(op=op, name=name, input=inputs)
        for key, value in types.items():
            node.attr[key].type = value

    for name, shape in SIZES.items():
        if outputs and not any(output.startswith(name) for output in outputs):
            continue
        node = made.node.add(op="Placeholder", name=name)
        node.attr["dtype"].type = FLOAT
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
        if not shape:
            node.attr["shape"].shape.unknown_rank = False
        add("Neg", f"{name}_neg", [name], T=FLOAT)
        add("Cast", f"{name}_int", [name], SrcT=FLOAT, DstT=INT)
        add("Cast", f"{name}_half", [name], SrcT=FLOAT, DstT=HALF)
        add("Greater", f"{name}_flag", [name, f"{name}_neg"], T=FLOAT)
    every = [f"{name}_{kind}" for name in SIZES for kind in ("neg", "int", "half", "flag")]
    return flat_of(made, outputs=list(outputs) or [*every, "a"])


def inputs(seed):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(shape) * 50, np.float32) for name, shape in SIZES.items()}


def expected(feeds):
    found = {"a": feeds["a"]} if "a" in feeds else {}
    for name, value in feeds.items():
        found |= {f"{name}_neg": -value, f"{name}_int": value.astype(np.int32)}
        found |= {f"{name}_half": value.astype(np.float16), f"{name}_flag": value > -value}
    return found


def check(executable, seed):
    feeds = inputs(seed)
    found = executable.step(feeds)
    wanted = expected(feeds)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert found[name].flags.writeable
        np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, step {seed}")
    return found


@pytest.fixture
def build():
    """Makes executables of the graph; all are closed at the end."""
    flat, engine, made = graph(), CudaEngine(), []

    def one(streams=1, **options):
        ids = np.arange(len(flat), dtype=np.int32) % streams
        made.append(
            engine.build(
                Job(flat, ids, streams, inputs(0), precision=Precision.IEEE, options=options_of("cuda", **options))
            )
        )
        return made[-1]

    yield one
    for executable in made:
        executable.close()


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("streams", [1, 4])
def test_every_step_gives_the_outputs_of_its_own_inputs(build, streams, capture):
    executable = build(streams, capture=capture)
    kept = [check(executable, seed) for seed in range(50)]
    for seed, found in enumerate(kept):  # no later step wrote over them
        np.testing.assert_array_equal(found["d_neg"], -inputs(seed)["d"])
        np.testing.assert_array_equal(found["f_half"], inputs(seed)["f"].astype(np.float16))


@pytest.mark.parametrize(
    "outputs",
    [
        ["c_neg"], ["e_neg"], ["a_flag"], ["f_neg"], ["a_neg", "b_half"], ["f_half", "e_int", "d_flag", "c_int"],
        ["f_neg", "f_int", "f_half", "f_flag", "e_neg"], ["a_neg", "b_neg", "c_flag", "d_int", "f_neg"],
    ],
)  # fmt: skip
def test_few_and_many_outputs_arrive_whole(outputs):
    """Up to four that are not empty have their addresses in the kernel's arguments; five need the table."""
    names = {output[0] for output in outputs}
    given = [{name: value for name, value in inputs(seed).items() if name in names} for seed in range(20)]
    flat = graph(outputs)
    executable = CudaEngine().build(Job(flat, np.zeros(len(flat), np.int32), 1, given[0], precision=Precision.IEEE))
    try:
        for feeds in given:
            found = executable.step(feeds)
            assert set(found) == set(outputs)
            for name, value in found.items():
                np.testing.assert_array_equal(value, expected(feeds)[name], err_msg=name)
    finally:
        executable.close()


@pytest.mark.parametrize("rows", [130, 1100, 4200, 36_000])
def test_a_large_input_is_whole_in_every_step(rows):
    """Pieces of it are on the bus while others are being copied, by helpers where it is very large; a small one comes with the graph."""
    made = schema.graph_pb2.GraphDef()
    for name, shape in (("x", (rows, 1000)), ("y", (1, 1000))):
        node = made.node.add(op="Placeholder", name=name)
        node.attr["dtype"].type = FLOAT
        for size in shape:
            node.attr["shape"].shape.dim.add(size=size)
    made.node.add(op="Mul", name="z", input=["x", "y"]).attr["T"].type = FLOAT
    made.node.add(op="Neg", name="w", input=["x"]).attr["T"].type = FLOAT
    flat = flat_of(made, outputs=["z", "w"])
    rng = np.random.default_rng(rows)
    values = rng.standard_normal((rows + 20, 1000)).astype(np.float32)
    given = [{"x": values[first:][:rows], "y": np.float32(first + 1) * values[:1]} for first in range(20)]
    given[7]["x"], given[12]["x"] = np.asfortranarray(given[7]["x"]), given[12]["x"][::-1]
    executable = CudaEngine().build(
        Job(flat, np.arange(len(flat), dtype=np.int32) % 2, 2, given[0], precision=Precision.IEEE)
    )
    try:
        for feeds in given:
            found = executable.step(feeds)
            np.testing.assert_array_equal(found["w"], -feeds["x"])
            np.testing.assert_array_equal(found["z"], feeds["x"] * feeds["y"])
    finally:
        executable.close()


@pytest.mark.parametrize("way", ["patience", "processor"])
def test_a_host_that_does_not_look_for_long_lets_cuda_wait(build, monkeypatch, way):
    if way == "patience":
        monkeypatch.setattr(output_staging, "_PATIENCE", 0)
    else:
        monkeypatch.setattr(output_staging, "CAN_POLL", False)
    executable = build()
    for seed in range(20):
        check(executable, seed)


def test_a_replay_that_never_came_is_not_mistaken_for_the_next(build, monkeypatch):
    executable = build()
    check(executable, 0)
    executable._outputs.expect()  # as when the user interrupts a step right there
    for seed in range(1, 5):
        check(executable, seed)
    executable._outputs.expect()
    executable._graphs[CapturedGraph.STEP].start()  # interrupted while it waits
    for seed in range(5, 10):
        check(executable, seed)


def test_work_of_others_on_the_stream_comes_first(build):
    executable = build(4)
    for seed in range(3):
        torch.cuda._sleep(HEAD_START_CYCLES)  # longer than the host looks for
        check(executable, seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(HEAD_START_CYCLES // 100)
            check(executable, seed + 10)


def test_executables_take_turns(build):
    live = [build(streams) for streams in (1, 2, 4)]
    rng = np.random.default_rng(0)
    for seed in range(60):
        which = live[int(rng.integers(len(live)))]
        check(which, seed)
        if seed % 7 == 0:
            which.launch()
            which.device_times(2)
    live[0].close()
    check(live[1], 100)


def test_a_step_that_waits_for_the_device_is_named_when_it_is_captured(monkeypatch):
    def peeks(node, tensor):
        assert tensor.isfinite().all().item()
        return -tensor

    monkeypatch.setitem(lowering.table(), "Neg", replace(lowering.table()["Neg"], function=peeks))
    flat, feeds = graph(["b_neg"]), {"b": np.ones(1, np.float32)}
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds)
    eager = CudaEngine().build(replace(job, options=EngineOptions(capture=False)))
    np.testing.assert_array_equal(eager.step(feeds)["b_neg"], [-1])
    eager.close()
    with pytest.raises(EngineError, match=r"b_neg \(Neg\) can not be captured: .*\n.*--cuda capture=no"):
        CudaEngine().build(job)
