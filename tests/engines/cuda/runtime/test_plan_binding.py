"""Between nodes and steps: stored plans come back to the last wait, ids say where steps run, ties hold steps of one node together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import StoredPlan
from msplit.engines.cuda.runtime import plan_binding
from msplit.engines.cuda.runtime.executables import plan_for
from msplit.errors import EngineError
from msplit.flatten.build import flatten
from msplit.formats import read
from msplit.inputs.make import make_inputs
from msplit.schedule.plan import make_plan, topological
from tests.engines.cuda.cases import SAMPLES, job, program_of, scattered

MODELS = ["mmoe_small.pb", "lstm_small.pb", "towers_small.pb", "keras_inception"]


def load(name):
    flat = flatten(read(SAMPLES / name))
    return flat, make_inputs(flat, {}, batch=2)


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_plan_comes_back_the_same(name):
    flat, feeds = load(name)
    program = program_of(flat, feeds)
    plan = plan_for(program, scattered(flat, 4), None)
    again = plan_binding.restore(program, plan_binding.store(program, plan))
    assert plan.waits > 0
    for field in ("stream", "order"):
        np.testing.assert_array_equal(getattr(again, field), getattr(plan, field), err_msg=field)
    assert (set(again.fork.tolist()), set(again.join.tolist())) == (set(plan.fork.tolist()), set(plan.join.tolist()))
    pairs = [set(zip(p.wait_node.tolist(), p.wait_on.tolist(), strict=True)) for p in (plan, again)]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_a_plan_put_every_step_where_the_plan_has_it(name):
    flat, feeds = load(name)
    program = program_of(flat, feeds)
    tie = plan_binding.ties(program, np.full(len(flat), -1, np.int32))
    lanes = np.asarray([-1 if not step.launches else number % 3 for number, step in enumerate(program.steps)], np.int32)
    for group in np.unique(tie[(tie >= 0) & (lanes >= 0)]):
        lanes[(tie == group) & (lanes >= 0)] = 1
    ids = plan_binding.ids_of(program, lanes, len(flat))
    found, count = program.lanes(np.maximum(ids, 0))
    assert count == 3
    np.testing.assert_array_equal(found, lanes)


def test_steps_of_tied_nodes_are_tied():
    flat, feeds = load("mmoe_small.pb")
    program = program_of(flat, feeds)
    first, second = [step.op.source_nodes[0] for step in program.steps if step.launches][:2]
    groups = np.full(len(flat), -1, np.int32)
    groups[[first, second]] = 0
    tie = plan_binding.ties(program, groups)
    tied = {program.steps[number].op.source_nodes[0] for number in np.flatnonzero(tie == 0)}
    assert tied == {first, second}


LARGER = [{"fuse": True}, {"group": True}, {"fuse": True, "group": True}]


def larger(name, options):
    flat, feeds = load(name)
    return flat, ENGINE.compile(job(flat, feeds, **options)).program


@pytest.mark.parametrize("options", LARGER, ids=lambda options: "+".join(options))
@pytest.mark.parametrize("name", MODELS)
def test_nodes_that_share_a_kernel_share_a_stream_and_are_listed(name, options):
    flat, program = larger(name, options)
    tie = plan_binding.ties(program, np.full(len(flat), -1, np.int32))
    launching = np.asarray([step.launches for step in program.steps])
    # As many streams as can be: every tie, and every step without one, on its own.
    own = np.where(tie >= 0, tie, len(tie) + np.arange(len(tie)))
    lanes = np.where(launching, np.unique(own, return_inverse=True)[1] % 7, -1).astype(np.int32)
    order = topological(program.dag, np.zeros(len(program.steps)))
    used = np.unique(lanes[launching])
    plan = make_plan(program.dag, np.where(launching, np.searchsorted(used, lanes), -1).astype(np.int32), order)
    ids = plan_binding.ids_of(program, plan.stream, len(flat))
    stored = plan_binding.store(program, plan)
    assert stored.groups
    for group in stored.groups:
        assert {int(ids[node]) for node in group.nodes} == {group.stream}
    shared = {tuple(step.op.source_nodes) for step in program.steps if step.launches and len(step.op.source_nodes) > 1}
    assert {group.nodes for group in stored.groups} == {tuple(dict.fromkeys(source_nodes)) for source_nodes in shared}


def test_groups_are_called_by_what_they_are():
    kinds = {
        name: {option: {group.kind for group in groups_of(name, {option: True})} for option in ("fuse", "group")}
        for name in ("towers_small.pb", "lstm_small.pb")
    }
    assert kinds["towers_small.pb"] == {"fuse": {"library"}, "group": {"library", "columns", "grouped"}}
    assert kinds["lstm_small.pb"] == {"fuse": {"library", "fused"}, "group": {"library", "grouped"}}
    both = groups_of("lstm_small.pb", {"fuse": True, "group": True})
    (first, *_) = [group for group in both if group.kind == "fused and grouped"]
    flat, _ = load("lstm_small.pb")
    assert {flat.graph.names[node].rpartition("/")[0] for node in first.nodes} == {"layer_0/step_1", "layer_1/step_0"}


def groups_of(name, options):
    flat, program = larger(name, options)
    return plan_binding.store(program, plan_for(program, np.zeros(len(flat), np.int32), None)).groups


def test_a_fused_kernel_does_not_go_by_a_node_that_another_kernel_computes():
    # Grouping adds copies and views in front of the next wavefront's products; fusion takes them into the cells behind which they stand.
    flat, program = larger("lstm_small.pb", {"fuse": True, "group": True})
    owner = {}
    for step in program.steps:
        if step.launches:
            for node in step.op.source_nodes:
                assert owner.setdefault(node, step) is step, flat.graph.names[node]
    products = [node for node, op in enumerate(flat.graph.ops) if op == "MatMul" and node in owner]
    assert products
    assert all("MatMul" in owner[node].op.op for node in products)


def test_steps_that_work_for_one_node_are_tied_whichever_node_they_go_by():
    flat, program = larger("mmoe_small.pb", {"fuse": True})
    launching = [number for number, step in enumerate(program.steps) if step.launches]
    one, other = launching[0], launching[-1]
    groups = np.full(len(flat), -1, np.int32)
    assert (plan_binding.ties(program, groups)[[one, other]] == -1).all()
    groups[[program.steps[one].op.source_nodes[-1], program.steps[other].op.source_nodes[-1]]] = 0
    tie = plan_binding.ties(program, groups)
    assert tie[one] == tie[other] >= 0
    assert set(np.flatnonzero(tie >= 0)) & set(launching) == {one, other}


def test_memory_of_another_gpu_is_its_graphs_until_it_is_given_back(monkeypatch):
    """PyTorch frees a pool that nothing uses, and refuses it to a further capture."""
    uses = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    for name, change in (("beginAllocateCurrentThreadToPool", 1), ("endAllocateToPool", 0), ("releasePool", -1)):
        tell = partial(lambda change, place, pool: uses.append((place, pool, change)), change)
        monkeypatch.setattr(torch._C, f"_cuda_{name}", tell, raising=False)
    place = torch.device("cuda", 1)
    monkeypatch.setattr(plan_binding.Device, "of", Device)
    memory = plan_binding.CaptureMemory(place)
    with memory.used():
        pass
    with pytest.raises(EngineError), memory.used():
        raise EngineError("a step can not be captured")
    assert {(index, pool) for index, pool, _ in uses} == {(1, (0, 7))}
    assert [change for *_, change in uses] == [1, 0, 1, 0]
    memory.give_back()
    memory.give_back()
    assert sum(change for *_, change in uses) == 0


def test_a_plan_of_other_steps_does_not_fit():
    flat, feeds = load("towers_small.pb")
    program = program_of(flat, feeds)
    stored = plan_binding.store(program, plan_for(program, scattered(flat, 2), None))
    for kernels in (stored.kernels[1:], (*stored.kernels, (0, 99, 0)), (*stored.kernels[1:], stored.kernels[1])):
        assert plan_binding.restore(program, StoredPlan(kernels)) is None


def test_a_job_runs_by_the_plan_that_it_brings():
    flat, feeds = load("towers_small.pb")
    program = program_of(flat, feeds)
    stored = plan_binding.store(program, plan_for(program, scattered(flat, 3, seed=5), None))
    made = job(flat, feeds)
    executable = ENGINE.build(replace(made, options=replace(made.options, plan=stored)))
    assert [(a.step, a.lane) for a in executable.stream_program.instructions] == [
        (int(step), int(lane))
        for step, lane in zip(
            plan_binding.restore(program, stored).order, [lane for _, _, lane in stored.kernels], strict=True
        )
    ]
    outputs = executable.step(feeds)
    alone = ENGINE.build(made).step(feeds)
    for name, value in alone.items():
        np.testing.assert_array_equal(outputs[name], value)


def test_a_job_whose_plan_does_not_fit_runs_by_its_ids():
    flat, feeds = load("towers_small.pb")
    made = job(flat, feeds, scattered(flat, 3), streams=3)
    executable = ENGINE.build(replace(made, options=replace(made.options, plan=StoredPlan(((0, 0, 0),)))))
    assert executable.facts()["streams"] == 3
