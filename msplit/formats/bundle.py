"""Checkpoints of TensorFlow, and the values of a model's variables in them.

Reads TensorFlow's checkpoints (tensor bundles) without TensorFlow.

A bundle is ``PREFIX.index``, a LevelDB table from tensor name to BundleEntryProto, and shards ``PREFIX.data-00000-of-00001`` with the
bytes. Formats: leveldb's table_format.md, and tensor_bundle.proto. TensorFlow writes the table uncompressed. A tensor that was saved in
slices has an entry without bytes, which lists them, and each slice has one under a key of its own: these are in the order of where slices
begin (saved_tensor_slice_util.cc, ordered_code.cc). What this reader does not know (compressed tables, all of a tensor whose slices are no
rows, checkpoints of version 1) it leaves to TensorFlow's own.

Every block of the table and every tensor has a checksum (CRC-32C), which is verified before anything of it is used: a file that a disk or
a copy has damaged is refused, as TensorFlow refuses it.

The values of a model's variables, from the checkpoint beside its graph.

Which tensor of the checkpoint belongs to which variable is read off the model's own saver: its RestoreV2 ops list names, and each of
their outputs is assigned to one variable. That holds for TensorFlow 1 (in the graph) and 2 (in the function that the
saver's restore op calls), and for partitioned variables. Names alone do not do: Keras exports hold several variables of one name.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from msplit.core.graph import CONTROL, FunctionRef, Graph, TensorValue
from msplit.errors import INSTALL_TENSORFLOW, LoadError
from msplit.formats.endpoints import behind, split_tensor
from msplit.formats.files import open_regular, read_bytes
from msplit.formats.model import Model
from msplit.formats.tensors import dtype_name, fits, numpy_dtype, stacked, string_array, varint
from msplit.opset import schema
from msplit.opset.traits import VARIABLES, ops_with

_MOST_INDEX = 1 << 30
_FOOTER = 48
_TRAILER = 5  # one byte of compression type, four of checksum
_AT_ONCE = 1 << 22
_OPAQUE = ("resource", "variant")
TABLE_MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
"""Last bytes of a checkpoint's .index file (a LevelDB table)."""


_Box = tuple[tuple[int, ...], ...]
"""A slice of a tensor: on each axis the tensor's size, and where the slice begins and how long it is."""
_FIX = "copy or export it again; of a training, an earlier checkpoint will do"


class NotSupported(Exception):
    """Only TensorFlow's own reader reads this."""


