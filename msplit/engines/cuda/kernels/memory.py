"""Kernels that move memory: copies to and from the host, and gathers that check their indices.

Copies between the GPU and pinned host memory by a kernel. On a GPU.

A GPU reads and writes pinned host memory directly. The copy engine takes long to start inside a graph: on an H200 a step of one kernel
and a copy of 1 KB to the host takes 16 µs with the copy engine and 9 with a kernel, 40 KB to the device 17 and 11.
From 4 MB on both wait for the bus alone.

Gathers in one kernel that a wrong index can not crash. On a GPU.

PyTorch's gathers assert on the device that every index is in range. A failing assertion ends the CUDA context and with it
the process's work on the GPU; clamping and masking around them takes several kernels. These kernels write zeros for an
index that is out of range, which is what TensorFlow's GPU kernel does.

Places of inputs that a kernel finds by their distance from the start of one block of memory, or of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from msplit.engines.cuda.ir.dtypes import as_words
from msplit.engines.cuda.ir.program import seen_by
from msplit.engines.cuda.kernels.launch import Code, launch
from msplit.engines.cuda.kernels.tiles import shares

_COPY = Code("memory", "copy_to")
_DELIVER = Code("memory", "deliver", specialized=False)

_BLOCK = 1024
_DIRECT = 4
"""So many tensors at most are delivered by a kernel that gets their addresses as arguments."""
_NEVER = 2**31 - 1
_MOST_GATHERED = 512
"""Programs, each of 4 KB, of a kernel that reads from where it copies: more bytes are copied sooner otherwise."""


class OutputCopy:
    """One kernel that copies many tensors to host memory and then raises a number there by one.

    The addresses of a few tensors are arguments of the kernel. Those of more come from a table on the device, which costs the kernel one
    more access to memory before it can start, and is filled by `aim`.

    Args:
        sizes: Bytes of each tensor.
        targets: Where each is to go. Addresses are multiples of 4, and up to 3 bytes behind a tensor are copied with it.
        device: Where the tensors are.
        tables: How many there are: launches for other tensors, captured once and replayed, need another one.

    Attributes:
        number: The number, in pinned memory: how often the kernel ran.
    """

    def __init__(self, sizes: Sequence[int], targets: Sequence[int], device: torch.device, tables: int) -> None:
        self._targets, self._words = list(targets), [-(-size // 4) for size in sizes]
        self._direct = sum(words > 0 for words in self._words) <= _DIRECT
        runs = [sum(self._words)] if self._direct else self._words
        self._programs = max(sum(shares(words, _BLOCK) for words in runs), 1)
        shape = 1 if self._direct else self._programs, 3
        self._tables = [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(tables)]
        self._finished = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._number = seen_by(device, self._host)
        self._store = device.type == "cuda"
        self.number = memoryview(self._host.numpy())

    def issue(self, sources: Sequence[int], table: int) -> None:
        """Launches the kernel on the current stream, for the tensors at these addresses. If there are many, see `aim`."""
        launch(_DELIVER, (self._programs,))(
            self._tables[table],
            self._finished,
            self._number,
            *self._places(sources),
            DIRECT=self._direct,
            BLOCK=_BLOCK,
            ALONE=self._programs == 1,
            STORE=self._store,
        )

    def _places(self, sources: Sequence[int]) -> list[int]:
        """Words of all tensors; then of each its first word's number, and from where and to where its word number 0 would go."""
        found: list[int] = []
        first = 0
        for source, target, words in zip(sources, self._targets, self._words, strict=True):
            if self._direct and words:
                found += [first, source - 4 * first, target - 4 * first]
                first += words
        missing = _DIRECT - len(found) // 3
        return [first, *(found + [_NEVER, 0, 0] * missing)[1:]]  # the first one starts at 0

    def aim(self, sources: Sequence[int], table: int) -> None:
        """Issues what sets the table for all launches and replays that come after. Until then a kernel with a table copies nothing."""
        if self._direct:
            return
        rows = [
            (source + 4 * start, target + 4 * start, min(words - start, _BLOCK))
            for source, target, words in zip(sources, self._targets, self._words, strict=True)
            for start in range(0, words, _BLOCK)
        ]
        self._tables[table].copy_(torch.tensor(rows, dtype=torch.int64))


