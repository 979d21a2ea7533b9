"""Memory that two processes share: requests go in, answers come out, and no array is pickled that has the shape of its port.

A file without a name (`memfd_create`), mapped by both, so that nothing is left of it however either process ends. Each client of a worker
has one of its own. Its parts begin at multiples of a page, and numbers are little-endian:

| part | what |
| --- | --- |
| taken | how many requests of this client the worker has taken so far |
| requests | ring: as many uint32 as there are slots, each the number of a slot that has a request |
| answers | ring of answers, likewise |
| flags | a byte for each slot: 1 where nobody waits for its request any more |
| heads | for each slot `REQUEST`, then for each slot `ANSWER` |
| inputs, outputs | for each slot the arrays of its request, then for each slot those of its answer |
| spilled | likewise, what is not laid out, pickled |

A slot belongs to the caller until its number is in the ring of requests, then to the worker until its number is in the ring of answers.
A ring has room for all slots, so that it is never full: requests wait where no slot is free. An eventfd tells how many numbers are new, and
wakes who waits. Its system calls also order the memory, on every processor: who was told of a number sees all that its slot holds.

Arrays lie one behind the other at multiples of 64 bytes, in the order of the ports, where shapes are those of so many rows. Those of all
slots are side by side, so that small ones stay in the processor's cache. What is shaped otherwise, strings, and errors take memory of their
own only while they are there.

A slot with an array of a MB or more is registered with CUDA by the worker when it first has one: the GPU reads it there, without a copy
in the worker (`engines.cuda.runtime.memcpy`).
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Feeds, Registers
from msplit.engines.environment import THREADS, THREADS_BYTES, native_threads
from msplit.engines.table_rows import LOOKUPS
from msplit.errors import Closed, EngineError, MsplitError

COUNTS = struct.Struct(f"<{6 + len(LOOKUPS)}q")
"""What the pool of a worker has counted, in a page that all its clients see: rows that are under way there, requests that wait, steps that
ended, that run, rows of steps, rows of padding, and `LOOKUPS`."""
REQUEST = struct.Struct("<qqqqdd")
"""Bytes that are spilled (0: the arrays are as laid out), rows, their length, priority level, coming and deadline (CLOCK_MONOTONIC)."""
ANSWER = struct.Struct("<qqq")
"""Bytes that are spilled (0: the arrays are as laid out), what the answer is (`OUTPUTS`, `ERROR` or `DROPPED`), and the number of the
values that it was made with."""
OUTPUTS, ERROR, DROPPED = 0, 1, 2

SPILL = 64 << 20
"""Most bytes of strings, or of outputs that are shaped otherwise than those of the example."""
_MESSAGE = 1 << 16
"""Bytes for an error, and more than a description of arrays takes."""
_LINE = 64
_MOST_VIEWS = 4096
"""Slots and numbers of rows, together, for which arrays are kept, since to make one takes as long as to copy 10 KB."""

Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Type and shape of arrays by name."""
Layouts = Callable[[int, int], Layout | None]
"""Gives the layout for a number of rows and their length (0: they have none); None where a description has to say it."""


class _Mapped(mmap.mmap):
    """The mapped file, of which slots are registered until nobody looks at any of its arrays.

    Attributes:
        host_memory: Registers them; None: nothing does.
        registered: Where they begin, and where that was refused.
    """

    host_memory: Registers | None = None
    registered: frozenset[int] = frozenset()

    def __del__(self) -> None:
        if self.host_memory is not None:  # a finalizer would come when the memory is gone
            for address in self.registered:
                self.host_memory.release(address)

    def register(self, first: int, size: int) -> None:
        """Registers a slot, unless it is."""
        address = np.frombuffer(self, np.uint8, 1, first).ctypes.data
        if self.host_memory is not None and address not in self.registered:
            self.registered |= {address}
            self.host_memory.register(address, size)


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


def bytes_of(layout: Layout) -> int:
    """Bytes that arrays take in a slot."""
    return sum(_up(dtype.itemsize * int(np.prod(shape, dtype=np.int64)), _LINE) for dtype, shape in layout.values())


@dataclass(frozen=True)
class MemorySizes:
    """Sizes of the memory.

    Attributes:
        slots: Number of slots.
        inputs, outputs: Bytes of a request, whole pages where it is large, and of an answer that a slot keeps ready.
        texts: True where requests have strings, and may need `SPILL` bytes more.
    """

    slots: int
    inputs: int
    outputs: int
    texts: bool = False

    def spills(self) -> tuple[int, int]:
        """Bytes that a request, and an answer, may spill."""
        return (SPILL if self.texts else self.inputs) + _MESSAGE, SPILL + _MESSAGE

    def parts(self) -> Sequence[int]:
        """Where the parts begin, headers being two, and where all ends. Bytes that nobody has written to take no memory."""
        each = (4, 4, 1, REQUEST.size, ANSWER.size, self.inputs, self.outputs, *self.spills())
        return [*accumulate((_up(size * self.slots, mmap.PAGESIZE) for size in each), initial=mmap.PAGESIZE)]


