"""One graph on several simulated GPUs, each with a memory of its own: the same results, every crossing copied, and every order proved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit import api
from msplit.benchmark.benchmark import bench
from msplit.cost.profile import Workload
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import PEER_COPY, Op, OpGraph, apart, gpus_of
from msplit.engines.cuda.runtime.executables import SimulatedExecutable
from msplit.engines.cuda.runtime.plan_binding import gpu_of_streams
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.errors import EngineError, MsplitError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import feeds_for
from msplit.run.request import RunRequest
from msplit.schedule.plan_check import check
from msplit.schedule.split_problem import MEMORY_FOR_WEIGHTS
from msplit.verify.compare import compare
from msplit.verify.results import Settings
from tests.campaign import examples
from tests.engines.cuda.cases import SAMPLES, bits, flat_of, job, run, scattered
from tests.engines.cuda.random_graphs import random_graphs

SMALL = ["mmoe_small.pb", "towers_small.pb"]


def split_job(flat, feeds, gpus: int, streams: int, seed: int, **options):
    count = gpus * streams
    return job(flat, feeds, scattered(flat, count, seed), streams=count, split=tuple(range(gpus)), **options)


def split_run(flat, feeds, gpus: int = 2, streams: int = 1, seed: int = 0, **options):
    executable = ENGINE.build(split_job(flat, feeds, gpus, streams, seed, **options))
    for _ in range(2):
        outputs = executable.step(feeds)
    return outputs, executable


@settings(max_examples=examples(8, 2000), deadline=None)
@given(case=random_graphs(), gpus=st.integers(2, 4), streams=st.integers(1, 2), seed=st.integers(0, 99))
def test_nodes_scattered_over_gpus_give_the_same_bits(case, gpus, streams, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    feeds = {tensor.name: feeds[tensor.name] for tensor in flat.inputs}
    outputs, _ = split_run(flat, feeds, gpus, streams, seed)
    assert bits(outputs) == bits(run(flat, feeds))


@settings(max_examples=examples(6, 1000), deadline=None)
@given(case=random_graphs(most=12), seed=st.integers(0, 99))
def test_larger_kernels_stay_on_one_gpu(case, seed):
    graph_def, feeds, outputs = case
    flat = flat_of(graph_def, outputs=outputs)
    feeds = {tensor.name: feeds[tensor.name] for tensor in flat.inputs}
    found, _ = split_run(flat, feeds, 2, 2, seed, fuse=True, group=True)
    passed = compare(found, run(flat, feeds), tolerance=2e-4)
    assert passed.passed, passed.describe()


@pytest.mark.parametrize(
    "options", [{}, {"group": True}, {"fuse": True, "group": True}], ids=["plain", "grouped", "both"]
)
@pytest.mark.parametrize("name", SMALL)
def test_samples_run_with_larger_kernels_too(name, options):
    flat = flatten(read(SAMPLES / name))
    feeds = feeds_for(flat, Workload(3))
    expected = run(flat, feeds)
    for seed in range(2):
        outputs, executable = split_run(flat, feeds, 2, 2, seed, **options)
        for key, value in expected.items():
            np.testing.assert_allclose(outputs[key], value, rtol=2e-5, atol=1e-6)
        facts = executable.facts()
        assert facts["gpus"] == 2
        assert facts["copies"] > 0
        assert min(facts["weight_bytes_of_gpus"]) > 0


def test_tables_that_do_not_fit_on_one_gpu_are_placed_by_the_rule_and_run(tmp_path):
    """Six tables of 32 kB and 150 kB for weights on each GPU."""
    rules = tmp_path / "rules.yaml"
    memory = 150e3 / MEMORY_FOR_WEIGHTS / 1e9
    rules.write_text(
        f"version: 1\nstreams: 4\nrules:\n  - device: {{gpus: 2, memory_gb: {memory}}}\n  - colocation\n  - propagate\n"
    )
    flat = api.load(SAMPLES / "towers_small.pb")
    assigned = api.assign(flat, rules)
    feeds = feeds_for(flat, Workload(3))
    executable = ENGINE.build(job(flat, feeds, assigned.ids, streams=4, split=(0, 1)))
    outputs = executable.step(feeds)
    for key, value in run(flat, feeds).items():
        np.testing.assert_allclose(outputs[key], value, rtol=2e-5, atol=1e-6)
    facts = executable.facts()
    assert min(facts["weight_bytes_of_gpus"]) > 3 * 32e3
    index = flat.graph.index
    tables = [int(assigned.ids[index[f"tower_{tower}/embedding/table"]]) // 2 for tower in range(6)]
    assert sorted(tables) == [0, 0, 0, 1, 1, 1]


def program_and_plan(seed: int = 3):
    flat = flatten(read(SAMPLES / "mmoe_small.pb"))
    asked = split_job(flat, feeds_for(flat, Workload(3)), 2, 2, seed)
    compiled = ENGINE.compile(asked)
    return compiled, compiled.plan(asked)


def test_without_a_wait_across_gpus_the_second_checker_refuses_the_plan():
    compiled, plan = program_and_plan()
    program = compiled.program
    gpus = gpu_of_streams(program, plan)
    crossing = [
        wait
        for wait, (node, on) in enumerate(zip(plan.wait_node.tolist(), plan.wait_on.tolist(), strict=True))
        if PEER_COPY in (program.steps[node].op.op, program.steps[on].op.op)
    ]
    assert set(gpus) == {0, 1}
    assert crossing
    assert check(plan, program.dag) == []
    for wait in crossing:
        less = replace(plan, wait_node=np.delete(plan.wait_node, wait), wait_on=np.delete(plan.wait_on, wait))
        assert check(less, program.dag)


def test_a_step_on_the_wrong_gpu_is_refused_before_it_runs():
    compiled, plan = program_and_plan()
    program = compiled.program
    reader = next(
        number
        for number, step in enumerate(program.steps)
        if step.op.op != PEER_COPY and step.launches and program.gpus.steps[number] == 1
    )
    steps = tuple(0 if number == reader else gpu for number, gpu in enumerate(program.gpus.steps))
    moved = replace(program, gpus=replace(program.gpus, steps=steps))
    with pytest.raises(EngineError, match="internal error"):
        gpu_of_streams(moved, plan)


def test_memory_of_another_gpu_is_not_to_be_had():
    """The simulated memories find by addresses what the static check is told nothing of."""
    compiled, plan = program_and_plan()
    program = compiled.program
    copy = next(number for number, step in enumerate(program.steps) if step.op.op == PEER_COPY)
    steps = list(program.steps)
    steps[copy] = replace(steps[copy], call=lambda tensor: (tensor,))
    broken = replace(program, steps=tuple(steps))
    feeds = compiled.optimized.feeds
    with pytest.raises(EngineError, match="is in the memory that it copies"):
        SimulatedExecutable(broken, arrange(broken, plan), {}).step(feeds)
    # And a constant that lies on the other GPU.
    key = next(key for key, gpu in program.gpus.constants.items() if gpu == 1 and key in program.constants)
    lent = replace(program, gpus=replace(program.gpus, constants={**program.gpus.constants, key: 0}))
    with pytest.raises(EngineError, match="runs on GPU 1 and reads memory of GPU 0 without a copy"):
        SimulatedExecutable(lent, arrange(lent, plan), {}).step(feeds)


def test_a_value_is_copied_once_for_all_that_read_it_on_a_gpu():
    compiled, _ = program_and_plan()
    copies = [
        (step.inputs[0], gpu)
        for step, gpu in zip(compiled.program.steps, compiled.program.gpus.steps, strict=True)
        if step.op.op == PEER_COPY
    ]
    assert len(copies) == len(set(copies))


def test_bench_has_a_row_for_the_split_and_verifies_it():
    request = {
        "streams": (4,),
        "engine": "cuda",
        "device": "cpu",
        "batch": 3,
        "effort": "fast",
        "split": (0, 1),
        "ruleset": "default",
        "settings": Settings(duration=0, warmup=0, min_rounds=1),
    }
    found = bench(api.load(SAMPLES / "mmoe_small.pb"), **request)
    row = next(row for row in found.result.variants if "on 2 GPUs" in row.label)
    assert row.asked == ("4 streams on 2 GPUs",)
    assert row.facts["gpus"] == 2
    assert row.checks
    assert not found.result.failed


@pytest.mark.parametrize(("capture", "how"), [(True, "CUDA graph"), (False, "eager")])
def test_a_split_step_is_captured_as_any_other(capture, how):
    request = {"streams": (4,), "engine": "cuda", "device": "cpu", "batch": 3, "effort": "fast", "ruleset": "default"}
    flat = api.load(SAMPLES / "mmoe_small.pb")
    with api.prepare(flat, **request, split=(0, 1), capture=capture) as runner:
        assert runner.label.endswith(f" streams on 2 GPUs, {how}")
        assert runner.facts["captured"] is capture
        assert not [note for note in runner.notes if "captured" in note]


def test_ops_that_read_constants_alone_are_on_the_gpu_of_what_they_feed():
    """A lookup of constant rows, too large to be computed before it runs, whose only anchor is another reader of the same table."""
    table, only_copied = (0, 0), (2, 0)
    graph = OpGraph(
        {
            0: Op(0, "table", "Tanh", {}, [(9, 0)], [0]),
            1: Op(1, "near", "AddV2", {}, [table, (3, 0)], [1]),
            2: Op(2, "only_copied", "Neg", {}, [table], [2]),
            3: Op(3, "copy", PEER_COPY, {"gpu": 1}, [(8, 0)], [3]),
            4: Op(4, "back", PEER_COPY, {"gpu": 0}, [only_copied], [4]),
            5: Op(5, "anywhere", "Neg", {}, [(9, 0)], [5]),
            6: Op(6, "away", PEER_COPY, {"gpu": 1}, [(5, 0)], [6]),
        },
        constants={(9, 0): np.zeros(2, np.float32)},
        feeds={"x": (8, 0)},
        fetches={"y": (4, 0)},
    )
    gpus = gpus_of(graph)
    assert gpus == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0, 5: 0, 6: 1}
    assert apart(graph, gpus) is None


def test_prepare_gives_the_split_that_was_asked_for():
    flat = api.load(SAMPLES / "mmoe_small.pb")
    request = {
        "streams": (4,),
        "engine": "cuda",
        "device": "cpu",
        "batch": 3,
        "effort": "fast",
        "split": (0, 1),
        "ruleset": "default",
    }
    feeds = feeds_for(flat, Workload(3))
    expected = run(flat, feeds)
    with api.prepare(flat, **request) as runner:
        assert runner.facts["gpus"] == 2
        for key, value in runner.step(feeds).items():
            np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=1e-6)


def test_a_gpu_that_is_not_there_is_named():
    flat = api.load(SAMPLES / "mmoe_small.pb")
    feeds = feeds_for(flat, Workload(3))
    asked = job(flat, feeds, scattered(flat, 2), streams=2, split=(0, 63), device="cuda")
    with pytest.raises(EngineError, match=r"there is no GPU (0|63) here: PyTorch sees"):
        ENGINE.compile(asked)


def test_pools_and_builds_are_for_one_gpu():
    request = {"streams": (4,), "engine": "cuda", "device": "cpu", "batch": 3, "split": (0, 1)}
    with pytest.raises(MsplitError, match="builds and pools are for one GPU"):
        api.pool(SAMPLES / "mmoe_small.pb", **request)


def test_one_gpu_is_no_split():
    for gpus in ((0,), (0, 0), (-1, 1)):
        with pytest.raises(MsplitError, match="can not be split over the GPUs"):
            RunRequest.of(split=gpus)


def test_streams_that_can_not_be_divided_are_refused():
    flat = flatten(read(SAMPLES / "mmoe_small.pb"))
    feeds = feeds_for(flat, Workload(3))
    with pytest.raises(EngineError, match="3 streams can not be divided evenly over 2 GPUs"):
        ENGINE.build(job(flat, feeds, scattered(flat, 3), streams=3, split=(0, 1)))
