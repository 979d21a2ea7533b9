"""The pages in docs/ that users copy from: every command and every Python example runs, and every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from msplit import rules
from msplit.api import EMITS
from msplit.cli.main import COMMANDS
from msplit.rules.ruleset import RULES
from tests.cli.runner import ROOT, SAMPLES, fine

PAGES = (
    "usage.md",
    "analyze.md",
    "assign.md",
    "bench.md",
    "rules.md",
    "files.md",
    "library.md",
    "compile.md",
    "annotate.md",
    "builds.md",
    "production.md",
    "training.md",
    "scaling.md",
    "scheduling.md",
)
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = ("--measure", "duration=0.1", "--measure", "warmup=0", "--measure", "builds=1", "--engine", "tensorflow")


def blocks(language: str) -> list[tuple[str, str, str]]:
    """(page, what follows the language, text) of each block."""
    found = []
    for page in PAGES:
        for match in BLOCK.finditer((ROOT / "docs" / page).read_text()):
            if match[1] == language:
                found.append((page, match[2].strip(), match[3]))
    return found


COMMAND_LINES = [(page, line) for page, _, text in blocks("sh") for line in text.splitlines()]
PYTHON = blocks("python")
YAML = blocks("yaml")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sample graphs in it, to run examples in."""
    (tmp_path / "sample_graphs").symlink_to(SAMPLES)
    (tmp_path / "my-rules.yaml").write_text(YAML[0][2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def slow(line: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.tf] if line.startswith("msplit bench") else []


@pytest.mark.parametrize("line", [pytest.param(line, marks=slow(line), id=line) for _, line in COMMAND_LINES])
def test_commands_run(line: str, clone: Path) -> None:
    program, *arguments = shlex.split(line)
    assert program == "msplit"
    done = fine(*arguments, *(QUICK if arguments[0] == "bench" else ()), columns=200)
    assert done.out
    assert "Traceback" not in done.out


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=[pytest.mark.tf] if extra == "tensorflow" else []) for _, extra, text in PYTHON]
)
def test_python_examples_run(text: str, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as thread:  # a browser's tests leave an event loop running in theirs
        thread.submit(exec, compile(text, "example", "exec"), {"__name__": "example"}).result()
    out = capsys.readouterr().out.splitlines()
    expected = re.findall(r"^print\(.*\) +# (\w+)$", text, re.MULTILINE)
    assert [line for line in out if line in expected] == expected


@pytest.mark.parametrize("text", [text for _, _, text in YAML])
def test_rules_files_are_read(text: str) -> None:
    assert rules.parse(text, "example").rules


@pytest.mark.parametrize("name", ["make_options_doc", "make_reference"])
def test_a_page_that_a_script_writes_is_up_to_date(name: str) -> None:
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text("utf-8") == module.page(), f"run: python scripts/{name}.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_options_names_every_option(command: str) -> None:
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    section = page.partition("\n## ")[0] + page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", fine(command, "--help", columns=100).out, re.MULTILINE):
        assert re.search(rf"{option}(?![\w-])", section), option


def test_usage_names_every_command() -> None:
    usage = "".join((ROOT / "docs" / page).read_text() for page in ("usage.md", "reports.md"))
    for command in COMMANDS:
        assert f"msplit {command}" in usage


def test_rules_names_every_rule_every_option_and_every_rule_set() -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    for name in rules.available():
        assert f"| `{name}` |" in page
    sections = dict(zip(*[iter(re.split(r"^### (\w+)$", page, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert set(sections) == set(RULES)
    example = (ROOT / "rules" / "example.yaml").read_text()
    for options in re.findall(r"^ +(?:# +)?([a-z]\w*):(?: |$)", example, re.MULTILINE):
        assert f"`{options}`" in page or options in RULES, options


def test_files_names_every_kind_of_emit() -> None:
    page = (ROOT / "docs" / "files.md").read_text()
    for kind in EMITS:
        assert f"`{kind}`" in page


def test_the_changelog_has_the_version() -> None:
    from msplit._version import __version__

    assert __version__ in (ROOT / "CHANGELOG.md").read_text()


def test_examples_need_nothing_but_the_samples(clone: Path) -> None:
    for _, line in COMMAND_LINES:
        for part in shlex.split(line):
            if "/" in part and not part.startswith(("outputs=", "expert")):
                assert (clone / part).exists(), part


def test_files_that_pages_name_are_there() -> None:
    """Of the package, the tests and the tools; scripts of `benchmarks/notes` may be gone from the tree, as these say."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *ROOT.glob("*.md")]
    named = re.compile(r"`[^`\n]*?((?:msplit|tests|tools|scripts)/[\w/.-]+\.(?:py|md|toml|yaml|txt))[^`\n]*`")
    gone = {
        f"{page.relative_to(ROOT)}: {path}"
        for page in pages
        for path in named.findall(page.read_text("utf-8"))
        if page.name != "CHANGELOG.md" and not (ROOT / path).exists()
    }
    assert not gone, f"these were moved or are gone: {sorted(gone)}"
