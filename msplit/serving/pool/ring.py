"""Memory that two processes share: requests go in, answers come out, and no array is pickled.

A file without a name (`memfd_create`), mapped by both, so that nothing is left of it however either process ends. Little-endian.

| from byte | what |
| --- | --- |
| 0 | `COUNTS`: what the pool of the worker has counted so far |
| 64 | ring of requests: as many uint32 as there are slots, each the number of a slot that has a request |
| behind it | ring of answers, likewise |
| behind it | a byte for each slot: 1 where nobody waits for its request any more |
| behind it, from a multiple of 64 | for each slot `REQUEST`, then for each slot `ANSWER` |
| from a multiple of 4,096 | for each slot the inputs of its request, then for each slot the outputs |

A slot belongs to the caller until its number is in the ring of requests, then to the worker until its number is in the ring of answers.
A ring has room for all slots, so that it is never full: requests wait where no slot is free. An eventfd tells how many numbers are new, and
wakes who waits. Its system calls also order the memory, on every processor: who was told of a number sees all that its slot holds.

Arrays lie one behind the other at multiples of 64 bytes, in the order of the ports, where shapes are those of so many rows. Else, as with
strings, a description follows them. Strings, and outputs, have room for `SPILL` bytes more, which take memory only while in use.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.errors import Closed, EngineError, MsplitError

COUNTS = struct.Struct("<6q")
"""Requests that came, that wait, steps that ended, that run, rows of steps, rows of padding."""
REQUEST = struct.Struct("<qqqqdd")
"""Where the description begins, its bytes (0: there is none), rows, priority level, time of coming and deadline (CLOCK_MONOTONIC)."""
ANSWER = struct.Struct("<qqq")
"""Where the description, or the error, begins, its bytes (0: there is none), and what the answer is: `OUTPUTS`, `ERROR` or `DROPPED`."""
OUTPUTS, ERROR, DROPPED = 0, 1, 2

SPILL = 64 << 20
"""Bytes for strings, and for outputs that are larger than those of the example, beyond what a slot keeps ready."""
_MESSAGE = 1 << 16
"""Bytes for an error, or a description."""
_LINE, _PAGE = 64, mmap.PAGESIZE
_MOST_VIEWS = 4096
"""Slots and numbers of rows, together, for which arrays are kept, since to make one takes as long as to copy 10 KB."""

Layout = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Type and shape of arrays by name."""
Layouts = Callable[[int], Layout | None]
"""Gives the layout for a number of rows; None where a description has to say it."""


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
        inputs, outputs: Bytes of a request and of an answer that a slot keeps ready.
        texts: True where requests have strings, and may need `SPILL` bytes more.
    """

    slots: int
    inputs: int
    outputs: int
    texts: bool = False

    def strides(self) -> tuple[int, int]:
        """Bytes from one slot's inputs, and outputs, to those of the next."""
        more = SPILL if self.texts else 0
        return _up(self.inputs, _PAGE) + _MESSAGE + more, _up(self.outputs, _PAGE) + _MESSAGE + SPILL

    def rings(self) -> tuple[int, int]:
        """Where both rings begin."""
        return _LINE, _LINE + 4 * self.slots

    def flags(self) -> int:
        """Where the flags begin."""
        return _LINE + 8 * self.slots

    def heads(self) -> tuple[int, int]:
        """Where the headers of requests, and those of answers, begin."""
        first = _up(self.flags() + self.slots, _LINE)
        return first, first + REQUEST.size * self.slots

    def areas(self) -> tuple[int, int]:
        """Where the inputs, and the outputs, begin."""
        first = _up(self.heads()[1] + ANSWER.size * self.slots, _PAGE)
        return first, first + self.strides()[0] * self.slots

    def whole(self) -> int:
        """Bytes of all. Those that nobody has written to take no memory."""
        return self.areas()[1] + self.strides()[1] * self.slots


