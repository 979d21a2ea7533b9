import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from msplit import formats
from msplit.errors import LoadError
from msplit.formats import tensors, wire
from msplit.formats.model import Format
from msplit.formats.reader import main_file
from msplit.opset import schema

SAMPLES = Path(__file__).parents[2] / "sample_graphs"


def graph_def(*names: str) -> bytes:
    graph = schema.graph_pb2.GraphDef()
    for name in names or ("a",):
        graph.node.add(name=name, op="NoOp")
    return graph.SerializeToString()


def meta_graph(**info: str) -> bytes:
    meta = schema.meta_graph_pb2.MetaGraphDef()
    meta.graph_def.MergeFromString(graph_def())
    for key, value in info.items():
        setattr(meta.meta_info_def, key, value)
    return meta.SerializeToString()


def saved_model() -> bytes:
    saved = schema.saved_model_pb2.SavedModel(saved_model_schema_version=1)
    saved.meta_graphs.add().MergeFromString(meta_graph())
    return saved.SerializeToString()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (graph_def("a"), Format.GRAPH_DEF),
        (graph_def("a", "b"), Format.GRAPH_DEF),
        (schema.graph_pb2.GraphDef(version=21).SerializeToString() + graph_def(), Format.GRAPH_DEF),
        (meta_graph(), Format.META_GRAPH),
        (meta_graph(tensorflow_version="2.21.0"), Format.META_GRAPH),
        (meta_graph(meta_graph_version="v1"), Format.META_GRAPH),
        (b'node { name: "a" op: "NoOp" }', Format.GRAPH_DEF_TEXT),
        (b'\n# made by hand\n  node{name:"a" op:"NoOp"}', Format.GRAPH_DEF_TEXT),
        (b'\xef\xbb\xbfnode { name: "a" op: "NoOp" }', Format.GRAPH_DEF_TEXT),
        (b"versions { producer: 21 }", Format.GRAPH_DEF_TEXT),
        (b'graph_def { node { name: "a" op: "NoOp" } }', Format.META_GRAPH_TEXT),
        (b'meta_info_def { tags: "serve" }', Format.META_GRAPH_TEXT),
    ],
)
def test_content_decides_and_the_ending_does_not(tmp_path: Path, data: bytes, kind: Format) -> None:
    for ending in ("pb", "pbtxt", "meta", "h5"):
        path = tmp_path / f"model.{ending}"
        path.write_bytes(data)
        assert formats.sniff(path) is kind


def test_graph_with_only_a_library_is_a_graph_def(tmp_path: Path) -> None:
    graph = schema.graph_pb2.GraphDef()
    function = graph.library.function.add()
    function.signature.name = "f"
    function.node_def.add(name="a", op="NoOp")
    (tmp_path / "m").write_bytes(graph.SerializeToString())
    assert formats.sniff(tmp_path / "m") is Format.GRAPH_DEF


@pytest.mark.parametrize("name", ["saved_model.pb", "saved_model.pbtxt"])
def test_saved_model_is_a_folder_or_its_main_file(tmp_path: Path, name: str) -> None:
    text = b'saved_model_schema_version: 1 meta_graphs { graph_def { node { name: "a" op: "NoOp" } } }'
    (tmp_path / name).write_bytes(text if name.endswith("txt") else saved_model())
    expected = Format.SAVED_MODEL_TEXT if name.endswith("txt") else Format.SAVED_MODEL
    assert formats.sniff(tmp_path) is expected
    assert formats.sniff(tmp_path / name) is expected
    assert main_file(tmp_path) == tmp_path / name
    assert main_file(tmp_path / name) == tmp_path / name


def test_saved_model_without_schema_version_is_known_by_its_graphs(tmp_path: Path) -> None:
    saved = schema.saved_model_pb2.SavedModel()
    saved.meta_graphs.add().MergeFromString(meta_graph())
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    assert formats.sniff(tmp_path) is Format.SAVED_MODEL


def test_saved_model_under_another_name_is_told_to_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.pb").write_bytes(saved_model())
    with pytest.raises(LoadError, match=r"a SavedModel is a folder(.|\n)*saved_model.pb"):
        formats.sniff(tmp_path / "model.pb")


@pytest.mark.parametrize("path", sorted(p for p in SAMPLES.iterdir() if p.suffix != ".md"), ids=lambda p: p.name)
def test_every_sample_is_known(path: Path) -> None:
    if path.is_dir():
        assert formats.sniff(path) is Format.SAVED_MODEL
    else:
        expected = {".pb": Format.GRAPH_DEF, ".pbtxt": Format.GRAPH_DEF_TEXT, ".meta": Format.META_GRAPH}
        assert formats.sniff(path) is expected[path.suffix]


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        # The same bytes at any time: pytest's older releases make a test's name of them, and xdist's workers must agree on names.
        archive.writestr(zipfile.ZipInfo("config.json"), "{}")
    return buffer.getvalue()


