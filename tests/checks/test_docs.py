"""docs/checks.md and docs/schemas/ are written by a script; they must be what it would write now."""

import importlib.util
import os
import re
from pathlib import Path

import jsonschema
import yaml

from msplit.checks import config
from tests.checks.test_reports import CHECK_SCHEMA

ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("make_check_docs", ROOT / "scripts" / "make_check_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_are_up_to_date():
    fix = "run: python scripts/make_check_docs.py"
    assert (ROOT / "docs" / "checks.md").read_text("utf-8") == script().checks_md(), fix
    written = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "schemas").iterdir()}
    assert written == script().schemas(), fix


def test_the_schema_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(CHECK_SCHEMA)


def test_the_settings_in_the_documents_are_valid(tmp_path):
    text = (ROOT / "docs" / "checks.md").read_text("utf-8")
    for suffix, body in re.findall(r"```(yaml|toml)\n(.*?)```", text, re.DOTALL):
        path = tmp_path / f"msplit.{suffix}"
        path.write_text(body, "utf-8")
        assert config.load(path).batch == 128


def test_the_pre_commit_hook_is_what_pre_commit_reads():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {"id", "name", "entry", "language"} <= hook.keys()
    assert (hook["entry"], hook["language"]) == ("scripts/hook", "script")  # relative to the clone of this repository
    assert os.access(ROOT / hook["entry"], os.X_OK)
    files = re.compile(hook["files"])
    for name in (
        "models/ranker.pbtxt",
        "a/saved_model.pb",
        "x.meta",
        "rules.yaml",
        "my_rules.yml",
        "msplit.yaml",
        "pyproject.toml",
    ):
        assert files.search(name), name
    for name in ("main.py", "README.md"):
        assert not files.search(name), name
