"""Kernels and streams chosen together: by the rule `auto`, in `bench`, and side by side in `assign --compare`."""

from __future__ import annotations

import functools
import importlib.util
import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from msplit import api, rules
from msplit.api import bench, compare
from msplit.assignment.assignment import present_ids
from msplit.assignment.plans import ends_with_auto, stored_job
from msplit.cost.profile import Workload
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import RulesError
from msplit.inputs.reference import Reference, save_reference
from msplit.report import assignment, benchmark
from msplit.report.document import plain
from msplit.report.render import to_markdown, to_terminal
from msplit.rules.auto import NOT_CHOSEN
from msplit.run import compilation
from msplit.schedule import planfile
from tests.campaign import campaign
from tests.cli.runner import SAMPLES, fine, msplit

PLAN_SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "plan.json").read_text("utf-8"))
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the cuda engine's kernel library is not installed"
)

BEST = """
version: 1
streams: 8
rules: [manual, auto: {kernels: best}, colocation, propagate]
"""


@pytest.fixture
def best(tmp_path: Path) -> Path:
    path = tmp_path / "best.yaml"
    path.write_text(BEST)
    return path


def said(assigned) -> dict[str, str]:
    return {remark.kind: remark.text for remark in assigned.outcome.remarks if remark.rule == "auto"}


@needs_torch
@pytest.mark.parametrize(
    "name", ["mmoe_small.pb", pytest.param("lstm_small.pb", marks=campaign), "towers_small.pb"]
)  # tests/run/test_tuning.py has what is written of the second in every run
def test_nodes_of_a_group_share_a_stream_and_the_plan_runs_as_it_is_written(name: str, best: Path) -> None:
    model, plan = best.parent / "model.pb", best.parent / "plan.json"
    out = fine("assign", SAMPLES / name, "--rules", best, "--batch", "2", "-o", model, "--emit", "plan", plan).out
    assert "are fastest in the simulator" in " ".join(out.split())
    Draft202012Validator(PLAN_SCHEMA).validate(json.loads(plan.read_text()))
    file = planfile.load(plan)
    assert file.groups
    assert file.made_for["options"]
    assert not {"gpu", "layout", "torch"} & {*file.made_for, *file.made_for["options"]}  # no GPU had a part in it
    flat = api.load(model)
    ids = present_ids(flat)
    for group in file.groups:
        assert {int(ids[flat.graph.index[node]]) for node in group.nodes} == {group.stream}
    fine("check", model, "--plan", plan, "--rules", best, "--batch", "2")
    # It runs kernel by kernel as it was chosen.
    _, costs = api.price(flat, batch=2)
    job, notes = stored_job(compilation.job_of(flat, costs, Workload(2)), file)
    assert notes == []
    assert ENGINE.compile(job).runs_as_stored(job)
    stream_program = ENGINE.build(job).stream_program
    assert [one.lane for one in stream_program.instructions] == [lane for _, _, lane in file.kernels]


def test_where_earlier_rules_have_placed_nodes_kernels_stay_plain(best: Path) -> None:
    flat = api.load(SAMPLES / "mmoe_small.pb")
    text = BEST.replace("manual,", "regex: {patterns: {1: 'expert_0/.*'}},")
    assigned = api.assign(flat, rules.parse(text, "text"))
    assert assigned.kernels is None
    assert "earlier rules have placed" in said(assigned)["kernels"]
    plain = api.assign(flat, rules.parse(text.replace("best", "plain"), "text"))
    np.testing.assert_array_equal(assigned.ids, plain.ids)


def test_without_pytorch_kernels_stay_plain_and_the_reason_is_told(best: Path, monkeypatch) -> None:
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    flat = api.load(SAMPLES / "mmoe_small.pb")
    assigned = api.assign(flat, best)
    assert assigned.kernels is None
    assert "PyTorch" in said(assigned)[NOT_CHOSEN]
    np.testing.assert_array_equal(assigned.ids, api.assign(flat, "auto", streams=8).ids)
    found = compare(flat, streams=3)
    assert found.kernels == ()
    assert "PyTorch" in found.no_kernels
    assert "Larger kernels are left out: PyTorch" in to_markdown(assignment.candidates_document(found))


def test_what_the_engine_can_not_run_keeps_plain_kernels(best: Path) -> None:
    assigned = api.assign(api.load(SAMPLES / "custom_op.pb"), best)
    assert assigned.kernels is None
    assert "kernels stay plain" in said(assigned)[NOT_CHOSEN]


