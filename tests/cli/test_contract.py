"""Exit codes, streams, formats, and what is promised about files."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

import msplit as library
from msplit import rules as rule_sets
from msplit.cli.main import COMMANDS, EXAMPLES, cli
from msplit.rules import streamfile
from tests.cli.runner import ROOT, SAMPLES, Done, contents, fine, msplit, unchanged
from tests.report.perfetto import complaints
from tests.rules import nvidia_reader

ALL = sorted(path.name for path in SAMPLES.iterdir() if path.name != "README.md")
SEVERAL_TAGS = ("two_tags",)
TEXT = ("mmoe_small.pb", "training.meta", "keras_lookup", "while_v1.pb", "ragged_sparse")


def options_of(model: str) -> tuple[str, ...]:
    return ("--tag", "serve") if model in SEVERAL_TAGS else ()


def process(*arguments: object, **environment: str) -> Done:
    """A command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "msplit", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
    )
    return Done(done.returncode, done.stdout, done.stderr)


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


def test_the_version() -> None:
    assert fine("--version").out == f"msplit, version {library.__version__}\n"


def test_what_analyze_says_to_run_next_runs_and_predicts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my model.pb").write_bytes((SAMPLES / "towers_small.pb").read_bytes())
    monkeypatch.chdir(tmp_path)
    found = fine("analyze", "my model.pb", "--batch", "64", "--gpu", "a100", "--format", "json").json
    program, *arguments = shlex.split(found["next"])
    assert program == "msplit"
    assert arguments[:2] == ["assign", "my model.pb"]
    assigned = fine(*arguments, "--format", "json").json
    assert assigned["judgement"]["gain"] == pytest.approx(found["judgement"]["gain"], rel=0.05)
    assert (tmp_path / "my model.streams.pb").exists()


def test_a_shape_is_asked_for_only_where_one_is_open() -> None:
    settled = fine("analyze", SAMPLES / "feature_columns", "--batch", "64").out
    assert "may settle it" not in settled
    assert "No option settles it" in " ".join(settled.split())


@pytest.mark.parametrize("model", ALL)
def test_every_sample_is_analyzed(model: str) -> None:
    done = fine("analyze", SAMPLES / model, *options_of(model))
    assert done.out.startswith(f"{SAMPLES / model}"[:78])
    verdict = " ".join(done.out[-800:].split())
    helps = "Streams help this model: " in verdict
    assert helps or "Streams can not help this model: " in verdict or "Streams gain next to nothing here: " in verdict
    assert ("Next: msplit assign " in verdict) == helps
    found = fine("analyze", SAMPLES / model, *options_of(model), "--show", "all", "--format", "json").json
    assert (found["schema_version"], found["command"]) == (1, "analyze")
    assert found["nodes"]["total"] == len(found["node_list"]) >= found["nodes"]["host"]
    assert sum(op["gpu"] + op["host"] for op in found["ops"]) == found["nodes"]["total"]
    assert found["bounds_us"]["lower_bound"] <= found["bounds_us"]["serial"] + 1e-6
    judged = found["judgement"]
    assert judged["words"] in " ".join(done.out.split())
    assert 1 <= judged["gain"] <= judged["most"] <= found["gain_at_most"]["any"] + 1e-9
    assert found["suggestion"]["helps"] == helps


@pytest.mark.parametrize("model", ALL)
@pytest.mark.parametrize("rules", ["default", pytest.param("auto", marks=pytest.mark.no_cover)])
def test_every_sample_is_assigned(model: str, rules: str, tmp_path: Path) -> None:
    arguments = ("assign", SAMPLES / model, *options_of(model), "--rules", rules, "--format", "json")
    with unchanged(SAMPLES):
        done = fine(*arguments, "-o", tmp_path / "once").json
    assert (done["schema_version"], done["command"]) == (1, "assign")
    assert sum(load["nodes"] for load in done["loads"]) > 0
    assert done["written"]
    # Assigning again changes nothing, whatever the rules do with graphs that have no ids.
    again = fine("assign", tmp_path / "once", *arguments[2:], "-o", tmp_path / "twice").json
    assert again["changed"] == 0
    assert only_contents(tmp_path / "once") == only_contents(tmp_path / "twice")


def only_contents(path: Path) -> object:
    return contents(path) if path.is_dir() else path.read_bytes()


