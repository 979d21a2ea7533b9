"""Copies between the GPU and pinned host memory by a kernel. Needs Triton and a GPU; import it only when both are there.

A GPU reads and writes pinned host memory directly. The copy engine takes long to start inside a graph: on an H200 a step of one kernel
and a copy of 1 KB to the host takes 16 µs with the copy engine and 9 with a kernel, 40 KB to the device 17 and 11.
From 4 MB on both wait for the bus alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from msplit.engines.cuda.tensors import as_words

_BLOCK = 1024

_WORDS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}
"""The bits move, whatever they mean."""


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < count
    tl.store(target + place, tl.load(source + place, mask=exists), mask=exists)


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
    return torch.as_tensor(_Pinned(host, _word(host)), device=device)


def copy(source: Tensor, target: Tensor) -> None:
    """Copies a contiguous tensor into another of the same size, at least one of them on the GPU and the other one there or `seen_by` it."""
    words, place = as_words(source.reshape(-1)), as_words(target.reshape(-1))
    if words.numel():
        _copy[(triton.cdiv(words.numel(), _BLOCK),)](words, place, words.numel(), BLOCK=_BLOCK)


def _word(tensor: Tensor) -> int:
    size: int = tensor.element_size()
    return min(size, 8)  # a complex128 is two words
