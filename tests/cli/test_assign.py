"""What `assign` writes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msplit.rules import streamfile
from tests.campaign import CAMPAIGN, campaign
from tests.cli.runner import ALL, ROOT, SAMPLES, contents, fine, msplit, only_contents, options_of, unchanged
from tests.rules import nvidia_reader

DEAR = {"feature_columns", "inception_v3_stripped.pb", "lstm_small.pb", "training.meta", "training_resource.meta"}
"""`auto` searches them for seconds. All but the last are assigned by it elsewhere in every run (golden tests, test_models.py, decide)."""


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        pytest.param(model, rules, marks=campaign if rules == "auto" and model in DEAR else ())
        for model in ALL
        for rules in ("default", "auto")
    ],
)
def test_every_sample_is_assigned(model: str, rules: str, tmp_path: Path) -> None:
    arguments = ("assign", SAMPLES / model, *options_of(model), "--rules", rules, "--format", "json")
    with unchanged(SAMPLES):
        done = fine(*arguments, "-o", tmp_path / "once").json
    assert (done["schema_version"], done["command"]) == (1, "assign")
    assert sum(load["nodes"] for load in done["loads"]) > 0
    assert done["written"]
    # Assigning again changes nothing, whatever the rules do with graphs that have no ids.
    again = fine("assign", tmp_path / "once", *arguments[2:], "-o", tmp_path / "twice").json
    assert again["changed"] == 0
    assert only_contents(tmp_path / "once") == only_contents(tmp_path / "twice")


@pytest.mark.parametrize(
    "model", ["two_signatures", "towers_small.pb", pytest.param("feature_columns", marks=campaign)]
)
def test_bytes_do_not_depend_on_the_hash_seed(model: str, tmp_path: Path) -> None:
    found: dict[str, list[object]] = {}
    for seed in ("0", "1", "4242") if CAMPAIGN else ("0", "4242"):
        for turn in "ab" if CAMPAIGN else "a":
            folder = tmp_path / f"{seed}{turn}"
            folder.mkdir()
            forms = [item for form in ("stream-file", "placement", "json", "plan") for item in ("--emit", form, form)]
            arguments = ["assign", str(SAMPLES / model), "-o", "out", *forms, "--format", "json"]
            done = subprocess.run(
                [sys.executable, "-m", "msplit", *arguments],
                capture_output=True,
                cwd=folder,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            )
            assert done.returncode == 0, done.stderr
            found.setdefault("stdout", []).append(done.stdout)
            found.setdefault("files", []).append(contents(folder))
    for values in found.values():
        assert len(values) == (6 if CAMPAIGN else 2)
        assert all(value == values[0] for value in values)


@pytest.mark.parametrize("model", ["mmoe_small.pb", "training.meta", "keras_inception"])
def test_force_replaces_and_nothing_else_does(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fine("assign", SAMPLES / model, "-o", out, "--streams", "1")
    before = only_contents(out)
    with unchanged(tmp_path):
        assert msplit("assign", SAMPLES / model, "-o", out).code == 2
    fine("assign", SAMPLES / model, "-o", out, "--force")
    assert only_contents(out) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] + ["out.msplit.json"] * out.is_file()


@pytest.mark.parametrize("option", ["--dry-run", "--diff", "--explain"])
def test_looking_writes_nothing(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extra = (option, "tower_0/out/Sigmoid") if option == "--explain" else (option,)
    with unchanged(tmp_path, SAMPLES):
        fine("assign", SAMPLES / "mmoe_small.pb", *extra)


def test_a_dry_run_wins_over_outputs(tmp_path: Path) -> None:
    outputs = ("-o", tmp_path / "out", "--emit", "json", tmp_path / "ids.json")
    with unchanged(tmp_path):
        done = fine("assign", SAMPLES / "mmoe_small.pb", *outputs, "--dry-run")
    assert "Nothing was written: --dry-run." in done.out


def test_explaining_and_writing_go_together(tmp_path: Path) -> None:
    arguments = ("assign", SAMPLES / "mmoe_small.pb", "-o", tmp_path / "out", "--explain", "tower_0/out/Sigmoid")
    done = fine(*arguments, columns=200)
    assert f"Written: {tmp_path / 'out'}, " in done.out
    assert (tmp_path / "out").exists()


def test_explain_as_json() -> None:
    done = fine(
        "assign",
        SAMPLES / "towers_small.pb",
        "--rules",
        "default",
        "--explain",
        "tower_3/dense_0/MatMul",
        "--format",
        "json",
    ).json
    assert {key: done[key] for key in ("node", "op", "host", "stream", "rule", "known")} == {
        "node": "tower_3/dense_0/MatMul",
        "op": "MatMul",
        "host": False,
        "stream": 3,
        "rule": "embedding",
        "known": True,
    }
    assert done["why"]
    host = fine("assign", SAMPLES / "towers_small.pb", "--explain", "tower_0/embedding/lookup/axis", "--format", "json")
    assert (host.json["host"], host.json["stream"]) == (True, None)


def test_diff_as_json_holds_what_changes() -> None:
    done = fine("assign", SAMPLES / "annotated.pb", "--streams", "2", "--wrap", "--diff", "--format", "json").json
    assert len(done["diff"]) == done["changed"] > 0
    assert all(node["was"] != node["is"] < 2 for node in done["diff"])


@pytest.mark.parametrize("model", ["mmoe_small.pb", "towers_small.pb", "training.meta", "feature_columns"])
def test_a_stream_file_comes_back_as_the_same_ids(model: str, tmp_path: Path) -> None:
    files = {form: tmp_path / form for form in ("stream-file", "json", "yaml", "placement")}
    forms = [item for form, path in files.items() for item in ("--emit", form, path)]
    fine("assign", SAMPLES / model, "--streams", "4", *forms)
    ids = {node["name"]: node["stream"] for node in json.loads(files["json"].read_text())["nodes"]}
    assert len(set(ids.values())) > 1

    (tmp_path / "again.yaml").write_text("version: 1\nstreams: 4\nrules:\n  - regex: {file: stream-file}\n")
    fine("assign", SAMPLES / model, "--rules", tmp_path / "again.yaml", "--emit", "json", tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())["nodes"]
    assert {node["name"]: node["stream"] for node in again} == ids
    assert {node["rule"] for node in again} == {"regex"}

    text = files["stream-file"].read_text()
    assert streamfile.traps(text) == ()
    rules = nvidia_reader.read(text)
    assert {name: nvidia_reader.stream_of(name, rules, groups=4) for name in ids} == ids

    devices = json.loads(files["placement"].read_text())["devices"]
    assert {name: device for name, device in devices.items() if name in ids} == {
        name: f"/device:GPU:{stream}" for name, stream in ids.items()
    }
    assert {device for name, device in devices.items() if name not in ids} <= {"/device:CPU:0"}
    import yaml

    assert yaml.safe_load(files["yaml"].read_text()) == json.loads(files["json"].read_text())


def test_ids_beyond_the_streams_wrap_on_request() -> None:
    done = fine("assign", SAMPLES / "annotated.pb", "--streams", "2", "--wrap", "--dry-run", "--format", "json").json
    assert done["streams"] == 2
    assert {remark["kind"] for remark in done["remarks"]} >= {"wrapped"}


def test_patterns_that_match_nothing_are_told(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        'version: 1\nrules:\n  - regex: {patterns: {1: ["expert_0/.*", "export_1/.*"]}}\n'
    )
    done = fine("assign", SAMPLES / "mmoe_small.pb", "--rules", tmp_path / "rules.yaml", "--dry-run", columns=200)
    assert re.search(r"warning: regex: .*'export_1/\.\*'.* matches no", done.out)


def test_a_saved_model_is_kept_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fine("assign", SAMPLES / "keras_lookup", "-o", out)
    before, after = contents(SAMPLES / "keras_lookup"), contents(out)
    assert set(before) - set(after) == {"fingerprint.pb"}
    assert {name for name in after if after[name] != before.get(name)} == {
        "saved_model.pb",
        "assets.extra",
        "assets.extra/msplit.json",
    }
    shutil.rmtree(out)


def test_assign_writes_a_trace(tmp_path):
    target = tmp_path / "trace.json"
    fine("assign", SAMPLES / "towers_small.pb", "--rules", "recsys", "--trace", target)
    assert json.loads(target.read_text())["traceEvents"]
    again = msplit("assign", SAMPLES / "towers_small.pb", "--trace", target)
    assert again.code == 2
    assert "is there already" in again.err
