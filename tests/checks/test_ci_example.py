"""docs/ci-example: the steps of its workflow, run as GitHub would run them, on the repository as it is and with mistakes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from msplit.checks.run import CHECKS
from tests.campaign import campaign

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "ci-example"
MODEL = "models/ranker.pbtxt"
WORKFLOW = yaml.safe_load((EXAMPLE / ".github" / "workflows" / "msplit.yml").read_text())
GH = '#!/bin/sh\necho "$@" >> "$GH_LOG"\ncp msplit.md "$GH_LOG.md"\n'


@pytest.fixture
def repository(tmp_path):
    """A copy of the example under git, with `msplit` and a `gh` that writes down what it is asked for."""
    folder = tmp_path / "repository"
    shutil.copytree(EXAMPLE, folder)
    tools = tmp_path / "bin"
    tools.mkdir()
    script = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c "import sys; from msplit.__main__ import entry; entry()" "$@"\n'
    for name, text in (("msplit", script), ("gh", GH)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-q", "-m", "base")
    return folder


def git(folder, *arguments):
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def pull_request(folder):
    """Runs the workflow's steps. Returns the exit code of each named step and what it printed."""
    job = WORKFLOW["jobs"]["check"]
    logs = folder.parent
    environment = {
        "PATH": f"{logs / 'bin'}:{os.environ['PATH']}",
        "HOME": str(logs),
        "GITHUB_STEP_SUMMARY": str(logs / "summary.md"),
        "GH_LOG": str(logs / "gh.log"),
        "MODEL": job["env"]["MODEL"],
        "BASE": git(folder, "rev-parse", "HEAD"),
        "PR": "7",
    }
    assert environment["MODEL"] == MODEL
    results = {}
    for step in job["steps"]:
        if "run" in step and step["name"] != "Install":
            assert "${{" not in step["run"]  # nothing of a pull request is pasted into a shell
            # GitHub runs steps with `bash -e -o pipefail`.
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            results[step["name"]] = (done.returncode, done.stdout + done.stderr)
    return results, (logs / "gh.log.md").read_text()


def test_the_repository_as_it_is_passes_and_its_report_is_posted(repository):
    results, comment = pull_request(repository)
    assert [code for code, _ in results.values()] == [0] * 4, results
    assert list(results) == ["Find the model of the base branch", "Write the report", "Post the report", "Gate"]
    assert "No findings" in comment
    assert (repository.parent / "summary.md").read_text() == comment
    assert (repository.parent / "gh.log").read_text().startswith("pr comment 7 --body-file msplit.md --edit-last")


def replaced(old, new):
    def change(folder):
        path = folder / MODEL
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def exported(folder):
    """The model as TensorFlow exports it, without ids."""
    shutil.copy(ROOT / "sample_graphs" / "mmoe_small.pbtxt", folder / MODEL)


def one_stream(folder):
    """Rules and model agree, and everything is on one stream but a gate."""
    (folder / "rules.yaml").write_text("version: 1\nstreams: 2\nrules:\n  - regex: {patterns: {1: 'gate_1/.*'}}\n")
    (folder / "msplit.yaml").write_text((folder / "msplit.yaml").read_text().replace("rules: rules.yaml\n", ""))
    path = folder / MODEL
    lines = path.read_text().split("\n")
    name = ""
    for number, line in enumerate(lines):
        if line.startswith('  name: "'):
            name = line.split('"')[1]
        if 'key: "_stream_id"' in line:
            lines[number + 2] = f"      i: {int(name.startswith('gate_1/'))}"
    path.write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("mistake", "codes"),
    [
        pytest.param(exported, {"MS002", "MS020", "MS003"}, id="exported model"),
        pytest.param(one_stream, {"MS015"}, id="no gain"),
        pytest.param(replaced("expert_3/", "expert_x/"), {"MS003", "MS004"}, id="renamed scope", marks=campaign),
        pytest.param(replaced("      i: 3", "      i: 5"), {"MS001", "MS003"}, id="wrong ids", marks=campaign),
    ],
)
def test_mistakes_fail_the_gate_and_annotate_the_pull_request(repository, mistake, codes):
    mistake(repository)
    results, comment = pull_request(repository)
    code, printed = results.pop("Gate")
    assert code == 1
    assert [code for code, _ in results.values()] == [0] * 3, results
    errors = {line.partition("title=")[2][:5] for line in printed.splitlines() if line.startswith("::error ")}
    assert errors == codes
    assert all(f"| {code} | error |" in comment for code in codes)


def test_the_readme_names_codes_that_there_are_and_files_that_are_there():
    text = (EXAMPLE / "README.md").read_text()
    assert set(re.findall(r"MS\d{3}", text)) <= set(CHECKS)
    for name in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE):
        assert (EXAMPLE / name).is_file(), name


def hook():
    (repo,) = yaml.safe_load((EXAMPLE / ".pre-commit-config.yaml").read_text())["repos"]
    (found,) = repo["hooks"]
    assert repo["repo"] == "local"
    return found


def test_the_examples_hook_runs_on_what_the_hook_of_this_repository_runs_on():
    (ours,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    for key in ("id", "name", "pass_filenames", "files"):
        assert hook()[key] == ours[key], key
    assert hook()["entry"] == "msplit check"
    assert 'exec "$venv/bin/msplit" check "$@"' in (ROOT / ours["entry"]).read_text()


@pytest.mark.parametrize(("mistake", "code"), [(None, 0), (exported, 1)])
def test_the_hook_stops_a_commit_with_a_mistake_and_no_other(repository, mistake, code):
    if mistake:
        mistake(repository)
    command = [*hook()["entry"].split(), *hook()["args"]]  # what pre-commit runs, in the repository's folder
    path = f"{repository.parent / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=repository, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr


@pytest.mark.parametrize("where", ["", "msplit-0.1.0-py3-none-any.whl"])
def test_the_workflow_installs_what_the_repository_names(repository, where):
    (step,) = [step for step in WORKFLOW["jobs"]["check"]["steps"] if step.get("name") == "Install"]
    assert WORKFLOW["jobs"]["check"]["env"]["MSPLIT"] == "${{ vars.MSPLIT }}"
    pip = repository.parent / "bin" / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    path = f"{pip.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MSPLIT": where}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, capture_output=True, text=True)
    if where:
        assert (done.returncode, done.stdout) == (0, f"install --no-deps -r requirements.txt {where}\n")
    else:
        assert done.returncode != 0
        assert "variable MSPLIT" in done.stderr


def test_nothing_in_the_documents_is_left_to_be_filled_in():
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*"), ROOT / ".pre-commit-hooks.yaml"):
        if path.suffix in (".md", ".yaml", ".yml"):
            assert not re.search(r"github\.com/(YOUR|OWNER|USER|EXAMPLE)\b", path.read_text()), path
