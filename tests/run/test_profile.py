"""`msplit profile` and `--costs profile=`, through the library and the command line. The times are the CPU's: there is no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from msplit import api
from msplit.api import bench
from msplit.cost import profile as profile_file
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.search import SimulatedRunner
from msplit.errors import EngineError
from msplit.report import commands as report
from msplit.report import document
from msplit.report.render import to_markdown
from msplit.run.profile import compared, profile
from msplit.run.request import RunRequest
from msplit.verify.results import Settings
from tests.cli.runner import ROOT, SAMPLES, fine, msplit, unchanged
from tests.report.test_schemas import validate

SCHEMA = json.loads((ROOT / "docs" / "schemas" / "profile.json").read_text("utf-8"))
MMOE = SAMPLES / "mmoe_small.pb"
NO_GPU = pytest.mark.skipif(ENGINE.unavailable() is None, reason="there is a GPU")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A profile of the small MMoE at batch 4."""
    found, _ = profile(api.load(MMOE), RunRequest.of(device="cpu", batch=4))
    path = tmp_path_factory.mktemp("profile") / "mmoe.json"
    path.write_text(profile_file.dumps(found))
    return path


def test_the_file_is_what_the_schema_says(path):
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)


def test_measured_costs_add_up_to_the_steps(path):
    flat, found = api.load(MMOE), profile_file.load(path)
    _, costs = api.price(flat, profile=found)
    total = sum(found.kernels[step.kernel].time_us for step in found.steps)
    assert costs.time_us.sum() == pytest.approx(total)
    assert np.count_nonzero(costs.time_us) == len(found.steps) == 25
    # The profile's shapes are taken: at batch 4, not 1.
    assert costs.flops.sum() == pytest.approx(api.price(flat, batch=4)[1].flops.sum())


@pytest.mark.parametrize("name", ["feature_columns", "lstm_small.pb", "two_signatures", "towers_small.pb"])
def test_other_models_are_profiled(name):
    flat = api.load(SAMPLES / name)
    found, notes = profile(flat, RunRequest(device="cpu"), seconds=2)
    assert found.measured + sum(found.unmeasured.values()) == len(found.steps) > 0
    assert found.measured > 0
    assert len(notes) == len(found.unmeasured)
    _, costs = api.price(flat, profile=found)
    assert np.count_nonzero(costs.time_us) <= len(found.steps)
    assert (costs.time_us[flat.host] == 0).all()


def test_the_report_names_the_costliest_kinds(path):
    flat, found = api.load(MMOE), profile_file.load(path)
    _, static = api.price(flat, shapes=found.shapes)
    text = to_markdown(report.profile_document(flat, found, static, notes=["said"]))
    assert "| _FusedMatMul | 4×64, 64×64, … | 4 |" in text
    assert "there is no GPU" in text
    validate("profile_command", json.loads(document.dumps("profile", report.profile_payload(flat, found, static))))
    estimates = report.estimated(found, flat, static)
    assert (estimates > 0).all()
    # As if a GPU had taken these times.
    found = replace(found, device=replace(found.device, name="NVIDIA H200", sms=132))
    assert "| _FusedMatMul | 4 |" in to_markdown(report.profile_document(flat, found, static)).partition("Roofline")[2]
    payload = json.loads(document.dumps("profile", report.profile_payload(flat, found, static)))
    validate("profile_command", payload)
    assert len(payload["roofline"]) > 2


def test_bench_goes_by_the_profile_and_says_so(path):
    request = {
        "engine": "cuda",
        "device": "cpu",
        "streams": (2,),
        "ruleset": "auto",
        "profile": profile_file.load(path),
        "precision": "ieee",
        "reference": None,
        "settings": Settings(duration=0.05, warmup=0.0, min_rounds=2, builds=1),
    }
    found = bench(api.load(MMOE), **request)
    assert not found.result.failed
    assert any("25 of 25 steps measured on CPU" in note for note in found.notes)
    assert "the profile was measured in tf32, this run is in ieee" in found.notes