class Ring:
    """Numbers of slots, from one process to another.

    Args:
        entries: As many uint32 as there are slots.
        bell: Descriptor of the eventfd.

    Attributes:
        untold: Numbers of which the other side was not told yet.
    """

    def __init__(self, entries: memoryview, bell: int) -> None:
        self._entries, self._size, self._bell = entries, len(entries), bell
        self._at = self.untold = 0

    def push(self, slot: int) -> None:
        """Adds a number. The other side sees it after `ring`."""
        self._entries[self._at] = slot
        self._at = self._at + 1 if self._at + 1 < self._size else 0
        self.untold += 1

    def ring(self) -> None:
        """Tells the other side of all numbers that were added, and wakes it."""
        if self.untold:
            count, self.untold = self.untold, 0
            os.eventfd_write(self._bell, count)

    def take(self) -> Sequence[int]:
        """Numbers that are new; the eventfd does not wait."""
        try:
            count = os.eventfd_read(self._bell)
        except BlockingIOError:
            return ()
        first, self._at = self._at, (self._at + count) % self._size
        return [self._entries[number % self._size] for number in range(first, first + count)]


def _copy(value: Any, view: NDArray[Any]) -> None:
    """Copies an array, without the interpreter's lock; a large one by several threads."""
    if value.nbytes >= THREADS_BYTES and value.flags.c_contiguous and (threads := native_threads()) is not None:
        helpers = min(len(os.sched_getaffinity(0)) - 1, THREADS)
        threads(view.ctypes.data, value.ctypes.data, view.nbytes, helpers)
    else:
        view[...] = value


class Area:
    """Arrays in one direction: the inputs, or the outputs, of all slots.

    Args:
        memory: The mapped file.
        start, stride: Where those of the first slot begin, and bytes of each.
        spilled, room: Where what the first slot spills begins, and bytes for that of each.
        layouts: Layout by number of rows and length.
        reads: True where a GPU reads them.
    """

    def __init__(
        self, memory: _Mapped, start: int, stride: int, spilled: int, room: int, layouts: Layouts, *, reads: bool
    ) -> None:
        self._memory, self._start, self._stride, self._layouts, self._reads = memory, start, stride, layouts, reads
        self._spilled, self._room = spilled, _up(room, mmap.PAGESIZE)
        self._views: dict[tuple[int, int, int], dict[str, NDArray[Any]] | None] = {}

    def views(self, slot: int, rows: int, length: int = 0) -> dict[str, NDArray[Any]] | None:
        """Arrays of so many rows in a slot, as they are laid out; None where they are not."""
        key = (slot, rows, length)
        if key in self._views:
            return self._views[key]
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        layout, found = self._layouts(rows, length), None
        if layout is not None and bytes_of(layout) <= self._stride:
            found, at = {}, self._start + slot * self._stride
            for name, (dtype, shape) in layout.items():
                found[name] = np.ndarray(shape, dtype, self._memory, at)
                at += _up(found[name].nbytes, _LINE)
            if self._reads and max((value.nbytes for value in found.values()), default=0) >= THREADS_BYTES:
                self._memory.register(self._start + slot * self._stride, self._stride)
        self._views[key] = found
        return found

    def write(self, slot: int, rows: int, arrays: Mapping[str, Any], length: int = 0) -> int:
        """Copies arrays into a slot, but for those that are its `views`. Returns the bytes that are spilled, 0 where they are laid out.

        Raises what `spill` does.
        """
        views = self.views(slot, rows, length)
        if views is not None and len(views) == len(arrays):
            for name, view in views.items():
                value = arrays.get(name)
                if value is None or value.shape != view.shape or value.dtype != view.dtype:
                    break
                if value is not view:
                    _copy(value, view)
            else:
                return 0
        return self.spill(slot, pickle.dumps(dict(arrays), pickle.HIGHEST_PROTOCOL))

    def spill(self, slot: int, data: bytes) -> int:
        """Copies what is not laid out. Returns its bytes.

        Raises:
            EngineError: It does not fit.
        """
        if len(data) > self._room:
            what = f"{len(data):,} bytes do not fit into the {self._room:,} of a slot between two processes"
            raise EngineError(what, fix="cut it into smaller requests")
        first = self._spilled + slot * self._room
        self._memory[first : first + len(data)] = data
        return len(data)

    def read(self, slot: int, rows: int, size: int, length: int = 0) -> dict[str, NDArray[Any]]:
        """Arrays of a slot, which lie in it; those that were spilled are made anew."""
        if size:
            found: dict[str, NDArray[Any]] = pickle.loads(self.spilled(slot, size))
            return found
        views = self.views(slot, rows, length)
        assert views is not None
        return views

    def spilled(self, slot: int, size: int) -> bytes:
        """Bytes in a slot that are not laid out."""
        first = self._spilled + slot * self._room
        return self._memory[first : first + size]

    def release(self, slot: int, size: int) -> None:
        """Gives the memory back that a slot has spilled into."""
        self._memory.madvise(mmap.MADV_REMOVE, self._spilled + slot * self._room, _up(size, mmap.PAGESIZE))


