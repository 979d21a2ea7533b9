"""Reading of model files of any kind, told apart by what is in them.

Reads a model file.

Tells what a file is by what is in it. Its name and its ending are not looked at.

A GraphDef parses as an (empty) SavedModel and nothing at all parses as an (empty) GraphDef, so parsing proves nothing; the first
fields of a message and their wire types do.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from msplit import escape
from msplit.core.graph import Graph
from msplit.core.validate import verify
from msplit.errors import INSTALL_TENSORFLOW, GraphError, LoadError, MsplitError
from msplit.formats import endpoints, wire
from msplit.formats import model as records
from msplit.formats.build import MANIFEST, WEIGHTS
from msplit.formats.bundle import TABLE_MAGIC
from msplit.formats.decode import to_graph
from msplit.formats.endpoints import Endpoints
from msplit.formats.files import open_regular
from msplit.formats.functions import Expand, Library
from msplit.formats.guess import guessed
from msplit.formats.model import EXPORTED, AssignmentRecord, Format, Model, ReadOptions, meta_graphs
from msplit.formats.tensors import NotWireFormat
from msplit.opset import schema
from msplit.progress import phase

SAVED_MODEL_FILES = ("saved_model.pb", "saved_model.pbtxt")
"""Names of a SavedModel's main file; TensorFlow prefers the first."""

FINGERPRINT = "fingerprint.pb"
_FIELDS_LOOKED_AT = 64
_LAST_FIELD = 15
"""Fields with higher numbers are extensions that say nothing about the kind of message."""

_KEEP = "give the SavedModel, GraphDef (.pb) or MetaGraphDef (.meta) that it was made from"
_OF_KERAS = 'export a SavedModel: keras.models.load_model(FILE).export("DIR")'
_ZIP = b"PK\x03\x04"
_STRANGERS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras .h5)", _OF_KERAS),
    (_ZIP, "a zip archive (Keras .keras?)", _OF_KERAS),
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
    with wire.opened(path) as data:
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
    with wire.reported(path):
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


def _sniff(data: wire.Buffer, where: str) -> Format:
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


def _text_format(data: wire.Buffer) -> Format | None:
    head = bytes(data[: 1 << 16])
    # A binary message begins with a control character; text never holds one besides white space.
    if head.translate(None, b"\t\n\r") != head.translate(None, bytes(range(32)) + b"\x7f"):
        return None
    match = _FIRST_WORD.match(head)
    return _TEXT_FIELDS.get(match[1].decode()) if match else None


def _binary_format(data: wire.Buffer) -> Format | str | None:
    """The format, or what else it is in words, or None."""
    try:
        first = [f for f in islice(wire.fields(data), _FIELDS_LOOKED_AT) if f.number <= _LAST_FIELD]
    except NotWireFormat:
        return None
    kinds = {(field.number, field.kind) for field in first}
    numbers = {field.number for field in first}
    # A number in field 1: the version of an ONNX model (its graph is field 7, its producer's name field 2) or of a SavedModel.
    if (1, wire.VARINT) in kinds:
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
    known = numbers <= {0, 1, 2, 3, 4, 5} and bool(parts or (3, wire.VARINT) in kinds)
    highest = {1: 7, 2: 3, 4: 3}  # of NodeDef, FunctionDefLibrary and VersionDef
    fit = all(part.number <= highest[field.number] for field in parts for part in _inside(data, field))
    return Format.GRAPH_DEF if known and fit and all(_is_message(data, field) for field in parts) else None


def _inside(data: wire.Buffer, field: wire.Field) -> list[wire.Field]:
    try:
        end = min(field.end, len(data))
        parts = islice(wire.fields(data, field.start, end), _FIELDS_LOOKED_AT)
        return [part for part in parts if part.number <= _LAST_FIELD]
    except NotWireFormat:
        return []


def _is_message(data: wire.Buffer, field: wire.Field) -> bool:
    return field.kind == wire.LENGTH and (field.start == field.end or bool(_inside(data, field)))


def _looks_like_node(data: wire.Buffer, field: wire.Field) -> bool:
    """True if a field can be a NodeDef: a name, an op, and nothing that a NodeDef has not."""
    if field.kind != wire.LENGTH:
        return False
    parts = _inside(data, field)
    if not parts or any(part.number > 7 or part.kind != wire.LENGTH for part in parts if part.number):
        return False
    ops = [part for part in parts if part.number == 2]
    if any(part.number == 5 and bytes(data[part.start : part.start + 1]) != b"\n" for part in parts):
        return False  # field 5 of a MetaInfoDef is a version; of a NodeDef a map entry, which begins with its key
    texts = [bytes(data[op.start : min(op.end, op.start + 1000)]) for op in ops]
    return bool(texts) and all(_OP.fullmatch(text) for text in texts)


