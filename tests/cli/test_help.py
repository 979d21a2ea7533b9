"""What can be learnt without a model: help, the version, the rule sets; and how soon."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import msplit as library
from msplit import rules as rule_sets
from msplit.cli.main import COMMANDS, EXAMPLES, cli
from tests.cli.runner import ROOT, SAMPLES, fine, msplit


def test_help_names_every_command() -> None:
    done = fine("--help")
    for name, meaning in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(meaning.split()[0])}", done.out, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = fine(command, "--help", columns=100)
    assert done.out.startswith(f"Usage: msplit {command} ")
    assert fine(command, "-h", columns=100).out == done.out
    options = re.split(r"^  (?=-)", done.out.partition("\nOptions:\n")[2], flags=re.MULTILINE)[1:]
    assert options
    for option in options:
        assert len(re.split(r" {2,}|\n +", option.strip(), maxsplit=1)) == 2, f"no word about {option}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model.pb", "annotated.pb", "before.pb"):
        (tmp_path / name).write_bytes(b"")
    lines = fine(command, "--help", columns=120).out.splitlines()
    (title,) = [number for number, line in enumerate(lines) if line.strip() in ("Example:", "Examples:")]
    examples = [line.strip() for line in lines[title + 1 :] if line.strip()]
    assert tuple(examples) == EXAMPLES[command]
    for example in examples:
        program, name, *arguments = shlex.split(example.partition(" > ")[0])
        assert (program, name) == ("msplit", command)
        known = cli.get_command(click.Context(cli), name)
        assert known.make_context(name, arguments).params  # every option and value is one


def test_the_version() -> None:
    assert fine("--version").out == f"msplit, version {library.__version__}\n"


def test_rules_prints_what_a_rules_file_can_start_from(tmp_path: Path) -> None:
    lines = fine("rules").out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert tuple(names) == rule_sets.available()
    for name in names:
        text = fine("rules", name).out
        assert (ROOT / "rules" / f"{name}.yaml").read_text() == text
        (tmp_path / "mine.yaml").write_text(text)
        (tmp_path / "example-streams.txt").write_text("3:a\n")
        fine("assign", SAMPLES / "cond_v1.pb", "--rules", tmp_path / "mine.yaml", "--dry-run")


def test_help_imports_nothing_heavy() -> None:
    heavy = {"tensorflow", "torch", "networkx", "keras"}
    code = (
        "import sys; from msplit.cli import main; import msplit\n"
        "for command in ('', *main.COMMANDS):\n"
        "    assert main.run([command, '--help'] if command else ['--help']) == 0\n"
        f"sys.exit(f'imports {{loaded}}' if (loaded := {heavy} & {{*sys.modules}}) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def quickest(enough: float, compiled: Path, *arguments: str) -> float:
    """Least processor time of a whole command, s: unlike wall time it says the same on a busy machine.

    Args:
        enough: A time below which it need not be run again, s; it is run four times at most.
        compiled: Folder for byte code, which an installed program has, whatever this suite's environment says. The first run fills it.
        arguments: The command.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    times: list[float] = []
    while len(times) < 4 and min(times, default=enough) >= enough:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [str(Path(sys.executable).with_name("msplit")), *arguments], cwd=ROOT, capture_output=True, env=environment
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_it_starts_quickly(tmp_path: Path) -> None:
    # The targets are 0.4 s and 0.6 s on an idle machine; memory that others keep busy slows processors down by up to a half.
    assert quickest(0.6, tmp_path, "--help") < 0.6
    assert quickest(0.9, tmp_path, "analyze", "sample_graphs/mmoe_small.pb") < 0.9


def test_help_of_a_command_is_what_its_own_option_shows() -> None:
    assert fine("help", "check").out == fine("check", "--help").out
    assert fine("help").out == fine("help", "help").out == fine("help", "--help").out == fine("--help").out
    assert "\n  help " in fine("--help").out
    wrong = msplit("help", "chekc")
    assert (wrong.code, "No such command 'chekc'. Did you mean 'check'?" in wrong.err) == (2, True)
    assert fine("help", "rules", "recsys").out == fine("rules", "--help").out
