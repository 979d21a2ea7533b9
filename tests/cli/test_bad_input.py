"""Whatever is wrong: one message that says what, where and how to mend it; exit code 2; no traceback; nothing written."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from msplit.formats import atomic
from msplit.opset import schema
from tests.cli.runner import SAMPLES, msplit, unchanged

MMOE = SAMPLES / "mmoe_small.pb"
SHORT = ("--measure", "duration=0.1", "--measure", "builds=1")


def graph_def(path: Path, *nodes: tuple[str, str, list[str]]) -> None:
    message = schema.graph_pb2.GraphDef()
    for name, op, inputs in nodes:
        message.node.add(name=name, op=op, input=inputs)
    path.write_bytes(message.SerializeToString())


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of bad files."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.pb").touch()
    (folder / "cut.pb").write_bytes(MMOE.read_bytes()[:3000])
    (folder / "cut.pbtxt").write_bytes((SAMPLES / "mmoe_small.pbtxt").read_bytes()[:2000])
    (folder / "photo.pb").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    with (folder / "huge.pb").open("wb") as file:
        file.truncate(2**31 + 52)
    graph_def(folder / "cycle.pb", ("a", "Relu", ["b"]), ("b", "Relu", ["a"]))
    graph_def(folder / "missing.pb", ("a", "Relu", ["gone"]))
    graph_def(folder / "twice.pb", ("a", "NoOp", []), ("a", "NoOp", []))
    graph_def(folder / "three.pb", ("a", "Relu", ["gone"]), ("b", "Relu", ["b"]), ("c", "NoOp", []), ("c", "NoOp", []))
    shutil.copytree(SAMPLES / "two_signatures", folder / "no_main", ignore=shutil.ignore_patterns("saved_model.pb"))
    (folder / "outside" / "inside").mkdir(parents=True)
    shutil.copy(SAMPLES / "two_signatures" / "saved_model.pb", folder / "outside" / "inside")
    head = "version: 1\nstreams: 2\n"
    for name, text in {
        "key": "version: 1\nstream: 2\nrules: [manual]\n",
        "option": head + "rules:\n  - branch: {min_cost: 5}\n",
        "rule": head + "rules: [branhc]\n",
        "regex": head + 'rules:\n  - regex: {patterns: {1: ["tower_a/("]}}\n',
        "range": head + 'rules:\n  - regex: {patterns: {5: "a"}}\n',
        "version": "version: 7\nrules: [manual]\n",
        "no_version": "rules: [manual]\n",
        "yaml": "version: 1\nrules: [manual\n",
        "file": head + "rules:\n  - regex: {file: streams.txt}\n",
        "no_file": head + "rules:\n  - regex: {file: gone.txt}\n",
    }.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "streams.txt").write_text("1:a\noops\n")
    np.save(folder / "text.npy", np.zeros((2, 64), "U3"))
    np.save(folder / "narrow.npy", np.zeros((2, 63), np.float32))
    (folder / "words.npy").write_text("not an array")
    with (folder / "claims.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    np.save(folder / "fine.npy", np.zeros((2, 64), np.float32))
    return folder


LOADING: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "empty file": ("{bad}/empty.pb", (), "empty.pb: the file is empty", "export or copy the model again"),
    "cut off": ("{bad}/cut.pb", (), "cut.pb: the file is cut off: it has 3,000 bytes", "copy or export it again"),
    "cut off text": ("{bad}/cut.pbtxt", (), "cut.pbtxt:52: the text is cut off", "copy or export it again"),
    "something else": ("{bad}/photo.pb", (), "photo.pb: is not a GraphDef", "give a .pb, .pbtxt or .meta file"),
    "over 2 GiB": ("{bad}/huge.pb", (), "huge.pb: has 2,147,483,700 bytes", "export a SavedModel"),
    "not there": ("{bad}/gone.pb", (), "gone.pb: there is no such file or folder", "check the path"),
    "cycle": ("{bad}/cycle.pb", (), "node 'a' (Relu): is on a cycle that no loop closes: a -> b -> a", "export the"),
    "missing input": ("{bad}/missing.pb", (), "node 'a' (Relu): input 'gone' names no node", "mend the nodes"),
    "duplicate name": ("{bad}/twice.pb", (), "node 'a' (NoOp): 2 nodes have this name", "mend the nodes named above"),
    "all defects": ("{bad}/three.pb", (), "the graph is not valid: 3 defects", "mend the nodes named above"),
    "no saved_model.pb": ("{bad}/no_main", (), "no_main: the folder has no saved_model.pb", "copy saved_model.pb as"),
    "folder above": ("{bad}/outside", (), "outside: the folder has no saved_model.pb", "give {bad}/outside/inside"),
    "several tags": ("{samples}/two_tags", (), "holds 2 graphs: serve; serve,gpu", "choose one with --part tag=TAGS"),
    "unknown tag": (
        "{samples}/two_tags",
        ("--part", "tag=tpu"),
        "no graph with the tags tpu",
        "one of: serve; serve,gpu",
    ),
    "tag of a file": ("{mmoe}", ("--part", "tag=serve"), "only a SavedModel has tags", "leave --part tag= out"),
    "signature": (
        "{samples}/two_signatures",
        ("--part", "signature=trian"),
        "there is no signature 'trian'",
        "one of: embed, serving_default",
    ),
    "signature of a file": ("{mmoe}", ("--part", "signature=a"), "no signature 'a'", "leave --part signature= out"),
    "unknown input": (
        "{mmoe}",
        ("--part", "inputs=gone"),
        "--part inputs= names 'gone'",
        "msplit analyze --show nodes",
    ),
    "unknown output": (
        "{mmoe}",
        ("--part", "outputs=gone:3"),
        "--part outputs= names 'gone:3'",
        "msplit analyze --show nodes",
    ),
    "shape of no input": ("{mmoe}", ("--shape", "y=1,2"), "there is no input called 'y'", "name one of the inputs: x"),
    "wrong rank": ("{mmoe}", ("--shape", "x=1,2,3"), "has the shape [?, 64] in the graph and is given", "give 2 sizes"),
    "wrong size": ("{mmoe}", ("--shape", "x=1,65"), "has the shape [?, 64]", "give 2 sizes that agree with it"),
    "shape of words": ("{mmoe}", ("--shape", "x=a,b"), "sizes are numbers", "as in input=1,224,224,3"),
    "shape of nothing": ("{mmoe}", ("--shape", "x"), "'x': write it as", "name=1,224,224,3"),
    "negative size": ("{mmoe}", ("--shape", "x=-1,64"), "'x=-1,64': write it as", "name=1,224,224,3"),
    "no batch": ("{mmoe}", ("--batch", "0"), "--batch", "x>=1"),
    "unknown GPU": ("{mmoe}", ("--costs", "gpu=h2000"), "'h2000' (did you mean h200?)", "choose one of: h200, h100"),
}


LOOKING = [(case, command) for case in LOADING for command in ("analyze", "assign")]
LOOKING.remove(("folder above", "analyze"))  # which analyzes the models in it: test_many.py


@pytest.mark.parametrize(("case", "command"), LOOKING)
def test_a_model_that_can_not_be_read_or_priced(case: str, command: str, bad: Path, tmp_path: Path) -> None:
    model, extra, what, fix = LOADING[case]
    places = {"bad": str(bad), "samples": str(SAMPLES), "mmoe": str(MMOE)}
    output = ("-o", tmp_path / "out") if command == "assign" else ()
    expect_refusal(bad, tmp_path, (command, model.format(**places), *extra, *output), what, fix.format(**places))


ARGUMENTS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "unknown view": (("analyze", "{mmoe}", "--show", "foo"), "'foo' is not one of", "'summary', 'branches'"),
    "unknown format": (("analyze", "{mmoe}", "--format", "xml"), "'xml' is not one of", "'json'"),
    "unknown command": (("anlyze", "{mmoe}"), "No such command 'anlyze'.", "Did you mean 'analyze'?"),
    "unlike any command": (("xyzzy",), "No such command 'xyzzy'.", "Try 'msplit --help'"),
    "unknown option": (("analyze", "{mmoe}", "--formt", "json"), "No such option", "--format"),
    "no model": (("analyze",), "Missing argument 'MODEL…'", "Try 'msplit analyze --help'"),
    "two models": (("build", "{mmoe}", "{mmoe}", "-o", "b"), "unexpected extra argument", "Try 'msplit build --help'"),
    "nothing to write": (("assign", "{mmoe}"), "nothing to write", "give -o OUT, or --dry-run"),
    "no stream": (("assign", "{mmoe}", "--streams", "0", "--dry-run"), "'--streams'", "1<=x<=1024"),
    "fewer than no streams": (
        ("bench", "{mmoe}", "--streams", "-3"),
        "'--streams'",
        "-3 is not in the range 1<=x<=1024",
    ),
    "too many to compare": (("bench", "{mmoe}", "--streams", "1,1025"), "'--streams'", "1<=x<=1024"),
    "too many to check": (("check", "{mmoe}", "--streams", "1025"), "'--streams'", "1<=x<=1024"),
    "too many streams": (("assign", "{mmoe}", "--streams", "1025", "--dry-run"), "'--streams'", "1<=x<=1024"),
    "unknown node": (("assign", "{mmoe}", "--explain", "gone"), "no node 'gone'", "`msplit analyze --show nodes`"),
    "near node": (
        ("assign", "{mmoe}", "--explain", "expert_0/dense_0/MatMu"),
        "no node 'expert_0/dense_0/MatMu'",
        "did you mean expert_0/dense_0/MatMul",
    ),
    "unknown form": (("assign", "{mmoe}", "--emit", "xml", "{out}"), "'xml' is not one of", "'stream-file'"),
    "ids out of range": (
        ("assign", "{samples}/annotated.pb", "--streams", "2", "-o", "{out}"),
        "has stream id 2, but ids are 0..1",
        "pass --streams 3 or more, or --wrap",
    ),
    "unknown key": (("assign", "{mmoe}", "--rules", "{bad}/key.yaml", "-o", "{out}"), "key.yaml:2: unknown key", "s'?"),
    "unknown option of a rule": (
        ("assign", "{mmoe}", "--rules", "{bad}/option.yaml", "-o", "{out}"),
        "option.yaml:4: unknown key 'min_cost' in branch; did you mean 'min_cost_us'?",
        "branch takes min_cost_us",
    ),
    "unknown rule": (
        ("assign", "{mmoe}", "--rules", "{bad}/rule.yaml", "-o", "{out}"),
        "rule.yaml:3: unknown rule 'branhc'; did you mean 'branch'?",
        "the rules are manual, regex",
    ),
    "bad regex": (
        ("assign", "{mmoe}", "--rules", "{bad}/regex.yaml", "-o", "{out}"),
        "regex.yaml:4: bad pattern 'tower_a/(': missing )",
        "fix: ",
    ),
    "id out of range": (
        ("assign", "{mmoe}", "--rules", "{bad}/range.yaml", "-o", "{out}"),
        "range.yaml:4: stream id 5 is out of range: with 2 streams, ids are 0..1",
        "pass --streams 6, or pass --wrap",
    ),
    "wrong version": (
        ("assign", "{mmoe}", "--rules", "{bad}/version.yaml", "-o", "{out}"),
        "version.yaml:1: version 7 of rules files is not known",
        "update msplit",
    ),
    "no version": (
        ("assign", "{mmoe}", "--rules", "{bad}/no_version.yaml", "-o", "{out}"),
        "the rules file has no `version`",
        "start it with `version: 1`",
    ),
    "no YAML": (
        ("assign", "{mmoe}", "--rules", "{bad}/yaml.yaml", "-o", "{out}"),
        "this is not valid YAML",
        "see the shipped rule set 'example'",
    ),
    "broken line": (
        ("assign", "{mmoe}", "--rules", "{bad}/file.yaml", "-o", "{out}"),
        "streams.txt:2: there is no ':' between the stream id and the patterns",
        "write lines like 1:tower_a/.*,tower_b/.*",
    ),
    "no stream file": (
        ("assign", "{mmoe}", "--rules", "{bad}/no_file.yaml", "-o", "{out}"),
        "gone.txt can not be read",
        "paths are relative to the rules file",
    ),
    "no rules file": (
        ("assign", "{mmoe}", "--rules", "{bad}/gone.yaml", "-o", "{out}"),
        "there is no rules file",
        "one of the shipped rule sets: auto, default",
    ),
    "near rule set": (
        ("assign", "{mmoe}", "--rules", "recsis", "-o", "{out}"),
        "there is no rules file 'recsis'; did you mean 'recsys'?",
        "shipped rule sets",
    ),
    "unknown rule set": (("rules", "nope"), "no rule set called 'nope' ships with msplit", "one of: auto, default"),
    "output is there": (
        ("assign", "{mmoe}", "-o", "{bad}/cycle.pb"),
        "cycle.pb: is there already",
        "choose another name, or replace it with --force",
    ),
    "form is there": (
        ("assign", "{mmoe}", "-o", "{out}", "--emit", "json", "{bad}/key.yaml"),
        "key.yaml: is there already",
        "choose another name, or replace it with --force",
    ),
    "output is the input": (
        ("assign", "{mmoe}", "-o", "{mmoe}", "--force"),
        "is the input; the input is never modified",
        "choose another name",
    ),
    "form is the input": (
        ("assign", "{mmoe}", "--emit", "json", "{mmoe}", "--force"),
        "is the input; the input is never modified",
        "choose another name",
    ),
    "output in the input": (
        ("assign", "{samples}/two_signatures", "-o", "{samples}/two_signatures/new"),
        "lies in the folder of the input; the input is never modified",
        "choose another name",
    ),
    "two outputs in one place": (
        ("assign", "{mmoe}", "-o", "{out}", "--emit", "json", "{out}"),
        "two outputs have this name",
        "choose another name for one of them",
    ),
    "no folder": (("assign", "{mmoe}", "-o", "{bad}/gone/out.pb"), "folder it goes into does not exist", "make the"),
    "no folder for a form": (
        ("assign", "{mmoe}", "-o", "{out}", "--emit", "yaml", "{bad}/gone/x"),
        "gone/x: the folder it goes into does not exist",
        "make the folder first",
    ),
    "folder for a file": (("assign", "{mmoe}", "-o", "{bad}", "--force"), "is a folder", "give the name of a file"),
    "file for a folder": (
        ("assign", "{samples}/two_signatures", "-o", "{bad}/key.yaml", "--force"),
        "is a file, and a SavedModel is a folder",
        "choose another name",
    ),
    "folder of something else": (
        ("assign", "{samples}/two_signatures", "-o", "{bad}", "--force"),
        "holds something that is not a SavedModel; it is not replaced",
        "choose another name",
    ),
    "unknown engine": (("bench", "{mmoe}", "--engine", "foo"), "'foo' is not one of", "'cuda', 'tensorflow'"),
    "streams of words": (("bench", "{mmoe}", "--streams", "1,x"), "'1,x' is not a list of numbers", "such as 1,2,4"),
    "streams of nothing": (("bench", "{mmoe}", "--streams", "0"), "'--streams'", "0 is not in the range 1<=x<=1024"),
    "input without a file": (("bench", "{mmoe}", "--input", "x="), "'x='", "write it as name=FILE"),
    "input that is not there": (
        ("bench", "{mmoe}", "--input", "x.npy"),
        "x.npy: the values can not be read",
        "check the path",
    ),
    "input of no file": (
        ("bench", "{mmoe}", "--input", "x={bad}/gone.npy", *SHORT),
        "gone.npy: the value of input 'x' can not be read: No such file",
        "check the path",
    ),
    "unknown input": (
        ("bench", "{mmoe}", "--input", "y={bad}/fine.npy", *SHORT),
        "the model has no input 'y'",
        "its inputs are: x",
    ),
    "input of another type": (
        ("bench", "{mmoe}", "--input", "x={bad}/text.npy", *SHORT),
        "text.npy: input 'x' is float32, the file <U3",
        "save it as array.astype('float32')",
    ),
    "input of another shape": (
        ("bench", "{mmoe}", "--input", "x={bad}/narrow.npy", *SHORT),
        "narrow.npy: input 'x' has shape [?, 64], the file [2, 63]",
        "save an array of that shape",
    ),
    "input that claims more than there is": (
        ("bench", "{mmoe}", "--input", "x={bad}/claims.npy", *SHORT),
        "claims.npy: the header claims 1,000,000,000,000 elements of 4 bytes, and there are 0 bytes",
        "the file is cut off or damaged",
    ),
    "input that is no array": (
        ("bench", "{mmoe}", "--input", "x={bad}/words.npy", *SHORT),
        "words.npy: the value of input 'x' is not an array in NumPy's .npy format",
        "write it with numpy.save",
    ),
    "reference that is none": (
        ("bench", "{mmoe}", "--reference", "{bad}/words.npy", *SHORT),
        "words.npy: this is not a reference file of msplit",
        "--measure save-reference=FILE.npz",
    ),
    "reference over the model": (
        ("bench", "{mmoe}", "--measure", "save-reference={mmoe}", "--force", *SHORT),
        "is the input; the input is never modified",
        "choose another name",
    ),
    "reference is there": (
        ("bench", "{mmoe}", "--measure", "save-reference={bad}/key.yaml", *SHORT),
        "key.yaml: is there already",
        "replace it with --force",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_that_do_not_fit(case: str, bad: Path, tmp_path: Path) -> None:
    arguments, what, fix = ARGUMENTS[case]
    places = {"bad": str(bad), "samples": str(SAMPLES), "mmoe": str(MMOE), "out": str(tmp_path / "out")}
    command = tuple(argument.format(**places) for argument in arguments)
    expect_refusal(bad, tmp_path, command, what, fix.format(**places))


def expect_refusal(bad: Path, work: Path, arguments: tuple[object, ...], what: str, fix: str) -> None:
    with unchanged(bad, work, SAMPLES):
        done = msplit(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "internal error" not in done.err
    assert done.err.lower().count("error:") == 1
    assert what in done.err
    assert fix in done.err


@contextmanager
def without_privileges() -> Iterator[None]:
    """Files are opened as somebody who owns nothing: permissions do not hold back the superuser."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None)
    libc.setfsuid(65534)
    try:
        yield
    finally:
        libc.setfsuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="msplit-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_file_that_may_not_be_read(open_folder: Path) -> None:
    model = open_folder / "model.pb"
    shutil.copy(MMOE, model)
    model.chmod(0o200)
    msplit("analyze", MMOE)  # what is imported later could not be read either
    with without_privileges():
        done = msplit("analyze", model)
    assert done.code == 2
    assert done.err == f"error: {model}: no permission to read it\n  fix: check its permissions\n"