def _looks_like_meta_info(data: wire.Buffer, field: wire.Field) -> bool:
    return field.kind == wire.LENGTH and any(part.number in (2, 4, 5, 6, 7) for part in _inside(data, field))


def _holds_graph(data: wire.Buffer, field: wire.Field) -> bool:
    """True if a field can be a GraphDef with nodes."""
    return field.kind == wire.LENGTH and any(
        part.number == 1 and _looks_like_node(data, part) for part in _inside(data, field)[:4]
    )


def read(
    path: str | Path,
    *,
    tags: Sequence[str] | None = None,
    signature: str | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    record: bool = True,
    gradients: Expand | None = None,
) -> Model:
    """Reads a GraphDef, a MetaGraphDef or a SavedModel and verifies it. Never imports TensorFlow, never runs the model. A `.keras` file is
    exported first, see `exported`.

    Where `msplit assign` has left its record with the model, what nobody asks for here is as it was for the assignment.

    Args:
        path: A file, a SavedModel's folder, or the main file in it.
        tags: Tags of the graph of a SavedModel; needed where it holds several.
        signature: Name of the signature; ``serving_default``, or the only one, where it is not given.
        inputs: What is fed, as names of the signature or ``node`` or ``node:1``, in place of what the file says.
        outputs: What is fetched, likewise. A node without outputs is one that must run.
        record: Whether to look for the record of an assignment.
        gradients: Makes the nodes of a `SymbolicGradient` when somebody looks into it; without it, it stays one node.

    Raises:
        LoadError: The file can not be read, or there is a choice to make; the message lists what there is.
        GraphError: The graph is not valid; carries every defect.
    """
    path = exported(Path(path))
    kind = sniff(path)
    file = main_file(path)
    asked = ReadOptions(_tuple(tags), signature, _tuple(inputs), _tuple(outputs))
    message, commented = parse(kind, file)
    found, problem = _record(kind, file)
    model = partial(_model, path, kind, file, message, gradients)
    if found is None or asked != ReadOptions() or not record:
        return _recorded(replace(model(asked), commented=commented), found, problem, record)
    try:
        return _recorded(replace(model(found.loaded), commented=commented), found, None)
    except LoadError as error:
        if found.loaded == asked:
            raise
        problem = f"what it asks of the file does not fit it: {error.what}"
        return replace(model(asked), commented=commented, record_problem=problem)


def _recorded(model: Model, found: AssignmentRecord | None, problem: str | None, record: bool = True) -> Model:
    """A model with its record. Ids that it has for nodes for which the file has no place are the model's in any case."""
    if found is not None and found.inside and isinstance(model.graph.functions, Library):
        problem = model.graph.functions.set_ids(model.graph, found.inside)
    if problem is not None:
        found = None
    return replace(model, record=found if record else None, record_problem=problem if record else None)


def _model(path: Path, kind: Format, file: Path, message: Any, gradients: Expand | None, asked: ReadOptions) -> Model:
    """The model that a message holds."""
    where = str(path)
    tags, signature, inputs, outputs = asked.tags, asked.signature, asked.inputs, asked.outputs
    chosen = 0
    if kind.binary is Format.SAVED_MODEL:
        path = file.parent
        chosen = endpoints.choose_meta_graph(message, tags, where)
    elif tags:
        raise LoadError("only a SavedModel has tags", where=where, fix="leave --part tag= out")
    around = meta_graphs(kind, message)[chosen]
    graph_def = message if around is None else around.graph_def
    if not graph_def.node:
        raise LoadError("the graph has no nodes", where=where, fix="export the model again")
    graph = _graph(graph_def, where, gradients)
    signatures = endpoints.signature_names(around) if around is not None else ()
    # Tensors that the user names need no signature to be chosen.
    ask_not = (
        signature is None
        and inputs is not None
        and outputs is not None
        and endpoints.DEFAULT_SIGNATURE not in signatures
    )
    name = None if ask_not else endpoints.choose_signature(signatures, signature, where)
    ends = find_endpoints(graph, around, name, kind, where, outputs)
    ends = _override(ends, graph, inputs, outputs, where)
    return Model(
        path=path,
        format=kind,
        proto=message,
        graph_def=graph_def,
        graph=graph,
        inputs=ends.inputs,
        outputs=ends.outputs,
        targets=ends.targets,
        left_out=ends.left_out,
        init_ops=_init_ops(around, graph, kind),
        tags=tuple(around.meta_info_def.tags) if around is not None else (),
        signature=name,
        signatures=signatures,
        versions={key: getattr(graph_def.versions, key) for key in ("producer", "min_consumer")}
        if graph_def.HasField("versions")
        else {},
        meta_graph=chosen,
        choice=asked,
    )


