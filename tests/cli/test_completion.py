"""Shell completion as docs/usage.md tells to switch it on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from msplit.cli.main import COMMANDS
from tests import forked
from tests.cli.runner import ROOT

LINES = re.findall(r"^.*_MSPLIT_COMPLETE=\w+ msplit.*$", (ROOT / "docs" / "usage.md").read_text(), re.MULTILINE)
BIN = str(Path(sys.executable).parent)


def run(*command: str, **variables: str) -> str:
    path = os.pathsep.join([BIN, os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, env={**os.environ, "PATH": path, **variables}
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


SHELLS = ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_each_shell(shell: str) -> None:
    assert f"_MSPLIT_COMPLETE={shell}_complete" in run("msplit", _MSPLIT_COMPLETE=f"{shell}_source")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_documented_line_switches_it_on(shell: str) -> None:
    (line,) = [line for line in LINES if f"{shell}_source" in line]
    code = line.partition("#")[0].strip()
    if shell != "bash" and shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ready = "autoload -Uz compinit; compinit -u; " if shell == "zsh" else ""
    show = {"bash": "complete -p msplit", "zsh": 'print "$_comps[msplit]"', "fish": "complete -c msplit"}[shell]
    assert "msplit" in run(shell, "-c", f"{ready}{code}\n{show}")


def completed(line: str, shell: str = "bash") -> list[str]:
    asked = {"_MSPLIT_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, f"{BIN}/msplit"]
    done = forked.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **asked}, quick=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("msplit a") == ["plain,analyze", "plain,assign"]
    assert {entry.partition(",")[2] for entry in completed("msplit ")} == set(COMMANDS)
    assert completed("msplit analyze --sh") == ["plain,--show", "plain,--shared", "plain,--shape"]
    assert completed("msplit analyze --show br") == ["plain,branches"]
    assert completed("msplit analyze sample") == ["file,sample"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("msplit assign m.pb --rules v", ["plain,vision"]),
        ("msplit bench m.pb --rules my", ["file,my"]),
        ("msplit rules r", ["plain,recsys", "plain,rnn"]),
        ("msplit sample m", ["plain,mmoe"]),
        ("msplit report m.pb --costs gpu=h", ["plain,gpu=h200", "plain,gpu=h100"]),
        ("msplit report m.pb --costs r", ["plain,record=yes", "plain,record=no"]),
        ("msplit analyze m.pb --part f", ["plain,function="]),
        ("msplit bench m.pb --input my", ["file,my"]),
        ("msplit bench m.pb --input se", ["plain,seed="]),
        # as Bash has them, to which an equals sign is a word
        ("msplit report m.pb --costs gpu = h", ["plain,h200", "plain,h100"]),
        ("msplit report m.pb --costs record =", ["plain,yes", "plain,no"]),
        ("msplit report m.pb --costs profile = pro", ["file,profile=pro"]),
        ("msplit report m.pb --costs gpu = h200 --co", ["plain,--costs"]),
        ("msplit check m.pb --ignore MS001,MS02", ["plain,MS001,MS020", "plain,MS001,MS021", "plain,MS001,MS022"]),
        ("msplit check --explain a", ["plain,all"]),
        ("msplit help ch", ["plain,check"]),
    ],
)
def test_names_that_msplit_knows_are_completed(line: str, expected: list[str]) -> None:
    assert completed(line) == expected
