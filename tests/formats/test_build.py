"""A build is written whole, and read only where it is what was written and nobody else could have changed it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import msplit
from msplit.errors import LoadError, WriteError
from msplit.formats import build, files
from msplit.formats.build import Bucket, Manifest

BUCKET = Bucket(4, {"x": (4, 2)}, "program", "reference", 2, 7, None, 12.5)
MANIFEST = Manifest(
    made_for={"torch": "2"},
    model="model.pb",
    digest="0" * 64,
    label="auto on 2 streams",
    why="it is the fastest",
    notes=("a note",),
    precision="ieee",
    capture=True,
    measured=False,
    outputs=("y",),
    computed={},
    rows=({"x": 1}, {"y": 1}),
    mixes="",
    rungs=(BUCKET,),
    preparation={"planning": 0.5},
    files={},
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    os.chmod(tmp_path, 0o755)
    path = tmp_path / "model.build"
    build.write(path, MANIFEST, {"program": b"a program", "reference": b"values"}, [memoryview(b"weights")])
    return path


def test_what_is_written_is_read(place: Path) -> None:
    found = build.read(place)
    build.verify(place, found)
    assert build.is_build(place)
    assert found.rungs == (BUCKET,)
    assert found.files["program"][0] == len(b"a program")
    assert sorted(found.files) == ["program", "reference", build.WEIGHTS]
    with pytest.raises(WriteError, match="is there already"):
        build.check_place(place, force=False)
    build.check_place(place, force=True)
    with pytest.raises(WriteError, match="is there, and is no build"):
        build.check_place(place.parent, force=True)


@pytest.mark.parametrize("size", [0, 1, 6, 7, 8, 14, 100])
def test_pieces_of_a_file_are_read_and_hashed_by_threads(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_PIECE", 7)
    os.chmod(tmp_path, 0o755)
    data = bytes(range(size))
    found = build.write(
        tmp_path / "b", MANIFEST, {"program": b"a program", "reference": b""}, [memoryview(data)], force=True
    )
    parts = [hashlib.sha256(data[at : at + 7]).digest() for at in range(0, size, 7)]
    whole = hashlib.sha256(b"".join(parts)).hexdigest() if len(parts) > 1 else hashlib.sha256(data).hexdigest()
    assert found.files[build.WEIGHTS] == (size, whole)
    weights = build.verify(tmp_path / "b", found)
    assert weights is not None
    assert weights.tobytes() == data
    assert build.verify(tmp_path / "b", replace(found, tables=1)) is None  # they are mapped
    for at in {0, size // 2, size - 1} if size else ():
        (tmp_path / "b" / build.WEIGHTS).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(LoadError, match=r"weights\.bin is not what was built"):
            build.verify(tmp_path / "b", found)
    for other in (data + b"0", data[:-1], data[7:]):
        if other != data:
            (tmp_path / "b" / build.WEIGHTS).write_bytes(other)
            with pytest.raises(LoadError, match=r"weights\.bin is not what was built"):
                build.verify(tmp_path / "b", found)


def test_a_manifest_of_more_bytes_than_there_is_memory_is_refused(place: Path) -> None:
    said = json.loads((place / build.MANIFEST).read_text())
    said["files"][build.WEIGHTS][0] = 1 << 49
    (place / build.MANIFEST).write_text(json.dumps(said))
    with pytest.raises(LoadError, match=r"weights\.bin is not what was built"):
        build.verify(place, build.read(place))


def test_a_build_from_before_methods_were_kept_is_read(place: Path) -> None:
    said = json.loads((place / build.MANIFEST).read_text())
    del said["method"]
    (place / build.MANIFEST).write_text(json.dumps(said))
    assert build.read(place).method == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "program").write_bytes(b"b program"), "program is not what was built"),
        (lambda path: (path / "program").unlink(), "program can not be read: No such file"),
        (lambda path: os.chmod(path / "reference", 0o666), "reference is not opened, for it is part of a program"),
        (lambda path: os.chmod(path, 0o777), "it is a program and anybody may write to"),
        (lambda path: os.chmod(path.parent, 0o777), "it is a program and anybody may write to"),
    ],
)
def test_what_somebody_else_could_have_changed_is_not_opened(
    change: Callable[[Path], None], message: str, place: Path
) -> None:
    found = build.read(place)
    change(place)
    with pytest.raises(LoadError, match=message):
        build.verify(place, found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 0}, "made by msplit of another version"),
        ({"rungs": []}, "does not name the files of a build"),
        ({"files": {"program": [1, "no hash"]}}, r"`files.program\[1\]` is not a SHA-256 in hexadecimal digits"),
        ({"capture": 1}, "`capture` is neither true nor false"),
        ({"precision": "best"}, "`precision` is 'best', not one of"),
        ({"outputs": "y"}, "`outputs` is not a list"),
        ({"rows": [{"x": 1}]}, "`rows` is not a list of 2"),
        ({"prepared": {}}, "has no key 'prepared'"),
    ],
)
def test_a_manifest_of_something_else_is_told(changes: dict[str, object], message: str, place: Path) -> None:
    path = place / build.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(LoadError, match=message):
        build.read(place)


def test_folders_of_other_users_are_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "getuid", lambda: os.stat(place).st_uid + 1)
    assert os.stat(place).st_uid == 0 or "belongs to another user" in str(files.writers(place))
    monkeypatch.undo()
    os.chmod(place, 0o775)
    monkeypatch.setattr(files, "_is_own_group", lambda _: False)
    assert files.writers(place) == f"a group may write to {place}"


@pytest.mark.parametrize("model", ["mmoe_small.pb", "keras_lookup"])
def test_a_model_that_is_opened_is_said_to_be_no_build(model: str, tmp_path: Path) -> None:
    for path in (Path("sample_graphs") / model, tmp_path):
        with pytest.raises(LoadError, match="is no build") as caught:
            msplit.open(path)
        assert caught.value.where == str(path)
        assert "`msplit.prepare` runs a model" in str(caught.value)
        assert "`msplit build MODEL -o DIR`" in str(caught.value)
    with pytest.raises(LoadError, match=r"none/manifest.json: the build can not be read: No such file"):
        msplit.open(tmp_path / "none")
    (tmp_path / build.WEIGHTS).touch()  # a build that was not copied whole
    with pytest.raises(LoadError, match=r"manifest\.json: the build can not be read"):
        msplit.open(tmp_path)
