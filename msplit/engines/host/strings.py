"""Host ops on strings: case, pieces, numbers, hash buckets, and lookup tables."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.host.hashing import FARM, PLAIN, SIP, KeyPlaces, all_bytes, hashes
from msplit.engines.host.table import HostNode, NativeNode, NotOurs, Run, as_bytes, check, host_op, objects

Array = NDArray[Any]

_NEWER = re.compile("([Ⱟⱟ\ua7c0\ua7c1\ua7d0\ua7d1\ua7d6-\ua7d9\U00010570-\U000105bc])")
"""Letters of Unicode 14, which Python has in two cases and TensorFlow's ICU (Unicode 13) not yet."""


def each(function: Callable[[Any], Any], texts: Array) -> Array:
    """A function of every string."""
    return objects([function(text) for text in texts.reshape(-1).tolist()], texts.shape)


@host_op("StringLower", "StringUpper", native="!encoding")
def change_case(node: HostNode) -> Run:
    """Lower or upper case of ASCII, or of Unicode where the attribute says UTF-8. That ends at a zero byte, as in TensorFlow."""
    lower = node.op == "StringLower"
    if not node.attrs["encoding"]:
        return lambda texts: each(bytes.lower if lower else bytes.upper, texts)
    check(str(node.attrs["encoding"]).lower() == "utf-8", "the encoding is not UTF-8")
    change: Callable[[str], str] = str.lower if lower else str.upper

    def one(text: bytes) -> bytes:
        pieces = _NEWER.split(text.partition(b"\0")[0].decode("utf-8", "replace"))
        return "".join(piece if number % 2 else change(piece) for number, piece in enumerate(pieces)).encode()

    return lambda texts: each(one, texts)


@host_op("StringStrip", native="")
def strip(node: HostNode) -> Run:
    """Strings without white space around them."""
    return lambda texts: each(bytes.strip, texts)


@host_op("StringLength")
def length(node: HostNode) -> Run:
    """Bytes of each string, or characters of UTF-8: bytes that go on with one are not counted."""
    more = bytes(range(0x80, 0xC0))
    count: Callable[[bytes], int] = (
        len if node.attrs["unit"] == "BYTE" else lambda text: len(text.translate(None, more))
    )
    return lambda texts: np.array([*map(count, texts.reshape(-1).tolist())], np.int32).reshape(texts.shape)


@host_op("StringJoin")
def join(node: HostNode) -> Run:
    """Strings of several tensors behind each other. Scalars go with every element."""
    separator = as_bytes(node.attrs["separator"])

    def run(*inputs: Array) -> Array:
        shapes = {x.shape for x in inputs if x.ndim}
        check(len(shapes) <= 1, "the strings to join have different shapes")
        columns = (x.reshape(-1).tolist() for x in np.broadcast_arrays(*inputs))
        return objects([separator.join(parts) for parts in zip(*columns, strict=True)], next(iter(shapes), ()))

    return run


@host_op("Substr")
def substr(node: HostNode) -> Run:
    """Bytes of each string from a position on; a negative one counts from the end."""
    if node.attrs["unit"] != "BYTE":
        raise NotOurs

    def one(text: bytes, start: int, size: int) -> bytes:
        check(-len(text) <= start <= len(text), f"pos {start} out of range for a string of {len(text)} bytes")
        start += len(text) if start < 0 else 0
        return text[start:] if size < 0 else text[start : start + size]

    def run(*inputs: Array) -> Array:
        columns = np.broadcast_arrays(*inputs)
        made = [one(*row) for row in zip(*(x.reshape(-1).tolist() for x in columns), strict=True)]
        return objects(made, columns[0].shape)

    return run


def _split(text: bytes, separator: bytes, most: int) -> list[bytes]:
    """The pieces of a string; without a separator, those between white space. With a limit, the rest comes last, even where it is empty."""
    if most == 0:
        return [text]
    if separator or most < 0:
        return text.split(separator or None, most)
    pieces = text.split(None, most)
    return [*pieces, b""] if len(pieces) == most else pieces


