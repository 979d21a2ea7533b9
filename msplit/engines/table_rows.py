"""Lookup tables that do not fit on the GPU: which leave it, what is counted of them, and their rows as int8 with a scale, or as bf16.

A row of int8 is numbers from -127 to 127 times one float32 number, its scale: the largest magnitude of the row by 127, cut to 17 bits of
mantissa.
So each product is exact in float32, whoever computes it, and rows that were rounded once are not changed by another time. A model whose
rows were rounded so is a model like any other: what it gives is held against TensorFlow on the same rows, to the same tolerances, and what
the rounding itself does is told apart.

A number of bf16 is the nearest one of float32 whose lower 16 bits are zero; of two that are as near, the even one. NaN and
infinities stay.

In memory a row is words of 4 bytes: its numbers, zeros up to a multiple of 16 bytes, and of int8 last the scale.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from msplit.core.arguments import number
from msplit.errors import EngineError, MsplitError
from msplit.progress import during

LOOKUPS = (
    "table_rows_looked_up",
    "table_rows_found",
    "table_rows_admitted",
    "table_bus_bytes",
    "table_cache_bytes",
    "host_table_bytes",
    "mapped_table_bytes",
)
"""Figures of tables that stay in the host's memory: rows that were looked up, those of them that the cache had, rows that came into it,
bytes that all others and those that came in took over the bus, memory of the cache, of the tables, and of those that are files."""
LookupCounts = Callable[[], tuple[int, ...]]
"""Gives these figures as of now. It waits for nobody, and costs no step anything."""


def no_lookups() -> tuple[int, ...]:
    """Figures of a model that has no such tables."""
    return (0,) * len(LOOKUPS)


INT8, BF16 = "int8", "bf16"
ROWS = {INT8: "int8 with a scale", BF16: "bf16"}
"""Ways to keep rows of float32, in words."""
_MOST = 127
_KEPT = np.int32(-1 << 7)
"""Mask of the bits of a scale that stay."""
_LEAST = np.finfo(np.float32).tiny
"""A row whose scale would be less is zeros: processors differ in smaller numbers."""
_ALIGNED = 16
_AT_ONCE = 1 << 20
"""Elements that a thread looks at together."""
_SAMPLE = 64
"""Rows that are looked at before all are."""

T = TypeVar("T")
Array = NDArray[Any]


class TableOptions(NamedTuple):
    """Bytes of the GPU for lookup tables, and how rows of float32 of those that leave it are kept: one of `ROWS`, or "" as they are."""

    bytes: int
    rows: str = ""

    @classmethod
    def read(cls, given: object) -> TableOptions:
        """What a caller says: GB, or a text such as ``4,rows=int8``.

        Raises:
            MsplitError: It is neither, or that can not be.
        """
        memory, comma, rows = given.partition(",") if isinstance(given, str) else (given, "", "")
        fix = "give GB, more than 0, and for smaller rows rows=bf16 or rows=int8 behind it: 4,rows=int8"
        if comma and rows.removeprefix("rows=") not in (ROWS if rows.startswith("rows=") else ()):
            raise MsplitError(f"the rows of tables (--table-memory) are {rows!r}", fix=fix)
        try:
            size = number("", float(memory) if isinstance(memory, str) else memory, above=True)
        except (ValueError, OverflowError, MsplitError):
            said = f"the memory for tables (--table-memory; in Python table_memory) is {given!r:.40}"
            raise MsplitError(said, fix=fix) from None
        return cls(int(min(size * 1e9, sys.maxsize)), rows.removeprefix("rows="))


def divided(
    sizes: Sequence[int], memory: int, most: int | None = None, first: Collection[int] = ()
) -> tuple[list[int], int]:
    """Numbers of the tables that go to the host, and the bytes that the others leave of a memory. Small ones stay on the device: they
    take up to half of it, or so many bytes. Of tables of one size those that are named go first."""
    most = memory // 2 if most is None else most
    if sum(sizes) <= memory:
        return [], memory - sum(sizes)
    left, hosted = memory, list[int]()
    for at in sorted(range(len(sizes)), key=lambda one: (sizes[one], one in first)):
        if not hosted and memory - left + sizes[at] <= most:
            left -= sizes[at]
        else:
            hosted.append(at)
    return sorted(hosted), left


def words_of(width: int, kind: str = INT8) -> int:
    """Words that a row of so many elements takes, kept as one of `ROWS`."""
    return -(-(width + 4 if kind == INT8 else 2 * width) // _ALIGNED) * _ALIGNED // 4


def _over(array: Array, run: Callable[[slice], T]) -> Iterator[T]:
    """Runs a function on parts of a table, several at a time."""
    rows = max(_AT_ONCE // max(array[:1].size, 1), 1)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        yield from threads.map(run, [slice(begin, begin + rows) for begin in range(0, len(array), rows)])


def _matrix(rows: Array) -> Array:
    return np.ascontiguousarray(rows).reshape(len(rows), -1)


def _quantized(rows: Array, kind: str) -> tuple[Array, NDArray[np.float32]]:
    """Numbers of rows of float32, a matrix, and the scale of each, a column; a scale is not finite where a row can not be kept."""
    if kind == BF16:
        with np.errstate(all="ignore"):
            numbers = rows.astype(ml_dtypes.bfloat16)
            lost = (np.isinf(numbers) & np.isfinite(rows)).any(1, keepdims=True)
        return numbers, np.where(lost, np.float32(np.inf), np.float32(1))
    scale = (np.abs(rows).max(1, initial=0, keepdims=True) / np.float32(_MOST)).view(np.int32) & _KEPT
    scale = scale.view(np.float32)
    scale[scale < _LEAST] = 0
    with np.errstate(all="ignore"):
        numbers = np.rint(rows / scale)
    return np.where((scale > 0) & np.isfinite(scale), numbers, 0).clip(-_MOST, _MOST).astype(np.int8), scale


def _values(numbers: Array, scale: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    return numbers.astype(np.float32) if kind == BF16 else numbers * scale


def rounded(name: str, array: Array, kind: str = INT8) -> tuple[Array, float, float]:
    """A table of float32 with its rows rounded, and the largest and the mean distance of an element.

    Raises:
        EngineError: A row is not finite, or is so no more.
    """
    found = np.empty_like(array)

    def round_part(part: slice) -> tuple[float, float]:
        rows = _matrix(array[part])
        numbers, scale = _quantized(rows, kind)
        if not np.isfinite(scale).all():
            row = part.start + int(np.flatnonzero(~np.isfinite(scale[:, 0]))[0])
            wrong = "not finite" if kind == INT8 else "larger than its largest"
            what = f"row {row} of table {name} has numbers that are {wrong}, which {ROWS[kind]} can not be"
            raise EngineError(what, fix=f"leave rows={kind} out (--table-memory; in Python table_memory)")
        values = _values(numbers, scale, kind)
        found[part] = values.reshape(found[part].shape)
        with np.errstate(invalid="ignore"):
            far = np.abs(values.astype(np.float64) - rows)
        far[np.isnan(far)] = 0  # of what is not finite
        return float(far.max(initial=0)), float(far.sum())

    errors = [*_over(array, round_part)]
    return found, max(most for most, _ in errors), sum(total for _, total in errors) / array.size


def is_rounded(array: Array, kind: str = INT8) -> bool:
    """True if all rows of a table were rounded, so that nothing is lost where they are packed."""

    def is_exact(part: slice) -> bool:
        rows = _matrix(array[part])
        if kind == BF16:
            return not (_values(*_quantized(rows, kind), kind).view(np.int32) != rows.view(np.int32)).any()
        numbers, scale = _quantized(rows, kind)
        return bool(np.array_equal(numbers * scale, rows))

    if array.dtype != np.float32 or array.ndim < 2 or not array.size:
        return False
    return is_exact(slice(0, _SAMPLE)) and all(_over(array, is_exact))


def packed(array: Array, kind: str = INT8) -> Array:
    """Rows of a table that was rounded, as words."""
    found = np.zeros((len(array), words_of(array[:1].size, kind)), np.int32)

    def pack(part: slice) -> None:
        numbers, scale = _quantized(_matrix(array[part]), kind)
        found[part].view(numbers.dtype)[:, : numbers.shape[1]] = numbers
        if kind == INT8:
            found[part, -1:] = scale.view(np.int32)

    list(_over(array, pack))
    return found


_LEAST_SHARED = 1 << 22
"""Bytes of a variable of which the pages that a step does not change are there once."""
_PAGES_AT_ONCE = 1 << 22
_files = dict[int, int]()
"""By the number of an array that can be shared, the file that is its memory."""
_beside: ContextVar[Mapping[str, Array]] = ContextVar("msplit_saving_beside", default=MappingProxyType({}))


def shareable(state: Mapping[str, Array], known: Mapping[str, Array] = MappingProxyType({})) -> dict[str, Array]:
    """The same values of variables, large ones in memory that copies share: that of `known`, where it has the same; see `saved`."""
    return {name: _in_file(value, known.get(name)) for name, value in state.items()}


def _in_file(value: Array, known: Array | None) -> Array:
    if known is not None and id(known) in _files and (known.shape, known.dtype) == (value.shape, value.dtype):
        pairs = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (known, value))
        parts = zip(*(np.array_split(one, one.size // _PAGES_AT_ONCE + 1) for one in pairs), strict=True)
        if all(np.array_equal(*pair) for pair in parts):
            return known
    if value.nbytes < _LEAST_SHARED or value.dtype.hasobject or not hasattr(os, "memfd_create"):
        return value
    file = os.memfd_create("msplit")
    os.ftruncate(file, value.nbytes)
    with mmap.mmap(file, value.nbytes) as memory:
        written = np.frombuffer(memory, np.uint8)
        np.copyto(written.view(value.dtype).reshape(value.shape), value)
        del written
    found = _mapped(file, value.nbytes).view(value.dtype).reshape(value.shape)
    _files[number := id(found)] = file
    weakref.finalize(found, lambda: os.close(_files.pop(number)))
    return found


def _mapped(file: int, size: int) -> Array:
    """Bytes of a file; what is written to them is in memory of their own, by pages."""
    return np.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)


def saving_beside(state: Mapping[str, Array]) -> contextlib.AbstractContextManager[object]:
    """A block in which copies of variables share the pages that are equal to those of other values, as far as these are `shareable`: of a
    large table a step changes few rows."""
    return during(_beside, state)


def saved(name: str, value: Array, copy: Callable[[Array], Array] = np.array) -> Array:
    """A copy of a variable's value, to the bit; made by a function where it shares nothing (see `saving_beside`)."""
    like = _beside.get().get(name)
    file = _files.get(id(like))
    if file is None or like is None or (like.shape, like.dtype) != (value.shape, value.dtype):
        return copy(value)
    found, new = _mapped(file, value.nbytes), np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    for begin in range(0, len(new), _PAGES_AT_ONCE):
        there, wanted = found[begin : begin + _PAGES_AT_ONCE], new[begin : begin + _PAGES_AT_ONCE]
        if not np.array_equal(there, wanted):
            for at in range(0, len(wanted), mmap.PAGESIZE):
                page = slice(at, at + mmap.PAGESIZE)
                if not np.array_equal(there[page], wanted[page]):
                    there[page] = wanted[page]
    return found.view(value.dtype).reshape(value.shape)


