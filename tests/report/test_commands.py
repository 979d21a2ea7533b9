"""`diff`, `report` and what `analyze --engine` says, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runner import SAMPLES, fine, msplit

PLAIN, ANNOTATED = SAMPLES / "mmoe_small.pb", SAMPLES / "annotated.pb"


def test_diff_prints_json_with_its_schema_version() -> None:
    found = fine("diff", PLAIN, ANNOTATED, "--format", "json").json
    assert (found["schema_version"], found["command"], found["same"]) == (1, "diff", False)


@pytest.mark.parametrize(("new", "code"), [(PLAIN, 0), (ANNOTATED, 1)])
def test_diff_tells_scripts_whether_anything_changed(new: Path, code: int) -> None:
    assert msplit("diff", PLAIN, new, "--exit-code").code == code


def test_diff_fits_eighty_columns() -> None:
    assert max(len(line.rstrip()) for line in fine("diff", PLAIN, ANNOTATED, "--rules", "auto").out.splitlines()) <= 80


def test_diff_of_a_file_that_is_not_there_is_an_error() -> None:
    done = msplit("diff", PLAIN, "nothing.pb")
    assert done.code == 2
    assert "nothing.pb" in done.err


def test_report_writes_one_file_and_nothing_on_stdout(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert fine("report", ANNOTATED, "-o", out, "--quiet").out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert out.read_text("utf-8").startswith("<!doctype html>")


def test_report_replaces_a_file_only_if_told_to(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("mine")
    assert msplit("report", ANNOTATED, "-o", out).code == 2
    assert out.read_text() == "mine"
    fine("report", ANNOTATED, "-o", out, "--force", "--quiet")
    assert out.read_text() != "mine"


def test_report_of_a_model_without_ids_says_where_its_ids_come_from(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    fine("report", PLAIN, "-o", out, "--rules", "auto", "--streams", "4", "--no-candidates", "--quiet")
    assert "from the rules auto (shipped)" in out.read_text("utf-8")


def test_a_loop_that_can_not_be_unrolled_is_told_and_one_that_can_is_not() -> None:
    pytest.importorskip("torch")
    said = {}
    for model in ("gru_while", "control_flow_v2"):
        said[model] = " ".join(fine("analyze", SAMPLES / model, "--engine", "cuda").out.split())
    assert "can run every op of this model." in said["gru_while"]
    assert "can not run this model" in said["control_flow_v2"]
    assert "how many turns the loop takes depends on values that only the run knows" in said["control_flow_v2"]