def forbid_compiling(monkeypatch) -> None:
    if importlib.util.find_spec("torch"):
        monkeypatch.setattr("msplit.engines.cuda.compile.optimize", lambda *_, **__: pytest.fail("compiled"))


def test_the_ordinary_rule_runs_nothing(monkeypatch) -> None:
    forbid_compiling(monkeypatch)
    assert api.assign(api.load(SAMPLES / "mmoe_small.pb"), "auto").kernels is None


def test_a_check_does_not_run_the_model_to_know_what_the_rules_would_choose(best: Path) -> None:
    model = best.parent / "model.pb"
    fine("assign", SAMPLES / "mmoe_small.pb", "--rules", best, "-o", model)
    done = msplit("check", model, "--rules", best, "--verbose")
    assert done.code == 0
    assert "MS003" in done.out
    assert "takes running the model" in " ".join((done.out + done.err).split())


def test_the_option_is_read_and_a_wrong_word_is_named() -> None:
    with pytest.raises(RulesError, match=r"auto\.kernels is text 'bets'"):
        rules.parse(BEST.replace("best", "bets"), "text")
    assert rules.parse(BEST, "text").rules[1].kernels == "best"
    assert ends_with_auto(rules.load("auto"))
    assert not ends_with_auto(rules.load("default"))