def test_what_differs_from_the_profile_is_said(path):
    found = profile_file.load(path)
    other = replace(found, device=replace(found.device, pytorch="1.13"), layout="nhwc", precision="ieee")
    notes = compared(other, precision="tf32", layout="nchw")[1:]
    assert [note.split(", ")[0] for note in notes][-3:] == [
        "the profile was measured with PyTorch 1.13",
        "the profile was measured in ieee",
        "the profile was measured with convolutions in nhwc",
    ]


def test_analyze_and_assign_say_that_costs_are_measured(path):
    out = fine("analyze", MMOE, "--costs", f"profile={path}", columns=100).out
    assert "25 of 25 steps measured on CPU" in out
    assert "by measured costs" in out
    assert "launched by 25 nodes" in out
    for rules in ("auto", "default", "recsys"):
        found = fine(
            "assign", MMOE, "--costs", f"profile={path}", "--rules", rules, "--dry-run", "--format", "json"
        ).json
        assert found["costs"].startswith("25 of 25 steps measured on CPU")
        assert sum(load["kernels"] for load in found["loads"]) == 25


def test_measured_costs_decide(path, tmp_path):
    """One expert that takes five times longer than the others has a stream for itself."""
    data = json.loads(path.read_text())
    slow = len(data["kernels"])
    data["kernels"].append({**data["kernels"][0], "time_us": 10.0, "share": 0.05})
    for kernel in data["kernels"][:slow]:
        kernel["time_us"] = 2.0
        kernel["share"] = 0.05
    for step in data["steps"]:
        if any(name.startswith("expert_2/") for name in step["nodes"]):
            step["kernel"] = slow
    (tmp_path / "slow.json").write_text(json.dumps(data))
    flat = api.load(MMOE)
    assigned = api.assign(flat, "auto", streams=2, profile=profile_file.load(tmp_path / "slow.json"))
    ids = {name: int(assigned.ids[node]) for name, node in flat.graph.index.items() if name.endswith("MatMul")}
    mine = {ids[name] for name in ids if name.startswith("expert_2/")}
    others = {ids[name] for name in ids if name.startswith(("expert_0/", "expert_1/", "expert_3/"))}
    assert len(mine) == len(others) == 1
    assert mine != others


def test_another_graph_other_shapes_and_missing_files_are_refused(path, tmp_path):
    for arguments, message in (
        (
            ("analyze", SAMPLES / "towers_small.pb", "--costs", f"profile={path}"),
            "measured on another graph: it has 138 nodes",
        ),
        (
            ("assign", MMOE, "--dry-run", "--batch", "5", "--costs", f"profile={path}"),
            "measured with x of 4×64, not of 5×64",
        ),
        (("analyze", MMOE, "--costs", f"profile={tmp_path / 'gone.json'}"), "the profile can not be read"),
    ):
        done = msplit(*arguments)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
        assert "fix: " in done.err


@NO_GPU
def test_without_a_gpu_the_command_says_what_to_do_and_writes_nothing(tmp_path):
    with unchanged(tmp_path):
        done = msplit("profile", MMOE, "-o", tmp_path / "out.json")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: there is nothing to measure on: ")
    assert "fix: run `msplit profile` where the GPU is" in done.err
    with pytest.raises(EngineError):
        profile(api.load(MMOE))


def test_places_are_checked_first(tmp_path):
    (tmp_path / "there.json").write_text("mine")
    done = msplit("profile", MMOE, "-o", tmp_path / "there.json")
    assert done.code == 2
    assert "there.json" in done.err
    assert (tmp_path / "there.json").read_text() == "mine"
    assert "-o/--output is missing" in msplit("profile", MMOE).err


def test_candidates_are_measured_in_the_shapes_that_were_profiled(path):
    shapes = []

    def device(variants):
        shapes.append({name: value.shape for name, value in variants["plain"].job.feeds.items()})
        return SimulatedRunner(variants)

    found = profile_file.load(path)
    api.compare(api.load(MMOE), streams=2, profile=found, device=device)
    assert shapes == [found.shapes, found.shapes]
