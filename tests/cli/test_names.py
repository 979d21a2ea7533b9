"""Hostile names in every command and format do no harm to who reads the output. `python -m tests.fuzz --kind names` tries more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from msplit.cli import main, output
from msplit.opset import schema
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, msplit
from tests.fuzz import names
from tests.hostile import HIDDEN, NAMES


@pytest.mark.parametrize("seed", range(8))
def test_no_name_does_harm(seed: int, tmp_path: Path) -> None:
    assert names.run(names.make(seed), tmp_path / "case").problem == ""


@pytest.mark.parametrize(
    ("style", "out", "told"),
    [
        ("table", "a\n ::error::x", "commands"),
        ("table", "the ##[error]x", "commands"),
        ("table", "a\u202eb", "has '\\u202e'"),
        ("table", "\x1b[31m", "has '\\x1b'"),
        ("table", "ok\nFORGED: fine", "a line that a name made"),
        ("md", "![x](y)", "image"),
        ("md", "hello @user", "means something"),
        ("json", "{", "can not be read"),
        ("github", "::error title=a::b\n::add-mask::c", "no annotations"),
    ],
)
def test_harm_is_noticed(style: str, out: str, told: str) -> None:
    assert told in names.judged(("check", "--format", style), 0, out, "")


def model(path: Path) -> Path:
    """A model whose nodes have all hostile names that TensorFlow accepts in functions."""
    graph = names.Graph(names.Random(0))
    graph.build()
    path.write_bytes(graph.message.SerializeToString())
    return path


def test_a_table_that_wraps_begins_no_line_with_a_command() -> None:
    from rich.console import Console

    from msplit.report.document import Document, Table
    from msplit.report.render import to_terminal

    name = "a" * 17 + "::error::forged" + "b" * 40
    document = Document(
        name, facts=[(name, name)], tables=[Table(name, ("a", "b"), [(name, name)], name)], notes=[name]
    )
    guarded = 0
    for width in range(20, 70):
        out = io.StringIO()
        to_terminal(document, Console(file=out, width=width, highlight=False))
        assert not names.COMMAND.search(out.getvalue()), width
        guarded += "\\x3a:" in out.getvalue()
    assert guarded > 3  # so often a line would have begun there


def test_colours_are_ours_only(tmp_path: Path) -> None:
    found = msplit("analyze", model(tmp_path / "m"), "--show", "all", FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[1m" in found.out
    assert not HIDDEN.search(re.sub(r"\x1b\[[0-9;]*m", "", found.out))


def test_the_bar_shows_names_as_they_are() -> None:
    from msplit.cli import output

    with mock.patch.object(sys, "stderr", io.StringIO()) as err, mock.patch.dict(os.environ, {"FORCE_COLOR": "1"}):
        bar = output.Bar(patience=100)
        bar.begin("reading [red]\x1b]0;x\x07")
        bar._draw()
        bar.close()
    assert "[red]\\x1b]0;x\\x07" in err.getvalue()
    assert "\x1b]0" not in err.getvalue()


def test_nothing_else_writes_to_the_terminal() -> None:
    # `output` and `render` escape; what passes them by does not.
    allowed = {"cli/output.py", "report/render.py"}
    ways = re.compile(r"\bprint\(|click\.s?echo|\bprint_exc\(|warnings\.warn|std(out|err)\.write|\.show\(sys\.")
    found = {}
    for path in sorted((ROOT / "msplit").rglob("*.py")):
        name, text = str(path.relative_to(ROOT / "msplit")), path.read_text("utf-8")
        if name not in allowed and (way := ways.search(text)):
            found[name] = way[0]
    # Examples in docstrings, a process of its own whose output is read, and warnings that escape what they say.
    warned = dict.fromkeys(
        ("run/function.py", "run/keras_fit.py", "run/runner.py"),
        "warnings.warn",
    )
    examples = dict.fromkeys(("__init__.py", "training/trainer.py"), "print(")
    assert found == {**examples, "cli/doctor.py": "print(", **warned}


def run_with(arguments: list[object], encoding: str, **more: object) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "COLUMNS": "80"}
    command = [sys.executable, "-m", "msplit", *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, check=False, **more)  # type: ignore[call-overload]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize("style", ["table", "md", "json", "junit", "sarif", "github"])
def test_output_that_is_not_utf8_loses_nothing(encoding: str, style: str) -> None:
    import json
    from xml.etree import ElementTree

    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    command = "check" if style in ("junit", "sarif", "github") else "analyze"
    with contextlib.redirect_stdout(out):
        code = main.run([command, str(SAMPLES / "towers_small.pb"), "--format", style])
    out.flush()
    text = out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert code in (0, 1)
    if style == "table":
        assert "31.4 us" in text if encoding == "ascii" else "31.4 µs" in text
    if style in ("json", "sarif"):
        json.loads(text)
    if style == "junit":
        ElementTree.fromstring(text)


def test_a_real_stream_of_another_encoding() -> None:
    done = run_with(["analyze", "sample_graphs/towers_small.pb"], "ascii", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"31.4 us of kernels" in done.stdout


def test_help_knows_every_encoding() -> None:
    done = run_with(["analyze", "--help"], "latin-1", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"A,B,..." in done.stdout


@pytest.mark.parametrize("style", ["table", "md", "json", "junit", "sarif", "github"])
def test_a_file_name_that_is_not_utf8(style: str, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"m\xff.pb")
    with open(path, "wb") as file:
        file.write((SAMPLES / "annotated.pb").read_bytes())
    here = os.getcwd()
    for place in (os.fsdecode(path), "m\udcff.pb"):
        os.chdir(tmp_path)
        try:
            done = msplit("check", place, "--rules", "default", "--streams", "2", "--format", style)
        finally:
            os.chdir(here)
        assert done.code == 1, done.err
        assert {"json": "m\\udcff.pb", "sarif": "m%FF.pb"}.get(style, "m\\xff.pb") in done.out


def test_half_of_a_surrogate_pair_in_a_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(
        '{"schema_version": 1, "kind": "plan", "graph_hash": "\\ud800", "streams": 2, "order": [["\\ud800", 0]], "waits": []}'
    )
    for style in ("table", "md", "json", "junit", "sarif", "github"):
        done = msplit("check", SAMPLES / "annotated.pb", "--plan", plan, "--format", style)
        assert done.code in (1, 2)
        assert "internal error" not in done.err
        (done.out + done.err).encode()


def test_a_closed_pipe_says_what_was_written(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    out = tmp_path / "out.pb"
    done = run_with(["assign", SAMPLES / "towers_small.pb", "-o", out], "utf-8", stdout=write)
    os.close(write)
    assert out.exists()
    assert done.returncode == 0
    assert done.stderr.decode() == f"Written before that: {out}\nWritten before that: {out}.msplit.json\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_says_what_was_written(tmp_path: Path) -> None:
    out, plan = tmp_path / "a\nb.pb", tmp_path / "plan.json"
    with open("/dev/full", "wb") as full:
        command = ["assign", SAMPLES / "towers_small.pb", "-o", out, "--emit", "plan", plan]
        done = run_with(command, "utf-8", stdout=full)
    assert done.returncode == 2
    lines = done.stderr.decode().splitlines()
    assert lines[0] == f"error: standard output: can not be written: {os.strerror(errno.ENOSPC)}"
    written = [f"{tmp_path}/a\\nb.pb", f"{tmp_path}/a\\nb.pb.msplit.json", str(plan)]
    assert lines[-3:] == [f"Written before that: {name}" for name in written]


def test_a_second_output_that_fails_says_that_the_first_is_there(tmp_path: Path) -> None:
    out = tmp_path / "out.pb"
    with mock.patch("msplit.api.emit", side_effect=OSError(errno.EIO, "broken")):
        done = msplit("assign", SAMPLES / "towers_small.pb", "-o", out, "--emit", "plan", tmp_path / "plan")
    assert done.code == 2
    assert f"Written before that: {out}" in done.err


def test_stderr_that_is_full_changes_no_exit_code() -> None:
    command = [sys.executable, "-m", "msplit", "analyze", "no such model"]
    with open("/dev/full", "wb") as full:
        done = forked.run(command, stdout=subprocess.PIPE, stderr=full, cwd=ROOT, check=False)
    assert done.returncode == 2


def test_what_is_emitted_is_read_again_as_it_was(tmp_path: Path) -> None:
    import json

    import yaml

    graph = schema.graph_pb2.GraphDef()
    body = graph.library.function.add()
    body.signature.name = "f"
    body.signature.input_arg.add(name="a", type=1)
    body.signature.output_arg.add(name="r", type=1)
    before = "a"
    for name in NAMES:
        name = re.sub(r"[\^:\s]", "", name).replace("\ud800", "\ufffe") or "x"
        if all(node.name != name for node in body.node_def):
            node = body.node_def.add(name=name, op="Tanh", input=[before])
            node.attr["T"].type = 1
            before = f"{name}:y:0"
    body.ret["r"] = before
    entry = graph.node.add(name="x", op="Placeholder")
    entry.attr["dtype"].type = 1
    call = graph.node.add(name="call", op="PartitionedCall", input=["x"])
    call.attr["f"].func.name = "f"
    call.attr["Tin"].list.type.append(1)
    call.attr["Tout"].list.type.append(1)
    path = tmp_path / "m.pb"
    path.write_bytes(graph.SerializeToString())
    emits = [
        part
        for kind in ("yaml", "json", "plan", "placement", "stream-file")
        for part in ("--emit", kind, str(tmp_path / kind))
    ]
    done = msplit("assign", path, "--streams", "2", "-o", tmp_path / "o", *emits)
    assert done.code == 0, done.err
    wanted = {f"call/{node.name}" for node in body.node_def}
    for kind in ("yaml", "json"):
        read = yaml.safe_load if kind == "yaml" else json.loads
        assert wanted <= {node["name"] for node in read((tmp_path / kind).read_text("utf-8"))["nodes"]}
    assert wanted <= json.loads((tmp_path / "placement").read_text("utf-8"))["devices"].keys()
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        json.dumps({"version": 1, "streams": 2, "rules": [{"regex": {"file": str(tmp_path / "stream-file")}}]})
    )
    again = msplit("assign", path, "--rules", rules, "-o", tmp_path / "again")
    assert again.code == 0, again.err
    assert (tmp_path / "again").read_bytes() == (tmp_path / "o").read_bytes()
    assert msplit("check", tmp_path / "o", "--plan", tmp_path / "plan").code == 0


def test_kept_kernels_are_one_line_among_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, gone = tmp_path / "reference.npz", tmp_path / "temporary"
    kernels = [tmp_path / "kernels" / f"{number:064x}" for number in range(1234)]
    kernels[0].parent.mkdir()
    for path in (asked, *kernels):
        path.touch()
    with mock.patch.object(output, "_written", [kernels[0], asked, gone, *kernels]):
        output.tell_written()
    said = capsys.readouterr().err
    assert said == f"Written before that: 1,234 files in {tmp_path}/kernels\nWritten before that: {asked}\n"
