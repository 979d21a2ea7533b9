"""Tells what a file is by what is in it. Its name and its ending are not looked at.

A GraphDef parses as an (empty) SavedModel and nothing at all parses as an (empty) GraphDef, so parsing proves nothing; the first
fields of a message and their wire types do.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from msplit.errors import LoadError
from msplit.formats.build import MANIFEST, WEIGHTS
from msplit.formats.bundle import TABLE_MAGIC
from msplit.formats.model import Format
from msplit.formats.tensors import NotWireFormat
from msplit.formats.wire import LENGTH, VARINT, Buffer, Field, fields, opened, reported

SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
"""Names of a SavedModel's main file; TensorFlow prefers the first."""

FINGERPRINT = "fingerprint.pb"
_FIELDS_LOOKED_AT = 64
_LAST_FIELD = 15
"""Fields with higher numbers are extensions that say nothing about the kind of message."""

_KEEP = "give the SavedModel, GraphDef (.pb) or MetaGraphDef (.meta) that it was made from"
_OF_KERAS = 'export a SavedModel: keras.models.load_model(FILE).export("DIR")'
_STRANGERS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras .h5)", _OF_KERAS),
    (b"PK\x03\x04", "a zip archive (Keras .keras?)", _OF_KERAS),
    (b"\x1f\x8b", "a gzip archive", "unpack it and give the model inside"),
    (b"\x93NUMPY", "a NumPy array", _KEEP),
    (b"\x80\x04\x95", "a Python pickle", "export the model as a SavedModel"),
    (b"<!DOCTYPE", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself: git lfs pull"),
    (b"model_checkpoint_path", "the index of a checkpoint folder", "give the .meta file beside it"),
    (b"all_model_checkpoint_paths", "the index of a checkpoint folder", "give the .meta file beside it"),
)

_FIELDS_OF_META_GRAPH = "meta_info_def graph_def saver_def collection_def signature_def asset_file_def object_graph_def"
_TEXT_FIELDS = {
    **dict.fromkeys(("node", "library", "versions", "version", "debug_info"), Format.GRAPH_DEF_TEXT),
    **dict.fromkeys(_FIELDS_OF_META_GRAPH.split(), Format.META_GRAPH_TEXT),
    **dict.fromkeys(("saved_model_schema_version", "meta_graphs"), Format.SAVED_MODEL_TEXT),
}
_FIRST_WORD = re.compile(rb"(?:\xef\xbb\xbf)?(?:\s|#[^\n]*(?:\n|\Z))*([A-Za-z_][A-Za-z_0-9]*)\s*[:{<]")
_OP = re.compile(rb"[A-Za-z_][A-Za-z0-9_.>/:\-]*")


def sniff(path: str | Path) -> Format:
    """The kind of a model file, of a SavedModel's folder, or of the ``saved_model.pb`` in it.

    Raises:
        LoadError: There is nothing to read, or it is something else; the message says what it looks like.
    """
    path = main_file(Path(path))
    with opened(path) as data:
        found = _sniff(data, str(path))
    if found.binary is Format.SAVED_MODEL and path.name not in SAVED_MODEL_FILES:
        raise LoadError(
            "holds a SavedModel, but a SavedModel is a folder",
            where=str(path),
            fix=f"name it {SAVED_MODEL_FILES[0]}, with its variables and assets beside it, and give the folder",
        )
    return found


def main_file(path: Path) -> Path:
    """The file that holds the message: the path itself, or the main file of a SavedModel's folder.

    Raises:
        LoadError: The folder has no such file.
    """
    with reported(path):
        return _main_file(path) if path.is_dir() else path


def _main_file(folder: Path) -> Path:
    for name in SAVED_MODEL_FILES:
        if (folder / name).exists():
            return folder / name
    inside = sorted(entry.name for entry in folder.iterdir())
    if {MANIFEST, WEIGHTS} <= set(inside):
        fix = "give the model that it was made from, which `msplit show` names; builds are for `msplit bench` and `msplit.open`"
        raise LoadError("this is a build, not a model", where=str(folder), fix=fix)
    hint = next((name for name in inside if name.endswith((".meta", ".pb", ".pbtxt")) and name != FINGERPRINT), None)
    below = next((entry for entry in inside if (folder / entry / SAVED_MODEL_FILES[0]).exists()), None)
    if below:
        fix = f"give {folder / below}"
    elif hint:
        fix = f"give the file: {folder / hint}"
    elif "variables" in inside or FINGERPRINT in inside:
        fix = f"this was a SavedModel: copy {SAVED_MODEL_FILES[0]} as well, or export it again"
    elif "model.json" in inside:
        fix = "this looks like a TensorFlow.js model: give the SavedModel it was converted from"
    else:
        fix = "give the folder that tf.saved_model.save or model.export wrote"
    raise LoadError(f"the folder has no {SAVED_MODEL_FILES[0]}", where=str(folder), fix=fix)