@pytest.mark.parametrize("style", ["table", "md", "json"])
@pytest.mark.parametrize("model", TEXT)
def test_colour_is_for_terminals_only(style: str, model: str) -> None:
    for arguments in (("analyze",), ("assign", "--dry-run")):
        command, *extra = arguments
        done = fine(command, SAMPLES / model, *extra, "--format", style, NO_COLOR="1")
        assert "\x1b" not in done.out
        assert done.out.endswith("\n")
        assert not re.search(r"[ \t]$", done.out, re.MULTILINE)


def test_a_terminal_gets_colour_unless_it_wants_none(tmp_path: Path) -> None:
    def shown(**environment: str) -> str:
        leader, follower = os.openpty()
        variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
        arguments = [sys.executable, "-m", "msplit", "assign", str(SAMPLES / "cond_v1.pb"), "--dry-run"]
        with subprocess.Popen(
            arguments, stdout=follower, stderr=follower, cwd=ROOT, env={**variables, "TERM": "xterm", **environment}
        ) as running:
            os.close(follower)
            text = b""
            try:
                while part := os.read(leader, 65536):
                    text += part
            except OSError:  # the other end is closed
                pass
            assert running.wait() == 0
        os.close(leader)
        return text.decode()

    assert "\x1b[1m" in shown()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", shown(NO_COLOR="1"))


