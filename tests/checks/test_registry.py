import ast
import re
from pathlib import Path

import pytest

from msplit.checks import CHECKS, Severity, lookup
from msplit.checks.registry import chosen, expand
from msplit.checks.run import MOST_FINDINGS
from msplit.checks.settings import Limits
from msplit.errors import MsplitError
from msplit.report import findings
from tests.checks.harness import report

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
        assert limit in Limits.__dataclass_fields__
        assert limit in check.what


def test_every_limit_belongs_to_a_check():
    assert {limit for check in CHECKS.values() for limit in check.limits} == set(Limits.__dataclass_fields__)


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