def numpy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


# ir_version: 8, producer_name: "pytorch", graph { }, opset_import { }
ONNX = b"\x08\x08\x12\x07pytorch\x3a\x02\x12\x00\x42\x00"
ONNX_BARE = b"\x08\x08\x12\x07pytorch"


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "the file is empty"),
        (b"\x89HDF\r\n\x1a\n" + b"\0" * 100, "HDF5"),
        (zip_bytes(), "zip archive"),
        (b"\x1f\x8b\x08" + b"\0" * 50, "gzip"),
        (numpy_bytes(), "NumPy"),
        (b"\x80\x04\x95" + b"\0" * 50, "pickle"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS"),
        (b'model_checkpoint_path: "model-1000"\n', "checkpoint"),
        (b"\x1c\0\0\0TFL3" + b"\0" * 50, "TensorFlow Lite"),
        (ONNX, "ONNX"),
        (ONNX_BARE, "ONNX"),
        (b'  {"format": "graph-model"}', "JSON"),
        (b"hello world", "not a GraphDef"),
        (b"# only a comment\n", "not a GraphDef"),
        (b"\x00\x01\x02\x03", "not a GraphDef"),
        (b"\xff" * 40, "not a GraphDef"),
        (b"\x08\x01\x1a\x00", "not a GraphDef"),
        (b"\x0a\x03abc\x0a\x03abc", "not a GraphDef"),
        (b"\x32\x03abc", "not a GraphDef"),
    ],
)
def test_other_files_are_named_for_what_they_are(tmp_path: Path, data: bytes, what: str) -> None:
    path = tmp_path / "model.pb"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=what) as caught:
        formats.sniff(path)
    assert caught.value.where == str(path)
    assert caught.value.fix


def test_index_of_a_checkpoint_points_to_its_meta_file() -> None:
    with pytest.raises(LoadError, match=r"index of a checkpoint(.|\n)*\.meta"):
        formats.sniff(SAMPLES / "keras_lookup" / "variables" / "variables.index")


@pytest.mark.parametrize(
    ("files", "fix"),
    [
        ([], "tf.saved_model.save"),
        (["frozen.pb"], "frozen.pb"),
        (["model-10.meta", "model-10.index"], "model-10.meta"),
        (["1/saved_model.pb"], "/1"),
        (["model.json", "group1-shard1of1.bin"], "TensorFlow.js"),
    ],
)
def test_folder_that_is_no_saved_model_says_what_to_give(tmp_path: Path, files: list[str], fix: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(LoadError, match=r"no saved_model\.pb") as caught:
        formats.sniff(tmp_path)
    assert fix in (caught.value.fix or "")


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file"):
        formats.sniff(tmp_path / "nothing.pb")
    with pytest.raises(LoadError, match="can not be read"):
        formats.sniff("a\0b")


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadError, match="not a regular file"):
        formats.sniff(tmp_path / "pipe")


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pb"
    path.write_bytes(graph_def())

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(LoadError, match="no permission to read"):
        formats.sniff(path)


def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(LoadError, match="no permission to read"):
        formats.sniff(tmp_path)


def test_file_over_two_gib_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.pb"
    with path.open("wb") as file:
        file.write(graph_def())
        file.truncate(wire.MAX_BYTES + 1)  # sparse: takes no space
    with pytest.raises(LoadError, match=r"2,147,483,648 bytes(.|\n)*SavedModel"):
        formats.read(path)


def test_wire_reader_sees_every_kind_of_field() -> None:
    data = b"\x08\x96\x01" + b"\x11" + b"\0" * 8 + b"\x1a\x02ab" + b"\x25" + b"\0" * 4
    assert [(f.number, f.kind) for f in wire.fields(data)] == [(1, 0), (2, 1), (3, 2), (4, 5)]
    assert wire.cut_off_at(data) is None
    assert wire.cut_off_at(data[:-1]) == len(data)
    assert wire.cut_off_at(b"\x1a\x05ab") == 7
    assert wire.cut_off_at(b"\x1a") == 2
    assert wire.cut_off_at(b"\x0b") is None
    with pytest.raises(tensors.NotWireFormat):
        list(wire.fields(b"\x00\x01"))
    with pytest.raises(tensors.NotWireFormat):
        tensors.varint(b"\xff" * 11, 0, 11)
