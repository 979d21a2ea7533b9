"""Writes a model back with stream ids: a copy of the message that was read, with `_stream_id` changed and nothing else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msplit.errors import WriteError
from msplit.formats.atomic import (
    refuse_existing,
    reported,
    write_bytes_atomic,
    write_folder_atomic,
    write_in_new_folder,
)
from msplit.formats.model import Format, Model
from msplit.formats.sniffer import SAVED_MODEL_FILES
from msplit.formats.source import MAX_BYTES

STREAM_ID = "_stream_id"
"""The attribute that holds a node's stream id."""

FINGERPRINT = "fingerprint.pb"
_FINGERPRINT_NOTE = f"{FINGERPRINT} is left out: it holds TensorFlow's hashes of the graph without stream ids. SavedModels load without it"


@dataclass(frozen=True)
class WriteReport:
    """What was written.

    Attributes:
        path: The file or folder.
        format: Its kind.
        bytes: Size of the message.
        set: Nodes whose id was set or changed.
        removed: Nodes whose id was removed.
        notes: What a user should know.
    """

    path: Path
    format: Format
    bytes: int
    set: int
    removed: int
    notes: tuple[str, ...] = ()


def write(
    model: Model, ids: Mapping[tuple[str | None, str], int | None], out: str | Path, *, force: bool = False
) -> WriteReport:
    """Writes a model with stream ids, in the format that it was read from.

    The same model and ids give the same bytes in every process. A SavedModel's variables, assets and other files are copied.

    Args:
        model: A model as read; neither it nor its file is modified.
        ids: By function (None for the top-level graph) and node the stream id, None to remove it. Other nodes keep what they have.
        out: A file, or a folder for a SavedModel.
        force: Whether to replace what is there.

    Raises:
        WriteError: `out` is there already or is the input itself, a key names no node, the message would be over 2 GiB, or writing
            fails. What stood at `out` before is unharmed.
    """
    out = Path(out)
    _check_place(model, out, force=force)
    message, changed, removed = _annotated(model, ids)
    data = _encoded(model.format, message, out)
    notes: tuple[str, ...] = ()
    if not model.is_saved_model:
        write_bytes_atomic(out, data, force=force)
    else:
        name = _main_name(model.format)
        write_folder_atomic(out, lambda folder: _fill(folder, model.path, name, data), force=force)
        if (model.path / FINGERPRINT).exists():
            notes = (_FINGERPRINT_NOTE,)
    return WriteReport(out, model.format, len(data), changed, removed, notes)


def _check_place(model: Model, out: Path, *, force: bool) -> None:
    """Refuses places where writing would change the input, or remove a folder that is no SavedModel."""
    with reported(out):
        source = Path(os.path.realpath(model.path))
        target = Path(os.path.realpath(out))
        same = source == target or (target.exists() and source.exists() and os.path.samefile(source, target))
        if same or (model.is_saved_model and source in target.parents) or target in source.parents:
            what = "is the input" if same else "and the input lie in each other"
            raise WriteError(f"{what}; the input is never modified", where=str(out), fix="choose another name")
        refuse_existing(out, target, force=force)
        if not model.is_saved_model or not target.exists():
            return
        if not target.is_dir():
            raise WriteError("is a file, and a SavedModel is a folder", where=str(out), fix="choose another name")
        if any(target.iterdir()) and not any((target / name).exists() for name in SAVED_MODEL_FILES):
            raise WriteError(
                "holds something that is not a SavedModel; it is not replaced",
                where=str(out),
                fix="choose another name",
            )


def _annotated(model: Model, ids: Mapping[tuple[str | None, str], int | None]) -> tuple[Any, int, int]:
    """A copy of the model's message with ids, how many were set or changed, and how many were removed."""
    message = type(model.proto)()
    message.CopyFrom(model.proto)
    graph_def = _graph_def(model, message)
    by_function: dict[str | None, dict[str, int | None]] = {}
    for (function, node), stream in ids.items():
        by_function.setdefault(function, {})[node] = stream
    changed = removed = 0
    for function in by_function:
        if function is None:
            nodes = graph_def.node
        else:
            nodes = next((f.node_def for f in graph_def.library.function if f.signature.name == function), ())
        wanted = by_function[function]
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
                node.attr[STREAM_ID].i = stream
                changed += 1
        if found < len(wanted):
            present = {node.name for node in nodes}
            missing = next(name for name in wanted if name not in present)
            place = "the graph" if function is None else f"function {function!r}"
            raise WriteError(f"an id is given for node {missing!r}, which {place} does not have", where=str(model.path))
    return message, changed, removed


def _graph_def(model: Model, message: Any) -> Any:
    if model.is_saved_model:
        return message.meta_graphs[model.meta_graph].graph_def
    return message if model.meta is None else message.graph_def


def _encoded(kind: Format, message: Any, out: Path) -> bytes:
    size = message.ByteSize()
    if size > MAX_BYTES:
        raise WriteError(
            f"the graph with its ids would have {size:,} bytes; TensorFlow reads no message over 2 GiB ({MAX_BYTES:,} bytes)",
            where=str(out),
            fix="give a SavedModel, which keeps the weights in files of their own, or write the ids alone with --emit",
        )
    if kind.endswith("-text"):
        from google.protobuf import text_format

        text: str = text_format.MessageToString(message, as_utf8=True)
        return text.encode()
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _main_name(kind: Format) -> str:
    return SAVED_MODEL_FILES[0] if kind is Format.SAVED_MODEL else SAVED_MODEL_FILES[1]


def _fill(folder: Path, source: Path, main: str, data: bytes) -> None:
    """Fills a SavedModel's new folder: all files of the old one but the main file and the fingerprint."""

    def left_out(where: str, names: list[str]) -> list[str]:
        return [name for name in names if name in (main, FINGERPRINT)] if Path(where) == source else []

    # Copies, not links: whoever edits one of the folders must not change the other.
    # The main file first: copytree ends by giving the new folder the old one's permissions, which may forbid writing.
    write_in_new_folder(folder / main, data)
    shutil.copymode(source / main, folder / main)
    shutil.copytree(source, folder, ignore=left_out, dirs_exist_ok=True)
