"""Copies between the GPU and pinned host memory by a kernel. Needs Triton and a GPU; import it only when both are there.

A GPU reads and writes pinned host memory directly. The copy engine takes long to start inside a graph: on an H200 a step of one kernel
and a copy of 1 KB to the host takes 16 µs with the copy engine and 9 with a kernel, 40 KB to the device 17 and 11.
From 4 MB on both wait for the bus alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.tensors import as_words

_BLOCK = 1024

_WORDS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""The bits move, whatever they mean."""
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    tl.store(target + place, tl.load(source + place, mask=exists), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _deliver(pieces, finished, number, BLOCK: tl.constexpr, ALONE: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = pieces + tl.program_id(0) * 3
    source = tl.load(piece).to(tl.pointer_type(tl.int32))
    target = tl.load(piece + 1).to(tl.pointer_type(tl.int32))
    place = tl.arange(0, BLOCK)
    exists = place < tl.load(piece + 2)
    if ALONE:
        count = tl.load(finished) + 1
        tl.store(finished, count)
    tl.store(target + place, tl.load(source + place, mask=exists), mask=exists)
    # All threads of the program have written; who sees the number that is then released to the whole system sees that, too.
    tl.debug_barrier()
    if ALONE:
        tl.atomic_xchg(number, count, sem="release", scope="sys")
    else:
        programs = tl.num_programs(0)
        count = tl.atomic_add(finished, 1, sem="acq_rel", scope="sys") + 1
        if count % programs == 0:
            tl.atomic_xchg(number, count // programs, sem="release", scope="sys")


class Delivery:
    """One kernel that copies many tensors to host memory and then raises a number there by one.

    Attributes:
        number: The number, in pinned memory: how often the kernel ran.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._words = [-(-size // 4) for size in sizes]
        count = sum(triton.cdiv(words, _BLOCK) for words in self._words)
        self._pieces = torch.zeros((max(count, 1), 3), dtype=torch.int64, device=device)
        self._finished = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._number = seen_by(device, self._host)
        self.number = memoryview(self._host.numpy())

    def issue(self) -> None:
        """Launches the kernel on the current stream. Until it is aimed it copies nothing."""
        count = len(self._pieces)
        _deliver[(count,)](self._pieces, self._finished, self._number, BLOCK=_BLOCK, ALONE=count == 1)

    def aim(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Issues what sets the addresses that the kernel copies from and to, in all its launches and replays that come after.

        They are multiples of 4, and up to 3 bytes behind a tensor are copied with it.
        """
        rows = [
            (source + 4 * start, target + 4 * start, min(words - start, _BLOCK))
            for source, target, words in zip(sources, targets, self._words, strict=True)
            for start in range(0, words, _BLOCK)
        ]
        if rows:
            self._pieces.copy_(torch.tensor(rows, dtype=torch.int64))


class _Pinned:
    """Pinned host memory as an array that a GPU can use (CUDA's addresses are the same on both sides)."""

    def __init__(self, host: Tensor, word: int) -> None:
        self.memory = host
        self.__cuda_array_interface__ = {
            "data": (host.data_ptr(), False),
            "shape": (host.numel() * host.element_size() // word,),
            "typestr": _WORDS[word],
            "version": 3,
        }


def seen_by(device: torch.device, host: Tensor) -> Tensor:
    """A contiguous pinned tensor as a flat tensor of words on the GPU. It must not outlive `host`."""
    if device.type == "cpu":  # for Triton's interpreter
        return host.reshape(-1).view(_CARRIERS[_word(host)])
    return torch.as_tensor(_Pinned(host, _word(host)), device=device)


def copy(source: Tensor, target: Tensor) -> None:
    """Copies a contiguous tensor into another of the same size, at least one of them on the GPU and the other one there or `seen_by` it."""
    words, place = as_words(source.reshape(-1)), as_words(target.reshape(-1))
    if words.numel():
        _copy[(triton.cdiv(words.numel(), _BLOCK),)](words, place, words.numel(), BLOCK=_BLOCK)


def _word(tensor: Tensor) -> int:
    size: int = tensor.element_size()
    return min(size, 8)  # a complex128 is two words
