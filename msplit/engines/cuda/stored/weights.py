"""The constants of several programs in one file, each block of memory once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.ir.dtypes import dtype_name, torch_dtype
from msplit.engines.cuda.ir.node import Unsupported

ALIGNED = 512
"""Every block of memory begins at a multiple of so many bytes, as PyTorch's own do: kernels are compiled for aligned addresses."""

_LARGEST = 1 << 40


@dataclass
class Weights:
    """Blocks of memory to be written behind each other.

    Attributes:
        blocks: By content, where a block begins, and its bytes.
        size: Bytes in all.
    """

    blocks: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)
    size: int = 0

    def add(self, tensor: torch.Tensor) -> list[Any]:
        """Keeps the memory that a tensor lies in. Where the tensor will be: type, shape, strides, and first element of all memory."""
        storage = tensor.untyped_storage()
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()
        name = hashlib.sha256(data.numpy().data).hexdigest()
        if name not in self.blocks:
            self.blocks[name] = self.size, data
            self.size += data.numel() + -data.numel() % ALIGNED
        start = self.blocks[name][0] + tensor.storage_offset() * tensor.element_size()
        return [dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride()), start]

    def memory(self) -> NDArray[np.uint8]:
        """Bytes of the file in one array."""
        pieces = [np.frombuffer(piece, np.uint8) for piece in self.pieces()]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the file."""
        for _, data in self.blocks.values():
            yield memoryview(data.numpy()).cast("B")
            yield memoryview(bytes(-data.numel() % ALIGNED))


def tensor_of(data: Any, memory: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of a file, bytes on a device, from what `Weights.add` gave.

    Raises:
        ValueError: It would lie outside of it, or have no type.
    """
    name, shape, stride, start = data
    try:
        dtype = torch_dtype(name)
    except Unsupported as problem:
        raise ValueError(str(problem)) from None
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else -1
    if (
        not all(isinstance(one, int) and 0 <= one < _LARGEST for one in (*shape, *stride, start))
        or start % dtype.itemsize
    ):
        raise ValueError("a weight has no place")
    if start + (last + 1) * dtype.itemsize > memory.numel():
        raise ValueError("a weight lies outside of the file")
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start // dtype.itemsize, shape, stride)
