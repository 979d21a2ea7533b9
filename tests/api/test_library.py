"""The library: what the commands do, as typed functions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import msplit
from msplit import api, formats
from msplit.assignment.assignment import plan_of, present_ids
from msplit.errors import EngineError, LoadError, MsplitError, RulesError, WriteError
from msplit.report import benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown
from msplit.rules.ruleset import RuleSet
from msplit.run.request import RunRequest
from msplit.run.tensorflow_rows import assignments_for
from msplit.run.variants import choose_engine
from tests.fuzz import plans
from tests.graphs import parse

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


@pytest.fixture(scope="module")
def towers() -> msplit.Assigned:
    return msplit.assign(msplit.load(SAMPLES / "towers_small.pb"), "recsys", streams=3)


def test_load_takes_text_and_paths_and_keeps_the_choice() -> None:
    flat = msplit.load(str(SAMPLES / "two_signatures"), signature="embed")
    assert flat.model.signature == "embed"
    assert flat.model.format is formats.Format.SAVED_MODEL
    assert len(msplit.load(SAMPLES / "two_tags", tags=["serve", "gpu"])) > 0
    part = msplit.load(SAMPLES / "mmoe_small.pb", outputs=["expert_0/dense_0/Relu"])
    assert len(part) < len(msplit.load(SAMPLES / "mmoe_small.pb"))


def test_errors_are_of_one_family_and_say_where() -> None:
    with pytest.raises(msplit.MsplitError) as caught:
        msplit.load("gone.pb")
    assert isinstance(caught.value, LoadError)
    assert (caught.value.where, caught.value.fix) == ("gone.pb", "check the path")


def test_analyze_answers_what_can_be_gained() -> None:
    found = msplit.analyze(msplit.load(SAMPLES / "lstm_small.pb"))
    assert isinstance(found, msplit.Analysis)
    assert found.suggestion.rule_set == "rnn"
    assert found.kernels == int((found.costs.time_us > 0).sum())
    assert found.gains[2] <= found.gains[4] <= found.gains[8] <= found.bounds.max_gain + 1e-9
    assert found.bounds.lower_bound_us <= found.bounds.serial_us
    assert found.guesses.share == 0
    assert found.judgement.helps
    assert 1 < found.judgement.gain <= found.bounds.max_gain


def test_a_batch_and_shapes_change_the_work() -> None:
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    one = msplit.analyze(flat)
    many = msplit.analyze(flat, batch=4096)
    assert many.costs.flops.sum() == pytest.approx(4096 * one.costs.flops.sum(), rel=0.01)
    assert msplit.analyze(flat, shapes={"x": (4096, 64)}).bounds.serial_us == many.bounds.serial_us
    assert one.shapes.assumed
    assert not many.shapes.assumed


def test_another_gpu_costs_differently() -> None:
    flat = msplit.load(SAMPLES / "inception_v3_stripped.pb")
    assert msplit.analyze(flat, gpu="t4").bounds.serial_us > msplit.analyze(flat, gpu="h200").bounds.serial_us


def test_assign_gives_every_node_an_id_and_a_reason(towers: msplit.Assigned) -> None:
    flat = towers.flat
    assert towers.ids.shape == (len(flat),)
    assert set(towers.ids[~flat.host].tolist()) == {0, 1, 2}
    assert sum(load.nodes for load in towers.loads) == int((~flat.host).sum())
    assert sum(load.time_us for load in towers.loads) == pytest.approx(towers.costs.time_us.sum())
    assert towers.unassigned == 0
    assert len(towers.changed) == int(((towers.ids != present_ids(flat)) & ~flat.host).sum())
    rule, why = towers.outcome.assignment.why(flat.graph.index["tower_1/dense_0/MatMul"]) or ("", "")
    assert rule == "embedding"
    assert why


def test_assign_takes_files_and_rule_sets_that_are_loaded(towers: msplit.Assigned, tmp_path: Path) -> None:
    flat = towers.flat
    path = tmp_path / "rules.yaml"
    path.write_text('version: 1\nstreams: 2\nrules:\n  - regex: {patterns: {1: ["tower_1/.*"]}}\n')
    by_path = msplit.assign(flat, path)
    assert isinstance(by_path.ruleset, RuleSet)
    by_rules = msplit.assign(flat, by_path.ruleset, priced=(towers.shapes, towers.costs))
    assert np.array_equal(by_path.ids, by_rules.ids)
    assert by_path.unassigned > 0
    with pytest.raises(RulesError, match="did you mean 'recsys'"):
        msplit.assign(flat, "recsis")


def test_what_crosses_is_counted_once_per_reading_stream_and_where_the_kernels_are() -> None:
    flat, costs = parse("""
        x:Placeholder
        a:MatMul(x)[_stream_id=0]
        view:Identity(a)[_stream_id=1]
        b:Relu(view)[_stream_id=1]
        c:Relu(a)[_stream_id=1]
        back:Identity(a)[_stream_id=1]
        d:Relu(back)[_stream_id=0]
        e:Relu(x)[_stream_id=2]
        f:AddN(b,d,e,a)[_stream_id=2]
    """)
    from msplit.assignment.assignment import _crossing

    ids = present_ids(flat)
    edges, moved, unknown = _crossing(flat, costs, ids)
    # a -> 1 (b through a view, and c), b -> 2, d -> 2, a -> 2; a view that comes back to its stream crosses nothing.
    assert edges == 4
    assert moved == costs.out_bytes[[flat.graph.index[name] for name in "abda"]].sum()
    assert unknown == int((~costs.known[[flat.graph.index[name] for name in "abda"]]).sum())


def test_save_writes_what_load_reads_back(towers: msplit.Assigned, tmp_path: Path) -> None:
    report, conflicts = msplit.save(towers.flat, towers.ids, tmp_path / "out.pb", costs=towers.costs)
    assert conflicts == ()
    assert report.set == int((~towers.flat.host).sum())
    back = msplit.load(tmp_path / "out.pb")
    assert np.array_equal(present_ids(back)[~back.host], towers.ids[~towers.flat.host])
    with pytest.raises(WriteError, match="is there already"):
        msplit.save(towers.flat, towers.ids, tmp_path / "out.pb")
    msplit.save(towers.flat, towers.ids, tmp_path / "out.pb", force=True)


def test_save_writes_into_the_bodies_of_functions(tmp_path: Path) -> None:
    assigned = msplit.assign(msplit.load(SAMPLES / "keras_inception"), "vision")
    assert len(set(assigned.ids.tolist())) > 1
    msplit.save(assigned.flat, assigned.ids, tmp_path / "out", costs=assigned.costs)
    again = msplit.load(tmp_path / "out")
    assert np.array_equal(present_ids(again)[~again.host], assigned.ids[~again.host])


def test_call_sites_that_disagree_are_told_and_the_costlier_wins(tmp_path: Path) -> None:
    flat = msplit.load(SAMPLES / "two_signatures")
    ids = np.zeros(len(flat), np.int32)
    groups: dict[tuple[int, int], list[int]] = {}
    for node, origin in enumerate(zip(flat.origin_function.tolist(), flat.origin_node.tolist(), strict=True)):
        if origin[0] >= 0 and origin[1] >= 0 and not flat.host[node] and flat.graph.ops[node] == "MatMul":
            groups.setdefault(origin, []).append(node)
    shared = next(nodes for nodes in groups.values() if len(nodes) > 1)
    ids[shared[1]] = 1
    _, conflicts = msplit.save(flat, ids, tmp_path / "out")
    assert [set(conflict.wanted) for conflict in conflicts] == [{0, 1}]
    assert "gets stream 0 at every place it is called from" in str(conflicts[0])


def test_streams_waits_and_the_plan_are_of_the_ids_as_they_are_written(tmp_path: Path) -> None:
    """Rules want other streams for a function's node at each place that calls it, and the file has room for one."""
    (tmp_path / "model.pb").write_bytes(plans.make(1).model)
    assigned = msplit.assign(msplit.load(tmp_path / "model.pb"), "default", streams=4)
    _, conflicts = msplit.save(assigned.flat, assigned, tmp_path / "out.pb")
    assert conflicts == assigned.outcome.conflicts != ()
    again = msplit.load(tmp_path / "out.pb")
    ids = present_ids(again)
    assert np.array_equal(ids[~again.host], assigned.ids[~again.host])
    assert (plan_of(again, assigned.costs, ids).waits, assigned.prediction.plan.waits) == (assigned.plan.waits,) * 2
    for node in np.flatnonzero(~again.host).tolist():  # what decided it is what decided the place that has its way
        rule, why = assigned.outcome.assignment.why(node) or ("default", "")
        assert rule != "branch" or assigned.outcome.assignment.ids[node] == ids[node], why