class Checkpoint:
    """The tensors of a checkpoint, read one by one. Its `prefix` is the path without ``.index``.

    Raises:
        LoadError: There is no such checkpoint, or its index is damaged.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix, where = prefix, f"{prefix}.index"
        self._entries: dict[str, Any] | None = None
        self._shards: dict[int, NDArray[np.uint8]] = {}
        self._slices: dict[str, dict[_Box, Any]] = {}
        self._wholes: WeakValueDictionary[str, NDArray[Any]] = WeakValueDictionary()  # parts are asked for one by one
        # Parts of a variable are read off the whole, one after the other. An empty tensor begins where the next one does.
        self._verified: set[tuple[int, int, int, int]] = set()
        self._tensorflow: Any = None
        try:
            self._entries, self._slices, self._shard_count = _entries(read_bytes(where, _MOST_INDEX))
        except NotSupported:
            self._open_with_tensorflow()
        except EOFError:
            raise LoadError(
                f"the index of the checkpoint is longer than {_MOST_INDEX >> 20} MiB", where=where
            ) from None
        except FileNotFoundError:
            raise LoadError("there is no checkpoint", where=where, fix="copy the whole model") from None
        except OSError as error:
            raise LoadError(f"can not be read: {error.strerror}", where=where) from None
        except (ValueError, IndexError) as error:
            raise LoadError(f"the index of the checkpoint is damaged: {error}", where=where, fix=_FIX) from None

    def __contains__(self, key: str) -> bool:
        return key in self._entries if self._entries is not None else bool(self._tensorflow.has_tensor(key))

    def tensor(self, key: str, part: str = "") -> NDArray[Any]:
        """A tensor, or a slice of it. Numbers are read-only views of the mapped file where they lie so in it, and are aligned.

        Args:
            key: Its name.
            part: The slice, as savers write it: the full shape, then ``start,length`` or ``-`` per dimension; "" for all.

        Raises:
            KeyError: The checkpoint does not have it.
            LoadError: Its bytes are not there, or are not those that were written, or it has no such slice.
        """
        box = _box_of(part)
        if (stored := self._slices.get(key, {}).get(box)) is not None:
            return self._values(key, stored)
        if (whole := self._wholes.get(key)) is None:
            self._wholes[key] = whole = self._whole(key)
        if not part:
            return whole
        if whole.shape != tuple(full for full, *_ in box):
            said = f"{key!r} of the checkpoint, of shape {list(whole.shape)}, has no slice {part!r}"
            raise LoadError(said, where=str(self.prefix), fix="give the checkpoint of this model")
        return np.ascontiguousarray(whole[tuple(slice(at, at + size) for _, at, size in box)])

    def _whole(self, key: str) -> NDArray[Any]:
        """All of a tensor. Slices that are rows are put together here."""
        entry = None if self._entries is None else self._entries[key]
        if entry is None or dtype_name(entry.dtype) in _OPAQUE:
            return self._with_tensorflow(key)
        if not entry.slices:
            return self._values(key, entry)
        shape, parts, whole = _shape(entry), self._slices.get(key, {}), None
        ends = [at + size for (_, at, size), *_ in parts]
        inside = {tuple((full, 0, full) for full in shape[1:])}
        if [*(box[0][1] for box in parts), *shape[:1]] == [0, *ends] and {box[1:] for box in parts} == inside:
            whole = stacked([self._values(key, one) for one in parts.values()])
        return self._with_tensorflow(key) if whole is None else whole

    def _values(self, key: str, entry: Any) -> NDArray[Any]:
        name, shape = dtype_name(entry.dtype), _shape(entry)
        data, lengths = self._content(key, entry)
        if name == "string":
            packed = data.tobytes()
            return string_array(packed[:lengths] + packed[lengths + 4 :], math.prod(shape)).reshape(shape)
        dtype = numpy_dtype(name)
        if math.prod(shape) * dtype.itemsize != entry.size:
            raise self._damaged(f"the size of {key!r} does not fit its shape", entry)
        values = data.view(dtype)
        return (values if values.flags.aligned else values.copy()).reshape(shape)

    def verify(self) -> None:
        """Refuses a checkpoint any of whose tensors is damaged, as far as it is not left to TensorFlow.

        Raises:
            LoadError: One is; the message names it.
        """
        parts = [(key, part) for key, found in self._slices.items() for part in found.values()]
        for key, entry in [*(self._entries or {}).items(), *parts]:
            if not entry.slices and dtype_name(entry.dtype) not in _OPAQUE:
                self._content(key, entry)

    def _content(self, key: str, entry: Any) -> tuple[NDArray[np.uint8], int]:
        """The stored bytes of an entry, which fit their checksum, and the position in them where lengths of strings end."""
        data = self._shard(entry.shard_id)[entry.offset : entry.offset + entry.size]
        if len(data) != entry.size:
            raise self._damaged(f"the checkpoint is cut off: {key!r} is not all there", entry)
        summed: Any = data
        lengths = 0
        if dtype_name(entry.dtype) == "string":
            try:
                summed, lengths = _summed(data.tobytes(), math.prod(_shape(entry)))
            except (IndexError, ValueError, OverflowError):
                raise self._damaged(f"the checkpoint is damaged: {key!r} is no list of strings", entry) from None
        place = (entry.shard_id, entry.offset, entry.size, entry.crc32c)
        if place not in self._verified and masked_crc(summed) != entry.crc32c:
            raise self._damaged(f"the checkpoint is damaged: {key!r} does not fit its checksum", entry)
        self._verified.add(place)
        return data, lengths

    def _damaged(self, what: str, entry: Any) -> LoadError:
        return LoadError(what, where=str(self._path(entry.shard_id)), fix=_FIX)

    def _path(self, shard: int) -> Path:
        return Path(f"{self.prefix}.data-{shard:05d}-of-{self._shard_count:05d}")

    def _shard(self, number: int) -> NDArray[np.uint8]:
        shard = self._shards.get(number)
        if shard is None:
            path = self._path(number)
            try:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    shard = np.asarray(np.memmap(file, mode="r")) if size else np.empty(0, np.uint8)
            except OSError as error:
                raise LoadError(
                    f"can not be read: {error.strerror}", where=str(path), fix="copy the whole model"
                ) from None
            self._shards[number] = shard
        return shard

    def _open_with_tensorflow(self) -> None:
        try:
            import tensorflow as tf
        except ModuleNotFoundError:
            raise LoadError(
                "the checkpoint is of a kind that only TensorFlow reads, and TensorFlow is not installed",
                where=str(self.prefix),
                fix=f"{INSTALL_TENSORFLOW}; compressed tables, tensors in columns and checkpoints of version 1 are of this kind",
            ) from None
        try:
            self._tensorflow = tf.train.load_checkpoint(str(self.prefix))
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise LoadError(f"the checkpoint can not be read: {error}", where=str(self.prefix), fix=_FIX) from None

    def _with_tensorflow(self, key: str) -> NDArray[Any]:
        if self._tensorflow is None:
            self._open_with_tensorflow()
        import tensorflow as tf

        try:
            value = self._tensorflow.get_tensor(key)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            said = f"{key!r} of the checkpoint can not be read: {error}"
            raise LoadError(said, where=str(self.prefix), fix=_FIX) from None
        return np.asarray(value, object if isinstance(value, bytes) else None)


def masked_crc(data: Any) -> int:
    """The checksum of bytes as TensorFlow stores it beside them: their CRC-32C, rotated, with a constant added."""
    crc = 0
    for at in range(0, len(data), _AT_ONCE):  # other threads go on in between: what a server answers while it loads
        crc = google_crc32c.extend(crc, data[at : at + _AT_ONCE])
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _shape(entry: Any) -> tuple[int, ...]:
    return tuple(dim.size for dim in entry.shape.dim)


def _box_of(part: str) -> _Box:
    """The slice that a saver's words are; () of other words."""
    *sizes, ranges = part.split(" ")
    with contextlib.suppress(ValueError):
        ends = zip(map(int, sizes), ranges.split(":"), strict=True)
        box = tuple((full, 0, full) if one == "-" else (full, *map(int, one.split(","))) for full, one in ends)
        return box if all(0 <= at <= at + size <= full for full, at, size in box) else ()
    return ()