def _listed(rows: Sequence[list[bytes]]) -> tuple[Array, Array, Array]:
    """Lists of strings as a sparse tensor: indices, values and shape."""
    counts = np.array([*map(len, rows)], np.int64)
    row = np.repeat(np.arange(len(rows)), counts)
    column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = objects([*itertools.chain.from_iterable(rows)], (len(row),))
    return np.stack([row, column], 1), values, np.array([len(rows), counts.max(initial=0)], np.int64)


@host_op("StringSplitV2", native=lambda node: None if node.attrs["maxsplit"] >= 0 else NativeNode(()))
def split_v2(node: HostNode) -> Run:
    """The pieces of each string, as a sparse tensor."""
    most = int(node.attrs["maxsplit"])

    def run(texts: Array, separator: Array) -> tuple[Array, Array, Array]:
        check(texts.ndim == 1, "strings to split have one axis")
        return _listed([_split(text, separator.item(), most) for text in texts.tolist()])

    return run


@host_op("StringSplit")
def split(node: HostNode) -> Run:
    """The pieces of each string between any of the delimiter's bytes, as a sparse tensor."""
    skip = bool(node.attrs["skip_empty"])

    def run(texts: Array, delimiter: Array) -> tuple[Array, Array, Array]:
        check(texts.ndim == 1, "strings to split have one axis")
        letters = delimiter.item()
        between = re.compile(b"[" + re.escape(letters) + b"]") if letters else re.compile(b"(?<=.)(?=.)", re.DOTALL)
        rows = [between.split(text) if text else [] for text in texts.tolist()]
        return _listed([[piece for piece in row if piece] for row in rows] if skip else rows)

    return run


_FLOAT = re.compile(rb"[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|inf(inity)?)", re.IGNORECASE)
_HEX = re.compile(rb"[+-]?0x([0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(p[+-]?\d+)?", re.IGNORECASE)
_NAN = re.compile(rb"[+-]?nan(\(\w*\))?", re.IGNORECASE)


def _float64(text: bytes) -> float:
    text = text.strip()
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NAN.fullmatch(text):
        return math.nan
    if _HEX.fullmatch(text):
        return float.fromhex(text.decode())
    raise _no_number(text)


def _float32(text: bytes) -> np.float32:
    """The nearest number: one that is rounded twice, where the first result lies in the middle of two, may be the other."""
    wide = _float64(text)
    with np.errstate(over="ignore"):
        near = np.float32(wide)
    if math.isfinite(wide) and wide and np.float64(wide).view(np.int64) & 0x1FFFFFFF == 0x10000000:
        exact = Fraction(wide if b"x" in text.lower() else text.strip().decode())
        if exact != Fraction(wide):
            side = np.float32(np.inf if exact > Fraction(wide) else -np.inf)
            if (float(near) > wide) != (side > 0):
                near = np.nextafter(near, side)
    return near


def _whole(low: int, high: int) -> Callable[[bytes], int]:
    signs = rb"[+-]?" if low else rb"\+?"
    form = re.compile(signs + rb"\d+")

    def one(text: bytes) -> int:
        number = text.strip()
        if not form.fullmatch(number) or not low <= (value := int(number)) <= high:
            raise _no_number(text)
        return value

    return one


def _no_number(text: bytes) -> ValueError:
    return ValueError(
        f"StringToNumberOp could not correctly convert string: {text.decode('utf-8', 'backslashreplace')}"
    )


@host_op("StringToNumber")
def to_number(node: HostNode) -> Run:
    """The number that each string says."""
    name = node.dtype("out_type")
    one: Callable[[bytes], Any]
    if name in ("float32", "float64"):
        one = _float32 if name == "float32" else _float64
    else:
        limits = np.iinfo(name)
        one = _whole(int(limits.min), int(limits.max))
    return lambda texts: np.array([*map(one, texts.reshape(-1).tolist())], name).reshape(texts.shape)