def test_a_pipe_is_at_least_100_columns_wide() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    command = [sys.executable, "-m", "msplit", "analyze", "sample_graphs/feature_columns"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0
    assert 80 < max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.parametrize("command", [("analyze", "--show", "all"), ("assign", "--dry-run", "--diff"), ("rules",)])
def test_a_reader_that_goes_away_is_no_error(command: tuple[str, ...]) -> None:
    name, *extra = command
    model = [] if name == "rules" else ["sample_graphs/inception_v3_stripped.pb"]
    with subprocess.Popen(
        [sys.executable, "-m", "msplit", name, *model, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(1)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 0


def hear_control_c() -> None:
    """What runs in the background of a script, as this suite may, is started deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored


@pytest.mark.tf
def test_control_c_ends_a_bench_with_130() -> None:
    command = [sys.executable, "-m", "msplit", "bench", "sample_graphs/mmoe_small.pb", "--duration", "60"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=hear_control_c,
    ) as running:
        time.sleep(6)
        running.send_signal(signal.SIGINT)  # on a busy machine this may be in the middle of TensorFlow's import
        try:
            out, err = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            pytest.fail("an interrupted bench went on for a minute")
    assert running.returncode == 130
    assert out == ""
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


SWALLOWED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from msplit import formats
from msplit.cli import main

real = formats.read

def read(*arguments, **options):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the handler runs between two instructions
            pass
    except BaseException:
        pass  # as an import of a large library may do
    {then}

formats.read = read
sys.exit(main.run(["analyze", "sample_graphs/mmoe_small.pb"]))
"""


@pytest.mark.parametrize("then", ["return real(*arguments, **options)", "raise ValueError('half imported')"])
def test_control_c_that_something_swallows_counts(then: str) -> None:
    code = SWALLOWED.replace("{then}", then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr


WRITING = """
import os, signal, sys
from msplit.cli import main

real = os.fsync

def fsync(descriptor):
    real(descriptor)
    os.kill(os.getpid(), {number})
    for _ in range(1000):  # the handler runs between two instructions
        pass

os.fsync = fsync
sys.exit(main.run(["assign", {model!r}, "--streams", "2", "-o", sys.argv[1]]))
"""


@pytest.mark.parametrize("model", ["mmoe_small.pb", "two_signatures"])
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_in_the_middle_of_writing_leaves_nothing(
    model: str, number: int, code: int, said: str, tmp_path: Path
) -> None:
    text = WRITING.format(model=str(SAMPLES / model), number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", text, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        preexec_fn=hear_control_c,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith(f"{said}\n")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_handlers_that_a_host_program_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    handler = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    monkeypatch.setattr("msplit.formats.read", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM) or 1 / 0)
    try:
        assert msplit("analyze", "sample_graphs/mmoe_small.pb").code == 2
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert {number: signal.getsignal(number) for number in before} == before


def test_little_is_loaded_before_control_c_is_caught() -> None:
    """What is imported before `entry` runs is where Python's own traceback can not be kept away."""
    code = "import os; before = set(sys.modules); import msplit.__main__; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "['__future__', 'msplit', 'msplit.__main__', 'msplit._version']\n", done.stderr


@pytest.mark.parametrize("library", ["click", "msplit/cli/main.py"])
def test_control_c_while_the_program_is_still_being_imported(library: str, tmp_path: Path) -> None:
    """A stand-in for what is imported presses it, in the middle."""
    press = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    path = tmp_path / (library if "/" in library else f"{library}.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(press)
    for name in ("__init__.py", "__main__.py", "_version.py"):
        if "/" in library:
            shutil.copyfile(ROOT / "msplit" / name, tmp_path / "msplit" / name)
    done = subprocess.run(
        [sys.executable, "-m", "msplit", "--help"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        timeout=60,
        preexec_fn=hear_control_c,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_full_disk_behind_standard_output() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "msplit", "analyze", "sample_graphs/mmoe_small.pb"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == (
        "error: standard output: can not be written: No space left on device\n  fix: free some space, or write elsewhere\n"
    )


@pytest.mark.parametrize(("closed", "code"), [("stdout", 0), ("stderr", 2)])
def test_a_stream_that_is_closed_is_no_bug(closed: str, code: int) -> None:
    model = "mmoe_small.pb" if closed == "stdout" else "gone.pb"
    redirect = ">&-" if closed == "stdout" else "2>&-"
    command = f"'{sys.executable}' -m msplit analyze sample_graphs/{model} {redirect}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_errors_of_a_real_process() -> None:
    done = process("analyze", "sample_graphs/two_tags")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: sample_graphs/two_tags: the SavedModel holds 2 graphs: serve; serve,gpu\n  fix: choose one with --tag\n"
    )


def test_the_cuda_engine_without_a_gpu() -> None:
    done = process("bench", "sample_graphs/mmoe_small.pb", "--engine", "cuda", CUDA_VISIBLE_DEVICES="")
    assert (done.code, done.out) == (2, "")
    assert "error: the cuda engine can not run here: " in done.err
    assert "fix: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("heavy", ["tensorflow", "torch", "networkx", "keras"])
def test_help_imports_nothing_heavy(heavy: str) -> None:
    code = (
        "import sys; from msplit.cli import main; import msplit\n"
        "for command in ('', *main.COMMANDS):\n"
        "    assert main.run([command, '--help'] if command else ['--help']) == 0\n"
        f"sys.exit({heavy!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def best_of(count: int, *arguments: str) -> float:
    """Least processor time of a whole command, s: unlike wall time it says the same on a busy machine."""
    times = []
    for _ in range(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([str(Path(sys.executable).with_name("msplit")), *arguments], cwd=ROOT, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_it_starts_quickly() -> None:
    # The targets are 0.4 s and 0.6 s on an idle machine; memory that others keep busy slows processors down by up to a half.
    assert best_of(4, "--help") < 0.6
    assert best_of(4, "analyze", "sample_graphs/mmoe_small.pb") < 0.9


@pytest.mark.parametrize("model", ["feature_columns", "towers_small.pb"])
def test_bytes_do_not_depend_on_the_hash_seed(model: str, tmp_path: Path) -> None:
    found: dict[str, list[object]] = {}
    for seed in ("0", "1", "4242"):
        for turn in "ab":
            folder = tmp_path / f"{seed}{turn}"
            folder.mkdir()
            forms = [item for form in ("stream-file", "placement", "json", "plan") for item in ("--emit", form, form)]
            arguments = ["assign", str(SAMPLES / model), "-o", "out", *forms, "--format", "json"]
            done = subprocess.run(
                [sys.executable, "-m", "msplit", *arguments],
                capture_output=True,
                cwd=folder,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            )
            assert done.returncode == 0, done.stderr
            found.setdefault("stdout", []).append(done.stdout)
            found.setdefault("files", []).append(contents(folder))
    for values in found.values():
        assert len(values) == 6
        assert all(value == values[0] for value in values)


@pytest.mark.parametrize("model", ["mmoe_small.pb", "training.meta", "keras_inception"])
def test_force_replaces_and_nothing_else_does(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    fine("assign", SAMPLES / model, "-o", out, "--streams", "1")
    before = only_contents(out)
    with unchanged(tmp_path):
        assert msplit("assign", SAMPLES / model, "-o", out).code == 2
    fine("assign", SAMPLES / model, "-o", out, "--force")
    assert only_contents(out) != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"] + ["out.msplit.json"] * out.is_file()


@pytest.mark.parametrize("option", ["--dry-run", "--diff", "--explain"])
def test_looking_writes_nothing(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    extra = (option, "tower_0/out/Sigmoid") if option == "--explain" else (option,)
    with unchanged(tmp_path, SAMPLES):
        fine("assign", SAMPLES / "mmoe_small.pb", *extra)


def test_a_dry_run_wins_over_outputs(tmp_path: Path) -> None:
    outputs = ("-o", tmp_path / "out", "--emit", "json", tmp_path / "ids.json")
    with unchanged(tmp_path):
        done = fine("assign", SAMPLES / "mmoe_small.pb", *outputs, "--dry-run")
    assert "Nothing was written: --dry-run." in done.out


def test_explaining_and_writing_go_together(tmp_path: Path) -> None:
    arguments = ("assign", SAMPLES / "mmoe_small.pb", "-o", tmp_path / "out", "--explain", "tower_0/out/Sigmoid")
    done = fine(*arguments, columns=200)
    assert f"Written: {tmp_path / 'out'}, " in done.out
    assert (tmp_path / "out").exists()


def test_explain_as_json() -> None:
    done = fine(
        "assign",
        SAMPLES / "towers_small.pb",
        "--rules",
        "default",
        "--explain",
        "tower_3/dense_0/MatMul",
        "--format",
        "json",
    ).json
    assert {key: done[key] for key in ("node", "op", "host", "stream", "rule", "known")} == {
        "node": "tower_3/dense_0/MatMul",
        "op": "MatMul",
        "host": False,
        "stream": 3,
        "rule": "embedding",
        "known": True,
    }
    assert done["why"]
    host = fine("assign", SAMPLES / "towers_small.pb", "--explain", "tower_0/embedding/lookup/axis", "--format", "json")
    assert (host.json["host"], host.json["stream"]) == (True, None)


def test_diff_as_json_holds_what_changes() -> None:
    done = fine("assign", SAMPLES / "annotated.pb", "--streams", "2", "--wrap", "--diff", "--format", "json").json
    assert len(done["diff"]) == done["changed"] > 0
    assert all(node["was"] != node["is"] < 2 for node in done["diff"])


@pytest.mark.parametrize("model", ["mmoe_small.pb", "towers_small.pb", "training.meta", "feature_columns"])
def test_a_stream_file_comes_back_as_the_same_ids(model: str, tmp_path: Path) -> None:
    files = {form: tmp_path / form for form in ("stream-file", "json", "yaml", "placement")}
    forms = [item for form, path in files.items() for item in ("--emit", form, path)]
    fine("assign", SAMPLES / model, "--streams", "4", *forms)
    ids = {node["name"]: node["stream"] for node in json.loads(files["json"].read_text())["nodes"]}
    assert len(set(ids.values())) > 1

    (tmp_path / "again.yaml").write_text("version: 1\nstreams: 4\nrules:\n  - regex: {file: stream-file}\n")
    fine("assign", SAMPLES / model, "--rules", tmp_path / "again.yaml", "--emit", "json", tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())["nodes"]
    assert {node["name"]: node["stream"] for node in again} == ids
    assert {node["rule"] for node in again} == {"regex"}

    text = files["stream-file"].read_text()
    assert streamfile.traps(text) == ()
    rules = nvidia_reader.read(text)
    assert {name: nvidia_reader.stream_of(name, rules, groups=4) for name in ids} == ids

    devices = json.loads(files["placement"].read_text())["devices"]
    assert {name: device for name, device in devices.items() if name in ids} == {
        name: f"/device:GPU:{stream}" for name, stream in ids.items()
    }
    assert {device for name, device in devices.items() if name not in ids} <= {"/device:CPU:0"}
    import yaml

    assert yaml.safe_load(files["yaml"].read_text()) == json.loads(files["json"].read_text())


def test_ids_beyond_the_streams_wrap_on_request(tmp_path: Path) -> None:
    done = fine("assign", SAMPLES / "annotated.pb", "--streams", "2", "--wrap", "--dry-run", "--format", "json").json
    assert done["streams"] == 2
    assert {remark["kind"] for remark in done["remarks"]} >= {"wrapped"}


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


def test_patterns_that_match_nothing_are_told(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        'version: 1\nrules:\n  - regex: {patterns: {1: ["expert_0/.*", "export_1/.*"]}}\n'
    )
    done = fine("assign", SAMPLES / "mmoe_small.pb", "--rules", tmp_path / "rules.yaml", "--dry-run", columns=200)
    assert re.search(r"warning: regex: .*'export_1/\.\*'.* matches no", done.out)


@pytest.mark.tf
def test_bench_of_a_graph_without_ids_and_of_one_with(tmp_path: Path) -> None:
    short = ("--duration", "0.1", "--builds", "1", "--warmup", "0", "--engine", "tensorflow", "--format", "json")
    done = process("bench", "sample_graphs/mmoe_small.pb", "--streams", "1,2", *short)
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert (found["schema_version"], found["command"], found["engine"]) == (1, "bench", "tensorflow")
    assert [variant["streams"] for variant in found["result"]["variants"]] == [1, 2]
    assert not found["result"]["failed"]
    assert any("rule set auto" in note for note in found["notes"])
    reference = tmp_path / "reference.npz"
    more = ("--save-reference", reference, "--streams", "2")
    done = fine("bench", SAMPLES / "annotated.pb", *more, *short)
    assert any("as it is annotated, on 3 streams" in note for note in done.json["notes"])
    assert any("folded onto 2" in note for note in done.json["notes"])
    assert reference.exists()
    checked = fine("bench", SAMPLES / "annotated.pb", "--reference", reference, "--streams", "3", *short)
    sources = [check["against"] for variant in checked.json["result"]["variants"] for check in variant["checks"]]
    assert any("TensorFlow on the CPU" in source for source in sources)


@pytest.mark.tf
def test_wrong_outputs_are_told_with_the_tolerance_that_would_pass_and_exit_code_1(tmp_path: Path) -> None:
    import numpy as np

    from msplit.measure.reference import Reference, load_reference, save_reference

    short = ("--duration", "0.1", "--builds", "1", "--warmup", "0", "--streams", "2", "--engine", "tensorflow")
    path = tmp_path / "reference.npz"
    fine("bench", SAMPLES / "mmoe_small.pb", "--save-reference", path, *short)
    right = load_reference(path)
    wrong: dict[str, Any] = {name: np.asarray(value) + 0.25 for name, value in right.outputs.items()}
    save_reference(path, Reference(right.feeds, wrong, right.source), force=True)
    done = msplit("bench", SAMPLES / "mmoe_small.pb", "--reference", path, *short, "--format", "json")
    assert done.code == 1
    assert done.json["result"]["failed"]
    assert "error: outputs differ" in done.err
    assert "would pass" in done.err
    text = msplit("bench", SAMPLES / "mmoe_small.pb", "--reference", path, *short)
    assert text.code == 1
    assert "NO: outputs of " in text.out


def test_a_saved_model_is_kept_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fine("assign", SAMPLES / "keras_lookup", "-o", out)
    before, after = contents(SAMPLES / "keras_lookup"), contents(out)
    assert set(before) - set(after) == {"fingerprint.pb"}
    assert {name for name in after if after[name] != before.get(name)} == {
        "saved_model.pb",
        "assets.extra",
        "assets.extra/msplit.json",
    }
    shutil.rmtree(out)


def test_analyze_looks_inside_a_function_on_request():
    model = SAMPLES / "gru_while"
    name = next(name for name in library.load(model).model.graph.functions if "while_body" in name)
    assert "MatMul" in fine("analyze", model, "--function", name, "--batch", "4").out
    wrong = msplit("analyze", model, "--function", name[:-1])
    assert wrong.code == 2
    assert name in wrong.err
    assert re.search(r"it has (__\w+, ){5}\w+ and \d+ more", msplit("analyze", model, "--function", "-").err)
    assert "it has no functions" in msplit("analyze", SAMPLES / "while_v1.pb", "--function", "-").err


def test_assign_writes_a_trace(tmp_path):
    target = tmp_path / "trace.json"
    fine("assign", SAMPLES / "towers_small.pb", "--rules", "recsys", "--trace", target)
    assert json.loads(target.read_text())["traceEvents"]
    again = msplit("assign", SAMPLES / "towers_small.pb", "--trace", target)
    assert again.code == 2
    assert "is there already" in again.err


@pytest.mark.tf
def test_bench_writes_a_trace_of_what_it_measured(tmp_path: Path) -> None:
    target = tmp_path / "step.json"
    short = ("--duration", "0.1", "--builds", "1", "--warmup", "0", "--engine", "tensorflow", "--streams", "2")
    done = fine("bench", SAMPLES / "mmoe_small.pb", *short, "--trace", target, columns=400)
    assert f"Written: {target}, one measured step of 2 variants" in done.out
    found = json.loads(target.read_bytes())
    assert complaints(found) == []
    assert {event["pid"] for event in found["traceEvents"]} == {1, 2}
    again = msplit("bench", SAMPLES / "mmoe_small.pb", *short, "--trace", target)
    assert (again.code, again.out) == (2, "")
    assert "is there already" in again.err


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