def to_train(model: Model, targets: Sequence[str] | None, fetches: Sequence[str]) -> Model:
    """This model with other ends: what a step of its training runs, and what is fetched of it.

    Args:
        model: Any model. What is fed stays.
        targets: Nodes that must run; None: the train ops that the file names, or else those of `model`.
        fetches: Tensors, as names of the signature or ``node`` or ``node:1``.

    Raises:
        LoadError: A name is not in the graph, or no train op is known.
    """
    graph, where = model.graph, str(model.path)
    around = model.meta
    ends = find_endpoints(graph, around, model.signature, model.format, where, ())
    if targets is None:
        named = () if around is None else endpoints.collection_names(around, "train_op")
        nodes = [node for node, _ in map(endpoints.split_tensor, named) if node in graph.index] or [*model.targets]
        if not nodes and model.signature is None:
            guesses = ", ".join(ends.targets[:5])
            fix = f"name the op that a step runs with --target{f', such as {guesses}' if guesses else ''}"
            raise LoadError("the file does not say which op trains", where=where, fix=fix)
    else:
        known = [endpoint for endpoint in ends.outputs if endpoint.name in targets]
        nodes = [end.node for end in endpoints.named(targets, known, graph, "--target", where)]
    fetched = endpoints.named(fetches, ends.outputs, graph, "--fetch", where)
    without = [end.name for end in fetched if not endpoints.has_outputs(graph, graph.index[end.node])]
    if without:
        raise LoadError(f"--fetch names {without[0]!r}, which gives no tensor", where=where, fix="run it with --target")
    return replace(model, outputs=tuple(fetched), targets=tuple(dict.fromkeys(nodes)), left_out=None)


KERAS = ".keras"
_EXPORT = """
import sys
import keras
keras.models.load_model(sys.argv[1], compile=False).export(sys.argv[2])
"""


def exported(path: Path) -> Path:
    """The SavedModel of a file that ends in `.keras`: exported by the Keras that is installed, in a process of its own, and kept as long as
    this process lives. Other paths, and what is no such file inside, stay as they are.

    Keras builds and traces the model for that, in its safe mode: such a file is a program, unlike those that msplit reads itself.

    Raises:
        LoadError: Keras or TensorFlow is not installed, or can not export it.
    """
    if path.suffix != KERAS or not path.is_file():
        return path
    with wire.reported(path), open_regular(path) as file:
        if file.read(4) != _ZIP:
            return path
        info = os.fstat(file.fileno())
    target = _export(path.resolve(), info.st_mtime_ns, info.st_size)
    EXPORTED[target] = path
    return target


@lru_cache
def _export(path: Path, changed: int, size: int) -> Path:
    """See `exported`; once for a file as it is."""
    missing = [name for name in ("keras", "tensorflow") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"is a Keras model, which Keras exports with TensorFlow; not installed: {', '.join(missing)}"
        raise LoadError(what, where=str(path), fix=f"{INSTALL_TENSORFLOW} brings both; or, where they are, {_OF_KERAS}")
    folder = Path(tempfile.mkdtemp(prefix="msplit-keras-"))
    atexit.register(_remove, folder, os.getpid())
    source, target = folder / f"in{KERAS}", folder / (escape.line(path.stem)[:100] + KERAS)
    source.symlink_to(path)  # by a name that is no option
    quiet = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with phase("exporting by Keras"):
        done = subprocess.run(
            [sys.executable, "-c", _EXPORT, source, target],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**os.environ, **quiet},
        )
    if done.returncode:
        said = next((line for line in reversed(done.stderr.splitlines()) if re.match(r"[\w.]+: ", line)), "")
        fix = f"load it as you do, with its own layers and functions, and {_OF_KERAS}"
        raise LoadError(
            f"Keras can not export it: {said or f'it ended with {done.returncode}'}", where=str(path), fix=fix
        )
    return target


