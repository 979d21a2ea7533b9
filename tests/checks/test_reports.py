"""What the formats look like (golden files), that they are valid, and that nothing a name may hold breaks them."""

import io
import json
import re
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from msplit.checks import Finding, Report
from msplit.checks.run import CHECKS, Reported
from msplit.checks.subject import Severity
from msplit.report import document, findings, render
from tests.checks.harness import plan_of, report, rules_of

HERE = Path(__file__).parent


def valid(schema):
    """What holds documents against a schema, which is itself held against the schema of schemas, once."""
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


GOLDEN = HERE / "golden"
SARIF_SCHEMA = json.loads((HERE / "schemas" / "sarif-schema-2.1.0.json").read_text())
SARIF = jsonschema.Draft7Validator(SARIF_SCHEMA)
WRITTEN_SARIF = valid(json.loads((HERE / "sarif-2.1.0-subset.json").read_text()))
JUNIT = xmlschema.XMLSchema(HERE / "schemas" / "junit-10.xsd")
CHECK_SCHEMA = json.loads((files("msplit") / "data" / "schemas" / "check.json").read_text("utf-8"))
CHECK = valid(CHECK_SCHEMA)

GRAPH = """
    x:Placeholder
    tower_a/m:MatMul(x)@9us[_stream_id=1]
    tower_b/m:MatMul(x)@9us[_stream_id=6]
    tower_c/m:MatMul(x)@9us
    join:AddN(tower_a/m,tower_b/m,tower_c/m)@3us
    s:StringJoin(x)[_stream_id=1] host
"""
RULES = rules_of('regex: {patterns: {1: ["tower_[ab]/.*", "100%,\\"<&>z"], 2: "tower_[bc]/.*"}}')


def example(**options):
    return report(GRAPH, rules=RULES, ignore=("MS017",), **options)


def sarif_without_pages(result):
    """SARIF, with each rule cut down to its id and name: the pages are held by docs/checks.md."""
    log = json.loads(findings.sarif(result))
    driver = log["runs"][0]["tool"]["driver"]
    driver["version"] = "VERSION"
    driver["rules"] = [{key: rule[key] for key in ("id", "name")} for rule in driver["rules"]]
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def terminal(result):
    out = io.StringIO()
    render.to_terminal(findings.document(result), Console(file=out, width=100))
    return out.getvalue()


WRITERS = {
    "report.txt": terminal,
    "report.md": lambda result: render.to_markdown(findings.document(result)),
    "report.json": lambda result: document.dumps("check", findings.payload(result)) + "\n",
    "report.github.txt": findings.github,
    "report.junit.xml": findings.junit,
    "report.sarif": lambda result: sarif_without_pages(result),
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_looks_as_it_did(name):
    text = WRITERS[name](example())
    golden = GOLDEN / name
    if not golden.exists():  # delete one to write it anew
        golden.write_text(text, "utf-8")
        pytest.fail(f"{golden} was written: look at it, and run the test again")
    assert text == golden.read_text("utf-8")


ODD = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('%\r\n:,|<>&"\x00\x1b\ufffe]]>'), max_size=12)


@st.composite
def reports(draw):
    """Any report: names and texts may hold anything."""
    codes = draw(st.lists(st.sampled_from(sorted(CHECKS)), max_size=4))
    found = [
        Reported(
            code,
            draw(st.sampled_from(Severity)),
            Finding(
                draw(ODD.filter(bool)),
                draw(ODD.filter(bool)),
                tuple(draw(st.lists(ODD, max_size=2, unique=True))),
                draw(st.integers(0, 9)),
                draw(st.none() | ODD.filter(bool)),
                draw(st.none() | st.integers(1, 99)),
            ),
        )
        for code in sorted(codes)
    ]
    rest = [code for code in CHECKS if code not in codes]
    skipped = {code: draw(ODD.filter(bool)) for code in draw(st.lists(st.sampled_from(rest), max_size=2, unique=True))}
    omitted = dict.fromkeys(codes[:1], 3)
    return Report("m%,:odel.pb", tuple(found), tuple(CHECKS.values()), skipped, omitted, (0, 1), (), bool(found))


@given(reports())
def test_json_fits_its_schema(result):
    CHECK.validate(json.loads(document.dumps("check", findings.payload(result))))


@given(reports())
def test_sarif_fits_its_schema_and_its_rules_are_those_of_the_results(result):
    log = json.loads(findings.sarif(result))
    SARIF.validate(log)  # the official one, which allows what it does not know in places
    WRITTEN_SARIF.validate(log)
    (run,) = log["runs"]
    for one in run["results"]:
        assert run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]


@given(reports())
def test_junit_is_xml_and_its_counts_are_right(result):
    JUNIT.validate(findings.junit(result))
    root = ElementTree.fromstring(findings.junit(result))
    (suite,) = root
    cases = suite.findall("testcase")
    failures = {case.get("name").split()[0] for case in cases if case.find("failure") is not None}
    assert root.tag == "testsuites"
    assert [int(root.get(key)) for key in ("tests", "failures", "errors")] == [len(cases), len(failures), 0]
    assert int(suite.get("skipped")) == len([case for case in cases if case.find("skipped") is not None])
    assert len(cases) == len(CHECKS)
    assert failures == {one.code for one in result.findings if one.severity is Severity.ERROR}


LINE = re.compile(r"::(error|warning|notice) ([a-z]+=[^,:\r\n]*)(,[a-z]+=[^,:\r\n]*)*::[^\r\n]*")


@given(reports())
def test_a_finding_is_one_line_for_github_whatever_it_holds(result):
    text = findings.github(result)
    lines = text.split("\n")[:-1]
    assert len(lines) == len(result.findings) + len(result.omitted)
    assert all(LINE.fullmatch(line) for line in lines)


def test_junit_fails_what_fails_the_run():
    warned = example(select=("MS005",))
    assert ElementTree.fromstring(findings.junit(warned)).get("failures") == "0"
    assert ElementTree.fromstring(findings.junit(warned, fail_on=Severity.WARNING)).get("failures") == "1"


def test_a_saved_model_is_annotated_at_its_message(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"")
    reported = Reported("MS001", Severity.ERROR, Finding("text", "fix"))
    result = Report(str(tmp_path), (reported,), (), {}, {}, (), (), True)
    assert findings.file_of(result, reported) == str(tmp_path / "saved_model.pb")


def test_a_fingerprint_stays_where_only_figures_differ():
    def prints(result):
        return [one["partialFingerprints"] for one in json.loads(findings.sarif(result))["runs"][0]["results"]]

    one = report("x:Placeholder; a:MatMul(x)@9us; b:MatMul(a)@9us[_stream_id=1]", "MS015")
    other = report("x:Placeholder; a:MatMul(x)@7us; b:MatMul(a)@8us[_stream_id=1]", "MS015")
    assert one.findings[0].finding.text != other.findings[0].finding.text
    assert prints(one) == prints(other)


def test_the_example_has_findings_of_every_kind_of_place():
    result = example(plan=plan_of(GRAPH, [0, 1, 0, 0, 0, 0]))
    places = [
        (one.finding.file is not None, one.finding.line is not None, bool(one.finding.nodes)) for one in result.findings
    ]
    assert {(False, False, True), (True, True, False), (True, False, True), (False, False, False)} <= set(places)
