"""Writes a model back with stream ids: a copy of the message that was read, with `_stream_id` changed and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msplit.errors import WriteError
from msplit.formats import record as records
from msplit.formats.atomic import (
    refuse_existing,
    reported,
    write_bytes_atomic,
    write_folder_atomic,
    write_new_file,
)
from msplit.formats.folder_copy import copy, listed
from msplit.formats.model import Format, Model, meta_graphs
from msplit.formats.record import AssignmentRecord
from msplit.formats.sniffer import FINGERPRINT, SAVED_MODEL_FILES
from msplit.formats.source import MAX_BYTES

STREAM_ID = "_stream_id"
"""The attribute that holds a node's stream id."""

_FINGERPRINT_NOTE = f"{FINGERPRINT} is left out: it holds TensorFlow's hashes of the graph without stream ids. SavedModels load without it"

_COMMENTS_WARNING = "The comments of the text file are not kept: what is written holds the graph alone."


@dataclass(frozen=True)
class WriteReport:
    """What was written.

    Attributes:
        path: The file or folder.
        bytes: Size of the message.
        new: Nodes that had no id and have one now.
        changed: Nodes whose id is another one now.
        removed: Nodes whose id was removed.
        notes: What a user should know.
        warnings: What a user should not miss: something of the input is not in what was written.
    """

    path: Path
    format: Format
    bytes: int
    new: int
    changed: int
    removed: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def set(self) -> int:
        """Nodes whose id was set or changed."""
        return self.new + self.changed


def write(
    model: Model,
    ids: Mapping[tuple[str | None, str], int | None],
    out: str | Path,
    *,
    force: bool = False,
    record: AssignmentRecord | None = None,
) -> WriteReport:
    """Writes a model with stream ids, in the format that it was read from.

    The same model and ids give the same bytes in every process. A SavedModel's variables, assets and other files are copied.

    Args:
        model: A model as read; neither it nor its file is modified.
        ids: By function (None for the top-level graph) and node the stream id, None to remove it. Other nodes keep what they have.
        out: A file, or a folder for a SavedModel.
        force: Whether to replace what is there.
        record: What the ids were made with, written with the model: into the folder of a SavedModel, beside any other file once that is
            in its place. Without it, a record that the place has of an earlier assignment is removed.

    Raises:
        WriteError: `out` is there already or is the input itself, a key names no node, the message would be over 2 GiB, or writing
            fails. What stood at `out` before is unharmed.
    """
    out = Path(out)
    check_place(model, out, force=force)
    message, new, changed, removed = _annotated(model, ids)
    data = _encoded(model.format, message, out)
    kept = None if record is None else records.dumps(replace(record, model_hash=records.hash_of(data)))
    notes: tuple[str, ...] = ()
    if not model.is_saved_model:
        write_bytes_atomic(out, data, force=force)
        _write_record(out, kept)
    else:
        name = SAVED_MODEL_FILES[model.format.is_text]
        write_folder_atomic(out, lambda folder: _fill(folder, model.path, name, data, kept), force=force)
        if (model.path / FINGERPRINT).exists():
            notes = (_FINGERPRINT_NOTE,)
    warnings = (_COMMENTS_WARNING,) if model.commented else ()
    return WriteReport(out, model.format, len(data), new, changed, removed, notes, warnings)


def _write_record(out: Path, data: bytes | None) -> None:
    """Puts the record beside a model that is in its place, or takes that of an earlier assignment away."""
    target = records.place(out)
    if data is not None:
        try:
            write_bytes_atomic(target, data, force=True)
        except WriteError as error:
            raise WriteError(
                f"{error.what}; the model was written ({out}), without the record of its assignment",
                where=error.where,
                fix=error.fix,
            ) from None
    elif os.path.lexists(target) and records.is_record(target):
        with reported(target):
            target.unlink()


def write_message(
    model: Model, message: Any, out: Path, *, force: bool = False, beside: Callable[[Path], None] | None = None
) -> None:
    """Writes a message in a model's format; a record that the place has of an earlier assignment is removed.

    Args:
        model: What it was made of.
        message: A GraphDef or, for the folder of a SavedModel, that.
        out: A file, or a folder.
        force: Whether to replace what is there.
        beside: Fills the folder with what lies beside the main file.

    Raises:
        WriteError: As for `write`.
    """
    check_place(model, out, force=force)
    data = _encoded(model.format, message, out)
    if not model.is_saved_model:
        write_bytes_atomic(out, data, force=force)
        _write_record(out, None)
        return

    def fill(folder: Path) -> None:
        write_new_file(folder / SAVED_MODEL_FILES[model.format.is_text], data, None)
        if beside is not None:
            beside(folder)

    write_folder_atomic(out, fill, force=force)


