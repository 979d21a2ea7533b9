"""Reads TensorFlow's checkpoints (tensor bundles) without TensorFlow.

A bundle is ``PREFIX.index``, a LevelDB table from tensor name to BundleEntryProto, and shards ``PREFIX.data-00000-of-00001`` with the
bytes. Formats: leveldb's table_format.md, and tensor_bundle.proto. TensorFlow writes the table uncompressed. What this
reader does not know (compressed tables, tensors saved in slices, checkpoints of version 1) it leaves to TensorFlow's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import INSTALL_TENSORFLOW, LoadError
from msplit.formats import wire
from msplit.formats.special import open_regular, read_bytes
from msplit.formats.tensors import dtype_name, numpy_dtype, string_array
from msplit.opset import proto

_MOST_INDEX = 1 << 30
_FOOTER = 48
_TRAILER = 5  # one byte of compression type, four of checksum
_MAGIC = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"


class NotSupported(Exception):
    """Only TensorFlow's own reader reads this."""


class Checkpoint:
    """The tensors of a checkpoint, read one by one. Its `prefix` is the path without ``.index``.

    Raises:
        LoadError: There is no such checkpoint, or its index is damaged.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._entries: dict[str, Any] | None = None
        self._shards: dict[int, NDArray[np.uint8]] = {}
        self._tensorflow: Any = None
        try:
            self._entries, self._shard_count = _entries(read_bytes(f"{prefix}.index", _MOST_INDEX))
        except NotSupported:
            self._open_with_tensorflow()
        except EOFError:
            raise LoadError(
                f"the index of the checkpoint is longer than {_MOST_INDEX >> 20} MiB", where=f"{prefix}.index"
            ) from None
        except FileNotFoundError:
            raise LoadError("there is no checkpoint", where=f"{prefix}.index", fix="copy the whole model") from None
        except OSError as error:
            raise LoadError(f"can not be read: {error.strerror}", where=f"{prefix}.index") from None
        except (ValueError, IndexError) as error:
            raise LoadError(
                f"the index of the checkpoint is damaged: {error}",
                where=f"{prefix}.index",
                fix="copy or export it again",
            ) from None

    def __contains__(self, key: str) -> bool:
        return key in self._entries if self._entries is not None else bool(self._tensorflow.has_tensor(key))

    def tensor(self, key: str) -> NDArray[Any]:
        """A tensor. Numbers are read-only views of the mapped file where they are aligned in it.

        Raises:
            KeyError: The checkpoint does not have it.
            LoadError: Its bytes are not there.
        """
        if self._entries is None:
            return self._with_tensorflow(key)
        entry = self._entries[key]
        name = dtype_name(entry.dtype)
        if entry.slices or name in ("resource", "variant"):
            return self._with_tensorflow(key)
        shape = tuple(dim.size for dim in entry.shape.dim)
        data = self._shard(entry.shard_id)[entry.offset : entry.offset + entry.size]
        if len(data) != entry.size:
            raise LoadError(
                f"the checkpoint is cut off: {key!r} is not all there",
                where=str(self.prefix),
                fix="copy or export it again",
            )
        if name == "string":
            return _strings(data.tobytes(), math.prod(shape)).reshape(shape)
        dtype = numpy_dtype(name)
        if math.prod(shape) * dtype.itemsize != entry.size:
            raise LoadError(f"the size of {key!r} does not fit its shape", where=str(self.prefix))
        values = np.frombuffer(data, dtype)
        return (values if values.flags.aligned else values.copy()).reshape(shape)

    def _shard(self, number: int) -> NDArray[np.uint8]:
        shard = self._shards.get(number)
        if shard is None:
            path = Path(f"{self.prefix}.data-{number:05d}-of-{self._shard_count:05d}")
            try:
                with open_regular(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    shard = np.memmap(file, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
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
                fix=f"{INSTALL_TENSORFLOW}; compressed tables, tensors in slices and checkpoints of version 1 are of this kind",
            ) from None
        try:
            self._tensorflow = tf.train.load_checkpoint(str(self.prefix))
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            raise LoadError(f"the checkpoint can not be read: {error}", where=str(self.prefix)) from None

    def _with_tensorflow(self, key: str) -> NDArray[Any]:
        if self._tensorflow is None:
            self._open_with_tensorflow()
        value: NDArray[Any] = self._tensorflow.get_tensor(key)
        return value


def _entries(data: bytes) -> tuple[dict[str, Any], int]:
    """BundleEntryProtos by tensor name, and the number of shards."""
    if len(data) < _FOOTER or data[-8:] != _MAGIC:
        raise NotSupported("not a table")
    footer = data[-_FOOTER:]
    _, position = wire.varint(footer, 0, _FOOTER)
    _, position = wire.varint(footer, position, _FOOTER)
    index = _block(data, footer, position)
    entries: dict[str, Any] = {}
    shards = 1
    for _, handle in _pairs(index):
        for key, value in _pairs(_block(data, handle, 0)):
            if key:
                # Slices of one tensor have keys that are no text; the tensor's own entry tells of them.
                if not key.startswith(b"\0"):
                    entries[key.decode()] = _message(proto.tensor_bundle_pb2.BundleEntryProto(), value)
            else:
                header = _message(proto.tensor_bundle_pb2.BundleHeaderProto(), value)
                shards = header.num_shards
                if header.endianness != 0:
                    raise NotSupported("big-endian")
    return entries, shards


def _message(message: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return message


def _block(data: bytes, handle: bytes, position: int) -> bytes:
    """The block that a handle (offset and size as varints) points to."""
    offset, position = wire.varint(handle, position, len(handle))
    size, _ = wire.varint(handle, position, len(handle))
    if offset + size + _TRAILER > len(data):
        raise ValueError("a block lies outside the file")
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
        shared, position = wire.varint(block, position, end)
        rest, position = wire.varint(block, position, end)
        length, position = wire.varint(block, position, end)
        if shared > len(key) or position + rest + length > end:
            raise ValueError("an entry lies outside its block")
        key = key[:shared] + block[position : position + rest]
        position += rest
        yield key, block[position : position + length]
        position += length


def _strings(data: bytes, count: int) -> NDArray[Any]:
    """Strings of a bundle: the varint lengths, their checksum, then the bytes of all."""
    position = 0
    for _ in range(count):
        try:
            _, position = wire.varint(data, position, len(data))
        except (IndexError, ValueError):
            raise LoadError("a string tensor of the checkpoint is damaged", fix="copy or export it again") from None
    return string_array(data[:position] + data[position + 4 :], count)