def _remove(folder: Path, owner: int) -> None:
    """Removes what was exported, when the process ends that did it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def parse(kind: Format, file: Path) -> tuple[Any, bool]:
    """The message that a file holds, and whether there are comments beside it."""
    message = {
        Format.GRAPH_DEF: lambda: schema.graph_pb2.GraphDef(),
        Format.META_GRAPH: lambda: schema.meta_graph_pb2.MetaGraphDef(),
        Format.SAVED_MODEL: lambda: schema.saved_model_pb2.SavedModel(),
    }[kind.binary]()
    with wire.opened(file) as data:
        if kind.is_text:
            return wire.parse_text(data, message, str(file)), wire.has_comments(data)
        return wire.parse_binary(data, message, str(file)), False


def _record(kind: Format, file: Path) -> tuple[AssignmentRecord | None, str | None]:
    """The record of the assignment of a model, or why there is one that is not gone by."""
    place = records.place(file.parent if kind.binary is Format.SAVED_MODEL else file)
    if not os.path.lexists(place):
        return None, None
    try:
        found = records.load(place)
    except MsplitError as error:
        return None, f"{error.what} ({place})"
    with wire.opened(file) as data:
        if found.model_hash != records.hash_of(data):
            return None, f"it is not of this file, which has changed since ({place})"
    return found, None


def _graph(graph_def: Any, where: str, gradients: Expand | None) -> Graph:
    library = Library(graph_def.library, gradients)
    graph = to_graph(graph_def, library)
    defects = [defect.text for defect in verify(graph)]
    defects += [f"function {name!r} is there more than once" for name in library.duplicates]
    if defects:
        raise GraphError(defects, where=where)
    return graph


def find_endpoints(
    graph: Graph, around: Any, signature: str | None, kind: Format, where: str, outputs: Sequence[str] | None = None
) -> Endpoints:
    """Find feeds and fetches: those of a signature or, without one, guesses.

    Args:
        graph: The top-level graph.
        around: Its MetaGraphDef, None for a bare GraphDef.
        signature: The signature's name, None for none.
        kind: Of the file.
        where: The file, for messages.
        outputs: What the user wants fetched, if anything.

    Raises:
        LoadError: The signature names what is not there, or there is none and nothing to guess from.
    """
    if signature is not None:
        ends = endpoints.of_signature(around.signature_def[signature])
        endpoints.check(ends, graph, where)
        return ends
    ends = guessed(graph)
    if around is None:
        return ends
    if kind.binary is Format.SAVED_MODEL and around.HasField("object_graph_def") and outputs is None:
        # The top graph of a TensorFlow 2 SavedModel without signatures holds nothing but its saver.
        raise LoadError(
            "the SavedModel has no signatures, so there is nothing to run",
            where=where,
            fix="export it with signatures: tf.saved_model.save(model, dir, signatures=model.call.get_concrete_function(…))",
        )
    # In a graph of TensorFlow 1, the collection of train ops names targets, or outputs where these have a tensor.
    train = [
        graph.index[n]
        for n, _ in map(endpoints.split_tensor, endpoints.collection_names(around, "train_op"))
        if n in graph.index
    ]
    steps = tuple(endpoints.endpoint(graph, node, 0) for node in train if endpoints.has_outputs(graph, node))
    # The ops that initialize and save are left out, whatever a guess makes of them.
    init = {*endpoints.init_ops(around, with_variables=True)}
    init |= {
        endpoints.split_tensor(name)[0]
        for name in (around.saver_def.restore_op_name, around.saver_def.save_tensor_name)
    }
    targets = [graph.names[node] for node in train if not endpoints.has_outputs(graph, node)]
    targets += [name for name in ends.targets if name not in init]
    # What gradients and updates leave over is no result.
    scopes = tuple(f"{graph.names[node]}/" for node in train) + (("gradients/",) if train else ())
    results = [e for e in ends.outputs if e.node not in init and e not in steps and not e.node.startswith(scopes)]
    left_out = (*(e.name for e in ends.outputs if e not in results and e not in steps), *(ends.left_out or ()))
    return Endpoints(ends.inputs, (*results, *steps), tuple(dict.fromkeys(targets)), left_out)


def _override(
    ends: Endpoints, graph: Graph, inputs: Sequence[str] | None, outputs: Sequence[str] | None, where: str
) -> Endpoints:
    fed, fetched, targets, left_out = ends.inputs, ends.outputs, ends.targets, ends.left_out
    if inputs is not None:
        fed = tuple(endpoints.named(inputs, ends.inputs, graph, "--part inputs=", where))
    if outputs is not None:
        given = endpoints.named(outputs, ends.outputs, graph, "--part outputs=", where)
        targets = tuple(end.node for end in given if not endpoints.has_outputs(graph, graph.index[end.node]))
        fetched = tuple(end for end in given if end.node not in targets)
        left_out = None
    return Endpoints(fed, fetched, targets, left_out)


def _init_ops(around: Any, graph: Graph, kind: Format) -> tuple[str, ...]:
    if around is None:
        return ()
    found = endpoints.init_ops(around, with_variables=kind.binary is Format.META_GRAPH)
    return tuple(name for name in found if name in graph.index)
