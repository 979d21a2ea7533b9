"""Keras' own files: exported by the Keras that is installed, in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import msplit as library
from msplit import formats
from msplit.errors import INSTALL_TENSORFLOW, LoadError
from msplit.formats import reader
from tests import forked
from tests.cli.runner import ROOT, SAMPLES, fine, msplit, process, unchanged

STAND_IN = f"""
import os, shutil, sys, types

class Model:
    def export(self, folder):
        with open(os.environ["ASKED"], "a") as asked:
            asked.write(os.environ["KERAS_BACKEND"] + os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
        shutil.copytree({str(SAMPLES / "two_signatures")!r}, folder)

def load_model(path, compile=True):
    assert path.endswith(".keras") and open(path, "rb").read(2) == b"PK" and not compile
    what = os.environ.get("KERAS_DOES", "")
    if what == "raises":
        raise ValueError("an \\x1b[31mown layer\\nis not known")
    if what == "ends":
        os._exit(7)
    return Model()

models = types.SimpleNamespace(load_model=load_model)
"""


@pytest.fixture
def keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Keras, and the file in which it says what it was asked for."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "keras.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    real = importlib.util.find_spec
    found = {"keras": object(), "tensorflow": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: found.get(name) or real(name, *rest))
    return tmp_path / "asked"


def file(folder: Path, name: str = "m.keras") -> Path:
    """A file that begins as Keras' own do."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("config.json", "{}")
    return folder / name


def test_it_is_exported_once_and_read_as_a_saved_model(keras: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "in")
    with unchanged(tmp_path / "in"):
        model = formats.read(path)
        assert model.format is formats.Format.SAVED_MODEL
        assert formats.read(path).path == model.path
        assert model.signatures == formats.read(SAMPLES / "two_signatures").signatures
        assert len(library.load(path)) == len(library.load(SAMPLES / "two_signatures"))
        assert "signature serving_default" in fine("show", path).out
        for command in ("show", "analyze"):  # and not the folder that it was exported to
            assert fine(command, path).out.split()[0] == str(path)
    assert keras.read_text() == "tensorflow-1\n"
    assert model.source == path
    os.utime(path, (1, 1))  # another file
    assert formats.read(path).path != model.path
    assert keras.read_text() == "tensorflow-1\n" * 2


def test_json_and_errors_name_the_file_that_was_given(keras: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "in")
    as_json = ("--format", "json")
    assert fine("show", path, *as_json).json["model"] == str(path)
    assert fine("analyze", path, *as_json).json["model"]["path"] == str(path)
    assert fine("assign", path, "--dry-run", *as_json).json["model"] == str(path)
    assert fine("assign", path, "--compare", "--no-measure", *as_json).json["model"] == str(path)
    found = fine("diff", path, path, *as_json).json
    assert [found[side]["path"] for side in ("old", "new")] == [str(path)] * 2
    assert found["same"]
    for command in (("analyze", path, "--shape", "none=1"), ("cut", path, "--outputs", "none", "-o", tmp_path / "cut")):
        assert f"error: {path}: " in msplit(*command).err
    # Nothing that is written has the folder in it.
    assert msplit("report", path, "-o", tmp_path / "report.html", "--model-explorer", tmp_path / "explorer").code == 0
    assert json.loads((tmp_path / "explorer" / "graph.json").read_text())["label"] == str(path)
    written = [one.read_text() for one in (tmp_path / "report.html", *(tmp_path / "explorer").iterdir())]
    assert not [text for text in written if "msplit-keras-" in text]


@pytest.mark.parametrize("name", ["-rf.keras", "a b'$x\n\x1b.keras", ".keras.keras", "ü" * 100 + ".keras"])
def test_names_of_files_are_names_and_nothing_else(name: str, keras: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "in", name)
    found = fine("check", path, "--format", "json").json
    assert found["model"] == str(path)
    assert found["findings"][0]["file"] == str(path)
    text = fine("analyze", path)
    assert "\x1b" not in text.out


def test_the_file_is_not_written_over(keras: Path, tmp_path: Path) -> None:
    path = file(tmp_path / "in")
    with unchanged(tmp_path / "in"):
        for command in (("assign", path, "--streams", "2"), ("strip", path)):
            done = msplit(*command, "-o", path, "--force")
            assert (done.code, "the input is never modified" in done.err) == (2, True), done.err
    fine("assign", path, "--streams", "2", "-o", tmp_path / "out", "--quiet")
    assert formats.sniff(tmp_path / "out") is formats.Format.SAVED_MODEL
    commands = fine("analyze", path, "--format", "json").json["commands"]
    assert any(one.endswith("-o m.streams") for one in commands), commands


@pytest.mark.parametrize(
    ("does", "why"), [("raises", r"ValueError: an \x1b[31mown layer"), ("ends", "it ended with 7")]
)
def test_what_keras_can_not_export(
    does: str, why: str, keras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_DOES", does)
    path = file(tmp_path / "in")
    done = msplit("analyze", path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {path}: Keras can not export it: {why}\n  fix: load it as you do")
    assert 'keras.models.load_model(FILE).export("DIR")' in done.err


def test_where_keras_is_not_installed_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "keras" else object())
    with pytest.raises(LoadError, match="not installed: keras") as caught:
        formats.read(file(tmp_path / "in"))
    assert INSTALL_TENSORFLOW in str(caught.value)
    assert 'export("DIR")' in str(caught.value)


def test_what_is_no_such_file_is_read_by_its_content_and_never_by_keras(keras: Path, tmp_path: Path) -> None:
    graph, zipped = tmp_path / "graph.keras", file(tmp_path / "in", "m.pb")
    graph.write_bytes((SAMPLES / "mmoe_small.pb").read_bytes())
    assert formats.read(graph).format is formats.Format.GRAPH_DEF
    with pytest.raises(LoadError, match="is a zip archive"):
        formats.read(zipped)
    with pytest.raises(LoadError, match="no such file"):
        formats.read(tmp_path / "none.keras")
    file(tmp_path / "in")
    assert [path.name for path in many_models(tmp_path / "in")] == ["m.pb"]  # a file that runs is named, not found
    assert not keras.exists()


def many_models(folder: Path) -> tuple[Path, ...]:
    from msplit.cli.many import models_in

    return models_in([folder])


def test_nothing_is_left_behind(keras: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = process("show", file(tmp_path / "in"), TMPDIR=str(tmp_path / "tmp"))
    if importlib.util.find_spec("tensorflow") and done.code == 0:
        assert keras.read_text() == "tensorflow-1\n"
    assert not list((tmp_path / "tmp").glob("msplit-keras-*"))


@pytest.mark.tf
def test_a_file_of_keras_runs_as_keras_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = f"""
import keras, numpy as np
one = keras.Input((6,), name="x")
sides = [keras.layers.Dense(4, activation="relu")(one) for _ in range(3)]
model = keras.Model(one, keras.layers.Dense(2, name="out")(keras.layers.concatenate(sides)))
model.save({str(tmp_path / "m.keras")!r})
np.save({str(tmp_path / "y.npy")!r}, model(np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)))
keras.Model(one, keras.layers.Lambda(lambda x: x * 2)(one)).save({str(tmp_path / "lambda.keras")!r})
"""
    done = forked.run([sys.executable, "-c", make], server=forked.TENSORFLOW, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    with library.prepare(tmp_path / "m.keras", batch=3, engine="tensorflow") as runner:
        (found,) = runner(x=np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)).values()
    np.testing.assert_allclose(found, np.load(tmp_path / "y.npy"), rtol=1e-5, atol=1e-6)
    run = functools.partial(forked.run, server=forked.TENSORFLOW)  # another new process shows no more
    monkeypatch.setattr(reader, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    with pytest.raises(LoadError, match="deserialization of a `Lambda` layer"):  # which is code
        formats.read(tmp_path / "lambda.keras")
