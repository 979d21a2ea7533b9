"""The command: what it takes, what goes to stdout, and its exit codes."""

import json

import jsonschema
import numpy as np
import pytest

import msplit
from msplit import cost, formats, rules
from msplit.checks.run import CHECKS
from msplit.checks.subject import CheckSettings
from msplit.cli.main import run
from msplit.flatten.build import flatten
from msplit.flatten.flat import to_ids
from msplit.schedule import planfile
from tests.checks.harness import dumps
from tests.checks.test_reports import CHECK_SCHEMA, SARIF_SCHEMA

SAMPLE = "sample_graphs/mmoe_small.pb"


@pytest.fixture(scope="module")
def assigned(tmp_path_factory):
    """A sample with ids from the shipped rule set, and its plan."""
    folder = tmp_path_factory.mktemp("assigned")
    flat = flatten(formats.read(SAMPLE))
    costs = cost.estimate(flat, cost.infer(flat))
    ids = rules.assign(flat, costs, rules.load("default")).ids
    formats.write(flat.model, dict(to_ids(flat, np.where(flat.host, -1, ids).tolist())[0]), folder / "m.pb")
    (folder / "plan.json").write_text(dumps(flat, costs, ids))
    return folder


def check(capsys, *arguments):
    """Exit code, stdout, stderr."""
    code = run(["check", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def codes(text):
    return [one["code"] for one in json.loads(text)["findings"]]


def test_what_assign_gives_passes_against_its_rules_and_its_plan(capsys, assigned):
    code, out, err = check(
        capsys,
        assigned / "m.pb",
        "--rules",
        "default",
        "--plan",
        assigned / "plan.json",
        "--ignore",
        "MS017",
        "--format",
        "json",
    )
    assert (code, err) == (0, "")
    result = json.loads(out)
    jsonschema.validate(result, CHECK_SCHEMA)
    assert result["findings"] == []
    assert set(result["checked"]) | set(result["skipped"]) == set(CHECKS) - {"MS017"}
    assert {"MS002", "MS003", "MS011", "MS015"} <= set(result["checked"])


def test_an_error_exits_1_and_exit_zero_says_otherwise(capsys):
    code, out, _ = check(capsys, SAMPLE, "--rules", "default", "--select", "MS002", "--format", "json")
    assert code == 1
    assert set(codes(out)) == {"MS002"}
    assert check(capsys, SAMPLE, "--rules", "default", "--select", "MS002", "--exit-zero")[0] == 0


def test_infos_and_warnings_do_not_fail_the_run_unless_told_to(capsys):
    code, out, _ = check(capsys, SAMPLE, "--select", "MS020", "--format", "json")
    assert (code, codes(out)) == (0, ["MS020"])
    assert check(capsys, SAMPLE, "--select", "MS020", "--fail-on", "info")[0] == 1
    assert check(capsys, SAMPLE, "--select", "MS020", "--fail-on", "warning")[0] == 0


def test_a_wait_less_is_found(capsys, assigned, tmp_path):
    plan = json.loads((assigned / "plan.json").read_text())
    assert plan["waits"]
    for place in range(len(plan["waits"])):
        torn = {**plan, "waits": plan["waits"][:place] + plan["waits"][place + 1 :]}
        (tmp_path / "torn.json").write_text(json.dumps(torn))
        code, out, _ = check(
            capsys, assigned / "m.pb", "--plan", tmp_path / "torn.json", "--select", "MS011", "--format", "json"
        )
        assert code == 1
        assert plan["waits"][place][0] in {name for one in json.loads(out)["findings"] for name in one["nodes"]}


def test_against_the_model_before(capsys, assigned):
    code, out, _ = check(capsys, SAMPLE, "--against", assigned / "m.pb", "--select", "MS003", "--format", "json")
    assert (code, codes(out)) == (1, ["MS003"])
    assert "have none now" in out
    stale, _, _ = check(capsys, assigned / "m.pb", "--against", "sample_graphs/towers_small.pb", "--select", "MS003")
    assert stale == 0  # no node of the towers is in it, and none of the towers had an id


def test_settings_come_from_the_folder_upward_and_options_win(capsys, assigned, tmp_path, monkeypatch):
    model, sample = assigned / "m.pb", formats.read(SAMPLE).path.resolve()
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    (tmp_path / "msplit.yaml").write_text("rules: default\nselect: [MS002]\nfail_on: info\n")
    assert check(capsys, sample)[0] == 1
    assert check(capsys, model)[0] == 0
    assert check(capsys, sample, "--select", "MS001")[0] == 0
    (tmp_path / "other.toml").write_text('[tool.msplit]\nselect = ["MS020"]\nseverity = { MS020 = "error" }\n')
    assert check(capsys, sample, "--config", tmp_path / "other.toml")[0] == 1
    (tmp_path / "msplit.yaml").write_text("rulez: default\n")
    code, out, err = check(capsys, sample)
    assert (code, out) == (2, "")
    assert "did you mean 'rules'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pb"], "missing.pb"),
        ([SAMPLE, "--select", "XY"], "no check's code begins with 'XY'"),
        ([SAMPLE, "--rules", "defalt"], "did you mean 'default'"),
        ([SAMPLE, "--plan", "missing.json"], "can not be read"),
        ([SAMPLE, "--against", "missing.pb"], "missing.pb"),
        ([SAMPLE, "--config", "missing.yaml"], "can not be read"),
        ([SAMPLE, "--format", "xml"], "xml"),
        ([SAMPLE, "--costs", "gpu=h20"], "did you mean"),
        ([SAMPLE, "--shape", "y=1"], "y"),
        (["--explain", "MS0"], "there is no check 'MS0'"),
        ([], "MODEL"),
    ],
)
def test_what_can_not_be_checked_exits_2_with_one_message(capsys, arguments, message):
    code, out, err = check(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert "internal error" not in err


def test_explain_prints_pages_and_needs_no_model(capsys):
    code, out, _ = check(capsys, "--explain", "ms007")
    assert code == 0
    assert out.startswith("## MS007 variable-split\n")
    code, out, _ = check(capsys, "--explain", "all")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("## ")] == list(CHECKS)