class Gather:
    """One kernel that copies tensors, wherever they lie on the device, to places there.

    It is captured once: from where, it reads in a table in pinned memory, which the host writes between two launches that are over.

    Args:
        places: Contiguous tensors on the device that start at whole words and end at such, see `fits`.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        device, starts = places[0].device, [range(0, place.nbytes, 4 * _BLOCK) for place in places]
        self._of = np.repeat(np.arange(len(places)), [*map(len, starts)])
        self._from = np.array([start for each in starts for start in each], np.int64)
        self._programs = len(self._of)
        self._host = torch.zeros((self._programs, 3), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._rows, self._table = self._host.numpy(), seen_by(device, self._host)
        self._counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
        addresses = np.array([place.data_ptr() for place in places], np.int64)
        ends = np.array([place.nbytes for place in places], np.int64)
        self._rows[:, 1] = addresses[self._of] + self._from
        self._rows[:, 2] = np.minimum((ends[self._of] - self._from) // 4, _BLOCK)
        self._sources = list[int]()
        self.aim(addresses.tolist())

    @staticmethod
    def fits(places: Sequence[Tensor]) -> bool:
        """True if these tensors are several, and small, and of whole words."""
        small = 0 < sum(len(range(0, place.nbytes, 4 * _BLOCK)) for place in places) <= _MOST_GATHERED
        return len(places) > 1 and small and not any(place.nbytes % 4 or place.data_ptr() % 4 for place in places)

    def aim(self, sources: list[int]) -> bool:
        """Has the next launches copy what is at these addresses; false where one is not that of a word."""
        if sources != self._sources:
            addresses = np.array(sources, np.int64)
            if (addresses & 3).any():
                return False
            self._rows[:, 0] = addresses[self._of] + self._from
            self._sources = sources
        return True

    def issue(self) -> None:
        """Launches the kernel on the current stream: that of `OutputCopy` with a table, so that most builds have it."""
        flags = {"DIRECT": False, "BLOCK": _BLOCK, "ALONE": self._programs == 1, "STORE": self._table.is_cuda}
        nowhere = [0, *([_NEVER, 0, 0] * _DIRECT)[1:]]
        launch(_DELIVER, (self._programs,))(self._table, *self._counts, *nowhere, **flags)


def copy(source: Tensor, target: Tensor) -> None:
    """Copies a contiguous tensor into another of the same size, by a kernel of the GPU that the target is on or `seen_by`; the source is
    there, too, or on one whose memory it `reads`."""
    words, place = as_words(source.reshape(-1)), as_words(target.reshape(-1))
    if words.numel():
        launch(_COPY, (shares(words.numel(), _BLOCK),))(place, words, words.numel(), BLOCK=_BLOCK)


_GATHER, _LOOKUP = Code("memory", "gather"), Code("memory", "lookup")

_GATHER_BLOCK = 256

# From this many elements on, positions are counted with 64 bits, whose divisions are several times slower.
_WIDE_FROM = 2**31 - _GATHER_BLOCK


def gather(table: Tensor, indices: Tensor) -> Tensor:
    """out[b, o, m, i] = table[b, o, indices[b, m], i], or 0 where the index is not in [0, n).

    Args:
        table: Contiguous, of shape [b, o, n, i], on a GPU, with elements of at most 8 bytes.
        indices: Contiguous integers of shape [b, m].

    Returns:
        Contiguous, of shape [b, o, m, i].
    """
    batch, outer, size, inner = table.shape
    count = indices.shape[1]
    out = table.new_empty((batch, outer, count, inner))
    total = out.numel()
    if total:
        flags = {"BLOCK": _GATHER_BLOCK, "WIDE": total >= _WIDE_FROM, "SINGLE": batch * outer == 1}
        grid = (shares(total, _GATHER_BLOCK),)
        launch(_GATHER, grid)(as_words(table), indices, as_words(out), total, size, count, inner, outer, **flags)
    return out


def grouped_gather(table: Tensor, ids: Tensor, starts: Tensor, sizes: Tensor) -> Tensor:
    """out[n, m] = table[starts[n] + ids[n, m]], or zeros where the id is not in [0, sizes[n]), though the next member's table lies there.

    Args:
        table: Contiguous, of shape [rows, ...], on a GPU, with elements of at most 8 bytes.
        ids: Contiguous integers of shape [members, m].
        starts: First row of each member's table, int64.
        sizes: Number of rows of each member's table, int64.

    Returns:
        Contiguous, of shape [members, m, ...].
    """
    inner = math.prod(table.shape[1:])
    out = table.new_empty((*ids.shape, *table.shape[1:]))
    total = out.numel()
    if total:
        grid = (shares(total, _GATHER_BLOCK),)
        arguments = (as_words(table), ids, starts, sizes, as_words(out), total, ids.shape[1], inner)
        launch(_LOOKUP, grid)(*arguments, BLOCK=_GATHER_BLOCK, WIDE=total >= _WIDE_FROM)
    return out


Place = tuple[int, int]
"""Place of an input: 0 for the shared block or 1 for the extra one, and the distance from its start in bytes."""


def lie(sources: dict[int, Tensor]) -> tuple[Tensor | None, dict[int, Place]]:
    """The memory that most of the inputs share, from its start, and where in it they lie; nothing where none share any."""
    blocks: dict[int, list[int]] = {}
    for slot, tensor in sources.items():
        blocks.setdefault(tensor.untyped_storage().data_ptr(), []).append(slot)
    members = max(blocks.values(), key=len)
    if len(members) < 2:
        return None, {}
    storage = sources[members[0]].untyped_storage()
    block = torch.empty(0, dtype=torch.int8, device=sources[members[0]].device).set_(storage)
    return block, {slot: (0, sources[slot].storage_offset() * sources[slot].element_size()) for slot in members}


def _rest(sources: dict[int, Tensor], places: dict[int, Place]) -> list[int]:
    """Inputs that do not lie in the shared block, those of large elements first so that all are aligned."""
    return sorted(
        (slot for slot in sources if places.get(slot, (1, 0))[0]), key=lambda slot: -sources[slot].element_size()
    )


def layout(sources: dict[int, Tensor], places: dict[int, Place]) -> dict[int, Place]:
    """The places of all inputs, given those in the shared block; `lay` puts the others there."""
    result, end = dict(places), 0
    for slot in _rest(sources, places):
        result[slot] = (1, end)
        end += sources[slot].numel() * sources[slot].element_size()
    return result


def lay(sources: dict[int, Tensor], places: dict[int, Place]) -> Tensor | None:
    """The memory of the inputs that do not share any: that of the only one, or else copies side by side."""
    flat = [sources[slot].reshape(-1).view(torch.int8) for slot in _rest(sources, places)]
    if not flat:
        return None
    return flat[0] if len(flat) == 1 else torch.cat(flat)
