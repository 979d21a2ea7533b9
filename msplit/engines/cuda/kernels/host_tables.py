"""Tables that lie in the host's memory, beside a cache on the device of the rows that are read most.

A lookup takes a row from the cache where it is there, and over the bus from the host's memory otherwise, which the device sees under its
own addresses. It notes the rows that it missed. Between steps `RowCache.refresh` gives them places in the cache, of rows that nobody has
read for a while.

Every row of such a table has a number on the device, of 4 bytes: its place in the cache, or -1. A cache of sets and ways needs less memory
(for rows of 64 bytes it is 6 % of the table here, for rows of 512 bytes 0.8 %), but there rows compete for few places, and a lookup has to
compare some tags in place of reading one number.

Steps read what a refresh writes, so a refresh waits for all steps before it, and those behind it wait for the refresh: see
`HostTables.step`. Steps may run beside each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from msplit.engines.cuda.device.capture import capture, is_capturing, no_capture, synchronize
from msplit.engines.cuda.device.device import Device, new_stream, pin, runtime
from msplit.engines.cuda.device.shared_memory import FileTable
from msplit.engines.cuda.ir.dtypes import torch_dtype
from msplit.engines.cuda.ir.program import copy_array, place_of, seen_by
from msplit.engines.cuda.kernels.launch import Code, can_launch, is_precompiling, launch
from msplit.engines.cuda.kernels.tiles import power_of_two
from msplit.engines.table_rows import (
    BF16,
    LOOKUPS,
    MAPPED,
    PACKED,
    REFUSED,
    UPDATED,
    LookupCounts,
    divided,
    is_rounded,
    kept_in,
    no_lookups,
    packed,
    words_of,
)
from msplit.errors import EngineError

NEW, MOST_ROWS = 2, 1 << 30
"""Refreshes that a row stays in the cache after it was read last; most rows of the tables of one cache."""
_NOTES, _NOTES_OF_CPU = 1 << 22, 1 << 14
"""Numbers of rows that lookups note between two refreshes at most."""
_HIT, _NOTHING = -1, -2
"""What is noted of a row that was there, and what stands where nothing was noted."""
_WAYS = 8
"""Places of the cache that are looked at for each row that is to come in: the one that nobody read for longest is taken."""
_ADMITTED = 1 << 14
"""Rows that come in at a refresh at most."""
_FIRST, _EVERY = 8, 16
"""There is a refresh behind each of the first steps of a new cache and while it fills, and then behind every so many."""
_LEAST_ROWS = 256
_TALLIES = 1 << 10
"""Numbers that programs of a kernel add what they read to, a power of two: many that add to one would wait for each other."""
_FOUND = (1 << 32) - 1
"""Part of such a number that counts rows which were in the cache; the rest counts those that were not."""
_OF_PLACE = 13
"""Bytes on the device for a place of the cache beside its row."""
_BLOCK = 1024
"""Elements of a row that are copied at a time."""

_ROWS = Code("memory", "copy_rows", specialized=False)


@dataclass(frozen=True)
class CachedTable:
    """A table in the host's memory, of which the device keeps some rows.

    Attributes:
        cache: The rows of this table and of others.
        first: Number of its first row among those.
        host: The table in the host's memory.
        packed: How its rows are words, of `engines.table_rows.ROWS`; "" where they are not.
        file: The file that it is mapped from, if it is.
    """

    cache: RowCache
    first: int
    host: NDArray[Any]
    packed: str = ""
    file: FileTable | None = None

    def unpacked(self, rows: Tensor, width: int) -> Tensor:
        """Rows of so many elements, as they were before they were packed."""
        if self.packed == BF16:
            return rows.contiguous().view(torch.bfloat16)[..., :width].float()
        numbers = rows.contiguous().view(torch.int8)[..., :width]
        return numbers.float() * rows[..., -1:].contiguous().view(torch.float32)

    def taken(self, ids: Tensor, rows: Tensor, valid: Tensor | None = None) -> Tensor:
        """Rows that were read from the host, with those of the cache in their place: the lookup where no kernel does it.

        Args:
            ids: Numbers of rows, in range.
            rows: The rows that the table in the host's memory has there.
            valid: Which of them count as looked up; None: all.
        """
        cache = self.cache
        slots = cache.slot_of[self.first + ids].long()
        hit = slots >= 0
        cache.recent[slots[hit]] = NEW
        # A GPU that has no kernel for it has read all rows over the bus.
        cheap = hit if cache.tally.device.type == "cpu" else torch.zeros_like(hit)
        each = torch.where(cheap, 1, 1 << 32) if valid is None else torch.where(cheap, 1, 1 << 32) * valid
        cache.tally.index_add_(0, cache.tally.new_zeros(1), each.sum().view(1))
        cache.note(torch.where(hit, _HIT, self.first + ids))
        held = cache.rows[slots.clamp(0)].view(rows.dtype).view(rows.shape)
        return torch.where(hit.view(*hit.shape, *(1 for _ in rows.shape[hit.dim() :])), held, rows)


class RowCache:
    """Rows of some tables of one width and type.

    Args:
        tables: As the device sees them: matrices.
        capacity: Rows that it has places for.

    Attributes:
        tables: See above.
        ways: By the number of a table's first row, how it is in the host's memory, and its bytes.
        slot_of: Per row of all tables, and once more, its place or -1, int32.
        table_bytes, row_bytes: Memory of the tables, and of a row.
        rows: The rows in the cache.
        recent: Per place, how many refreshes its row stays without being read.
        notes: What lookups noted: numbers of rows, `_HIT`, or `_NOTHING`.
        graph: What a refresh does, captured; None: it is launched kernel by kernel.
        admits: Rows that come in at a refresh at most.
        tally: What lookups have added since the last refresh: of rows in the cache 1, of others 1 << 32.
        counts: Rows that were looked up and were in the cache, those that were not, rows that came in, all up to the last refresh; and the
            sum of the three. In the host's memory, so that nobody has to wait for the device to know them.
    """

    def __init__(self, device: Device, tables: Sequence[Tensor], capacity: int) -> None:
        place, sizes = device.place, [len(table) for table in tables]
        ends = np.cumsum(sizes)
        self._device, self.tables, self._total = device, tuple(tables), int(ends[-1])
        self.firsts = (0, *ends[:-1].tolist())
        self.ways = dict[int, tuple[str, int]]()
        self.capacity, width = capacity, tables[0].shape[1]
        self.table_bytes, self.row_bytes = sum(table.nbytes for table in tables), tables[0][:1].nbytes

        def numbers(count: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=place)

        # One more row and one more place take what is written for nobody.
        self.slot_of = numbers(self._total + 1, -1)
        self._row_of = numbers(capacity + 1, -1)
        self.recent = numbers(capacity + 1, 0, torch.int8)
        self.rows = torch.zeros((capacity + 1, width), dtype=tables[0].dtype, device=place)
        self.notes = numbers(notes_of(device), _NOTHING)
        self.tally = numbers(_TALLIES, 0, torch.int64)
        self._counted = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)  # CUDA pins pages, each once
        self.counts = _mapped(self._counted, device)[:4]
        self.admits = max(min(_ADMITTED, capacity // _WAYS), 1)
        self._hand = numbers(1, 0, torch.int64)
        self._ends = torch.from_numpy(ends).to(place)
        self._firsts = torch.tensor(self.firsts, device=place)
        self._addresses = torch.tensor([table.data_ptr() for table in tables], device=place)
        self._next = self._known = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    @property
    def bytes(self) -> int:
        """Memory of the device that it takes."""
        mine = (self.slot_of, self._row_of, self.recent, self.rows, self.notes, self.tally)
        return sum(one.nbytes for one in mine)

    def counter(self) -> Callable[[], tuple[int, int, int]]:
        """What reads the first three of `counts`, also while a refresh writes them. It keeps neither tables nor rows alive."""
        counted = self._counted

        def count() -> tuple[int, int, int]:
            while True:  # all of them grow, so that no mixture of two writes has the right sum
                hits, misses, admitted, total = counted[:4].tolist()
                if hits + misses + admitted == total:
                    return hits, misses, admitted

        return count

    def is_filling(self) -> bool:
        """True if there are free places, and most of what may come in did since this was asked last, by refreshes that are over."""
        before, self._known = self._known, int(self._counted[2])
        return before + self.admits // 2 < self._known < self.capacity

    def region(self, count: int, lookups: int) -> tuple[int, int]:
        """Where a lookup of so many rows, one of so many lookups of a step, may note rows at each step: the first place, and how many of
        its first rows. Where there are not enough places for all, those that come last share them with the first ones."""
        count, every = min(count, max(len(self.notes) // lookups, 1)), len(self.notes)
        begin = 0 if self._next + count > every else self._next
        self._next = begin + count
        return begin, count

    def note(self, found: Tensor) -> None:
        """Notes of a lookup that no kernel does."""
        begin, count = self.region(found.numel(), 1)
        self.notes[begin : begin + count] = found.reshape(-1)[:count].to(torch.int32)

    def captured(self, stream: Any) -> torch.cuda.CUDAGraph:
        """What a refresh does as a graph, on a GPU. It has run before, so that nothing is compiled in the capture."""
        with torch.cuda.stream(stream), capture([stream], torch.cuda.graph_pool_handle()) as graph:
            self.take_in()
        return graph

    def refresh(self) -> None:
        """Takes in rows that were missed. No step runs meanwhile."""
        if self.graph is None:
            self.take_in()
        else:
            self.graph.replay()

    def take_in(self) -> None:
        """The same, kernel by kernel."""
        count, device, nobody, nowhere = self.admits, self.notes.device, self._total, self.capacity
        each = torch.arange(count, device=device)
        missed = self.notes >= 0
        # If more were noted than may come in, one of each so many neighbours: no lookup is always the last one.
        number = missed.cumsum(0)
        target = torch.where(missed, (number - 1) * count // number[-1:].clamp(min=1), count)
        rows = each.new_full((count + 1,), -1).scatter_(0, target, self.notes.long())[:count]
        # Each row once: of those that claim it one wins. One that has come in since it was noted is there already.
        known = rows >= 0
        at = torch.where(known, rows, nobody)
        known &= self.slot_of[at] < 0
        at = torch.where(known, rows, nobody)
        claims = (-2 - each).int()
        self.slot_of.scatter_(0, at, claims)
        first = known & (self.slot_of[at] == claims)
        self.slot_of.scatter_(0, at, -1)
        # The hand goes on over places that are looked at, and all that it passes grow older. One that has no row is older than any.
        slots = (self._hand + torch.arange(count * _WAYS, device=device)).remainder(self.capacity).view(count, -1)
        ages = self.recent[slots]
        least, way = (ages + (self._row_of[slots] >= 0)).min(1)
        self.recent[slots] = (ages - 1).clamp(min=0)
        slot = slots.gather(1, way.unsqueeze(1)).squeeze(1)
        admitted = first & (least <= 1)
        slot = torch.where(admitted, slot, nowhere)
        self.recent.scatter_(0, slot, NEW - 1)
        gone = self._row_of[slot].long()
        self.slot_of.scatter_(0, torch.where(admitted & (gone >= 0), gone, nobody), -1)
        self.slot_of.scatter_(0, torch.where(admitted, rows, nobody), slot.int())
        self._row_of.scatter_(0, slot, rows.int())
        self._copy(torch.where(admitted, rows, 0), slot)
        self.slot_of[nobody:] = -1
        self._row_of[nowhere:] = -1
        each = torch.stack([(self.tally & _FOUND).sum(), (self.tally >> 32).sum(), admitted.sum()])
        self.counts += torch.cat([each, each.sum(0, keepdim=True)])  # by one kernel, and not one after the other
        self.tally.zero_()
        self.notes.fill_(_NOTHING)
        self._hand.add_(count * _WAYS).remainder_(self.capacity)

    def _copy(self, rows: Tensor, slots: Tensor) -> None:
        """Copies rows of the tables to places of the cache; where a place is nobody's, anything."""
        which = torch.bucketize(rows, self._ends, right=True)
        inside = rows - self._firsts[which]
        if can_launch(self._device.place):
            width = self.rows.shape[1]
            addresses = self._addresses[which] + inside * (width * self.rows.element_size())
            block = min(power_of_two(width), _BLOCK)
            launch(_ROWS, (len(rows),))(addresses, slots, self.rows, self.capacity, width, BLOCK=block)
            return
        for number, table in enumerate(self.tables):
            mine = which == number
            self.rows[torch.where(mine, slots, self.capacity)] = table[torch.where(mine, inside, 0)]

    def forget(self, first: int, count: int, ids: Tensor | None = None) -> None:
        """Drops rows that have got other values: all of a table, or some. No step runs meanwhile."""
        every = slice(first, first + count) if ids is None else first + ids.to(self.slot_of.device)
        slots = self.slot_of[every].long()
        slots = torch.where(slots < 0, self.capacity, slots)
        self._row_of[slots] = -1
        self.recent[slots] = 0
        self.slot_of[every] = -1


