from __future__ import annotations

import json
from pathlib import Path

import pytest

from msplit.cli.main import run

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
PLAIN, ANNOTATED = str(SAMPLES / "mmoe_small.pb"), str(SAMPLES / "annotated.pb")


def test_diff_prints_json_with_its_schema_version(capsys: pytest.CaptureFixture[str]):
    assert run(["diff", PLAIN, ANNOTATED, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema_version"], found["command"], found["same"]) == (1, "diff", False)


@pytest.mark.parametrize(("new", "code"), [(PLAIN, 0), (ANNOTATED, 1)])
def test_diff_tells_scripts_whether_anything_changed(new: str, code: int, capsys: pytest.CaptureFixture[str]):
    assert run(["diff", PLAIN, new, "--exit-code"]) == code


def test_diff_fits_eighty_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    run(["diff", PLAIN, ANNOTATED, "--rules", "auto"])
    assert max(len(line.rstrip()) for line in capsys.readouterr().out.splitlines()) <= 80


def test_diff_of_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert run(["diff", PLAIN, "nothing.pb"]) == 2
    assert "nothing.pb" in capsys.readouterr().err


def test_report_writes_one_file_and_nothing_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report.html"
    assert run(["report", ANNOTATED, "-o", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert out.read_text("utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out == ""


def test_report_replaces_a_file_only_if_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report.html"
    out.write_text("mine")
    assert run(["report", ANNOTATED, "-o", str(out)]) == 2
    assert out.read_text() == "mine"
    assert run(["report", ANNOTATED, "-o", str(out), "--force"]) == 0
    assert out.read_text() != "mine"


def test_report_of_a_model_without_ids_says_where_its_ids_come_from(tmp_path: Path):
    out = tmp_path / "report.html"
    assert run(["report", PLAIN, "-o", str(out), "--rules", "auto", "--streams", "4", "--no-candidates"]) == 0
    assert "from the rules auto (shipped)" in out.read_text("utf-8")


def test_a_loop_that_can_not_be_unrolled_is_told_and_one_that_can_is_not(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    said = {}
    for model in ("gru_while", "control_flow_v2"):
        assert run(["analyze", str(SAMPLES / model), "--engine", "cuda"]) == 0
        said[model] = " ".join(capsys.readouterr().out.split())
    assert "can run every op of this model." in said["gru_while"]
    assert "can not run this model" in said["control_flow_v2"]
    assert "how many turns the loop takes depends on values that only the run knows" in said["control_flow_v2"]