def _boxes(entry: Any) -> list[_Box]:
    """The slices of a tensor, in the order in which an index has their entries."""
    ends = sorted(
        [(axis.start, axis.length if axis.HasField("length") else -1) for axis in one.extent] for one in entry.slices
    )
    shape = _shape(entry)
    return [
        tuple((full, at, full if size < 0 else size) for full, (at, size) in zip(shape, one, strict=True))
        for one in ends
    ]


def _entries(data: bytes) -> tuple[dict[str, Any], dict[str, dict[_Box, Any]], int]:
    """BundleEntryProtos by tensor name, those of slices by tensor name and slice, and the number of shards."""
    if len(data) < _FOOTER or data[-8:] != TABLE_MAGIC:
        raise NotSupported("not a table")
    footer = data[-_FOOTER:]
    _, position = varint(footer, 0, _FOOTER)
    _, position = varint(footer, position, _FOOTER)
    index = _block(data, footer, position)
    entries: dict[str, Any] = {}
    slices: dict[str, list[Any]] = {}
    shards = 1
    for _, handle in _pairs(index):
        for key, value in _pairs(_block(data, handle, 0)):
            if key:
                entry = _message(schema.tensor_bundle_pb2.BundleEntryProto(), value)
                if key.startswith(b"\0"):  # of a slice: the name of its tensor, then numbers
                    slices.setdefault(key[1:].partition(b"\0\1")[0].decode(), []).append(entry)
                else:
                    entries[key.decode()] = entry
            else:
                header = _message(schema.tensor_bundle_pb2.BundleHeaderProto(), value)
                shards = header.num_shards
                if header.endianness != 0:
                    raise NotSupported("big-endian")
    found = {
        key: dict(zip(_boxes(entries[key]), parts, strict=True)) for key, parts in slices.items() if key in entries
    }
    return entries, found, shards