@host_op("AsString")
def as_string(node: HostNode) -> Run:
    """Each number as text."""
    name, precision, fill = node.dtype("T"), int(node.attrs["precision"]), node.attrs["fill"]
    if fill or int(node.attrs["width"]) != -1:
        raise NotOurs
    if name == "bool":
        return lambda x: each(lambda value: b"true" if value else b"false", x)
    if name.startswith(("int", "uint")):
        if precision > -1:
            raise NotOurs
        return lambda x: each(b"%d".__mod__, x)
    if name not in ("float32", "float64"):
        raise NotOurs
    kind = "e" if node.attrs["scientific"] else "g" if node.attrs["shortest"] else "f"
    form = f"%{f'.{precision}' if precision > -1 else ''}{kind}"

    def one(value: float) -> bytes:
        if math.isnan(value):
            return b"-nan" if math.copysign(1.0, value) < 0 else b"nan"
        return (form % value).encode()

    return lambda x: each(one, x)


@host_op("StringToHashBucketFast", "StringToHashBucketStrong", "StringToHashBucket", native="num_buckets key")
def to_hash_bucket(node: HostNode) -> Run:
    """A number below `num_buckets` for each string: FarmHash, SipHash with the key of the attribute, or TensorFlow's own hash."""
    buckets = int(node.attrs["num_buckets"])
    kind = {"StringToHashBucketFast": FARM, "StringToHashBucketStrong": SIP}.get(node.op, PLAIN)
    key = tuple(map(int, node.attrs.get("key", (0, 0))))
    if len(key) != 2:
        raise NotOurs

    def run(texts: Array) -> Array:
        return hashes(texts.reshape(-1), kind, (key[0], key[1]), buckets).view(np.int64).reshape(texts.shape)

    return run


class LookupTable:
    """A lookup table of two arrays of one length: of strings or whole numbers, and of any values, or rows of values.

    Raises:
        NotOurs: It is another one.
    """

    def __init__(self, keys: Array, values: Array) -> None:
        plain = keys.dtype.kind in "iu" or (keys.dtype.hasobject and all_bytes(keys))
        if keys.ndim != 1 or len(keys) != len(values) or not plain:
            raise NotOurs
        self.values, self.places = values, KeyPlaces(keys)


def _with_default(node: HostNode) -> tuple[LookupTable, Array]:
    """A node's table, and its values with the default of the node behind them."""
    table, default = node.table, node.known[-1] if node.known else None
    if not isinstance(table, LookupTable) or default is None:
        raise NotOurs
    shape = table.values.shape[1:]
    if default.shape != shape and (shape or default.size != 1):  # one default for each key
        raise NotOurs
    values = np.empty((len(table.values) + 1, *shape), table.values.dtype)
    values[:-1], values[-1] = table.values, default.reshape(shape)[()]
    return table, values


def _table_in_memory(node: HostNode) -> NativeNode | None:
    """The table for C: where to begin a search, keys and values."""
    table, values = _with_default(node)
    slots = table.places.slots
    return None if slots is None or values.ndim > 1 else NativeNode([], [slots, table.places.keys, 1, values])


@host_op("LookupTableFindV2", native=_table_in_memory)
def find(node: HostNode) -> Run:
    """The value of each key, a default for those that are not in the table."""
    table, values = _with_default(node)
    return lambda _, keys, __: values[table.places.of(keys.reshape(-1))].reshape(*keys.shape, *values.shape[1:])


@host_op("LookupTableSizeV2", native=lambda node: NativeNode([], [np.array(len(node.table.values))]))
def table_size(node: HostNode) -> Run:
    """The number of keys; a constant, but for what TensorFlow has it run behind."""
    table = node.table
    if not isinstance(table, LookupTable):
        raise NotOurs
    return lambda _: np.array(len(table.values), np.int64)
