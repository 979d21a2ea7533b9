"""Tuning from end to end on simulated streams: the search, the bench that verifies it, the files, and what runs from them again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from msplit import api, formats
from msplit.api import bench, compare
from msplit.assignment.assignment import present_ids
from msplit.assignment.plans import stored_job
from msplit.engines.base import Job
from msplit.engines.cuda import search
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.cuda.runtime import plan_binding
from msplit.errors import EngineError, MsplitError, WriteError
from msplit.inputs.make import make_inputs
from msplit.report import assignment, bench_sections, benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown
from msplit.run.tuning import TuneSettings, confirmed, tune, write
from msplit.schedule import planfile
from tests.cli.runner import fine, msplit

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_graphs"
PLAN_SCHEMA = json.loads((ROOT / "docs" / "schemas" / "plan.json").read_text("utf-8"))
QUICK = api.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)


def job_of(name: str) -> Job:
    flat = api.load(SAMPLES / name)
    _, costs = api.price(flat, batch=2)
    feeds = make_inputs(flat, {}, batch=2)
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions("cpu"))


class Clock:
    """A second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def tuned_of(name: str, seconds: float = 60.0, distort=None, **settings):
    job = job_of(name)
    device = search.SimulatedRunner(search.compile_variants(job, np.full(len(job.flat), -1, np.int32), ("plain",)))
    device.true_us = distort or device.true_us
    chosen = TuneSettings(seconds, kernels=("plain",), **settings)
    return job, tune(job, chosen, streams=4, batch=2, device=device, now=Clock())


@pytest.mark.parametrize("name", ["towers_small.pb", "lstm_small.pb", "keras_inception"])
def test_what_is_written_gives_the_same_plan_again(name: str, tmp_path: Path) -> None:
    job, tuned = tuned_of(name)
    assert tuned.gain is not None
    assert tuned.streams > 1
    model, plan = tmp_path / ("model" if name == "keras_inception" else "model.pb"), tmp_path / "plan.json"
    said = write(job.flat, tuned, output=model, plan=plan)
    assert [Path(line.split()[1].rstrip(",")) for line in said if line.startswith("Written")] == [model, plan]
    file = planfile.load(plan)
    assert file.made_for["batch"] == 2
    assert file.made_for["torch"]
    assert file.graph_hash == formats.graph_hash(job.flat.model)
    # The annotated model runs by the stored plan, kernel by kernel and wait by wait.
    again = api.load(model)
    planned, notes = stored_job(replace(job, flat=again), file)
    assert notes == []
    executable = ENGINE.build(planned)
    program = executable.program
    expected = plan_binding.restore(program, tuned.stored)
    assert [(action.step, action.lane) for action in executable.stream_program.instructions] == [
        (int(step), int(expected.stream[step])) for step in expected.order
    ]
    assert executable.facts()["waits"] == tuned.waits
    # And its ids say the same streams.
    lanes, _ = program.lanes(present_ids(again))
    np.testing.assert_array_equal(lanes, expected.stream)
    fine("check", model, "--plan", plan, "--batch", "2")


@pytest.mark.parametrize(
    ("name", "kernels", "kinds"),
    [
        ("lstm_small.pb", "fused", {"fused", "library"}),
        ("mmoe_small.pb", "grouped", {"grouped"}),
        ("lstm_small.pb", "fused and grouped", {"fused", "fused and grouped", "grouped", "library"}),
    ],
)
def test_what_is_written_says_which_nodes_share_a_kernel(
    name: str, kernels: str, kinds: set[str], tmp_path: Path
) -> None:
    job = job_of(name)
    variants = search.compile_variants(job, np.full(len(job.flat), -1, np.int32), ("plain", kernels))

    def truth(candidate, simulated):
        return (
            simulated
            / (3 if candidate.mode == kernels else 1)
            / (2 if candidate.mode == kernels and candidate.streams == 3 else 1)
        )

    device = search.SimulatedRunner(variants)
    device.true_us = truth
    tuned = tune(job, TuneSettings(60.0, kernels=("plain", kernels)), streams=3, batch=2, device=device, now=Clock())
    assert (tuned.kernels, tuned.streams) == (kernels, 3)
    model, plan = tmp_path / "model.pb", tmp_path / "plan.json"
    said = write(job.flat, tuned, output=model, plan=plan)
    file = planfile.load(plan)
    Draft202012Validator(PLAN_SCHEMA).validate(json.loads(plan.read_text()))
    assert {group.kind for group in file.groups} == kinds
    assert f"the plan, with {len(file.groups)} groups of nodes that share a kernel" in said[-1]
    assert len({group.stream for group in file.groups}) > 1
    ids = present_ids(api.load(model))
    for group in file.groups:
        assert {int(ids[job.flat.graph.index[node]]) for node in group.nodes} == {group.stream}
    fine("check", model, "--plan", plan, "--batch", "2")
    # A node that is moved away from its kernel is found, and named.
    moved = next(group for group in file.groups if group.kind in (kernels, "fused"))
    node = job.flat.graph.index[moved.nodes[-1]]
    ids[node] = (moved.stream + 1) % 3
    api.save(job.flat, ids, tmp_path / "moved.pb")
    found = msplit(
        "check", tmp_path / "moved.pb", "--plan", plan, "--batch", "2", "--select", "MS021", "--format", "json"
    )
    assert found.code == 1
    assert [finding["nodes"] for finding in found.json["findings"]] == [[moved.nodes[-1]]]


