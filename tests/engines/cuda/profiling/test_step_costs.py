"""What the steps of a program cost, from the costs of the graph's nodes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from msplit import api
from msplit.cost import estimate
from msplit.cost.gpus import data_sheet
from msplit.engines.base import Job
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.options import EngineOptions
from msplit.engines.cuda.profiling.step_costs import LEAST_US, estimated
from msplit.inputs.make import make_inputs
from msplit.run.profile import profile
from msplit.run.request import RunRequest
from msplit.shapes.infer import infer
from tests.cli.runner import SAMPLES
from tests.engines.cuda.cases import flat_of, graph_of, job, options_of
from tests.engines.cuda.passes.attention.graphs import attention_graph
from tests.engines.cuda.random_graphs import _Graph

FOREIGN = Path(__file__).parents[4] / "benchmarks" / "foreign"


@pytest.fixture(scope="module")
def model():

    flat = api.load(SAMPLES / "mmoe_small.pb")
    job = Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=4), options=EngineOptions("cpu"))
    return flat, CudaEngine().compile(job).program


def test_a_step_takes_what_its_nodes_take_and_fills_what_its_product_fills(model):
    flat, program = model
    _, costs = api.price(flat, batch=4)
    found = estimated(program, costs)
    number = next(place for place, step in enumerate(program.steps) if len(step.op.source_nodes) == 3 and step.launches)
    source_nodes = program.steps[number].op.source_nodes
    assert flat.graph.ops[source_nodes[0]] == "MatMul"
    assert found.time_us[number] == pytest.approx(costs.time_us[source_nodes].sum())
    assert found.share[number] == costs.share[source_nodes[0]]
    launching = [step.launches for step in program.steps]
    assert (found.time_us[launching] >= LEAST_US).all()
    assert found.time_us.sum() == pytest.approx(costs.time_us.sum())


def test_measured_costs_come_out_as_they_were_measured(model):
    flat, program = model
    measured, _ = profile(flat, RunRequest.of(device="cpu", batch=4))
    _, costs = api.price(flat, profile=measured)
    found = estimated(program, costs)
    kinds = {step.nodes: step.kernel for step in measured.steps}
    for place, step in enumerate(program.steps):
        if step.launches:
            kernel = measured.kernels[kinds[tuple(flat.graph.names[node] for node in step.op.source_nodes)]]
            assert found.time_us[place] == pytest.approx(max(kernel.time_us, LEAST_US))


class _First:
    """Draws nothing: only the seed of the constants is asked for."""

    def __call__(self, strategy):
        return 0


def _pointwise(length: int, width: int):
    """A chain of pointwise ops on (3, width), and the same fused: programs and costs."""

    g = _Graph(_First())
    value = g.placeholder("x", (3, width))
    for number in range(length):
        value = g.node("Tanh" if number % 2 else "Neg", [value], T=1)
    flat = flat_of(g.graph_def)
    costs = estimate(flat, infer(flat))
    own = job(flat, {"x": np.ones((3, width), np.float32)})
    engine = CudaEngine()
    fused = replace(own, options=options_of(fuse=True))
    return costs, [engine.compile(one).program for one in (own, fused)]


def test_a_fused_chain_is_launched_once():
    costs, (plain, fused) = _pointwise(6, 4)
    assert [sum(step.launches for step in program.steps) for program in (plain, fused)] == [6, 1]
    assert estimated(plain, costs).time_us.sum() == pytest.approx(6 * estimated(fused, costs).time_us.sum())


def test_a_fused_chain_moves_what_goes_in_and_what_comes_out():
    costs, (plain, fused) = _pointwise(6, 1 << 22)
    alone, together = estimated(plain, costs), estimated(fused, costs)
    tensor = 3 * (1 << 22) * 4
    assert together.bytes.sum() == 2 * tensor
    assert alone.bytes.sum() == 6 * 2 * tensor
    assert together.time_us.sum() == pytest.approx(alone.time_us.sum() / 6, rel=0.05)
    # All SMs, once the kernel runs: others have them while it is launched.
    running = 1 - data_sheet(costs.gpu).launch_us / alone.time_us.max()
    assert together.share.max() == alone.share.max() == pytest.approx(running)


def test_attention_is_one_kernel_that_moves_no_scores():
    flat, feeds = attention_graph(4, 4, 256, 256, 16, -1e9)
    program, costs = CudaEngine().compile(job(flat, feeds)).program, estimate(flat, infer(flat))
    found = estimated(program, costs)
    (number,) = [number for number, step in enumerate(program.steps) if step.op.op == "_Attention"]
    scores = 4 * 4 * 4 * 256 * 256
    assert found.bytes[number] < scores
    assert found.time_us[number] < costs.time_us[program.steps[number].op.source_nodes].sum()


def test_a_fused_chain_of_much_arithmetic_takes_that():
    costs, (_, fused) = _pointwise(6, 4)
    busy = replace(costs, flops=np.where(costs.time_us > 0, 1e12, 0.0), time_us=np.where(costs.time_us > 0, 1e5, 0.0))
    share = float(costs.share[costs.time_us > 0].max())
    least = 6e12 / (data_sheet(costs.gpu).flops_per_us("float32") * share)
    # As many operations take as long in one kernel as in six.
    assert estimated(fused, busy).time_us.sum() == pytest.approx(6e5)
    slow = replace(busy, time_us=np.where(costs.time_us > 0, least / 6, 0.0))
    assert estimated(fused, slow).time_us.sum() == pytest.approx(least)


def test_a_fused_chain_of_kernels_that_measure_slower_is_slower():
    costs, (_, fused) = _pointwise(6, 4)
    measured = replace(costs, time_us=costs.time_us * 2)
    assert estimated(fused, measured).time_us.sum() == pytest.approx(2 * estimated(fused, costs).time_us.sum())


def test_merged_lookups_are_no_slower_than_a_single_one_and_move_what_all_do():

    flat = api.load(SAMPLES / "towers_small.pb")
    _, costs = api.price(flat, batch=8)
    own = Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=8), options=EngineOptions("cpu"))
    grouped = replace(own, options=options_of(group=True))
    plain, merged = (CudaEngine().compile(one).program for one in (own, grouped))
    lookup = next(number for number, step in enumerate(merged.steps) if step.op.op == "_Columns")
    found = estimated(merged, costs)
    source_nodes = merged.steps[lookup].op.source_nodes
    assert found.time_us[lookup] <= costs.time_us[source_nodes].sum() / 2
    assert 0 < found.bytes[lookup] <= costs.bytes[source_nodes].sum()
    assert found.time_us.sum() < estimated(plain, costs).time_us.sum() / 2


def test_columns_move_the_rows_that_they_look_up_and_not_their_tables():
    """So sums of rows, which are not written before they are added, are found to be faster with the lookups than behind them."""
    batch, bag, width = 64, 50, 128

    def build(tf, v1):
        tables = [tf.constant(np.zeros((rows, width), np.float32)) for rows in (30_000, 40_000, 3)]
        ids = [v1.placeholder(tf.int32, [batch, bag], name=f"ids_{at}") for at in range(len(tables))]
        columns = [tf.reduce_sum(tf.gather(table, one), 1) for table, one in zip(tables, ids, strict=True)]
        tf.identity(tf.concat(columns, 1), name="out")

    flat = graph_of(build, outputs=["out"])
    feeds = make_inputs(flat, {}, batch=batch)
    grouped, plain = (CudaEngine().compile(job(flat, feeds, group=group)).program for group in (True, False))
    (columns,) = (step for step in grouped.steps if step.op.op == "_Columns")
    looked_up = 2 * batch * bag * width * 4 + 3 * width * 4
    assert columns.traffic == looked_up + 3 * batch * bag * 4 + 3 * batch * width * 4
    _, costs = api.price(flat, batch=batch)
    assert estimated(grouped, costs).time_us.sum() < 0.6 * estimated(plain, costs).time_us.sum()


def test_columns_whose_inputs_have_to_be_copied_first_take_a_launch_for_each():
    """The 60 columns of `bucket_columns` were predicted without their copies: 19 µs for the step that took 113 on an H200."""
    flat = api.load(SAMPLES / "towers_small.pb")
    _, costs = api.price(flat, batch=8, gpu="h200")
    own = Job(flat, np.zeros(len(flat), np.int32), 1, make_inputs(flat, {}, batch=8), options=options_of(group=True))
    program = CudaEngine().compile(own).program
    lookup = next(number for number, step in enumerate(program.steps) if step.op.op == "_Columns")
    assert program.steps[lookup].scattered == 0
    steps = list(program.steps)
    steps[lookup] = replace(steps[lookup], scattered=60)
    more = estimated(replace(program, steps=steps), costs).time_us - estimated(program, costs).time_us
    assert np.flatnonzero(more).tolist() == [lookup]
    suite = json.loads(gzip.decompress((FOREIGN / "suite.json.gz").read_bytes()))
    (run,) = (one for one in suite["runs"] if Path(one["model"]).stem == "bucket_columns")
    (layer,) = (one for one in run["layers"] if one["name"] == "the same, 1 stream")
    (row,) = (one for one in run["result"]["variants"] if one["label"] == layer["variant"])
    assert layer["predicted_us"] + more[lookup] == pytest.approx(row["device"]["median_us"], rel=0.2)


TURNS = 6


def _loops(functional: bool, count: int):
    """Alike loops beside each other, one product and four pointwise ops per turn: what each way to make kernels launches, and the costs."""
    import tensorflow as tf

    v1 = tf.compat.v1
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if functional else v1.disable_control_flow_v2)()

    def turn(i, a):
        made = tf.matmul(a, weights)
        return i + 1, tf.tanh(made) * tf.sigmoid(made) + a

    try:
        with tf.Graph().as_default() as graph:
            for number in range(count):
                x = v1.placeholder(tf.float32, [4, 8], f"x{number}")
                weights = tf.constant(np.random.default_rng(number).normal(size=(8, 8)).astype(np.float32))
                tf.identity(tf.while_loop(lambda i, a: i < TURNS, turn, (0, x))[1], f"out{number}")
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
    flat = flat_of(graph.as_graph_def(), outputs=[f"out{number}" for number in range(count)])
    own = job(flat, {f"x{number}": np.ones((4, 8), np.float32) for number in range(count)})
    engine, larger = CudaEngine(), ({}, {"fuse": True}, {"group": True}, {"fuse": True, "group": True})
    jobs = [replace(own, options=options_of(**options)) for options in larger]
    return estimate(flat, infer(flat)), [engine.compile(one).program for one in jobs]


@pytest.mark.tf
@pytest.mark.parametrize("functional", [True, False])
def test_fused_and_grouped_kernels_of_a_loop_cost_what_launching_them_does(functional):
    """All of these kernels are as short as kernels get: what there is to gain is the number of launches."""
    costs, programs = _loops(functional, 2)
    plain, *_ = programs
    counts = [sum(step.launches for step in program.steps) for program in programs]
    assert counts == [2 * 5 * TURNS, 2 * 2 * TURNS, 5 * TURNS + 1, 2 * TURNS + 1]  # what comes in is put side by side
    assert estimated(plain, costs).time_us.sum() == pytest.approx(costs.time_us.sum())
    each = costs.time_us.sum() / counts[0]
    for program, count in zip(programs, counts, strict=True):
        assert estimated(program, costs).time_us.sum() == pytest.approx(count * each, rel=0.1)


@pytest.mark.tf
def test_fused_kernels_of_a_loop_of_much_arithmetic_take_that():
    costs, (plain, fused, *_) = _loops(True, 1)
    busy = replace(costs, flops=np.where(costs.time_us > 0, 1e12, 0.0), time_us=np.where(costs.time_us > 0, 1e5, 0.0))
    # As many operations take as long in one kernel as in four.
    assert estimated(plain, busy).time_us.sum() == pytest.approx(1e5)
    assert estimated(fused, busy).time_us.sum() == pytest.approx(1e5)