QUICK = api.Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Outputs of the engine itself, so that TensorFlow need not be started for them."""

    @functools.cache
    def of(name: str) -> Path:
        flat = api.load(SAMPLES / name)
        job = compilation.job_of(flat, api.price(flat, batch=2)[1], Workload(2))
        path = tmp_path_factory.mktemp("reference") / "reference.npz"
        save_reference(path, Reference(job.feeds, ENGINE.build(job).step(job.feeds), "the engine"))
        return path

    return of


def benched(name: str, reference, **options):
    flat = api.load(SAMPLES / name)
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (1, 3),
        "batch": 2,
        "settings": QUICK,
        "compare_tensorflow": False,
        "ruleset": "auto",
    }
    return flat, bench(flat, **dict(request, reference=reference(name), **options))


@needs_torch
def test_bench_runs_what_auto_likes_best_of_all_kernels_and_streams(usual) -> None:
    flat, found = usual
    assert not found.result.failed
    # Of the three streams that the plain kernels have, the larger ones use two: the very plan that `auto` takes.
    label = "msplit, 2 streams, fused and grouped"
    variant = next(variant for variant in found.result.variants if variant.label == label)
    assert len(variant.checks) >= 2  # against the reference and against one stream
    assert variant.facts["streams"] == 2
    assert variant.asked == ("3 streams, fused and grouped", "auto")
    predicted = {layer.name: layer.predicted_us for layer in found.layers}
    assert predicted["fused and grouped"] <= min(predicted.values()) * 1.01
    assert predicted["fused and grouped"] < predicted["3 streams"] < predicted["1 stream"]
    text = to_markdown(benchmark.document(flat, found))
    assert "Auto chooses among kernels, too: fused and grouped ones on 2 streams, predicted" in text
    assert f"The row '{label}' is what runs for 3 streams, fused and grouped and for auto." in text
    gain = predicted["1 stream"] / predicted["fused and grouped"]
    (row,) = [line for line in text.splitlines() if line.startswith("| fused and grouped |")]
    assert row.endswith(f"| {gain:.2f} |")
    (told,) = [
        layer for layer in plain(benchmark.payload(flat, found))["layers"] if layer["name"] == "fused and grouped"
    ]
    assert told["predicted_gain_over_one"] == pytest.approx(gain)
    assert told["gain_over_one"]["over"] == "msplit, 1 stream, CUDA graph"
    out = StringIO()
    to_terminal(benchmark.document(flat, found), Console(file=out, width=80, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80


@pytest.fixture(scope="module")
def usual(reference):
    """The mixture of experts with every kind of kernel."""
    return benched("mmoe_small.pb", reference)


def note_in_place_of_a_variant(found) -> str:
    """What is said of the choice of `auto`, and of the row that is just that."""
    assert not [variant for variant in found.result.variants if "auto" in variant.label]
    (choice,) = [note for note in found.notes if note.startswith("auto chooses among kernels")]
    (row,) = [note for note in found.notes if "what runs for" in note and "auto" in note]
    return f"{choice}; {row}"


@needs_torch
def test_what_is_measured_anyway_is_not_measured_twice(reference) -> None:
    _, found = benched("towers_small.pb", reference)
    note = note_in_place_of_a_variant(found)
    assert "grouped ones on 1 stream" in note
    # Its four kernels are all on one of the three streams that the plain ones have.
    assert note.endswith(
        "the row 'msplit, 1 stream, fused and grouped' is what runs for 3 streams, fused and grouped and for auto"
    )


@needs_torch
def test_plain_kernels_on_streams_are_no_variant_of_their_own(reference) -> None:
    _, found = benched("keras_inception", reference, fuse=False)
    note = note_in_place_of_a_variant(found)
    assert "plain ones on" in note
    assert note.endswith("the row 'msplit, 3 streams, CUDA graph' is what runs for auto, too")


@needs_torch
def test_kernels_that_are_not_wanted_are_not_chosen(reference) -> None:
    _, found = benched("mmoe_small.pb", reference, group=False)
    assert not [variant for variant in found.result.variants if "grouped" in variant.label]
    _, found = benched("mmoe_small.pb", reference, group=False, fuse=False)
    assert not [note for note in found.notes if "auto chooses" in note]
    _, found = benched("mmoe_small.pb", reference, ruleset="recsys")
    assert not [note for note in found.notes if "auto chooses" in note]


@needs_torch
def test_rules_that_choose_kernels_give_plain_variants_the_streams_of_plain_kernels(
    usual, reference, best: Path
) -> None:
    _, found = benched("mmoe_small.pb", reference, ruleset=str(best))
    waits = [
        [variant.facts["waits"] for variant in one.result.variants if variant.label == "msplit, 3 streams, CUDA graph"]
        for one in (found, usual[1])
    ]
    assert waits[0] == waits[1]


@needs_torch
def test_compare_shows_each_way_to_make_kernels_on_its_best_streams() -> None:
    from msplit.engines.cuda.search import SimulatedRunner

    flat = api.load(SAMPLES / "mmoe_small.pb")
    found = compare(flat, streams=3, batch=2, device=SimulatedRunner)
    assert [row.name.split(":")[0] for row in found.kernels] == ["plain", "fused", "grouped", "fused and grouped"]
    assert found.kernels[-1].predicted_us < found.kernels[1].predicted_us < found.kernels[0].predicted_us
    assert all(row.streams <= 3 for row in found.kernels)
    payload = plain(assignment.candidates_payload(found))
    assert [row["name"] for row in payload["kernels"]] == [row.name for row in found.kernels]
    out = StringIO()
    to_terminal(assignment.candidates_document(found), Console(file=out, width=80, highlight=False))
    shown = out.getvalue()
    assert f"With larger kernels, '{found.kernels[-1].name}' is predicted to take" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@needs_torch
def test_compare_measures_ways_to_make_kernels_beside_one_stream() -> None:
    from msplit.engines.cuda.search import SimulatedRunner

    found = compare(api.load(SAMPLES / "towers_small.pb"), streams=3, batch=2, device=SimulatedRunner)
    plain, grouped = found.kernels
    assert found.same == ("fused", "fused and grouped")
    assert grouped.measured_us == pytest.approx(grouped.predicted_us)
    assert grouped.gain is not None
    assert grouped.gain.value == pytest.approx(grouped.predicted_gain)
    assert plain.gain is not None


@needs_torch
@pytest.mark.skipif(ENGINE.unavailable() is None, reason="there is a GPU here")
def test_compare_without_a_gpu_never_runs_the_model(monkeypatch) -> None:
    forbid_compiling(monkeypatch)
    found = compare(api.load(SAMPLES / "mmoe_small.pb"), streams=3)
    assert found.kernels == ()
    assert "on a GPU" in found.no_kernels


def test_compare_that_is_not_to_run_the_model_says_what_it_leaves_out(best: Path, monkeypatch) -> None:
    forbid_compiling(monkeypatch)
    found = compare(api.load(SAMPLES / "mmoe_small.pb"), streams=3, ruleset=best, measure=False)
    assert next(row for row in found.rows if row.name == found.auto).predicted_us == found.rows[-1].predicted_us
    assert found.kernels == ()
    assert "--no-measure" in found.no_kernels