def test_the_plan_file_proves_itself_and_a_wait_less_is_caught(tmp_path: Path) -> None:
    job, tuned = tuned_of("towers_small.pb")
    plan = tmp_path / "plan.json"
    write(job.flat, tuned, plan=plan)
    data = json.loads(plan.read_text())
    assert data["waits"]
    data["waits"] = data["waits"][1:]
    (tmp_path / "broken.json").write_text(json.dumps(data))
    broken = msplit("check", SAMPLES / "towers_small.pb", "--plan", tmp_path / "broken.json")
    assert broken.code == 1
    assert "MS011" in broken.out


def test_a_model_that_streams_only_slow_down_stays_on_one() -> None:
    _, tuned = tuned_of("towers_small.pb", distort=lambda candidate, simulated: 100.0 + candidate.streams)
    assert tuned.streams == 1
    assert tuned.gain is None
    assert not tuned.ids.any()
    assert "one stream" in tuned.why


def test_what_is_not_faster_for_certain_is_not_taken() -> None:
    draws = iter(np.random.default_rng(0).uniform(0.9, 1.1, 10**6))
    _, tuned = tuned_of("towers_small.pb", distort=lambda candidate, simulated: 100.0 * next(draws))
    assert tuned.streams == 1


def test_a_bench_that_finds_the_plan_slower_keeps_one_stream() -> None:
    flat = api.load(SAMPLES / "towers_small.pb")
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (1, 3),
        "batch": 2,
        "tune": TuneSettings(2.0),
        "settings": QUICK,
        "compare_tensorflow": False,
    }
    found = bench(flat, **dict(request, reference=_reference(flat)))
    assert not found.result.failed
    assert found.tuned is not None
    (label,) = [now for asked, now in found.labels.items() if asked.startswith("msplit, tuned")]
    tuned = next(variant for variant in found.result.variants if variant.label == label)
    assert all(check.passed for check in tuned.checks)
    assert len(tuned.checks) >= 2  # against the reference and against one stream
    text = to_markdown(benchmark.document(flat, found, ["Written: x."]))
    assert "Candidates" in text
    assert "Tuning took" in text
    assert "Written: x." in text
    assert json.dumps(plain(benchmark.payload(flat, found)))
    from msplit.core.statistics import Ratio

    slow = Ratio("msplit, 1 stream, CUDA graph", "device", 0.97, 0.96, 0.98, 0.98, 9)
    slower = replace(
        found.result, variants=tuple(replace(v, ratios=(slow,)) if v is tuned else v for v in found.result.variants)
    )
    kept = confirmed(found.tuned, slower, label)
    assert (kept.streams, kept.gain) == (1, None)
    assert "slower" in kept.why
    assert any("One stream is kept" in line for line in bench_sections.notes(kept))


def _reference(flat) -> Path | None:
    """Outputs of the engine itself, so that TensorFlow need not be started for them."""
    import tempfile

    from msplit.inputs.reference import Reference, save_reference

    job = job_of(Path(flat.model.path).name)
    path = Path(tempfile.mkdtemp()) / "reference.npz"
    save_reference(path, Reference(job.feeds, ENGINE.build(job).step(job.feeds), "the engine"))
    return path


def test_a_plan_of_another_graph_is_refused_and_other_circumstances_are_told(tmp_path: Path) -> None:
    job, tuned = tuned_of("towers_small.pb")
    write(job.flat, tuned, plan=tmp_path / "plan.json")
    file = planfile.load(tmp_path / "plan.json")
    with pytest.raises(MsplitError, match="not one of this graph"):
        stored_job(job_of("mmoe_small.pb"), file)
    elsewhere = replace(file, made_for={**file.made_for, "gpu": "L4", "torch": "2.0"})
    _, notes = stored_job(job, elsewhere)
    assert notes == ["the plan was made with another GPU and another PyTorch: tune again for the best"]
    with pytest.raises(WriteError):
        write(job.flat, tuned, plan=tmp_path / "plan.json")


def test_a_model_that_can_not_be_captured_can_not_be_tuned() -> None:
    with pytest.raises(EngineError, match="nor tuned"):
        tune(job_of("ragged_sparse"), TuneSettings(1.0), streams=2)