def _message(message: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return message


def _block(data: bytes, handle: bytes, position: int) -> bytes:
    """The block that a handle (offset and size as varints) points to."""
    offset, position = varint(handle, position, len(handle))
    size, _ = varint(handle, position, len(handle))
    if (end := offset + size + _TRAILER) > len(data):
        raise ValueError("a block lies outside the file")
    if masked_crc(data[offset : end - 4]) != int.from_bytes(data[end - 4 : end], "little"):
        raise ValueError("a block does not fit its checksum")
    if data[offset + size] != 0:
        raise NotSupported("compressed block")
    return data[offset : offset + size]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of a block. Each key is stored as the length it shares with the one before and the rest."""
    if len(block) < 4:
        raise ValueError("a block is too short")
    end = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    position = 0
    key = b""
    while position < end:
        shared, position = varint(block, position, end)
        rest, position = varint(block, position, end)
        length, position = varint(block, position, end)
        if shared > len(key) or position + rest + length > end:
            raise ValueError("an entry lies outside its block")
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _summed(data: bytes, count: int) -> tuple[bytes, int]:
    """The bytes that the checksum of a tensor of strings is of, and the position where their lengths end.

    Stored are the lengths as varints, a checksum of them, and the bytes of all strings; the lengths are summed as fixed numbers.
    """
    lengths, position = bytearray(), 0
    for _ in range(count):
        length, position = varint(data, position, len(data))
        lengths += length.to_bytes(4 if length < 1 << 32 else 8, "little")
    return bytes(lengths) + data[position:], position


_ASSIGNS, _FILLS, _IDENTITY = ops_with("assigns"), ops_with("fills a table from constants"), ("Identity",)


class CheckpointEntry(NamedTuple):
    """Key of a variable's value in a checkpoint.

    Attributes:
        key: Name of the tensor.
        part: The slice of it, as a saver writes it; "" for all of it.
        by_saver: Whether the model's own saver says so. What it does not save has a name of its own, and may be missing.
    """

    key: str
    part: str
    by_saver: bool


def saved_as(model: Model, nodes: Iterable[str]) -> dict[str, CheckpointEntry]:
    """Keys of a model's variables in its checkpoints, by the name of their node; each has a key of its own."""
    nodes, sources = list(nodes), {name: source for (name, _), source in _restored(model, _ASSIGNS).items()}
    found = {name: CheckpointEntry(*sources[name], True) for name in nodes if name in sources}
    taken = {(place.key, place.part) for place in found.values()}
    for name in nodes:
        if name not in found:
            own = _own_key(model.graph, name)
            place = CheckpointEntry(name if (own, "") in taken else own, "", False)
            taken.add((place.key, ""))
            found[name] = place
    return found


_opened: WeakKeyDictionary[Model, tuple[list[Any], Checkpoint]] = WeakKeyDictionary()
"""The checkpoint of each model that was verified last, and its files as they were: while these are the same, they are not read again, and
tensors are the same memory."""


def _verified(model: Model, prefix: Path) -> Checkpoint:
    saved = Checkpoint(prefix)
    with os.scandir(prefix.parent) as found:
        looks = [(one.path, one.stat()) for one in found if one.name.startswith(f"{prefix.name}.")]
    files = sorted((path, own.st_ino, own.st_size, own.st_mtime_ns) for path, own in looks)
    before, known = _opened.get(model, (None, saved))
    if files and before == files:
        return known
    saved.verify()
    _opened[model] = files, saved
    return saved


def variables(
    model: Model, nodes: Iterable[str] | None = None, *, checkpoint: str | Path | None = None
) -> dict[str, NDArray[Any]]:
    """Values of variables by the name of their node (VarHandleOp or VariableV2) in the top-level graph.

    Args:
        model: A SavedModel, or a .meta file with its checkpoint beside it.
        nodes: The variables wanted; all that have a saved value where it is not given.
        checkpoint: Prefix of the checkpoint (the path without ``.index``), where it is not in its usual place.

    Returns:
        Arrays, which may be read-only views of the mapped files.

    Raises:
        LoadError: There is no checkpoint, any tensor of it is damaged, or it does not hold a variable that was asked for.
    """
    graph = model.graph
    if nodes is None:
        wanted = [name for name, op in zip(graph.names, graph.ops, strict=True) if op in VARIABLES]
    elif not (wanted := list(nodes)):
        return {}
    saved = _verified(model, _prefix(model, checkpoint))
    places = saved_as(model, wanted)
    values = {}
    for name in wanted:
        key, part, _ = places[name]
        if key in saved:
            values[name] = saved.tensor(key, part)
        elif nodes is not None:
            raise LoadError(
                f"the checkpoint has no value for variable {name!r}",
                where=str(model.source),
                fix="export the model again with all its variables tracked",
            )
    return values


def tables(model: Model, nodes: Iterable[str]) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Keys and values of lookup tables by the name of their node, as the model's saver restores them; others are left out, and keys that
    mark places of a table which hold nothing. Arrays may be read-only views of the mapped files.

    Raises:
        LoadError: There is no checkpoint, or it is damaged there.
    """
    sources = _restored(model, _FILLS)
    wanted = [name for name in nodes if (name, 1) in sources and (name, 2) in sources]
    saved = Checkpoint(_prefix(model, None)) if wanted else None  # of which only these are read
    found = {}
    for name in wanted:
        places = [sources[name, slot][0] for slot in (1, 2)]
        if saved is not None and all(place in saved for place in places):
            keys, values = map(saved.tensor, places)
            if keys.ndim == 2 and keys.shape[1] == 1:  # as a table of open addressing has them
                keys = keys[:, 0]
            there = ~np.isin(keys, unused_keys(model.graph, model.graph.index[name]))
            found[name] = (keys, values) if keys.ndim != 1 or there.all() else (keys[there], values[there])
    return found


def unused_keys(graph: Graph, table: int) -> list[Any]:
    """Keys of a table of open addressing that mark places which hold nothing."""
    values = [graph.attrs[key[0]].get("value") for key in graph.inputs(table)]
    loaded = [value.load() for value in values if isinstance(value, TensorValue) and value.dtype != "string"]
    return [value[()] for value in loaded if not value.shape]


def stamp(model: Model) -> tuple[int, ...] | None:
    """Tells the checkpoint of a model from one that somebody puts in its place; None where there is none."""
    try:
        found = os.stat(f"{_prefix(model, None)}.index")
    except (LoadError, OSError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def verify(model: Model) -> None:
    """Refuses a model any tensor of whose own checkpoint is damaged; of a model without a checkpoint none is.

    Raises:
        LoadError: One is; the message names the tensor and the file.
    """
    try:
        prefix = _prefix(model, None)
    except LoadError:
        return
    if Path(f"{prefix}.index").exists():
        Checkpoint(prefix).verify()


def differs(model: Model, name: str, value: NDArray[Any]) -> str:
    """The difference in type or shape between a variable's value and the graph; "" where it fits."""
    dtype, shape = _declared(model, name)
    if dtype and value.dtype.name != dtype and not (dtype == "string" and value.dtype.kind in "OSU"):
        return f"variable {name!r} is {dtype}, there {value.dtype.name}"
    if shape is not None and not fits(value.shape, shape):
        return f"variable {name!r} is {_sizes(shape)}, there {_sizes(value.shape)}"
    return ""


def _declared(model: Model, name: str) -> tuple[str, tuple[int | None, ...] | None]:
    """Type and shape that the graph gives a variable; "" and None for what it does not say."""
    attrs = model.graph.attrs[model.graph.index[name]]
    dtype, shape = attrs.get("dtype"), attrs.get("shape")
    return dtype if isinstance(dtype, str) else "", shape if isinstance(shape, tuple) else None


def _sizes(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _prefix(model: Model, checkpoint: str | Path | None) -> Path:
    if checkpoint is not None:
        return Path(str(checkpoint).removesuffix(".index"))
    if model.is_saved_model:
        return model.path / "variables" / "variables"
    beside = model.path.with_suffix("")
    if model.meta is not None and Path(f"{beside}.index").exists():
        return beside
    raise LoadError(
        "holds a graph without the values of its variables",
        where=str(model.source),
        fix=f"put the checkpoint beside it ({beside.name}.index and its data files), freeze it, or give a SavedModel",
    )


def _own_key(graph: Graph, name: str) -> str:
    """The key of a variable that no saver restores: its shared name, else its node's."""
    node = graph.index.get(name)
    return name if node is None else graph.attrs[node].get("shared_name") or name


def _restored(model: Model, ops: Container[str]) -> dict[tuple[str, int], tuple[str, str]]:
    """By node of a variable or table, and slot of the op of these that gives it its value, the tensor that the saver restores it from,
    and the slice of it."""
    graph = model.graph
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for variable, slot, source in _assignments(graph, ops):
        found.setdefault((graph.names[variable], slot), source)
    restore = graph.index.get(split_tensor(model.meta.saver_def.restore_op_name)[0]) if model.meta is not None else None
    called = None if restore is None else graph.attrs[restore].get("f")
    if restore is None or not isinstance(called, FunctionRef) or called.name not in graph.functions:
        return found
    given = graph.inputs(restore)
    function = graph.functions[called.name]
    for parameter, slot, source in _assignments(function.body, ops):
        if parameter < min(len(function.parameters), len(given)):
            found.setdefault((graph.names[behind(graph, given[parameter], _IDENTITY)[0]], slot), source)
    return found


def _assignments(graph: Graph, ops: Container[str]) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """(variable, table or parameter, slot, (tensor name, slice)) for every restored tensor that one of these ops is given."""
    for node, op in enumerate(graph.ops):
        if op != "RestoreV2":
            continue
        inputs = graph.inputs(node)
        names = _constant_strings(graph, inputs[1][0])
        slices = _constant_strings(graph, inputs[2][0])
        for edge in graph.out_edges(node).tolist():
            port = int(graph.edges.port[edge])
            assigned, slot = _assigned_by(graph, edge, ops)
            if assigned is not None and 0 <= port < min(len(names), len(slices)):
                yield assigned, slot, (names[port], slices[port])


def _assigned_by(graph: Graph, edge: int, ops: Container[str]) -> tuple[int | None, int]:
    """The variable or table that one of these ops gives the tensor of an edge, directly or through Identity ops, and its slot."""
    edges = graph.edges
    while graph.ops[edges.dst[edge]] == "Identity":
        onward = [e for e in graph.out_edges(int(edges.dst[edge])).tolist() if edges.port[e] != CONTROL]
        if not onward:
            return None, 0
        edge = onward[0]
    target, slot = int(edges.dst[edge]), int(edges.slot[edge])
    if graph.ops[target] not in ops or slot < 1:
        return None, 0
    return behind(graph, graph.inputs(target)[0], _IDENTITY)[0], slot


def _constant_strings(graph: Graph, node: int) -> list[str]:
    value = graph.attrs[node].get("value")
    if not isinstance(value, TensorValue) or value.dtype != "string":
        return []
    return [item.decode(errors="replace") for item in value.load().ravel()]