def test_a_folder_that_may_not_be_read(open_folder: Path) -> None:
    model = open_folder / "model"
    shutil.copytree(SAMPLES / "two_signatures", model)
    model.chmod(0o000)
    msplit("analyze", MMOE)
    with without_privileges():
        done = msplit("analyze", model)
    assert done.code == 2
    assert "no permission to read it\n  fix: check its permissions" in done.err
    model.chmod(0o755)


@pytest.mark.parametrize("model", ["mmoe_small.pb", "two_signatures"])
def test_a_folder_that_may_not_be_written_to(model: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(SAMPLES / model, open_folder / "in") if model == "two_signatures" else shutil.copy(
        SAMPLES / model, open_folder / "in"
    )
    (open_folder / "closed").mkdir(mode=0o555)
    monkeypatch.setattr(os, "access", lambda *_: True)  # which does not know file-system ids; the writer must find out
    msplit("assign", open_folder / "in", "--dry-run")
    with without_privileges():
        done = msplit("assign", open_folder / "in", "-o", open_folder / "closed" / "out")
    assert done.code == 2
    assert "no permission to write there" in done.err
    assert "fix: check the permissions of the folder, or write elsewhere" in done.err
    assert list((open_folder / "closed").iterdir()) == []


def test_permissions_are_asked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path / "closed")
    (tmp_path / "closed").mkdir()
    arguments = ("assign", MMOE, "-o", tmp_path / "out", "--emit", "json", tmp_path / "closed" / "x")
    expect_refusal(tmp_path, tmp_path, arguments, "closed/x: no permission to write there", "write elsewhere")


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("mmoe_small.pb", ("-o", "{out}")),
        ("mmoe_small.pb", ("--emit", "stream-file", "{out}")),
        ("two_signatures", ("-o", "{out}")),
    ],
)
def test_a_full_disk_leaves_what_was_there(
    model: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ("assign", SAMPLES / model, *(argument.format(out=out) for argument in arguments), "--force")
    assert msplit(*command).code == 0
    monkeypatch.setattr(os, "fsync", full_disk)
    expect_refusal(tmp_path, tmp_path, command, "out: the disk is full", "what was there before is unharmed")


def test_a_disk_that_is_full_from_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "write_pieces", full_disk)
    arguments = ("assign", MMOE, "-o", tmp_path / "out")
    expect_refusal(tmp_path, tmp_path, arguments, "out: the disk is full", "free some space")


@pytest.mark.parametrize("problem", [MemoryError(), RecursionError("too deep"), ValueError("odd")])
def test_what_msplit_did_not_expect_is_told_as_its_own_bug(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Callable[..., None]:
        raise problem

    monkeypatch.setattr("msplit.cli.options.Choice.load", fail)
    done = msplit("analyze", MMOE)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    if isinstance(problem, MemoryError):
        assert "out of memory" in done.err
        return
    assert f"internal error in msplit: {type(problem).__name__}: {problem}" in done.err
    assert "this is a bug in msplit" in done.err
    assert "Traceback" in msplit("--debug", "analyze", MMOE).err


def test_debug_shows_the_traceback_of_a_users_error(bad: Path) -> None:
    done = msplit("--debug", "analyze", bad / "empty.pb")
    assert done.code == 2
    assert "Traceback" in done.err
    assert "the file is empty" in done.err