@pytest.mark.parametrize("kind", api.EMITS)
def test_emit_writes_every_form(kind: str, towers: msplit.Assigned, tmp_path: Path) -> None:
    path = tmp_path / kind
    msplit.emit(towers, kind, path)
    assert path.stat().st_size > 0
    with pytest.raises(WriteError, match="is there already"):
        msplit.emit(towers, kind, path)
    msplit.emit(towers, kind, path, force=True)


def test_an_emitted_plan_is_the_plan(towers: msplit.Assigned, tmp_path: Path) -> None:
    from msplit.schedule import planfile

    msplit.emit(towers, "plan", tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == planfile.dump(towers.plan, towers.flat)


def test_there_is_no_other_form(towers: msplit.Assigned, tmp_path: Path) -> None:
    with pytest.raises(MsplitError, match="nothing to emit is called 'xml'"):
        msplit.emit(towers, "xml", tmp_path / "x")


def test_networkx_for_notebooks() -> None:
    networkx = pytest.importorskip("networkx")
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    graph = flat.graph.to_networkx()
    assert isinstance(graph, networkx.MultiDiGraph)
    assert (len(graph), graph.number_of_edges()) == (len(flat), len(flat.graph.edges.src))
    assert graph.nodes["expert_0/dense_0/MatMul"]["op"] == "MatMul"
    assert graph.edges["x", "expert_0/dense_0/MatMul", 0] == {"port": 0, "slot": 0}
    assert networkx.is_directed_acyclic_graph(graph)


def test_an_engine_is_chosen_with_a_reason() -> None:
    engine, why = choose_engine(RunRequest.of(engine="tensorflow"))
    assert (engine.name, why) == ("tensorflow", "asked for")
    engine, why = choose_engine(RunRequest())
    assert why
    if engine.name == "tensorflow":
        with pytest.raises(EngineError, match="the cuda engine can not run here"):
            choose_engine(RunRequest.of(engine="cuda"))
    with pytest.raises(MsplitError, match="there is no engine 'tpu'"):
        choose_engine(RunRequest.of(engine="tpu"))


def test_assignments_of_a_bench() -> None:
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    priced = api.price(flat)
    found, notes = assignments_for(flat, *priced, RunRequest.of(streams=(4, 1, 2, 2)))
    assert [one.streams for one in found] == [2, 4]
    assert notes == ["streams are assigned by the rule set auto"]
    flat = msplit.load(SAMPLES / "annotated.pb")
    found, notes = assignments_for(flat, *api.price(flat), RunRequest.of(streams=(1,)))
    assert [one.streams for one in found] == [3]
    assert np.array_equal(found[0][1], present_ids(flat))
    found, notes = assignments_for(flat, *api.price(flat), RunRequest.of(streams=(2,), ruleset="recsys"))
    assert notes == ["streams are assigned by the rule set recsys, in place of the ids in the file"]
    assert set(found[0][1].tolist()) == {0, 1}


@pytest.mark.tf
def test_bench_verifies_and_measures() -> None:
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    told: list[tuple[str, float]] = []
    request = {
        "streams": (2,),
        "engine": "tensorflow",
        "batch": 4,
        "settings": msplit.Settings(duration=0.1, warmup=0, builds=1),
        "command": ("notebook",),
    }
    found = msplit.bench(flat, **request, progress=lambda what, share: told.append((what, share)))
    assert isinstance(found, msplit.Bench)
    assert [variant.streams for variant in found.result.variants] == [1, 2]
    assert not found.result.failed
    two = found.result.variants[1]
    assert two.host is not None
    assert two.host.median > 0
    assert two.ratio_over(found.result.baseline) is not None
    assert two.checks
    assert all(check.passed for check in two.checks)
    assert found.result.environment["command"] == ["notebook"]
    assert told
    assert 0 <= min(share for _, share in told) <= max(share for _, share in told) <= 1


@pytest.mark.tf
def test_bench_on_simulated_streams_of_the_cuda_engine(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    flat = msplit.load(SAMPLES / "mmoe_small.pb")
    request = {
        "streams": (2,),
        "engine": "cuda",
        "device": "cpu",
        "save_reference": tmp_path / "reference.npz",
        "settings": msplit.Settings(duration=0.1, warmup=0, builds=1, min_rounds=3),
    }
    found = msplit.bench(flat, **request)
    assert not found.result.failed
    assert {check.against for variant in found.result.variants for check in variant.checks} >= {"TensorFlow on the CPU"}
    markdown = to_markdown(benchmark.document(flat, found))
    assert "**What ran**" in markdown
    assert "| 2 streams | 2 | " in markdown
    payload = plain(benchmark.payload(flat, found))
    phases = [one["phase"] for one in payload["preparation"]]
    assert {"planning", "tracing and choosing kernels", "verifying outputs"} <= set(phases)
    assert not {"list-2", "measuring"} & set(phases)
    assert sum(one["time_s"] for one in payload["preparation"]) <= payload["preparation_s"]
    again = msplit.bench(flat, **dict(request, save_reference=None, reference=tmp_path / "reference.npz"))
    assert not again.result.failed
