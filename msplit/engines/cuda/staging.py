"""Host memory that the GPU copies from and to without the CPU's help: one block for all inputs, one for all outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.tensors import to_numpy
from msplit.errors import EngineError

_ALIGNMENT = 256


class Pack:
    """Tensors side by side in one block of pinned host memory and, for inputs, one block of device memory."""

    def __init__(self, like: Mapping[str, torch.Tensor], device: torch.device) -> None:
        offsets, end = {}, 0
        for name, tensor in like.items():
            offsets[name] = end
            end += -(-max(tensor.numel() * tensor.element_size(), 1) // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self.host = torch.zeros(max(end, 1), dtype=torch.uint8, pin_memory=pinned)
        self.device = torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
        self.on_host = {name: _view(self.host, offsets[name], tensor) for name, tensor in like.items()}
        self.on_device = {name: _view(self.device, offsets[name], tensor) for name, tensor in like.items()}

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copies arrays into the host block.

        Raises:
            EngineError: An array is missing or has another shape or dtype than the one that was captured.
        """
        for name, view in self.on_host.items():
            if name not in arrays:
                raise EngineError(f"no value for input {name}")
            source = torch.from_numpy(np.ascontiguousarray(arrays[name])) if view.dtype != torch.bfloat16 else None
            if source is None:
                from msplit.engines.cuda.tensors import to_torch

                source = to_torch(np.ascontiguousarray(arrays[name]), torch.device("cpu"))
            if source.shape != view.shape or source.dtype != view.dtype:
                raise EngineError(
                    f"input {name} was prepared as {view.dtype} {tuple(view.shape)}, not {source.dtype} {tuple(source.shape)}",
                    fix="shapes are fixed when the graph is captured: prepare one executable per shape",
                )
            view.copy_(source)

    def read(self) -> dict[str, NDArray[Any]]:
        """Copies of the host block's tensors."""
        return {name: to_numpy(view).copy() for name, view in self.on_host.items()}


def _view(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return block[offset : offset + size].view(like.dtype).view(like.shape)