def packed_error(problem: BaseException) -> bytes:
    """An error as bytes; see `unpacked_error`."""
    if isinstance(problem, MsplitError):
        with suppress(Exception):
            named = {"where": problem.where, "fix": problem.fix, "details": problem.details}
            return pickle.dumps((type(problem), (problem.what,), named))
    with suppress(Exception):
        data = pickle.dumps((type(problem), problem.args, {}))
        if str(unpacked_error(data)) == str(problem):
            return data
    return packed_error(EngineError(f"{type(problem).__name__}: {problem}"))


def unpacked_error(data: bytes) -> Exception:
    """The error that another process had: one of the same type with the same words, where that can be made of its arguments."""
    kind, arguments, named = pickle.loads(data)
    made: Exception = kind(*arguments, **named)
    return made


class Memory:
    """The memory as one of the two processes sees it.

    Args:
        handle: Descriptor of the file, which has the right size.
        bells: Descriptors of the eventfds of requests and of answers.
        inputs, outputs: Layouts by number of rows and length.
        host_memory: Registers inputs, in the process that has the GPU.

    Attributes:
        requests, answers: The rings.
        inputs, outputs: The arrays.
        flags: A byte for each slot.
        taken: One number: requests that the worker has taken.
    """

    def __init__(
        self,
        handle: int,
        bells: Sequence[int],
        sizes: MemorySizes,
        inputs: Layouts,
        outputs: Layouts,
        host_memory: Registers | None = None,
    ) -> None:
        counts, inputs_spill, outputs_spill = sizes.slots, *sizes.spills()
        asked, told, flags, self._asks, self._tells, ins, outs, spilled, rest, end = sizes.parts()
        self._memory = memory = _Mapped(handle, end)
        memory.host_memory = host_memory
        whole = memoryview(memory)
        self.taken = whole[:8].cast("q")
        self.requests = Ring(whole[asked : asked + 4 * counts].cast("I"), bells[0])
        self.answers = Ring(whole[told : told + 4 * counts].cast("I"), bells[1])
        self.flags = whole[flags : flags + counts]
        self.inputs = Area(memory, ins, sizes.inputs, spilled, inputs_spill, inputs, reads=host_memory is not None)
        self.outputs = Area(memory, outs, sizes.outputs, rest, outputs_spill, outputs, reads=False)

    def ask(
        self, slot: int, feeds: Feeds, rows: int, level: int, since: float, deadline: float, length: int = 0
    ) -> None:
        """Writes a request into a slot that is free; `requests.push` is next. Raises what `Area.write` does."""
        size = self.inputs.write(slot, rows, feeds, length)
        REQUEST.pack_into(self._memory, self._asks + REQUEST.size * slot, size, rows, length, level, since, deadline)

    def asked(self, slot: int) -> tuple[dict[str, NDArray[Any]], int, int, float, float]:
        """Inputs, rows, level, time of coming and deadline of the request in a slot."""
        size, rows, length, level, since, deadline = REQUEST.unpack_from(self._memory, self._asks + REQUEST.size * slot)
        found = self.inputs.read(slot, rows, size, length)
        if size:
            self.inputs.release(slot, size)
        return found, rows, level, since, deadline

    def tell(self, slot: int, kind: int, size: int, values: int = 0) -> None:
        """Writes what became of a request whose outputs, or whose error, are in place; `answers.push` is next."""
        ANSWER.pack_into(self._memory, self._tells + ANSWER.size * slot, size, kind, values)

    def values(self, slot: int) -> int:
        """Number of the values that an answer was made with."""
        return int(ANSWER.unpack_from(self._memory, self._tells + ANSWER.size * slot)[2])

    def told(self, slot: int, rows: int, length: int = 0) -> dict[str, NDArray[Any]] | Exception:
        """Answer to a request: outputs, which belong to the caller, or the error."""
        size, kind, _ = ANSWER.unpack_from(self._memory, self._tells + ANSWER.size * slot)
        if kind == OUTPUTS and not size:
            return {name: value.copy() for name, value in self.outputs.read(slot, rows, 0, length).items()}
        if kind == DROPPED:
            return Closed("the pool was closed before this request was run", fix="send it to another one")
        data = self.outputs.spilled(slot, size)
        self.outputs.release(slot, size)
        return unpacked_error(data) if kind == ERROR else pickle.loads(data)