MAPPED, PACKED, UNALIGNED, MEMORY, REFUSED, UPDATED = "mapped", "packed", "unaligned", "no file", "refused", "updated"
"""How a table is in the host's memory: as its file, or as a copy. That is since its rows are packed, it begins at no multiple of 16 bytes,
it is not as it stands in a file, the system does not map or pin that, or it has got new rows."""


def kept_in(ways: Mapping[str, int]) -> str:
    """Words for how tables are in the host's memory, by the bytes of each way."""
    copied = ", ".join(sorted(ways.keys() - {MAPPED}))
    if not copied:
        return "mapped from files"
    return (
        f"copied: {copied}"
        if MAPPED not in ways
        else f"{ways[MAPPED] / 1e9:.3g} GB mapped from files, else copied: {copied}"
    )


class KeyedTable:
    """A table whose rows have keys in place of numbers.

    Args:
        keys: Whole numbers; of those that are there twice the last one counts.
        rows: A row for each.

    Attributes:
        keys: In ascending order.
        rows: In the order of the keys, and behind them one for keys that are not there.
    """

    def __init__(self, keys: Array, rows: Array) -> None:
        order = np.argsort(keys, kind="stable")
        self.keys, self._made = keys[order], dict[bytes, Array]()
        self.rows = np.zeros((len(keys) + 1, *rows.shape[1:]), rows.dtype)
        self.rows[:-1] = rows[order]

    def with_default(self, default: Array | None) -> Array:
        """The rows and a default, the same array for the same one; None: zeros."""
        last = b"" if default is None else default.tobytes()
        if last not in self._made:
            made = self._made[last] = self.rows.copy() if self._made else self.rows
            made[-1] = 0 if default is None else default
        return self._made[last]


@dataclass(frozen=True)
class RoundedTables:
    """Tables of a model whose rows are rounded.

    Attributes:
        names: Variables, and constants of a frozen graph.
        kind: One of `ROWS`.
        errors: Largest and mean distance of the elements of each.
    """

    names: Sequence[str] = ()
    kind: str = INT8
    errors: dict[str, list[float]] = field(default_factory=dict)

    def of(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Values by name, those of such tables rounded. Raises what `rounded` does."""
        found = dict(values)
        for name in filter(found.__contains__, self.names):
            found[name], *self.errors[name] = rounded(name, found[name], self.kind)
        return found
