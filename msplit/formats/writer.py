"""Writing of models with stream ids, and of what lies beside them.

Writes a model back with stream ids: a copy of the message that was read, with `_stream_id` changed and nothing else.

Copies what lies beside the main file of a SavedModel: regular files, each as large as it was when it was looked at.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msplit._version import __version__
from msplit.errors import WriteError, is_read
from msplit.formats import atomic
from msplit.formats import model as records
from msplit.formats.files import descriptor_of, name_of, open_regular
from msplit.formats.functions import modules_of
from msplit.formats.model import STREAM_ID, AssignmentRecord, Format, Model, meta_graphs
from msplit.formats.reader import FINGERPRINT, SAVED_MODEL_FILES
from msplit.formats.wire import MAX_BYTES

_AT_ONCE = 1 << 20
_BLOCK = 512  # what st_blocks counts


@dataclass(frozen=True)
class Item:
    """A file or folder to copy.

    Attributes:
        place: Where it goes, from the top of the new folder.
        info: What the system said of it, links followed.
    """

    source: str
    place: str
    info: os.stat_result

    @property
    def taken(self) -> int:
        """Bytes that it takes on disk: holes take none."""
        return 0 if stat.S_ISDIR(self.info.st_mode) else min(self.info.st_size, self.info.st_blocks * _BLOCK)


def listed(source: Path, left_out: Container[str]) -> list[Item]:
    """Files and folders to copy, folders before what is in them.

    A link to a file becomes a copy of that file. A link to a folder likewise, once: twice the same folder may be a loop, or
    folders that double at each level. `left_out` are paths from `source` of what is not copied.

    Raises:
        WriteError: Something is no file and no folder, or can not be asked; says which.
    """
    found: list[Item] = []
    top = os.stat(source)
    entered = {(top.st_dev, top.st_ino)}
    todo = [(os.fspath(source), "")]
    while todo:
        folder, place = todo.pop()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise _refused(folder, str(error.strerror)) from None
        for name in names:
            if os.path.join(place, name) in left_out:
                continue
            item = _item(os.path.join(folder, name), os.path.join(place, name))
            found.append(item)
            if stat.S_ISDIR(item.info.st_mode):
                key = (item.info.st_dev, item.info.st_ino)
                if key in entered:
                    raise _refused(
                        item.source, f"the link leads to a folder that is copied already{_leads(item.source)}"
                    )
                entered.add(key)
                todo.append((item.source, item.place))
    return found


def _item(source: str, place: str) -> Item:
    try:
        info = os.stat(source)
    except OSError as error:
        raise _refused(source, f"{error.strerror}{_leads(source)}") from None
    special = name_of(info.st_mode)
    if special:
        raise _refused(source, f"it is {special}, not a file{_leads(source)}")
    return Item(source, place, info)


def _leads(path: str) -> str:
    return f" (a link to {os.path.realpath(path)})" if os.path.islink(path) else ""


def _refused(source: str, why: str) -> WriteError:
    return WriteError(f"{source} can not be copied: {why}", fix="remove it from the model, or export the model again")


def copy(items: list[Item], folder: Path) -> None:
    """Copies files and folders into a new folder. The process's umask applies, holes stay holes.

    Raises:
        WriteError: There is not enough room for all of them, or one can not be read.
        OSError: Writing fails.
    """
    needed, free = sum(item.taken for item in items), shutil.disk_usage(folder).free
    if needed > free:
        raise WriteError(
            f"the model's files take {needed:,} bytes, and {free:,} are free there",
            fix="free some space, or write elsewhere",
        )
    for item in items:
        target = folder / item.place
        if stat.S_ISDIR(item.info.st_mode):
            target.mkdir(stat.S_IMODE(item.info.st_mode) & 0o777 | 0o700)  # files shall go into it
        else:
            _copy_file(item, target)


def _copy_file(item: Item, target: Path) -> None:
    mode = stat.S_IMODE(item.info.st_mode) & 0o777
    with descriptor_of(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as out:
        try:
            file = open_regular(item.source)
        except OSError as error:
            raise _refused(item.source, str(error.strerror)) from None
        with file:
            _copy_bytes(file.fileno(), out, item.info.st_size)
        os.utime(out, ns=(item.info.st_atime_ns, item.info.st_mtime_ns))


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Copies the first `size` bytes; a file that grows meanwhile is cut there."""
    os.ftruncate(target, size)
    position = 0
    while position < size:
        position, end = _data(source, position, size)
        while position < end:
            part = os.pread(source, min(_AT_ONCE, end - position), position)
            if not part:  # it has become shorter
                return os.ftruncate(target, position)
            position += os.pwrite(target, part, position)
    return None


def _data(source: int, position: int, size: int) -> tuple[int, int]:
    """The next stretch of a file that is no hole; (size, size) where nothing but a hole follows."""
    try:
        start = os.lseek(source, position, os.SEEK_DATA)
        return start, min(os.lseek(source, start, os.SEEK_HOLE), size)
    except OSError as error:
        # The end, or a file system that knows no holes.
        return (size, size) if error.errno == errno.ENXIO else (position, size)


_FINGERPRINT_NOTE = f"{FINGERPRINT} is left out: it holds TensorFlow's hashes of the graph without stream ids. SavedModels load without it"

_NO_PLACE = "the module that JAX wrote, which they are for, has no place for them"

_COMMENTS_WARNING = "The comments of the text file are not kept: what is written holds the graph alone."