def notes_of(device: Device) -> int:
    """How many rows lookups note on a device."""
    return _NOTES if device.is_gpu else _NOTES_OF_CPU


class HostTables:
    """The tables that are in the host's memory for one device, which owns this, and what keeps refreshes and steps apart."""

    def __init__(self, device: Device) -> None:
        self._device, self._lock, self._steps = device, threading.RLock(), 0
        self._places: dict[int, CachedTable] = {}  # by the address of a table
        self._made: dict[tuple[Any, ...], list[weakref.ref[Tensor]]] = {}
        self._streams: dict[int, Any] = {}  # on which steps were begun, by CUDA's handle
        self._waited: set[int] = set()  # of those, which wait for the last refresh
        self._fresh: Any = None
        self._own: Any = None
        self._due = self._filling = False

    @property
    def caches(self) -> list[RowCache]:
        """Each once."""
        places = [*self._places.values()]  # at once: a table may go meanwhile
        return list({id(place.cache): place.cache for place in places}.values())

    def find(self, table: Tensor) -> CachedTable | None:
        """Where rows of a tensor are kept; None for one that is not in the host's memory."""
        return self._places.get(table.data_ptr()) if self._places else None

    def has(self, tensors: Mapping[Any, Tensor]) -> bool:
        """True if any of them lies in the host's memory."""
        return bool(self._places) and any(self.find(one) is not None for one in tensors.values())

    def place(
        self, arrays: Sequence[NDArray[Any]], memory: int | tuple[int, str], alone: Collection[int] = ()
    ) -> list[Tensor | None]:
        """Tables as the device sees them, with caches for what takes more memory than there is for them; None for each of those that
        stay on the device.

        Args:
            arrays: Tables, whose rows are along the first axis.
            memory: Bytes of the device for all of them, and how rows that were rounded are packed.
            alone: Numbers of those that nothing reads but what can read rows that are packed.

        Raises:
            EngineError: The memory is too small.
        """
        memory, packs = (memory, "") if isinstance(memory, int) else memory
        rounded = {number for number in alone if packs and is_rounded(arrays[number], packs)}
        hosted, left = divided([*map(_size, arrays)], memory, first=rounded)
        found: list[Tensor | None] = [None] * len(arrays)
        groups: dict[tuple[str, int, str], list[int]] = {}
        for number in hosted:
            array = arrays[number]
            groups.setdefault((array.dtype.name, array[:1].size, packs if number in rounded else ""), []).append(number)
        total = sum(_size(arrays[number]) for number in hosted)
        for (_, width, pack), numbers in groups.items():
            own = [arrays[number] for number in numbers]
            rows = sum(map(len, own))
            share = left * sum(map(_size, own)) // total
            each = (4 * words_of(width, pack) if pack else width * own[0].dtype.itemsize) + _OF_PLACE
            beside = 4 * rows + 4 * notes_of(self._device) + 8 * _TALLIES
            capacity = min((share - beside) // each, rows)
            if capacity < min(_LEAST_ROWS, rows) or rows > MOST_ROWS:
                least = memory - left + (beside + _LEAST_ROWS * each) * total / sum(map(_size, own))
                enough = min(least, sum(map(_size, arrays)))
                raise EngineError(
                    f"{memory / 1e9:.3g} GB are too little for the tables: the numbers of their rows alone take "
                    f"{4 * rows / 1e9:.3g} GB of the GPU",
                    fix=f"give at least {enough / 1e9:.3g} GB (--table-memory; in Python table_memory)",
                )
            for number, tensor in zip(numbers, self.cached(own, capacity, pack), strict=True):
                found[number] = tensor
        return found

    def cached(self, arrays: Sequence[NDArray[Any]], capacity: int, pack: str = "") -> list[Tensor]:
        """Tables of one width and type, with a cache for so many of their rows: those that were made of these arrays before, while
        somebody holds them, or new ones. With `pack` rows are packed, those of integers are already."""
        key = (capacity, pack, *map(place_of, arrays))
        made = [reference() for reference in self._made.get(key, ())]
        if made and all(one is not None for one in made):
            return [one for one in made if one is not None]
        hosted = [_hosted(array, self._device, pack) for array in arrays]
        tables = [table for table, *_ in hosted]
        with self._device.entered():
            cache = RowCache(self._device, [table.detach().view(len(table), -1) for table in tables], capacity)
        with self._lock:
            if self._own is None and self._device.is_gpu:
                self._own = new_stream(self._device.place)
            for (table, way, memory, file), first in zip(hosted, cache.firsts, strict=True):
                cache.ways[first] = way, table.nbytes
                self._places[table.data_ptr()] = CachedTable(cache, first, memory, pack, file)
                weakref.finalize(table, self._drop, table.data_ptr()).atexit = False
            self._steps = 0  # the new cache is empty
            self._made[key] = [weakref.ref(table) for table in tables]
        for array in arrays:  # another array may get its number
            weakref.finalize(array, self._made.pop, key, None)
        return tables

    def _drop(self, address: int) -> None:
        """Lets go of a table. A refresh that is on its way is over before the memory is somebody else's."""
        with self._lock:
            place = self._places.pop(address, None)
            if self._own is not None and place is not None:
                self._own.synchronize()

    @contextlib.contextmanager
    def step(self, stream: Any = None) -> Iterator[None]:
        """A block in which a step is begun on a stream. Steps that were begun before a refresh are over when that begins; those that are
        begun behind it wait for it."""
        with self._lock:
            if stream is not None:
                handle = stream.cuda_stream
                self._streams.setdefault(handle, stream)
                if self._fresh is not None and handle not in self._waited:
                    stream.wait_event(self._fresh)
                    self._waited.add(handle)
            yield
            self._steps += 1
            self._due |= self._filling or self._steps <= _FIRST or not self._steps % _EVERY
            # Where kernels are noted only, no row would be copied. Beside a capture, whose streams can not be waited for, it is put off.
            if self._due and self._places and not is_precompiling():
                with no_capture(wait=False) as free:
                    if free:
                        self._due = False
                        self._alone(self._refresh)

    def _refresh(self) -> None:
        for cache in self.caches:
            cache.refresh()
        self._filling = sum(map(RowCache.is_filling, self.caches)) > 0  # each is asked

    def lookup(self, tables: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
        """A block in which rows of tables are looked up on the current stream. In a capture nothing is read: who replays it begins a
        `step`."""
        if not self._places or not any(self.find(one) for one in tables) or is_capturing():
            return contextlib.nullcontext()
        return self.step(torch.cuda.current_stream(self._device.place) if self._device.is_gpu else None)

    def forget(self, table: Tensor, ids: Tensor | None = None) -> None:
        """Drops rows of a table that have got other values, all or some, from the cache."""
        place = self.find(table)
        if place is not None:
            with no_capture(wait=True), self._lock:
                self._alone(lambda: place.cache.forget(place.first, len(table), ids))

    def own(self, tables: Iterable[Tensor]) -> None:
        """Has tables that are files in memory instead, under the same addresses: who is about to write to them calls it.

        Raises:
            EngineError: There is no memory for one, or CUDA does not pin it.
        """
        for place in filter(None, map(self.find, tables)):
            if place.file is None or place.cache.ways[place.first][0] != MAPPED:
                continue
            copy, pages = place.file.memory(), place.file.pages
            copy_array(pages, copy)
            with no_capture(wait=True), self._lock:
                if self._device.is_gpu:
                    try:
                        pin(copy, self._device.place)  # if it can not be, that is known before anything is changed
                    except EngineError:
                        place.file.drop(copy)
                        raise
                    synchronize(self._device.place)  # no step begins meanwhile, and no refresh
                    for one in (copy, pages):
                        runtime().cudaHostUnregister(ctypes.c_void_p(one.ctypes.data))
                place.file.take(copy)
                if self._device.is_gpu:
                    pin(pages, self._device.place)
                place.cache.ways[place.first] = UPDATED, place.host.nbytes

    def _alone(self, run: Any) -> None:
        """Runs something between two steps. No stream is being captured."""
        if not self._device.is_gpu:
            run()
            return
        with self._device.entered():
            for stream in (*self._streams.values(), torch.cuda.current_stream(self._device.place)):
                self._own.wait_stream(stream)
            with torch.cuda.stream(self._own):
                run()
            self._fresh = self._own.record_event()
            self._waited.clear()

    def warm(self, constants: Iterable[Tensor]) -> None:
        """Runs a refresh of the caches of some constants kernel by kernel, so that whoever notes kernels has them, and captures it."""
        for cache in self._caches_of(constants):
            with no_capture(wait=True), self._lock:
                self._alone(cache.take_in)
            if cache.graph is None and self._device.is_gpu:
                streams = self._device.streams.lease(1)  # not ours, on which a refresh may begin meanwhile
                graph = cache.captured(streams[0])
                self._device.streams.give_back(streams)
                with self._lock:
                    cache.graph = cache.graph or graph

    def _caches_of(self, constants: Iterable[Tensor]) -> list[RowCache]:
        places = [place for one in constants if (place := self.find(one)) is not None]
        return list({id(place.cache): place.cache for place in places}.values())

    def counter(self, constants: Iterable[Tensor]) -> LookupCounts:
        """What counts lookups in the caches of some constants, without a look at the device: see `engines.table_rows.LOOKUPS`."""
        caches = [
            (one.counter(), one.row_bytes, one.bytes, one.table_bytes, one.ways) for one in self._caches_of(constants)
        ]

        def count() -> tuple[int, ...]:
            found = list(no_lookups())
            for counts, row, *sizes, ways in caches:
                hits, misses, admitted = counts()
                files = sum(size for way, size in ways.values() if way == MAPPED)
                own = (hits + misses, hits, admitted, (misses + admitted) * row, *sizes, files)
                for at, more in enumerate(own):
                    found[at] += more
            return tuple(found)

        return count if caches else no_lookups

    def facts(self, constants: Iterable[Tensor]) -> dict[str, Any]:
        """Figures of the caches of some constants."""
        caches = self._caches_of(constants := [*constants])
        if not caches:
            return {}
        found = dict(zip(LOOKUPS, self.counter(constants)(), strict=True))
        looked_up = found["table_rows_looked_up"]
        rate = found["table_rows_found"] / looked_up if looked_up else None
        sizes = dict[str, int]()
        for way, size in (one for cache in caches for one in cache.ways.values()):
            sizes[way] = sizes.get(way, 0) + size
        rows = sum(cache.capacity for cache in caches)
        return {**found, "table_cache_rows": rows, "table_hit_rate": rate, "host_tables": kept_in(sizes)}


def _size(array: NDArray[Any]) -> int:
    return array.nbytes


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    memory = np.empty(array.shape, array.dtype)
    copy_array(array, memory)
    return memory


def _hosted(array: NDArray[Any], device: Device, pack: str) -> tuple[Tensor, str, NDArray[Any], FileTable | None]:
    """A table as the device sees it, how it is in the host's memory, the table there, and its file, if it is one."""
    if pack and array.dtype == np.float32:
        return _mapped(memory := packed(array, pack), device), PACKED, memory, None
    file = FileTable.of(array)
    if not isinstance(file, str):
        try:
            return _mapped(file.rows, device, file.pages), MAPPED, file.rows, file
        except EngineError:
            file = REFUSED
    return _mapped(memory := _copied(array), device), file, memory, None


def _mapped(memory: NDArray[Any], device: Device, file: NDArray[np.uint8] | None = None) -> Tensor:
    """An array in the host's memory, as the device sees it; it may lie in the pages of a file.

    Raises:
        EngineError: CUDA does not pin it.
    """
    host = memory.reshape(-1).view(np.uint8)
    if device.is_gpu:
        pin(host if file is None else file, device.place, read_only=file is not None)
        owner = memory if file is None else file
        weakref.finalize(owner, runtime().cudaHostUnregister, ctypes.c_void_p(owner.ctypes.data)).atexit = False
    return seen_by(device.place, torch.from_numpy(host)).view(torch_dtype(memory.dtype.name)).view(memory.shape)
