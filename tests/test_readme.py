"""What the pages tell users to type: the README and the tour show what their commands print; elsewhere commands and options exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from msplit.cli import serve
from msplit.cli.main import COMMANDS
from tests.cli.runner import ROOT, SAMPLES, fine

pytestmark = pytest.mark.whole_search  # pages show what users see

PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/quickstarts/*.md",
        "docs/ci-example/*.md",
        "deploy/*.md",
        "sample_graphs/*.md",
        "benchmarks/**/*.md",
    )
    for path in ROOT.glob(pattern)
)
INLINE = re.compile(r"`(?:\$ )?msplit ([^`\n]+)`")
IN_BLOCKS = re.compile(r"^(?:    |\$ )?msplit ([a-z-].*)$", re.MULTILINE)
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHARED = {"--help", "--version", "--verbose", "--quiet", "--debug"}
QUICK = ("--measure", "duration=0.1", "--measure", "warmup=0", "--measure", "builds=1", "--engine", "tensorflow")


def mentions(page: Path) -> list[str]:
    """Everything behind `msplit ` in code, without comments."""
    text = page.read_text()
    blocks = "\n".join(
        re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL) + re.findall(r"^    .*$", text, re.MULTILINE)
    )
    found = [*INLINE.findall(text), *IN_BLOCKS.findall(blocks)]
    return [text.partition(" #")[0].strip() for text in found]


def options_of(command: str) -> set[str]:
    found = set(re.findall(r"(--[a-z][\w-]*)", fine(command, "--help", columns=200).out)) | SHARED
    if command == "serve":  # TensorFlow Serving's names, which the help leaves out
        found |= {"--" + name.strip("-").replace("-", "_") for one in serve.command.params for name in one.opts}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_that_pages_name_are_there(page: Path) -> None:
    for text in mentions(page):
        name = next((word for word in text.split() if not word.startswith("-")), "")
        if text.startswith("-") and name not in COMMANDS:
            continue  # an option of all commands, on its own
        if name in ("…", "COMMAND") or name.endswith(":"):  # the last is what a command printed
            continue
        assert name in (*COMMANDS, "help"), text
        assert set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", text)) <= options_of(name), text


def test_the_pages_name_every_command() -> None:
    named = {text.split()[0] for page in PAGES for text in mentions(page) if text.split()[0] in COMMANDS}
    assert named == set(COMMANDS)


def examples(page: Path) -> list[tuple[str, list[str]]]:
    """A page's commands and Python blocks in order, each with the lines that it shows of what a command prints."""
    found: list[tuple[str, list[str]]] = []
    for language, block in BLOCK.findall(page.read_text()):
        if language == "python":
            found.append((block, []))
            continue
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip() and "…" not in line:
                found[-1][1].append(line)
    return found


def plain(text: str) -> str:
    """Without its line breaks and columns, which depend on the width, and without what the simulator's figures are just now."""
    return re.sub(r"(predicted (?:step|gain))( [-+]?[\d.]+ ?(µs|ms|x))+", r"\1", " ".join(text.split()))


@pytest.mark.tf
@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_a_page_shows_what_its_commands_print(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, target in (("sample_graphs", SAMPLES), ("rules", ROOT / "rules"), ("docs", ROOT / "docs")):
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    ran = []
    for line, shown in examples(ROOT / page):
        if line.startswith("import "):
            exec(compile(line, "example", "exec"), {"__name__": "example"})
            ran.append("prepare" if "msplit.prepare" in line else "")
            continue
        program, *arguments = shlex.split(line)
        if program == "mkdir":
            (tmp_path / arguments[-1]).mkdir()
            continue
        assert program == "msplit", line
        ran.append(arguments[0])
        if arguments[0] == "bench":  # what it measures differs each time
            assert "outputs are equal" in fine(*arguments, *QUICK, columns=100).out
            continue
        if arguments[0] == "report":
            arguments.append("--quiet")
        printed = fine(*arguments, columns=100).out
        missing = [text for text in shown if plain(text) not in plain(printed)]
        assert not missing, f"{line} does not print {missing}:\n{printed}"
    assert set(ran) >= {"analyze", "assign", "check", "report", "bench", "prepare" if page == "README.md" else "diff"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    ):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_the_index_of_the_documents_names_every_one() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    folder = ROOT / "docs"
    pages = {
        path.relative_to(folder).as_posix() for pattern in ("*.md", "quickstarts/*.md") for path in folder.glob(pattern)
    }
    assert {page for page in pages if f"]({page})" not in index} == {"README.md"}


def script(path: str) -> ModuleType:
    """A script of the checkout, imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_timeline_is_what_msplit_simulates() -> None:
    tool = script("tools/timeline.py")
    assert tool.TARGET.read_text("utf-8") == tool.svg(), "run: python tools/timeline.py"


def test_the_results_are_those_of_the_raw_data() -> None:
    table = script("benchmarks/table.py")
    fix = "run: python benchmarks/table.py --write"
    assert (ROOT / "benchmarks" / "README.md").read_text() == table.page(), fix
    shown = (ROOT / "README.md").read_text()
    assert shown == table.readme(shown), fix
    assert shown.count("| MMoE, 16 experts, 128 |") == 1  # the table is between its marks