@dataclass(frozen=True)
class WriteReport:
    """Report of a written model.

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
    inside, *counts = _inside(model, ids)
    message, *held = _annotated(model, {key: ids[key] for key in ids if key[0] not in inside})
    new, changed, removed = map(sum, zip(counts, held, strict=True))
    data = _encoded(model.format, message, out)
    if any(inside.values()):
        record = replace(record or _by_hand(model, ids), inside={name: of for name, of in inside.items() if of})
    kept = None if record is None else records.dumps(replace(record, model_hash=records.hash_of(data)))
    notes: tuple[str, ...] = ()
    if not model.is_saved_model:
        atomic.write_bytes_atomic(out, data, force=force)
        _write_record(out, kept)
    else:
        name = SAVED_MODEL_FILES[model.format.is_text]
        atomic.write_folder_atomic(out, lambda folder: _fill(folder, model.path, name, data, kept), force=force)
        if (model.path / FINGERPRINT).exists():
            notes = (_FINGERPRINT_NOTE,)
    if any(inside.values()):
        count = sum(map(len, inside.values()))
        notes += (f"{count:,} of the ids are in {records.place(out)}: {_NO_PLACE}",)
    warnings = (_COMMENTS_WARNING,) if model.commented else ()
    return WriteReport(out, model.format, len(data), new, changed, removed, notes, warnings)


def _write_record(out: Path, data: bytes | None) -> None:
    """Puts the record beside a model that is in its place, or takes that of an earlier assignment away."""
    target = records.place(out)
    if data is not None:
        try:
            atomic.write_bytes_atomic(target, data, force=True)
        except WriteError as error:
            raise WriteError(
                f"{error.what}; the model was written ({out}), without the record of its assignment",
                where=error.where,
                fix=error.fix,
            ) from None
    elif os.path.lexists(target) and is_read(records.load, target):
        with atomic.reported(target):
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
        atomic.write_bytes_atomic(out, data, force=force)
        _write_record(out, None)
        return

    def fill(folder: Path) -> None:
        atomic.write_pieces(folder / SAVED_MODEL_FILES[model.format.is_text], [data], None)
        if beside is not None:
            beside(folder)

    atomic.write_folder_atomic(out, fill, force=force)


def copy_beside(model: Model, folder: Path, kept: Callable[[str], bool]) -> None:
    """Copies what lies beside the main file of a SavedModel into another's new folder, by its name there; never a record."""
    left_out = {os.path.join(*records.IN_SAVED_MODEL), *(name for name in os.listdir(model.path) if not kept(name))}
    copy(listed(model.path, left_out), folder)


def check_place(model: Model, out: Path, *, force: bool) -> None:
    """Refuses places where writing would change the input, or remove a folder that is no SavedModel.

    Raises:
        WriteError: It is such a place, or something is there already and `force` is not given.
    """
    with atomic.reported(out):
        source = Path(os.path.realpath(model.source))
        target = Path(os.path.realpath(out))
        same = source == target or (target.exists() and source.exists() and os.path.samefile(source, target))
        if same or (model.is_saved_model and source in target.parents) or target in source.parents:
            what = "is the input" if same else "and the input lie in each other"
            raise WriteError(f"{what}; the input is never modified", where=str(out), fix="choose another name")
        atomic.refuse_existing(out, target, force=force)
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
    if not is_read(records.load, place) and not (force and place.is_file()):
        raise WriteError(
            "is there already, where the record of the assignment goes", where=str(place), fix="choose another name"
        )


def _inside(
    model: Model, ids: Mapping[tuple[str | None, str], int | None]
) -> tuple[dict[str, dict[str, int]], int, int, int]:
    """Ids that nodes inside of modules get, by function and node; how many are new, how many were changed, and how many removed."""
    found, new, changed, removed = {}, 0, 0, 0
    for name in modules_of(model.graph.functions):
        body = model.graph.functions[name].body
        before = {body.names[node]: body.attrs[node][STREAM_ID] for node in body.nodes_with(STREAM_ID)}
        given = {node: stream for (function, node), stream in ids.items() if function == name}
        missing = next((node for node in given if node not in body.index), None)
        if missing is not None:
            raise WriteError(
                f"an id is given for node {missing!r}, which a module does not have", where=str(model.path)
            )
        after = {node: stream for node, stream in {**before, **given}.items() if stream is not None}
        found[name] = dict(sorted(after.items()))
        new += len(after.keys() - before.keys())
        removed += len(before.keys() - after.keys())
        changed += sum(before[node] != after[node] for node in before.keys() & after.keys())
    return found, new, changed, removed


def _by_hand(model: Model, ids: Mapping[tuple[str | None, str], int | None]) -> AssignmentRecord:
    """The record of ids that nobody says to be msplit's."""
    graphs = {"": model.graph, **{name: function.body for name, function in model.graph.functions.items()}}
    hand = {name: {graph.names[node]: None for node in graph.nodes_with(STREAM_ID)} for name, graph in graphs.items()}
    for (function, node), stream in ids.items():
        if stream is not None:
            hand[function or ""][node] = None
    streams = 1 + max(stream for stream in (0, *ids.values()) if stream is not None)
    by_hand = {name: tuple(nodes) for name, nodes in hand.items() if nodes}
    return AssignmentRecord(__version__, None, streams, loaded=model.choice, by_hand=by_hand)


def _annotated(model: Model, ids: Mapping[tuple[str | None, str], int | None]) -> tuple[Any, int, int, int]:
    """A copy of the model's message with ids, how many are new, how many were changed, and how many were removed."""
    message = deepcopy(model.proto)
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
    atomic.write_pieces(folder / main, [data], None, stat.S_IMODE((source / main).stat().st_mode))
    copy(items, folder)
    if record is not None:
        place = folder.joinpath(*records.IN_SAVED_MODEL)
        place.parent.mkdir(exist_ok=True)
        atomic.write_pieces(place, [record], None)
    # What the umask allows of what the old one has; the owner may always replace it.
    folder.chmod(folder.stat().st_mode & (source.stat().st_mode | 0o700) & 0o777)