@pytest.mark.parametrize("style", ["table", "md", "github", "junit", "sarif", "json"])
def test_every_format_prints_the_findings_of_a_real_model(capsys, style):
    code, out, err = check(capsys, SAMPLE, "--rules", "default", "--ignore", "MS017", "--format", style)
    assert (code, err) == (1, "")
    assert "MS002" in out
    if style == "sarif":
        jsonschema.validate(json.loads(out), SARIF_SCHEMA)


def test_verbose_says_why_checks_were_skipped(capsys):
    assert "MS011 was skipped: no plan was given" in check(capsys, SAMPLE, "--ignore", "MS017", "-v")[1]
    assert "Not checked: MS002" in check(capsys, SAMPLE, "--ignore", "MS017")[1]


def test_the_library_does_the_same(assigned):
    flat = msplit.load(assigned / "m.pb")
    settings = CheckSettings(rules="default", plan=str(assigned / "plan.json"), ignore=("MS017",))
    assert msplit.check(flat, settings).findings == ()
    report = msplit.check(
        msplit.load(SAMPLE), CheckSettings(select=("MS002", "MS003")), ruleset="default", against=assigned / "m.pb"
    )
    assert {one.code for one in report.findings} == {"MS002", "MS003"}
    assert report.failed


def test_the_plan_alone_says_where_nodes_run(capsys, assigned):
    code, out, _ = check(capsys, SAMPLE, "--plan", assigned / "plan.json", "--ignore", "MS017", "--format", "json")
    result = json.loads(out)
    assert (code, result["findings"]) == (0, [])
    assert len(result["streams"]) == planfile.load(assigned / "plan.json").streams
    assert "MS015" in result["checked"]