def test_options_that_belong_together() -> None:
    done = msplit("tune", SAMPLES / "towers_small.pb", "--cuda", "capture=no")
    assert done.code == 2
    assert "msplit tune excludes --cuda capture=no" in done.err
    done = msplit("tune", SAMPLES / "towers_small.pb", "-o", SAMPLES / "towers_small.pb")
    assert done.code == 2
    assert "never modified" in done.err


def test_compare_simulates_everything_and_marks_what_auto_takes() -> None:
    flat = api.load(SAMPLES / "towers_small.pb")
    found = compare(flat, streams=3, ruleset="recsys", measure=False)
    assert found.rows[0].name == "one"
    assert found.rows[-1].name == "rules recsys"
    chosen = next(row for row in found.rows if row.name == found.auto)
    tried = [row for row in found.rows[:-1] if row.skipped is None]
    assert chosen.predicted_us <= min(row.predicted_us for row in tried) * 1.02
    assert all(row.streams <= 3 for row in tried)
    assert all(row.predicted_us >= found.bound_us - 1e-6 for row in tried)
    assert all(row.measured_us is None for row in found.rows)
    assigned = api.assign(flat, "auto", streams=3)
    assert max(load.stream for load in assigned.loads if load.kernels) + 1 == chosen.streams


def test_compare_says_why_the_one_that_is_predicted_to_be_fastest_is_not_taken() -> None:
    found = compare(api.load(SAMPLES / "towers_small.pb"), streams=3, ruleset="recsys", measure=False)
    other = next(row.name for row in found.rows if row.name not in (found.auto, "one") and row.skipped is None)

    def text(us: float) -> str:
        rows = tuple(replace(row, predicted_us=us) if row.name == other else row for row in found.rows)
        return to_markdown(assignment.candidates_document(replace(found, rows=rows)))

    assert "less room to spare" in text(1.0)
    assert "less room to spare" not in text(1000.0)


def test_compare_measures_each_beside_one_stream() -> None:
    flat = api.load(SAMPLES / "towers_small.pb")
    found = compare(flat, streams=3, device=search.SimulatedRunner)
    assert found.device == "the simulator"
    for row in found.rows:
        if row.skipped is None:
            assert row.measured_us > 0
            assert (row.gain is None) == (row.streams == 1)
            assert row.gain is None or row.gain.value == pytest.approx(found.rows[0].measured_us / row.measured_us)
    text = to_markdown(assignment.candidates_document(found))
    assert "measured" in text
    assert json.dumps(assignment.candidates_payload(found), default=str)


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    done = fine("assign", SAMPLES / "towers_small.pb", "--compare", "--no-measure", "--streams", "3")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "The rule `auto` takes" in done.out
    data = fine("assign", SAMPLES / "towers_small.pb", "--compare", "--no-measure", "--format", "json").json
    assert data["auto"] in {row["name"] for row in data["candidates"]}
    fine("assign", SAMPLES / "towers_small.pb", "--compare", "--no-measure", "-o", tmp_path / "out.pb")
    assert (tmp_path / "out.pb").exists()
    assert msplit("assign", SAMPLES / "towers_small.pb", "--compare", "--diff").code == 2


def test_larger_kernels_win_where_they_are_faster_and_streams_are_told_on_the_same_kernels() -> None:
    job = job_of("mmoe_small.pb")
    variants = search.compile_variants(job, np.full(len(job.flat), -1, np.int32), ("plain", "grouped"))
    assert set(variants) == {"plain", "grouped"}

    def truth(candidate, simulated):
        return (50.0 if candidate.mode == "grouped" else 100.0) - 3 * candidate.streams

    device = search.SimulatedRunner(variants)
    device.true_us = truth
    tuned = tune(job, TuneSettings(60.0, kernels=("plain", "grouped")), streams=3, device=device, now=Clock())
    assert tuned.kernels is KernelMode.GROUPED
    assert tuned.made_for["options"] == {"group": True}
    assert tuned.gain is not None
    assert tuned.over_one is not None
    assert tuned.gain.value == pytest.approx(97 / (50 - 3 * tuned.streams))
    if tuned.streams > 1:
        assert tuned.over_one.value == pytest.approx(47 / (50 - 3 * tuned.streams))
    assert any("plain kernels" in line for line in bench_sections.notes(tuned))
    planned = tuned.on(job)
    outputs, alone = (ENGINE.build(one).step(job.feeds) for one in (planned, job))
    for name, value in alone.items():
        np.testing.assert_allclose(outputs[name], value, rtol=1e-4, atol=1e-5)


def test_a_plan_that_assign_wrote_runs_on_its_streams(tmp_path: Path) -> None:
    flat = api.load(SAMPLES / "towers_small.pb")
    api.emit(api.assign(flat, "recsys", streams=3), "plan", tmp_path / "plan.json")
    job = job_of("towers_small.pb")
    planned, _ = stored_job(job, planfile.load(tmp_path / "plan.json"))
    assert planned.options.plan is None
    assert ENGINE.build(planned).facts()["streams"] == 3