class Ring:
    """Numbers of slots, from one process to another.

    Args:
        entries: As many uint32 as there are slots.
        bell: Descriptor of the eventfd.
    """

    def __init__(self, entries: memoryview, bell: int) -> None:
        self._entries, self._size, self._bell = entries, len(entries), bell
        self._at = self._untold = 0

    def push(self, slot: int) -> None:
        """Adds a number. The other side sees it after `ring`."""
        self._entries[self._at] = slot
        self._at = self._at + 1 if self._at + 1 < self._size else 0
        self._untold += 1

    def ring(self) -> None:
        """Tells the other side of all numbers that were added, and wakes it."""
        if self._untold:
            count, self._untold = self._untold, 0
            os.eventfd_write(self._bell, count)

    def take(self) -> Sequence[int]:
        """Numbers that are new; the eventfd does not wait."""
        try:
            count = os.eventfd_read(self._bell)
        except BlockingIOError:
            return ()
        first, self._at = self._at, (self._at + count) % self._size
        if count == 1:
            return (self._entries[first],)
        if first + count <= self._size:
            return self._entries[first : first + count].tolist()
        return self._entries[first:].tolist() + self._entries[: self._at].tolist()


class Area:
    """Arrays in one direction: the inputs, or the outputs, of all slots.

    Args:
        memory: The mapped file.
        start: Where those of the first slot begin.
        stride: Bytes from one slot to the next.
        ready: Bytes of a slot that keep their memory.
        layouts: Layout by number of rows.
    """

    def __init__(self, memory: mmap.mmap, start: int, stride: int, ready: int, layouts: Layouts) -> None:
        self._memory, self._start, self._stride, self._ready = memory, start, stride, _up(ready, _PAGE)
        self._layouts = layouts
        self._views: dict[tuple[int, int], dict[str, NDArray[Any]] | None] = {}

    def views(self, slot: int, rows: int) -> dict[str, NDArray[Any]] | None:
        """Arrays of so many rows in a slot, as they are laid out; None where a description says it."""
        key = (slot, rows)
        if key in self._views:
            return self._views[key]
        layout = self._layouts(rows)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        found: dict[str, NDArray[Any]] | None = None
        if layout is not None and bytes_of(layout) <= self._stride:
            found, at = {}, self._start + slot * self._stride
            for name, (dtype, shape) in layout.items():
                found[name] = np.ndarray(shape, dtype, self._memory, at)
                at += _up(found[name].nbytes, _LINE)
        self._views[key] = found
        return found

    def write(self, slot: int, rows: int, arrays: Mapping[str, Any]) -> tuple[int, int]:
        """Copies arrays into a slot. Returns where their description begins in it, and its bytes; 0 and 0 where there is none.

        Raises:
            EngineError: They do not fit.
        """
        views = self.views(slot, rows)
        if views is not None and len(views) == len(arrays):
            for name, view in views.items():
                value = arrays.get(name)
                if value is None or value.shape != view.shape or value.dtype != view.dtype:
                    break
                view[...] = value
            else:
                return 0, 0
        return self._describe(slot, arrays)

    def _describe(self, slot: int, arrays: Mapping[str, Any]) -> tuple[int, int]:
        parts: list[tuple[int, Any]] = []
        told, at = [], 0
        for name, given in arrays.items():
            value = np.asarray(given)
            lengths = None
            shape, dtype = value.shape, value.dtype
            if value.dtype == object:
                texts = value.ravel().tolist()
                if not all(type(text) is bytes for text in texts):
                    raise EngineError(f"{name} has something else than bytes among its strings")
                lengths, value = [*map(len, texts)], np.frombuffer(b"".join(texts), np.uint8)
            told.append((name, dtype, shape, at, lengths))
            parts.append((at, value))
            at += _up(value.nbytes, _LINE)
        about = pickle.dumps(told)
        return self.put(slot, parts, about, at)

    def put(self, slot: int, parts: Sequence[tuple[int, Any]], about: bytes, at: int) -> tuple[int, int]:
        """Copies arrays to their places, and a description behind them. Returns where it begins, and its bytes."""
        if at + len(about) > self._stride:
            what = f"{at + len(about):,} bytes do not fit into a slot of {self._stride:,} between two processes"
            raise EngineError(what, fix="cut it into smaller requests")
        first = self._start + slot * self._stride
        for start, value in parts:
            np.ndarray(value.shape, value.dtype, self._memory, first + start)[...] = value
        self._memory[first + at : first + at + len(about)] = about
        return at, len(about)

    def read(self, slot: int, rows: int, at: int, size: int) -> dict[str, NDArray[Any]]:
        """Arrays of a slot, which lie in it; strings are made anew."""
        if not size:
            views = self.views(slot, rows)
            assert views is not None
            return views
        found, first = dict[str, NDArray[Any]](), self._start + slot * self._stride
        for name, dtype, shape, start, lengths in pickle.loads(self.about(slot, at, size)):
            if lengths is None:
                found[name] = np.ndarray(shape, dtype, self._memory, first + start)
                continue
            found[name] = texts = np.empty(len(lengths), object)
            place = first + start
            for number, length in enumerate(lengths):
                texts[number] = self._memory[place : place + length]
                place += length
            found[name] = texts.reshape(shape)
        return found

    def about(self, slot: int, at: int, size: int) -> bytes:
        """The description of a slot."""
        first = self._start + slot * self._stride + at
        return self._memory[first : first + size]

    def release(self, slot: int, end: int) -> None:
        """Gives memory back that a slot does not keep, where `end` bytes of it were used."""
        if end > self._ready:
            self._memory.madvise(
                mmap.MADV_REMOVE, self._start + slot * self._stride + self._ready, _up(end - self._ready, _PAGE)
            )


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
        inputs, outputs: Layouts by number of rows.

    Attributes:
        requests, answers: The rings.
        inputs, outputs: The arrays.
        flags: A byte for each slot.
    """

    def __init__(
        self, handle: int, bells: tuple[int, int], sizes: MemorySizes, inputs: Layouts, outputs: Layouts
    ) -> None:
        self.sizes = sizes
        self._memory = memory = mmap.mmap(handle, sizes.whole())
        whole = memoryview(memory)
        count, (first, second) = sizes.slots, sizes.rings()
        self.requests = Ring(whole[first : first + 4 * count].cast("I"), bells[0])
        self.answers = Ring(whole[second : second + 4 * count].cast("I"), bells[1])
        self.flags = whole[sizes.flags() : sizes.flags() + count]
        self._asks, self._tells = sizes.heads()
        strides, starts = sizes.strides(), sizes.areas()
        self.inputs = Area(memory, starts[0], strides[0], sizes.inputs, inputs)
        self.outputs = Area(memory, starts[1], strides[1], sizes.outputs, outputs)

    def ask(self, slot: int, feeds: Mapping[str, Any], rows: int, level: int, since: float, deadline: float) -> None:
        """Writes a request into a slot that is free; `requests.push` is next. Raises what `Area.write` does."""
        at, size = self.inputs.write(slot, rows, feeds)
        REQUEST.pack_into(self._memory, self._asks + REQUEST.size * slot, at, size, rows, level, since, deadline)

    def asked(self, slot: int) -> tuple[dict[str, NDArray[Any]], int, int, float, float]:
        """Inputs, rows, level, time of coming and deadline of the request in a slot."""
        at, size, rows, level, since, deadline = REQUEST.unpack_from(self._memory, self._asks + REQUEST.size * slot)
        return self.inputs.read(slot, rows, at, size), rows, level, since, deadline

    def tell(self, slot: int, kind: int, at: int, size: int) -> None:
        """Writes what became of a request whose outputs, or whose error, are in place; `answers.push` is next."""
        ANSWER.pack_into(self._memory, self._tells + ANSWER.size * slot, at, size, kind)

    def told(self, slot: int, rows: int) -> dict[str, NDArray[Any]] | Exception:
        """What became of a request: outputs, which belong to the caller, or the error. What took more than its slot is given back."""
        at, size, kind = ANSWER.unpack_from(self._memory, self._tells + ANSWER.size * slot)
        found: dict[str, NDArray[Any]] | Exception
        if kind == DROPPED:
            found = Closed("the pool was closed before this request was run", fix="send it to another one")
        elif kind == ERROR:
            found = unpacked_error(self.outputs.about(slot, at, size))
        else:
            found = {name: value.copy() for name, value in self.outputs.read(slot, rows, at, size).items()}
        if size:
            self.outputs.release(slot, at + size)
        at, size = REQUEST.unpack_from(self._memory, self._asks + REQUEST.size * slot)[:2]
        if size:
            self.inputs.release(slot, at + size)
        return found

    def count(self, *counts: int) -> None:
        """Writes the worker's counts; see `COUNTS`."""
        COUNTS.pack_into(self._memory, 0, *counts)

    def counts(self) -> tuple[int, ...]:
        """The worker's counts."""
        return COUNTS.unpack_from(self._memory, 0)
