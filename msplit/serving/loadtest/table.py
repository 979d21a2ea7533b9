"""The memory that generator and target share: a table with a row per request, written without a lock.

Each column has one writer, and each counter says how many rows of its columns are there, so that what a reader has counted is written. (The
order of writes is that of x86; elsewhere a reader may see a counter a moment before its row.) The memory has no name: nothing of it is left
when its processes have ended, however they did.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.formats.tensors import numpy_dtype

SENT, OVER, ANSWERED = 0, 8, 16
"""Counters: rows that the generator has sent; whether no more will be sent; rows that have an answer, whatever it is. Each in a cache line
of its own. Where several processes answer, each has a counter of its own, `LINE` further on."""

LINE = 8
MOST_PARTS = 32
"""Processes that may answer."""

RequestState = IntEnum("RequestState", "WAITING DONE REFUSED TIMED_OUT FAILED MISSHAPEN GIVEN_UP", start=0)
"""States of a request: a misshapen one gave outputs of wrong shapes, a given up one still waited when the run
was over for some time."""

_COUNTERS = ANSWERED + LINE * MOST_PARTS
_ALIGNED = 4096

_COLUMNS = {
    "scheduled": np.int64,
    "sent": np.int64,
    "taken": np.int64,
    "answered": np.int64,
    "request": np.int32,
    "priority": np.uint8,
    "status": np.uint8,
}


@dataclass(frozen=True)
class OutputLayout:
    """Type and shape of an output of one answer. Strings (``object``) are kept as a number that stands for them; see `digest`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Type and shape of what is kept of it."""
        return (np.dtype(np.uint64), ()) if self.dtype == "object" else (numpy_dtype(self.dtype), self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that are kept of one answer."""
        dtype, shape = self.stored
        return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def digest(value: NDArray[Any]) -> int:
    """A number of 64 bits that stands for an array of strings."""
    parts = [item.encode() if isinstance(item, str) else bytes(item) for item in value.reshape(-1).tolist()]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Layout:
    """Size and outputs of a table.

    Attributes:
        rows: Most requests of a run.
        outputs: By name.
    """

    rows: int
    outputs: Mapping[str, OutputLayout]

    def places(self) -> tuple[dict[str, int], dict[str, int], int]:
        """Offsets of columns and of outputs, and the size of the memory."""
        end = _ALIGNED
        columns, outputs = dict[str, int](), dict[str, int]()
        for name, dtype in _COLUMNS.items():
            columns[name] = end
            end = _after(end, self.rows * np.dtype(dtype).itemsize)
        for name, kept in self.outputs.items():
            outputs[name] = end
            end = _after(end, self.rows * kept.bytes)
        return columns, outputs, end


def _after(start: int, size: int) -> int:
    return -(-(start + size) // _ALIGNED) * _ALIGNED


class RequestTable:
    """The table, in one of the processes that share it.

    Args:
        layout: Size and outputs.
        handle: The descriptor of the memory; None makes it.

    Attributes:
        counters: Counters of 64 bits; see `SENT`.
        scheduled, sent, taken, answered: Per row, in ns of ``time.perf_counter_ns``, which processes share: when the request was due (0
            where it is due when it is sent), when it was sent, when the target's process took it, and when its answer was there.
        request: Number of the prepared request.
        priority: 0 is the most urgent.
        status: State; see `RequestState`.
        outputs: By name, an answer per row.
    """

    def __init__(self, layout: Layout, handle: int | None = None) -> None:
        self.layout = layout
        columns, outputs, size = layout.places()
        self.handle = _memory(size) if handle is None else handle
        self._map = mmap.mmap(self.handle, size)
        self.counters = memoryview(self._map)[: _COUNTERS * 8].cast("q")
        arrays = {name: np.frombuffer(self._map, dtype, layout.rows, columns[name]) for name, dtype in _COLUMNS.items()}
        self.scheduled, self.sent = arrays["scheduled"], arrays["sent"]
        self.taken, self.answered = arrays["taken"], arrays["answered"]
        self.request, self.priority, self.status = arrays["request"], arrays["priority"], arrays["status"]
        self.outputs: dict[str, NDArray[Any]] = {}
        for name, kept in layout.outputs.items():
            dtype, shape = kept.stored
            part = memoryview(self._map)[outputs[name] : outputs[name] + layout.rows * kept.bytes]
            self.outputs[name] = np.frombuffer(part, np.uint8).view(dtype).reshape(layout.rows, *shape)

    @property
    def answers(self) -> int:
        """Rows that have an answer, from whatever process."""
        return sum(self.counters[ANSWERED::LINE])

    def clear(self) -> None:
        """Makes it ready for another run: what the last one has written is forgotten."""
        used = self.counters[SENT]
        self.status[:used] = RequestState.WAITING
        for place in range(0, _COUNTERS, LINE):
            self.counters[place] = 0

    def close(self) -> None:
        """Lets go of the memory. What was read from it must be a copy."""
        os.close(self.handle)


def _memory(size: int) -> int:
    """A descriptor of memory without a name."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("msplit-load")
    else:
        with tempfile.TemporaryFile() as file:  # pragma: no cover
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle
