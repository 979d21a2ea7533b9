"""Host memory that the GPU copies from and to without the CPU's help: one block for all inputs, one for all outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.tensors import dtype_name, numpy_dtype
from msplit.errors import EngineError

_ALIGNMENT = 256
_PARALLEL_BYTES = 1 << 18
"""Arrays from this size on are copied by several threads."""


class Pack:
    """Tensors side by side in one block of pinned host memory and one block of device memory: one copy moves them all.

    Attributes:
        host: The host block.
        device: The device block.
        on_host: The tensors in the host block, by name.
        on_device: The tensors in the device block.
        arrays: The same in the host block, as NumPy arrays: writing to them costs a copy and nothing else.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], device: torch.device) -> None:
        offsets, end = {}, 0
        for name, tensor in like.items():
            offsets[name] = end
            end += -(-max(tensor.numel() * tensor.element_size(), 1) // _ALIGNMENT) * _ALIGNMENT
        self.host = torch.zeros(max(end, 1), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
        self.on_host = {name: _tensor(self.host, offsets[name], tensor) for name, tensor in like.items()}
        self.on_device = {name: _tensor(self.device, offsets[name], tensor) for name, tensor in like.items()}
        memory = self.host.numpy()
        self.arrays = {name: _array(memory, offsets[name], tensor) for name, tensor in like.items()}

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copies arrays into the host block.

        Raises:
            EngineError: An array is missing or has another shape or dtype than the one that was prepared.
        """
        for name, place in self.arrays.items():
            source = arrays.get(name)
            if source is None:
                raise EngineError(f"no value for input {name}")
            if source.shape != place.shape or source.dtype != place.dtype:
                raise EngineError(
                    f"input {name} was prepared as {place.dtype} {place.shape}, not {source.dtype} {source.shape}",
                    fix="shapes are fixed when the graph is captured: prepare one executable per shape",
                )
            if place.nbytes >= _PARALLEL_BYTES and source.flags.c_contiguous and source.flags.writeable:
                # PyTorch copies with several threads.
                torch.from_numpy(place.reshape(-1).view(np.uint8)).copy_(
                    torch.from_numpy(source.reshape(-1).view(np.uint8))
                )
            else:
                np.copyto(place, source)

    def read(self) -> dict[str, NDArray[Any]]:
        """Copies of the host block's tensors."""
        return {name: place.copy() for name, place in self.arrays.items()}


def _tensor(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return block[offset : offset + size].view(like.dtype).view(like.shape)


def _array(block: NDArray[Any], offset: int, like: torch.Tensor) -> NDArray[Any]:
    size = like.numel() * like.element_size()
    return block[offset : offset + size].view(numpy_dtype(dtype_name(like.dtype))).reshape(tuple(like.shape))
