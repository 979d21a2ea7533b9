from pathlib import Path

import pytest

from msplit.checks import config
from msplit.checks.subject import CheckSettings, Severity, Thresholds
from msplit.errors import MsplitError

FULL = """
select: [MS0, MS01]
ignore: MS017
severity: {MS012: error, ms005: info}
fail_on: warning
streams: 4
fork_streams: 2
hand_set: ["tower_a/.*"]
rules: my.yaml
plan: plan.json
batch: 128
gpu: H200
shapes: {image: [1, 224, 224, 3], n: 7}
limits: {min_gain: 1.2, max_imbalance: 3, max_cross_edges: 0, max_cross_bytes: 10, max_cross_share: 1, max_unknown: 0}
"""
FULL_TOML = """
[project]
name = "x"
[tool.msplit]
select = ["MS0", "MS01"]
ignore = "MS017"
severity = { MS012 = "error", ms005 = "info" }
fail_on = "warning"
streams = 4
fork_streams = 2
hand_set = ["tower_a/.*"]
rules = "my.yaml"
plan = "plan.json"
batch = 128
gpu = "H200"
shapes.image = [1, 224, 224, 3]
shapes.n = 7
[tool.msplit.limits]
min_gain = 1.2
max_imbalance = 3
max_cross_edges = 0
max_cross_bytes = 10
max_cross_share = 1
max_unknown = 0
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(("name", "text"), [("msplit.yaml", FULL), ("pyproject.toml", FULL_TOML)])
def test_every_setting_is_read_from_both_kinds_of_file(tmp_path, name, text):
    path = write(tmp_path / name, text)
    assert config.load(path) == CheckSettings(
        select=("MS0", "MS01"),
        ignore=("MS017",),
        severity={"MS012": Severity.ERROR, "MS005": Severity.INFO},
        fail_on=Severity.WARNING,
        streams=4,
        fork_streams=2,
        hand_set=("tower_a/.*",),
        rules=str(tmp_path / "my.yaml"),
        plan=str(tmp_path / "plan.json"),
        batch=128,
        gpu="H200",
        shapes={"image": (1, 224, 224, 3), "n": (7,)},
        limits=Thresholds(1.2, 3.0, 0, 10, 1.0, 0.0),
        source=str(path),
    )


def test_nothing_said_leaves_the_defaults_and_shipped_rules_are_no_path(tmp_path):
    path = write(tmp_path / "msplit.yaml", "rules: default\n")
    assert config.load(path) == CheckSettings(rules="default", source=str(path))


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("selct: [MS001]\n", 1, ["unknown key 'selct'", "did you mean 'select'"]),
        ("\nlimits:\n  min_gian: 2\n", 3, ["unknown key 'min_gian'", "did you mean 'min_gain'"]),
        ("select: [MS9]\n", 1, ["no check's code begins with 'MS9'"]),
        ("severity: {MS12: error}\n", 1, ["there is no check 'MS12'", "did you mean MS012"]),
        ("severity: {MS012: eror}\n", 1, ["'eror'"]),
        ("fail_on: never\n", 1, ["fail_on"]),
        ("streams: 0\n", 1, ["streams"]),
        ("batch: true\n", 1, ["batch"]),
        ('hand_set: ["a("]\n', 1, ["bad pattern 'a('"]),
        ("gpu: h20\n", 1, ["no data sheet of 'h20'"]),
        ("shapes: {x: [a]}\n", 1, ["sizes of 'x'"]),
        ("limits: {max_imbalance: 0.5}\n", 1, ["max_imbalance"]),
        ("limits: 3\n", 1, ["limits"]),
        ("- MS001\n", 1, ["mapping"]),
        ("a: *b\n", 1, ["aliases"]),
        ("select: [\n", 2, ["not valid YAML"]),
    ],
)
def test_mistakes_in_yaml_are_named_with_their_lines(tmp_path, text, line, parts):
    path = write(tmp_path / "msplit.yaml", text)
    with pytest.raises(MsplitError) as error:
        config.load(path)
    assert error.value.where == f"{path}:{line}"
    assert error.value.fix
    assert [part for part in parts if part not in str(error.value)] == []


def test_all_mistakes_are_told_at_once(tmp_path):
    path = write(tmp_path / "msplit.yaml", "selct: []\nstreams: -1\n")
    with pytest.raises(MsplitError, match="2 mistakes") as error:
        config.load(path)
    assert "line 1" in str(error.value)
    assert "line 2" in str(error.value)


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ('[project]\nname = "x"\n\n[tool.msplit]\nbatch = 1\nselct = []\n', 6, "unknown key 'selct'"),
        (
            "[tool.msplit]\nbatch = 1\n[tool.msplit.limits]\n# on the line below\nmin_gian = 1.0\n",
            5,
            "unknown key 'min_gian'",
        ),
        ("[tool.msplit.limits]\nmin_gain = 2020-01-01\n", 2, "min_gain"),
        ('[tool.msplit]\nseverity = { MS012 = "eror" }\n', 2, "eror"),
    ],
)
def test_mistakes_in_toml_are_named_with_their_lines(tmp_path, text, line, part):
    path = write(tmp_path / "pyproject.toml", text)
    with pytest.raises(MsplitError, match=part) as error:
        config.load(path)
    assert error.value.where == f"{path}:{line}"


def test_files_that_are_no_settings_are_errors(tmp_path):
    with pytest.raises(MsplitError, match="can not be read"):
        config.load(tmp_path / "none.yaml")
    with pytest.raises(MsplitError, match="not valid TOML"):
        config.load(write(tmp_path / "broken.toml", "[tool"))
    with pytest.raises(MsplitError, match=r"no table \[tool.msplit\]"):
        config.load(write(tmp_path / "other.toml", "[tool.other]\n"))
    (tmp_path / "latin.yaml").write_bytes(b"\xff")
    with pytest.raises(MsplitError, match="UTF-8"):
        config.load(tmp_path / "latin.yaml")


def test_the_nearest_file_upward_is_found(tmp_path):
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    top = write(tmp_path / "pyproject.toml", "[tool.msplit]\n")
    write(tmp_path / "a" / "b" / "pyproject.toml", '[project]\nname = "msplit-user"\n')
    assert config.find(deep) == top
    near = write(tmp_path / "a" / "msplit.yaml", "batch: 1\n")
    write(tmp_path / "a" / "pyproject.toml", "[tool.msplit]\n")
    assert config.find(deep) == near
    assert config.find(Path(tmp_path)) == top
