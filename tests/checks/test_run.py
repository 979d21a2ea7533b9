"""

Several models in one run, and findings that are known.
"""

import ast
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest

from msplit.api import load
from msplit.checks import check, lookup
from msplit.checks import run as baselines
from msplit.checks.run import CHECKS, MOST_FINDINGS, chosen, expand
from msplit.checks.subject import CheckSettings, Severity, Thresholds
from msplit.cli.check import FORMATS
from msplit.errors import MsplitError
from msplit.report import findings
from tests.checks.harness import report
from tests.checks.test_reports import CHECK_SCHEMA, JUNIT, SARIF
from tests.cli.runner import SAMPLES, fine, msplit, unchanged

HERE = Path(__file__).parent
SOURCES = Path(__file__).parents[2] / "msplit" / "checks"


def test_codes_are_numbered_without_gaps_and_each_has_its_own_file():
    assert list(CHECKS) == [f"MS{number:03}" for number in range(1, len(CHECKS) + 1)]
    named = sorted(path.stem for path in SOURCES.glob("ms[0-9]*.py"))
    assert named == [f"{code.lower()}_{check.name.replace('-', '_')}" for code, check in CHECKS.items()]
    assert len({check.name for check in CHECKS.values()}) == len(CHECKS)


@pytest.mark.parametrize("code", CHECKS)
def test_every_check_has_a_test_with_the_finding_and_one_without(code):
    (path,) = HERE.glob(f"test_{code.lower()}_*.py")
    tests = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    assert any(name.startswith("test_finds_") for name in tests)
    assert any(name.startswith("test_passes_") for name in tests)


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_every_page_says_what_why_how_and_names_its_limits(check):
    page = findings.page(check)
    for part in ("What it finds.", "Why it matters.", "Example.", "How to mend it.", check.title, check.severity.value):
        assert part in page
    for text in (check.what, check.why, check.example, check.mend):
        assert text.strip() == text
        assert re.search(r"[.`]$", text), text
        assert "  " not in text
    for limit in check.limits:
        assert limit in Thresholds.__dataclass_fields__
        assert limit in check.what


def test_every_limit_belongs_to_a_check():
    assert {limit for check in CHECKS.values() for limit in check.limits} == set(Thresholds.__dataclass_fields__)


def test_codes_are_chosen_by_their_beginnings():
    assert expand(["MS01"]) == [f"MS01{digit}" for digit in range(10)]
    assert [check.code for check in chosen(["MS001", "ms02"], [])] == ["MS001", "MS020", "MS021", "MS022"]
    assert [check.code for check in chosen(["MS00"], ["MS001", "MS003"])] == [f"MS00{n}" for n in (2, 4, 5, 6, 7, 8, 9)]
    assert len(chosen([], [])) == len(CHECKS)
    for wrong in ("", "X", "MS9", "MS0011"):
        with pytest.raises(MsplitError, match="no check's code begins with"):
            chosen([], [wrong])


def test_a_check_is_looked_up_by_code_or_name():
    assert lookup("ms007") is CHECKS["MS007"]
    assert lookup("id-out-of-range") is CHECKS["MS001"]
    with pytest.raises(MsplitError, match="did you mean MS007"):
        lookup("MS07")
    with pytest.raises(MsplitError, match="did you mean stale-id"):
        lookup("stale-ids")


GRAPH = "x:Placeholder; a:MatMul(x)[_stream_id=-1]; s:StringJoin[_stream_id=1] host"


def test_only_errors_fail_unless_the_settings_say_so():
    assert report(GRAPH, "MS001").failed
    assert not report(GRAPH, "MS009").failed
    assert report(GRAPH, "MS009", fail_on=Severity.WARNING).failed
    assert report(GRAPH, "MS009", severity={"MS009": Severity.ERROR}).failed
    mild = report(GRAPH, "MS001", severity={"MS001": Severity.INFO})
    assert (mild.failed, mild.count(Severity.INFO), mild.count(Severity.ERROR)) == (False, 1, 0)


