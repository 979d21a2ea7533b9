"""What runs where TensorFlow and PyTorch are not installed: in an environment of what docs/ci-example/requirements.txt names."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from msplit.formats.reader import main_file, sniff
from msplit.opset import schema
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, msplit

REQUIREMENTS = ROOT / "docs" / "ci-example" / "requirements.txt"
MODELS = sorted(path for path in SAMPLES.iterdir() if path.suffix != ".md")


def pinned(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to what the requirements name, to be used in place of the environment's own."""
    folder = tmp_path_factory.mktemp("light")
    for name in pinned(REQUIREMENTS):
        found = metadata.distribution(name)
        for top in {Path(str(file)).parts[0] for file in found.files or () if not str(file).startswith("..")}:
            if top != "__pycache__" and not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
    return folder


def python(light: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without the environment's packages.
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{light}{os.pathsep}{ROOT}", "COLUMNS": "80"},
    )


RUN = """
import contextlib, importlib.util, io, json, sys
from msplit.cli import main

assert all(importlib.util.find_spec(name) is None for name in ("tensorflow", "keras", "torch"))
found = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main.run(arguments)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


FULL = RUN.replace("assert all(", "assert any(").replace("is None for", "is not None for")


def commands(folder: Path) -> Iterator[list[str]]:
    for name in ("mmoe_small.pb", "keras_lookup", "training.meta"):
        model, out = str(SAMPLES / name), str(folder / name)
        searched = name == "mmoe_small.pb"  # others would take seconds, in both processes
        yield ["analyze", model, "--format", "json"]
        yield ["analyze", model, "--engine", "cuda"]
        yield ["assign", model, "--rules", "auto" if searched else "recsys", "--streams", "4", "-o", out]
        yield ["check", out, "--rules", "default", "--streams", "4", "--format", "json"]
        yield ["diff", model, out]
        yield ["report", out, "-o", f"{out}.html", *([] if searched else ["--no-candidates"])]
    yield ["rules"]
    yield ["rules", "recsys"]
    yield ["sample"]
    yield ["--help"]


NOT_TRIED = (
    "The cuda engine has every op of this model. Whether it can run its loops and branches, and capture its steps, "
    "was not tried, for PyTorch is not installed."
)


@pytest.mark.whole_search
def test_commands_give_the_same_as_with_tensorflow(light: Path, tmp_path: Path) -> None:
    with_it, without = tmp_path / "have", tmp_path / "lack"  # of one length: lines break alike
    with_it.mkdir()
    without.mkdir()
    done = python(light, "-c", RUN, json.dumps(list(commands(without))))
    assert done.returncode == 0, done.stderr
    for arguments, (code, out, err) in zip(commands(with_it), json.loads(done.stdout), strict=True):
        expected = msplit(*arguments)
        assert code == expected.code, (arguments, err)
        out, told = out.replace("/lack/", "/have/"), expected.out
        if "cuda" in arguments:  # to know how the engine runs a model takes PyTorch, which is not there either
            assert NOT_TRIED in " ".join(out.split())
            out, told = (text.partition("Ops that the cuda engine can run")[0] for text in (out, told))
        assert out == told, arguments
    written = sorted(path.relative_to(with_it) for path in with_it.rglob("*") if path.is_file())
    assert written == sorted(path.relative_to(without) for path in without.rglob("*") if path.is_file())
    for path in written:
        assert contents(without / path).replace(b"/lack/", b"/have/") == contents(with_it / path), path


def contents(path: Path) -> bytes:
    """What is in a file; the data of a report, which hold the model's path, unpacked."""
    found = path.read_bytes()
    packed = re.search(rb'id="data">([^<]*)<', found) if path.suffix == ".html" else None
    return found if packed is None else found.replace(packed[1], gzip.decompress(base64.b64decode(packed[1])))


def test_no_command_that_only_decides_loads_a_framework(tmp_path: Path) -> None:
    """Though both are installed: `check` and `report` took PyTorch's gigabytes for a list of names of ops.

    `analyze --engine cuda` asks for more: the engine's own build says what it refuses, where PyTorch is there.
    """
    asked = [arguments for arguments in commands(tmp_path) if "--engine" not in arguments]
    code = f"{FULL}\nprint(sorted({{'tensorflow', 'keras', 'torch', 'triton'}} & set(sys.modules)))"
    command = [sys.executable, "-c", code, json.dumps(asked)]
    done = forked.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize("command", ["analyze", "assign", "check", "report"])
