"""Values of inputs from files: NumPy's .npy and .npz, TFRecords, and JSON as TensorFlow Serving and saved_model_cli take it.

Nothing in a file is run: arrays of objects, which NumPy would unpickle, are refused. Nothing a header says is believed beyond the
size of the file.

Values of inputs in JSON, as TensorFlow Serving and saved_model_cli take it.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import LoadError
from msplit.formats.bundle import masked_crc
from msplit.formats.files import open_regular
from msplit.formats.tensors import numpy_dtype
from msplit.inputs.examples import encode
from msplit.inputs.reference import DAMAGED, PACKED, unpacked

UNNAMED = ""
ROWS, COLUMNS, EXAMPLES = "instances", "inputs", "examples"
FIX = 'give NumPy\'s .npy or .npz, a TFRecord file, or JSON such as {"instances": [{"x": [1, 2]}]}'


class Infinite(float):
    """`Infinity` as it is written; a number that is too large for its type is another thing."""


def loads(text: str | bytes | bytearray) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is none, or nested too deeply, or an object has a key twice, of which only one would be seen.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=Infinite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        if "set_int_max_str_digits" in str(error):  # Python's advice, which is not for who wrote the text
            raise ValueError("a number has more digits than any type") from None
        raise


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"key {next(name for name in counts if counts[name] > 1)!r} is there twice")
    return found


def values_by_input(data: bytes, where: str) -> Mapping[str, Any]:
    """Values by input, "" for one that has no name, from rows, columns or examples."""
    try:
        message = loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise LoadError(f"is no JSON: {error}", where=where, fix=FIX) from None
    if isinstance(message, dict):
        if EXAMPLES in message and isinstance(message[EXAMPLES], list):
            context, examples = message.get("context", {}), message[EXAMPLES]
            if not all(isinstance(features, dict) for features in (context, *examples)):
                what = f"{EXAMPLES!r} are no objects of features, or their 'context' is none"
                raise LoadError(what, where=where, fix='write {"examples": [{"feature": [1, 2]}]}')
            return {UNNAMED: [{**context, **example} for example in examples]}
        if COLUMNS in message and not message.keys() - {COLUMNS, "signature_name"}:
            return message[COLUMNS] if is_named(message[COLUMNS]) else {UNNAMED: message[COLUMNS]}
        if ROWS not in message or message.keys() - {ROWS, "signature_name"}:
            return message
        message = message[ROWS]
    if not isinstance(message, list):
        raise LoadError(f"{ROWS!r} is no list", where=where, fix=FIX)
    return rows_as_columns(message, where)


def is_named(value: Any) -> bool:
    """True if it is an object of inputs, and not one that stands for bytes."""
    return isinstance(value, dict) and value.keys() != {"b64"}


def rows_as_columns(rows: list[Any], where: str | None = None) -> Mapping[str, Any]:
    """Values by input, "" for one that has no name, from a list of rows.

    Raises:
        LoadError: Rows have different inputs.
    """
    if not rows or not all(is_named(row) for row in rows):
        return {UNNAMED: rows}
    names = rows[0].keys()
    for number, row in enumerate(rows):
        if row.keys() != names:
            raise LoadError(
                f"instance {number} has other inputs than the first: {', '.join(sorted(row.keys() ^ names))}",
                where=where,
                fix="give every instance the same inputs",
            )
    return {name: [row[name] for row in rows] for name in names}


def json_array(value: Any, dtype: str, name: str, where: str | None = None, source: str = "the file") -> NDArray[Any]:
    """A value as an array of TensorFlow's type `dtype`.

    Raises:
        LoadError: It is none of that type, or has rows of different lengths.
    """
    uneven = LoadError(f"input {name!r} has rows of different lengths", where=where, fix="make them equal")
    try:
        # As objects: NumPy would make all numbers beside a string as long as the string.
        items = np.array(value, dtype=object)
    except ValueError:
        raise uneven from None
    flat = items.ravel().tolist()
    kinds = {float if kind is Infinite else kind for kind in set(map(type, flat))}
    if list in kinds:
        raise uneven
    # Strings, then the kinds of JSON that stand for numbers of the type.
    if dtype == "string":
        strings = [_bytes_of(item, name, where, source) for item in flat]
        return np.array(strings, dtype=object).reshape(items.shape)
    kind = numpy_dtype(dtype)
    allowed = {bool} if kind.kind == "b" else {int} if kind.kind in "iu" else {int, float}
    if not kinds <= allowed:
        said = {str: "strings", bool: "true and false", float: "numbers with a fraction", int: "numbers"}
        found = next((said[one] for one in said if one in kinds - allowed), "no plain numbers")
        raise LoadError(
            f"input {name!r} is {dtype}, {source} has {found}",
            where=where,
            fix=f"write {'true or false' if kind.kind == 'b' else 'numbers'}",
        )
    # Numbers that the type can not hold: whole ones by its limits, others by what becomes infinite.
    larger = LoadError(f"input {name!r} is {dtype}, {source} has larger numbers", where=where, fix="mend them")
    limits = np.iinfo(kind) if kind.kind in "iu" and flat else None
    if limits is not None and (min(flat) < limits.min or max(flat) > limits.max):
        raise larger
    try:
        with np.errstate(over="ignore"):
            array: NDArray[Any] = items.astype(kind)
    except OverflowError:
        raise larger from None
    if limits is None and any(type(flat[place]) is not Infinite for place in np.flatnonzero(_is_infinite(array))):
        raise larger
    return array


def _is_infinite(values: NDArray[Any]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isinf(values.astype(np.float32) if values.dtype.kind == "V" else values)
    return found


def _bytes_of(item: Any, name: str, where: str | None, source: str) -> bytes:
    """A string; ``{"b64": …}`` for bytes; an object of other names for the tf.Example of these features."""
    if isinstance(item, str):
        return _encoded(item)
    if isinstance(item, dict):
        try:
            return _encoded(item) if item.keys() == {"b64"} else json_example(item)
        except (OverflowError, TypeError, ValueError) as error:
            raise LoadError(
                f"input {name!r}: {error}", where=where, fix='write {"b64": "…"} or {"feature": [1, 2]}'
            ) from None
    raise LoadError(
        f"input {name!r} is made of strings, {source} has {json.dumps(item)[:40]}",
        where=where,
        fix='write a string, {"b64": "…"} for bytes, or {"feature": [1, 2]} for a tf.Example',
    )


def _encoded(item: Any) -> bytes:
    """Bytes of a string, or of ``{"b64": …}``."""
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if not isinstance(item["b64"], str):
        raise TypeError("what is in 'b64' is no text")
    text = "".join(item["b64"].split())  # as TensorFlow Serving takes it: with blanks, and without what fills it up
    return base64.b64decode(text if "=" in text else text + "=" * (-len(text) % 4), validate=True)


def json_example(features: Mapping[str, Any]) -> bytes:
    """A serialized `tf.Example` of the features of an object: of each a number, true or false (1 or 0), a string, ``{"b64": …}`` for bytes,
    or a list of such of one type. An empty list is a feature that is missing.

    Raises:
        OverflowError, TypeError, ValueError: A feature has something else.
    """
    return encode({key: _feature(values) for key, values in features.items()})


def _feature(values: Any) -> list[Any]:
    """The values of a feature, all of one type."""
    listed = values if isinstance(values, list) else [values]
    if all(isinstance(value, str) or (isinstance(value, dict) and value.keys() == {"b64"}) for value in listed):
        return [*map(_encoded, listed)]
    if not all(isinstance(value, int | float) for value in listed):
        raise ValueError(f"a feature is a list of strings or of numbers, not {json.dumps(values)[:40]}")
    if any(isinstance(value, float) for value in listed):
        return [*map(float, listed)]
    if any(not -(1 << 63) <= value < 1 << 63 for value in listed):
        raise ValueError("a feature has numbers of more than 64 bits")
    return [*map(int, listed)]


_NPY, _ZIP, _GZIP = b"\x93NUMPY", b"PK", b"\x1f\x8b"
_MOST_DEFLATED = 1100
"""Deflate makes no file smaller than by this factor: what claims more is no array."""

_SAVE = "write it with numpy.save; strings as a 'U' or 'S' array"


def names_in(path: Path) -> list[str]:
    """The inputs that a file names; [""] where it holds one value without a name.

    Raises:
        LoadError: It can not be read.
    """
    with _opened(path) as (file, kind):
        if kind == "npz":
            with _archive(file, path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
            own = [name.removeprefix("input/") for name in names if name.startswith("input/")]
            return own if PACKED in names else names
        return list(values_by_input(file.read(), str(path))) if kind == "json" else [UNNAMED]


def read_value(name: str, path: Path, dtype: str, most: int | None) -> NDArray[Any]:
    """The value of one input, of the type that the file has; JSON as near to the wanted type as its numbers go.

    Args:
        name: The input.
        path: Where it is; ``file.npz[key]`` for another array than that of the input's name.
        dtype: Type that the model wants.
        most: How many records of a TFRecord file are read; None for all.

    Raises:
        LoadError: The file can not be read, or has no such value.
    """
    path, key = _with_key(path)
    with _opened(path, name) as (file, kind):
        if kind == "npy":
            return _npy(file, os.fstat(file.fileno()).st_size, name, str(path))
        if kind == "npz":
            return _npz(file, key or name, name, path)
        if kind == "json":
            columns = values_by_input(file.read(), str(path))
            wanted = key or (UNNAMED if list(columns) == [UNNAMED] else name)
            if wanted not in columns:
                raise _missing(wanted, columns, str(path))
            return json_array(columns[wanted], dtype, name, str(path))
        if dtype != "string":
            raise LoadError(f"input {name!r} is {dtype}, TFRecords are strings", where=str(path), fix=FIX)
        return np.array(records(file, str(path), most), dtype=object)


def _with_key(path: Path) -> tuple[Path, str]:
    """``file.npz[key]`` as the file and the key, unless a file has that very name."""
    text = str(path)
    start = text.rfind("[")
    if not text.endswith("]") or start < 1 or os.path.lexists(path):
        return path, ""
    return Path(text[:start]), text[start + 1 : -1]


@contextmanager
def _opened(path: Path, name: str = "") -> Iterator[tuple[IO[bytes], str]]:
    """A regular file with its kind, from its first bytes."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(path))
            head = file.read(12)
            file.seek(0)
        except OSError as error:
            raise LoadError(
                f"the value{f' of input {name!r}' if name else 's'} can not be read: {error.strerror or error}",
                where=str(path),
                fix="check the path",
            ) from error
        kind = _kind(head)
        if not kind and path.suffix == ".npy":
            raise LoadError(_no_array(name), where=str(path), fix=_SAVE)
        if not kind:
            raise LoadError("is of no format that inputs are read from", where=str(path), fix=FIX)
        yield file, kind