def test_thousands_of_findings_are_counted_and_not_all_told():
    many = "; ".join(f"a{n}:MatMul[_stream_id={-n}]" for n in range(1, 251))
    result = report(many, "MS001")
    assert len(result.findings) == MOST_FINDINGS
    assert result.omitted == {"MS001": 150}
    assert result.count(Severity.ERROR) == 250
    assert "150 more findings of MS001" in findings.document(result).warnings[0]


def test_a_graph_without_kernels_is_fine():
    result = report("x:Placeholder", ignore=("MS017",))
    assert [one.code for one in result.findings] == ["MS020"]
    assert not result.failed


SCHEMA = json.loads(Path("docs/schemas/baseline.json").read_text("utf-8"))
ONE, OTHER = SAMPLES / "mmoe_small.pb", SAMPLES / "annotated.pb"
STALE = ("--rules", "default", "--select", "MS002,MS003,MS020")


def test_several_models_in_every_format():
    arguments = ("check", ONE, OTHER, *STALE)
    found = msplit(*arguments, "--format", "json")
    assert found.code == 1
    jsonschema.validate(found.json, CHECK_SCHEMA)
    assert [report["model"] for report in found.json["reports"]] == [str(ONE), str(OTHER)]
    assert found.json["summary"]["error"] == sum(report["summary"]["error"] for report in found.json["reports"])
    assert found.json["failed"]
    text = msplit(*arguments).out
    assert text.index(f"msplit check: {ONE}") < text.index(f"msplit check: {OTHER}")
    lines = msplit(*arguments, "--format", "github").out.splitlines()
    assert {str(ONE), str(OTHER)} == {line.partition("file=")[2].partition("::")[0] for line in lines}
    suites = msplit(*arguments, "--format", "junit").out
    JUNIT.validate(suites)
    assert [suite.get("name") for suite in ElementTree.fromstring(suites)] == [str(ONE), str(OTHER)]
    log = msplit(*arguments, "--format", "sarif").json
    SARIF.validate(log)
    assert len(log["runs"]) == 1
    assert len(log["runs"][0]["results"]) == len(lines)


def test_one_model_is_told_as_before(tmp_path):
    found = msplit("check", ONE, *STALE, "--format", "json").json
    jsonschema.validate(found, CHECK_SCHEMA)
    assert found["model"] == str(ONE)


def test_a_model_that_can_not_be_read_does_not_hide_the_others(tmp_path):
    found = msplit("check", tmp_path / "none.pb", ONE, *STALE, "--format", "json")
    assert found.code == 2
    assert "none.pb: there is no such file or folder" in found.err
    assert [report["model"] for report in found.json["reports"]] == [str(ONE)]


def test_a_plan_belongs_to_one_model(tmp_path):
    for option in ("--plan", "--against"):
        found = msplit("check", ONE, OTHER, option, ONE)
        assert (found.code, "belongs to one model, and 2 were given" in found.err) == (2, True)


def test_what_is_known_does_not_fail_and_what_is_new_does(tmp_path):
    known = tmp_path / "known.json"
    written = msplit("check", ONE, OTHER, *STALE, "--write-baseline", known)
    assert written.code == 0
    assert "known findings" in written.err
    jsonschema.validate(json.loads(known.read_text()), SCHEMA)
    first = known.read_bytes()
    msplit("check", ONE, OTHER, *STALE, "--write-baseline", known)
    assert known.read_bytes() == first
    quiet = fine("check", ONE, OTHER, *STALE, "--baseline", known, "--format", "json").json
    assert not quiet["failed"]
    assert all(report["findings"] == [] and report["known"] > 0 for report in quiet["reports"])
    assert "known to the baseline" in fine("check", ONE, *STALE, "--baseline", known).out
    new = msplit("check", ONE, "--rules", "auto", "--select", "MS002,MS003,MS020", "--baseline", known)
    assert new.code == 1


def test_less_of_a_known_finding_is_known_and_more_is_not(tmp_path):
    report = check(load(ONE), CheckSettings(select=("MS002",)), ruleset="default")
    entries = baselines.load(_written(tmp_path, [report]))
    one = entries[0]
    from dataclasses import replace

    assert one.covers(replace(one, nodes=one.nodes[1:], node_count=one.node_count - 1, text="other words"))
    assert not one.covers(replace(one, node_count=one.node_count + 1))
    assert not one.covers(replace(one, nodes=(*one.nodes[1:], "another")))
    assert not one.covers(replace(one, code="MS003"))
    assert not one.covers(replace(one, model="other.pb"))
    figures = replace(one, nodes=(), node_count=0, text="stream # has # µs")
    assert figures.covers(figures)
    assert not figures.covers(replace(figures, text="stream # never runs"))