def copy_beside(model: Model, folder: Path, kept: Callable[[str], bool]) -> None:
    """Copies what lies beside the main file of a SavedModel into another's new folder, by its name there; never a record."""
    left_out = {os.path.join(*records.IN_SAVED_MODEL), *(name for name in os.listdir(model.path) if not kept(name))}
    copy(listed(model.path, left_out), folder)


def check_place(model: Model, out: Path, *, force: bool) -> None:
    """Refuses places where writing would change the input, or remove a folder that is no SavedModel.

    Raises:
        WriteError: It is such a place, or something is there already and `force` is not given.
    """
    with reported(out):
        source = Path(os.path.realpath(model.path))
        target = Path(os.path.realpath(out))
        same = source == target or (target.exists() and source.exists() and os.path.samefile(source, target))
        if same or (model.is_saved_model and source in target.parents) or target in source.parents:
            what = "is the input" if same else "and the input lie in each other"
            raise WriteError(f"{what}; the input is never modified", where=str(out), fix="choose another name")
        refuse_existing(out, target, force=force)
        if not model.is_saved_model:
            _check_record_place(target, force=force)
            return
        if not target.exists():
            return
        if not target.is_dir():
            raise WriteError("is a file, and a SavedModel is a folder", where=str(out), fix="choose another name")
        if any(target.iterdir()) and not any((target / name).is_file() for name in SAVED_MODEL_FILES):
            raise WriteError(
                "holds something that is not a SavedModel; it is not replaced",
                where=str(out),
                fix="choose another name",
            )


def _check_record_place(target: Path, *, force: bool) -> None:
    """Refuses a place beside which something that is no record has the name of the record."""
    place = records.place(target)
    try:
        place.lstat()  # not exists(): that would pass over a name that is too long
    except FileNotFoundError:
        return
    if not records.is_record(place) and not (force and place.is_file()):
        raise WriteError(
            "is there already, where the record of the assignment goes", where=str(place), fix="choose another name"
        )


def _annotated(model: Model, ids: Mapping[tuple[str | None, str], int | None]) -> tuple[Any, int, int, int]:
    """A copy of the model's message with ids, how many are new, how many were changed, and how many were removed."""
    message = type(model.proto)()
    message.CopyFrom(model.proto)
    around = meta_graphs(model.format, message)[model.meta_graph]
    graph_def = message if around is None else around.graph_def
    by_function: dict[str | None, dict[str, int | None]] = {}
    for (function, node), stream in ids.items():
        by_function.setdefault(function, {})[node] = stream
    # Backwards: of two functions of one name the first counts.
    nodes_of = {f.signature.name: f.node_def for f in reversed(graph_def.library.function)}
    new = changed = removed = 0
    for function, wanted in by_function.items():
        nodes = graph_def.node if function is None else nodes_of.get(function, ())
        found = 0
        for node in nodes:
            if node.name not in wanted:
                continue
            found += 1
            stream = wanted[node.name]
            before = node.attr[STREAM_ID].i if STREAM_ID in node.attr else None
            if stream is None:
                if STREAM_ID in node.attr:
                    del node.attr[STREAM_ID]
                    removed += 1
            elif before != stream or not node.attr[STREAM_ID].HasField("i"):
                new, changed = (new + 1, changed) if STREAM_ID not in node.attr else (new, changed + 1)
                node.attr[STREAM_ID].i = stream
        if found < len(wanted):
            present = {node.name for node in nodes}
            missing = next(name for name in wanted if name not in present)
            place = "the graph" if function is None else f"function {function!r}"
            raise WriteError(f"an id is given for node {missing!r}, which {place} does not have", where=str(model.path))
    return message, new, changed, removed


def _encoded(kind: Format, message: Any, out: Path) -> bytes:
    size = message.ByteSize()
    if size > MAX_BYTES:
        raise WriteError(
            f"the graph with its ids would have {size:,} bytes; TensorFlow reads no message over 2 GiB ({MAX_BYTES:,} bytes)",
            where=str(out),
            fix="give a SavedModel, which keeps the weights in files of their own, or write the ids alone with --emit",
        )
    if kind.is_text:
        from google.protobuf import text_format

        text: str = text_format.MessageToString(message, as_utf8=True)
        return text.encode()
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _fill(folder: Path, source: Path, main: str, data: bytes, record: bytes | None) -> None:
    """Fills a SavedModel's new folder: all files of the old one but the main file, the fingerprint and the record."""
    # Copies, not links: whoever edits one of the folders must not change the other.
    items = listed(source, (main, FINGERPRINT, os.path.join(*records.IN_SAVED_MODEL)))
    write_new_file(folder / main, data, None, stat.S_IMODE((source / main).stat().st_mode))
    copy(items, folder)
    if record is not None:
        place = folder.joinpath(*records.IN_SAVED_MODEL)
        place.parent.mkdir(exist_ok=True)
        write_new_file(place, record, None)
    # What the umask allows of what the old one has; the owner may always replace it.
    folder.chmod(folder.stat().st_mode & (source.stat().st_mode | 0o700) & 0o777)