def _kind(head: bytes) -> str:
    if head.startswith(_NPY):
        return "npy"
    if head.startswith(_ZIP):
        return "npz"
    if head.startswith(_GZIP) or (len(head) == 12 and _fits(head[:8], head[8:])):
        return "tfrecord"
    return "json" if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") else ""


# --- NumPy


def _no_array(name: str) -> str:
    return f"the value of input {name!r} is not an array in NumPy's .npy format"


def _npy(file: IO[bytes], size: int, name: str, where: str) -> NDArray[Any]:
    """An array; `size` are the bytes that there are."""
    try:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if header is None:
            raise LoadError(f"this version of NumPy's format, {version}, is not known", where=where, fix=_SAVE)
        shape, fortran, dtype = header(file)
        if dtype.hasobject:
            raise LoadError(
                "it holds Python objects, which only unpickling would give, and that can run code",
                where=where,
                fix="save strings as a 'U' or 'S' array: array.astype('U')",
            )
        count = math.prod(shape)
        there = size - file.tell()
        if count * dtype.itemsize > there:
            raise LoadError(
                f"the header claims {count:,} elements of {dtype.itemsize} bytes, and there are {max(there, 0):,} bytes",
                where=where,
                fix="the file is cut off or damaged: save it again",
            )
        data = file.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise LoadError("the file is cut off", where=where, fix="save it again")
        return np.ndarray(shape, dtype, bytearray(data), order="F" if fortran else "C")
    except DAMAGED as error:
        raise LoadError(_no_array(name), where=where, fix=_SAVE) from error