def test_they_run_in_a_limited_address_space(command: str, tmp_path: Path) -> None:
    arguments = [command, str(SAMPLES / "mmoe_small.pb")]
    arguments += [] if command in ("analyze", "check") else ["-o", str(tmp_path / "out")]
    limited = "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20)); "
    done = subprocess.run(
        [sys.executable, "-c", f"{limited}runpy.run_module('msplit', run_name='__main__')", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_library_that_finds_no_room_is_no_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "libtorch_cpu.so: failed to map segment from shared object"
    for problem in (ImportError(said), OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError()):
        monkeypatch.setattr("msplit.api.analyze", mock.Mock(side_effect=problem))
        done = msplit("analyze", SAMPLES / "mmoe_small.pb")
        assert (done.code, done.out) == (2, "")
        assert re.fullmatch(r"error: out of memory\n  fix: .*ulimit -v.*\n", done.err)
    monkeypatch.setattr("msplit.api.analyze", mock.Mock(side_effect=ImportError("no module named x")))
    assert "internal error" in msplit("analyze", SAMPLES / "mmoe_small.pb").err


def test_what_can_not_run_says_what_to_install(light: Path, tmp_path: Path) -> None:
    model = str(SAMPLES / "mmoe_small.pb")
    asked = [
        ["bench", model],
        ["bench", model, "--engine", "tensorflow"],
        ["sample", "towers", "-o", str(tmp_path / "towers.pb")],
        ["profile", model, "-o", str(tmp_path / "profile.json")],
        ["doctor", "--for", "check"],
        ["doctor", "--for", "bench"],
    ]
    done = python(light, "-c", RUN, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    *refused, light_one, heavy_one = json.loads(done.stdout)
    for (code, out, err), arguments in zip(refused, asked, strict=False):
        assert (code, out) == (2, ""), (arguments, err)
        assert re.search(r"is not installed(.|\n)*pip install '", err), (arguments, err)
        assert "internal error" not in err
    assert (light_one[0], heavy_one[0]) == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_only_tensorflow_reads_says_so(light: Path, tmp_path: Path) -> None:
    (tmp_path / "variables.index").write_bytes(b"an old checkpoint")
    code = "import sys; from pathlib import Path; from msplit.formats.bundle import Checkpoint; Checkpoint(Path(sys.argv[1]))"
    done = python(light, "-c", code, str(tmp_path / "variables"))
    assert "only TensorFlow reads, and TensorFlow is not installed" in done.stderr


def test_the_requirements_are_all_that_is_needed_in_the_versions_that_are_tested() -> None:
    listed = pinned(REQUIREMENTS)
    tested = pinned(ROOT / "constraints.txt")
    assert listed == {name: tested[name] for name in listed}
    needed, todo = set(), ["msplit"]
    while todo:
        for text in metadata.requires(todo.pop()) or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and name != "tensorflow" and name not in needed:
                needed.add(name)
                todo.append(name)
    assert set(listed) == needed


# ---- messages -------------------------------------------------------------------------------------------------------------


def test_the_shipped_descriptors_are_those_of_tensorflow() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_protos", ROOT / "scripts" / "make_protos.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    notice = (script.DATA / "tensorflow_protos.NOTICE").read_text("utf-8")
    version = metadata.version("tensorflow")
    if f"TensorFlow {version}\n" not in notice:
        pytest.skip(f"TensorFlow {version} is another than the descriptors are of")
    assert (script.DATA / "tensorflow_protos.binpb").read_bytes() == script.collect(), "python scripts/make_protos.py"


@pytest.mark.parametrize("name", schema.MODULES)
def test_modules_have_the_same_in_them(name: str) -> None:
    theirs, ours = getattr(schema, name), schema._of_msplit(schema.MODULES[name])
    public = {key for key in vars(theirs) if key[0].isupper() and not key.startswith("DESCRIPTOR")}
    assert public <= set(vars(ours))
    for key in public:
        if hasattr(getattr(theirs, key), "DESCRIPTOR") and hasattr(getattr(theirs, key), "FromString"):
            assert getattr(ours, key).DESCRIPTOR.full_name == getattr(theirs, key).DESCRIPTOR.full_name
            assert getattr(ours, key) is not getattr(theirs, key)
        elif isinstance(getattr(theirs, key), int):
            assert getattr(ours, key) == getattr(theirs, key)


@pytest.mark.parametrize(
    "path", [path for path in MODELS if not sniff(path).endswith("-text")], ids=lambda path: path.name
)
def test_a_message_comes_back_byte_for_byte(path: Path) -> None:
    name, message = {
        "graphdef": ("graph_pb2", "GraphDef"),
        "metagraph": ("meta_graph_pb2", "MetaGraphDef"),
        "savedmodel": ("saved_model_pb2", "SavedModel"),
    }[sniff(path)]
    theirs = getattr(getattr(schema, name), message)()
    theirs.ParseFromString(main_file(path).read_bytes())
    ours = getattr(schema._of_msplit(schema.MODULES[name]), message)()
    ours.ParseFromString(main_file(path).read_bytes())
    assert ours.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)
    from google.protobuf import text_format

    assert text_format.MessageToString(ours) == text_format.MessageToString(theirs)


def test_both_kinds_live_in_one_process(light: Path) -> None:
    code = (
        "from msplit.opset import schema; ours = schema._of_msplit(schema.MODULES['graph_pb2']).GraphDef();"
        "ours.node.add(name='a', op='NoOp'); theirs = schema.graph_pb2.GraphDef();"
        "theirs.ParseFromString(ours.SerializeToString()); assert type(theirs) is not type(ours); print(theirs.node[0].op)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "NoOp\n", done.stderr


def test_a_half_installed_tensorflow_does_no_harm(light: Path, tmp_path: Path) -> None:
    """Another layout, or modules that another protobuf has made: the shipped descriptors step in."""
    broken = tmp_path / "tensorflow" / "core" / "protobuf"
    broken.mkdir(parents=True)
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise RuntimeError('not for this protobuf')")
    (broken / "saved_model_pb2.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from msplit.cli import main; sys.exit(main.run(sys.argv[2:]))"
    done = python(light, "-c", code, str(tmp_path), "analyze", str(MODELS[0]))
    assert done.returncode == 0, done.stderr