def _written(tmp_path, reports):
    path = tmp_path / "known.json"
    path.write_bytes(baselines.dumps(reports, tmp_path))
    return path


def test_what_is_mended_is_told_as_gone(tmp_path):
    known, model = tmp_path / "known.json", tmp_path / "m.pb"
    model.write_bytes(ONE.read_bytes())
    msplit("check", model, *STALE, "--write-baseline", known)
    assert "any more" not in fine("check", model, "--select", "MS001", "--baseline", known).out  # nobody looked
    fine("assign", ONE, "--rules", "default", "-o", model, "--force")
    found = fine("check", model, *STALE, "--baseline", known, columns=120)
    assert "findings of the baseline are none any more: write it anew with --write-baseline" in found.out


def test_the_settings_may_name_it_and_paths_are_relative_to_it(tmp_path, monkeypatch):
    (tmp_path / "ci").mkdir()
    (tmp_path / "m.pb").write_bytes(ONE.read_bytes())
    monkeypatch.chdir(tmp_path)
    msplit("check", "m.pb", *STALE, "--write-baseline", "ci/known.json")
    assert {one["model"] for one in json.loads(Path("ci/known.json").read_text())["findings"]} == {"../m.pb"}
    Path("msplit.yaml").write_text("rules: default\nselect: [MS002, MS003, MS020]\nbaseline: ci/known.json\n")
    monkeypatch.chdir(tmp_path / "ci")
    assert msplit("check", "../m.pb").code == 0


def test_a_file_of_someone_else_is_not_replaced_and_a_damaged_one_says_where(tmp_path):
    other = tmp_path / "mine.json"
    other.write_text("{}")
    found = msplit("check", ONE, *STALE, "--write-baseline", other)
    assert (found.code, other.read_text()) == (2, "{}")
    for text, told in (
        ("{", "not valid JSON"),
        ('{"schema_version": 1, "kind": "baseline", "findings": [{}]}', "`findings[0]` lacks the key"),
        ('{"schema_version": 1, "kind": "plan"}', "is not one of version 1"),
    ):
        other.write_text(text)
        with pytest.raises(MsplitError, match=told.replace("[", r"\[").replace("]", r"\]")):
            baselines.load(other)
        assert msplit("check", ONE, "--baseline", other).code == 2


@pytest.mark.parametrize("style", FORMATS)
def test_a_result_in_a_file_is_what_is_printed(style, tmp_path):
    place = tmp_path / "found"
    printed = msplit("check", ONE, OTHER, *STALE, "--format", style, columns=100)
    written = msplit("check", ONE, OTHER, *STALE, "--format", style, "-o", place, columns=100, FORCE_COLOR="1")
    assert (written.code, written.out, written.err) == (printed.code, "", printed.err)
    assert place.read_text("utf-8") == printed.out
    before = place.read_bytes()
    refused = msplit("check", ONE, *STALE, "--output", place)
    assert (refused.code, "is there already" in refused.err) == (2, True)
    assert place.read_bytes() == before
    assert msplit("check", ONE, *STALE, "--output", place, "--force", "--format", style).code == 1
    assert place.read_bytes() != before


def test_a_result_is_written_whole_or_not_at_all_and_over_no_model(tmp_path):
    (tmp_path / "m.pb").write_bytes(ONE.read_bytes())
    with unchanged(tmp_path):
        for place, why in (
            ("m.pb", "is a model that is checked"),
            ("no/where", "make the folder first"),
            (".", "is a"),
        ):
            done = msplit("check", tmp_path / "m.pb", "-o", tmp_path / place, "--force")
            assert (done.code, done.out, why in done.err) == (2, "", True), done.err
        assert msplit("check", tmp_path / "none.pb", "-o", tmp_path / "found").code == 2