def _sniff(data: Buffer, where: str) -> Format:
    if len(data) == 0:
        raise LoadError("the file is empty", where=where, fix="export or copy the model again")
    head = bytes(data[:512])
    for magic, what, fix in _STRANGERS:
        if head.startswith(magic):
            raise LoadError(f"is {what}, not a TensorFlow graph", where=where, fix=fix)
    if head[4:8] == b"TFL3":
        raise LoadError("is a TensorFlow Lite model, not a TensorFlow graph", where=where, fix=_KEEP)
    if bytes(data[-8:]) == TABLE_MAGIC:
        raise LoadError(
            "is the index of a checkpoint: it has no graph", where=where, fix="give the .meta file beside it"
        )
    found = _text_format(data) or _binary_format(data)
    if isinstance(found, Format):
        return found
    if found:
        raise LoadError(f"is {found}, not a TensorFlow graph", where=where, fix=_KEEP)
    if head.lstrip()[:1] in (b"{", b"["):
        raise LoadError("is JSON, not a TensorFlow graph", where=where, fix=_KEEP)
    raise LoadError(
        "is not a GraphDef, MetaGraphDef or SavedModel",
        where=where,
        fix="give a .pb, .pbtxt or .meta file or a SavedModel folder",
    )


def _text_format(data: Buffer) -> Format | None:
    head = bytes(data[: 1 << 16])
    # A binary message begins with a control character; text never holds one besides white space.
    if head.translate(None, b"\t\n\r") != head.translate(None, bytes(range(32)) + b"\x7f"):
        return None
    match = _FIRST_WORD.match(head)
    return _TEXT_FIELDS.get(match[1].decode()) if match else None


def _binary_format(data: Buffer) -> Format | str | None:
    """The format, or what else it is in words, or None."""
    try:
        first = [f for f in islice(fields(data), _FIELDS_LOOKED_AT) if f.number <= _LAST_FIELD]
    except NotWireFormat:
        return None
    kinds = {(field.number, field.kind) for field in first}
    numbers = {field.number for field in first}
    # A number in field 1: the version of an ONNX model (its graph is field 7, its producer's name field 2) or of a SavedModel.
    if (1, VARINT) in kinds:
        if numbers & {7, 8} or any(f.number == 2 and not _is_message(data, f) for f in first):
            return "an ONNX model"
        return Format.SAVED_MODEL if numbers <= {0, 1, 2} else None
    # A graph in field 2, beside fields of a MetaGraphDef only; a GraphDef has its library there.
    ones = [field for field in first if field.number == 1]
    twos = [field for field in first if field.number == 2]
    if numbers <= {0, 1, 2, 3, 4, 5, 6, 7} and any(_holds_graph(data, field) for field in twos):
        return Format.META_GRAPH
    # A first field that reads as a node, then the formats without their usual first field.
    if ones and _looks_like_node(data, ones[0]):
        return Format.GRAPH_DEF
    if numbers <= {0, 2} and any(
        _holds_graph(data, part) for f in twos for part in _inside(data, f) if part.number == 2
    ):
        return Format.SAVED_MODEL  # one that leaves its schema version out
    if ones and _looks_like_meta_info(data, ones[0]):
        return Format.META_GRAPH
    # What is left can be a GraphDef whose nodes lack an op, or that has none; it is told as such when it is read.
    parts = [field for field in first if field.number in (1, 2, 4)]
    known = numbers <= {0, 1, 2, 3, 4, 5} and bool(parts or (3, VARINT) in kinds)
    highest = {1: 7, 2: 3, 4: 3}  # of NodeDef, FunctionDefLibrary and VersionDef
    fit = all(part.number <= highest[field.number] for field in parts for part in _inside(data, field))
    return Format.GRAPH_DEF if known and fit and all(_is_message(data, field) for field in parts) else None


def _inside(data: Buffer, field: Field) -> list[Field]:
    try:
        end = min(field.end, len(data))
        parts = islice(fields(data, field.start, end), _FIELDS_LOOKED_AT)
        return [part for part in parts if part.number <= _LAST_FIELD]
    except NotWireFormat:
        return []


def _is_message(data: Buffer, field: Field) -> bool:
    return field.kind == LENGTH and (field.start == field.end or bool(_inside(data, field)))


def _looks_like_node(data: Buffer, field: Field) -> bool:
    """True if a field can be a NodeDef: a name, an op, and nothing that a NodeDef has not."""
    if field.kind != LENGTH:
        return False
    parts = _inside(data, field)
    if not parts or any(part.number > 7 or part.kind != LENGTH for part in parts if part.number):
        return False
    ops = [part for part in parts if part.number == 2]
    if any(part.number == 5 and bytes(data[part.start : part.start + 1]) != b"\n" for part in parts):
        return False  # field 5 of a MetaInfoDef is a version; of a NodeDef a map entry, which begins with its key
    texts = [bytes(data[op.start : min(op.end, op.start + 1000)]) for op in ops]
    return bool(texts) and all(_OP.fullmatch(text) for text in texts)


def _looks_like_meta_info(data: Buffer, field: Field) -> bool:
    return field.kind == LENGTH and any(part.number in (2, 4, 5, 6, 7) for part in _inside(data, field))


def _holds_graph(data: Buffer, field: Field) -> bool:
    """True if a field can be a GraphDef with nodes."""
    return field.kind == LENGTH and any(
        part.number == 1 and _looks_like_node(data, part) for part in _inside(data, field)[:4]
    )