def _archive(file: IO[bytes], path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (*DAMAGED, OSError) as error:
        raise LoadError(
            "is no .npz file, or a damaged one", where=str(path), fix="write it with numpy.savez"
        ) from error


def _npz(file: IO[bytes], key: str, name: str, path: Path) -> NDArray[Any]:
    """The array of a name; one of a reference that bench wrote; or the only one."""
    where = str(path)
    with _archive(file, path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        found = next((k for k in (key, f"input/{key}") if k in members), None)
        if found is None and len(members) == 1:
            (found,) = members
        if found is None:
            raise _missing(key, members, where)
        array = _member(archive, members[found], name, where)
        if PACKED in members and found != PACKED:
            try:
                how = json.loads(str(_member(archive, members[PACKED], name, where)[()]))["packed"].get(found)
                return unpacked(array, how)
            except DAMAGED as error:
                raise LoadError(
                    "this is a damaged reference file of msplit", where=where, fix="make it again"
                ) from error
        return array


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, where: str) -> NDArray[Any]:
    if member.file_size > _MOST_DEFLATED * max(member.compress_size, 1):
        raise LoadError(
            f"claims {member.file_size:,} bytes in {member.compress_size:,}, which can not be",
            where=f"{where}[{member.filename}]",
            fix="the file is damaged: save it again",
        )
    try:
        with archive.open(member) as stream:
            return _npy(stream, member.file_size, name, f"{where}[{member.filename.removesuffix('.npy')}]")
    except (*DAMAGED, OSError) as error:
        raise LoadError(f"the archive is damaged: {error}", where=where, fix="write it with numpy.savez") from error


def _missing(name: str, known: Iterable[str], where: str) -> LoadError:
    listed = ", ".join(sorted(known)[:8]) or "nothing"
    return LoadError(
        f"the file has no value for input {name!r}, but {listed}",
        where=where,
        fix=f"name one: --input {name}={where}[KEY]",
    )


# --- TFRecord


def records(file: IO[bytes], where: str, most: int | None) -> list[bytes]:
    """The first records of a TFRecord file: length, its checksum, data, its checksum each."""
    damaged = "the file is cut off or damaged: write it again"
    zipped = file.read(2) == _GZIP
    file.seek(0)
    stream = gzip.GzipFile(fileobj=file) if zipped else file
    size = os.fstat(file.fileno()).st_size * (_MOST_DEFLATED if zipped else 1)
    records: list[bytes] = []
    try:
        while most is None or len(records) < most:
            head = stream.read(12)
            if not head:
                break
            if len(head) < 12 or not _fits(head[:8], head[8:]):
                raise LoadError(f"record {len(records)} has a damaged length", where=where, fix=damaged)
            (length,) = struct.unpack("<Q", head[:8])
            data = stream.read(length + 4) if length < size else b""
            if len(data) < length + 4:
                raise LoadError(f"record {len(records)} of {length:,} bytes is not all there", where=where, fix=damaged)
            if not _fits(data[:length], data[length:]):
                raise LoadError(f"record {len(records)} does not fit its checksum", where=where, fix=damaged)
            records.append(data[:length])
    except (OSError, EOFError, zlib.error) as error:
        raise LoadError(f"the compressed records are damaged: {error}", where=where, fix=damaged) from error
    if not records:
        raise LoadError("the file holds no records", where=where, fix=FIX)
    return records


def _fits(data: bytes, checksum: bytes) -> bool:
    return masked_crc(data) == int.from_bytes(checksum, "little")
