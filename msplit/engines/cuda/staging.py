"""Host memory that the GPU copies from and to without the CPU's help: one block for all inputs, one for all outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.tensors import dtype_name, numpy_dtype
from msplit.engines.cuda.triton_here import can_compile
from msplit.errors import EngineError

_ALIGNMENT = 256
_SMALL_BYTES = 1 << 14
"""Inputs up to this size lie gap-free beside others of their type, so that one call copies all of them."""
_PARALLEL_BYTES = 1 << 18
"""Arrays from this size on are copied by several threads."""
_ENGINE_BYTES = 1 << 12
"""Up to this size the GPU's copy engine brings inputs sooner than a kernel does."""


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one type that lie side by side without a gap.

    Attributes:
        names: In order.
        shapes: Likewise.
        dtypes: Likewise, all the same.
        memory: Their place in the host block, flat.
        rows: The same place as all tensors one below the other, where they differ in their first size alone; else None.
    """

    names: tuple[str, ...]
    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype[Any]]
    memory: NDArray[Any]
    rows: NDArray[Any] | None


class Pack:
    """Tensors side by side in one block of pinned host memory and one block of device memory: one copy moves them all.

    Attributes:
        host: The host block.
        device: The device block.
        on_host: The tensors in the host block, by name.
        on_device: The tensors in the device block.
        arrays: The tensors in the host block, as NumPy arrays: writing to them costs a copy and nothing else.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], device: torch.device) -> None:
        runs = _runs(like)
        offsets, starts, end = {}, [], 0
        for run in runs:
            starts.append(end)
            at = end
            for name in run:
                offsets[name] = at
                at += like[name].numel() * like[name].element_size()
            end = -(-max(at, end + 1) // _ALIGNMENT) * _ALIGNMENT
        self.host = torch.zeros(max(end, 1), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = torch.zeros(max(end, 1), dtype=torch.uint8, device=device)
        self.on_host = {name: _tensor(self.host, offsets[name], tensor) for name, tensor in like.items()}
        self.on_device = {name: _tensor(self.device, offsets[name], tensor) for name, tensor in like.items()}
        memory = self.host.numpy()
        self.arrays = {name: _array(memory, offsets[name], tensor) for name, tensor in like.items()}
        self._groups = [self._group(run, memory[start:]) for run, start in zip(runs, starts, strict=True)]
        self._seen: dict[str, torch.Tensor] = {}
        self._seen_host: torch.Tensor | None = None
        if device.type == "cuda" and can_compile():
            from msplit.engines.cuda import copy_kernel

            self._seen = {name: copy_kernel.seen_by(device, host) for name, host in self.on_host.items()}
            self._seen_host = copy_kernel.seen_by(device, self.host)

    def _group(self, names: list[str], memory: NDArray[np.uint8]) -> _Group:
        arrays = [self.arrays[name] for name in names]
        flat = memory[: sum(array.nbytes for array in arrays)].view(arrays[0].dtype)
        alike = all(array.ndim and array.shape[1:] == arrays[0].shape[1:] for array in arrays)
        return _Group(
            tuple(names),
            [array.shape for array in arrays],
            [array.dtype for array in arrays],
            flat,
            flat.reshape(sum(len(array) for array in arrays), *arrays[0].shape[1:]) if alike else None,
        )

    def to_device(self) -> None:
        """Issues the copy of the host block to the device block on the current stream."""
        if self._seen_host is None or self.host.numel() <= _ENGINE_BYTES:
            self.device.copy_(self.host, non_blocking=True)
            return
        from msplit.engines.cuda import copy_kernel

        copy_kernel.copy(self._seen_host, self.device)

    def collect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Issues copies of tensors on the device, by name, to their places in the host block, on the current stream."""
        for name, tensor in tensors.items():
            if name in self._seen:
                from msplit.engines.cuda import copy_kernel

                copy_kernel.copy(tensor.contiguous(), self._seen[name])
            else:
                self.on_host[name].copy_(tensor, non_blocking=True)

    def fill(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copies arrays into the host block.

        Raises:
            EngineError: An array is missing or has another shape or dtype than the one that was prepared.
        """
        for group in self._groups:
            try:
                sources = [arrays[name] for name in group.names]
            except KeyError as missing:
                raise EngineError(f"no value for input {missing.args[0]}") from None
            if [source.shape for source in sources] != group.shapes or [
                source.dtype for source in sources
            ] != group.dtypes:
                self._refuse(arrays, group)
            if len(sources) > 1:
                if group.rows is not None:
                    np.concatenate(sources, out=group.rows)
                else:
                    np.concatenate([source.ravel() for source in sources], out=group.memory)
            elif (
                group.memory.nbytes >= _PARALLEL_BYTES and sources[0].flags.c_contiguous and sources[0].flags.writeable
            ):
                _copy_with_threads(sources[0], group.memory)
            else:
                np.copyto(self.arrays[group.names[0]], sources[0])

    def _refuse(self, arrays: Mapping[str, NDArray[Any]], group: _Group) -> None:
        for name in group.names:
            place, source = self.arrays[name], arrays[name]
            if source.shape != place.shape or source.dtype != place.dtype:
                raise EngineError(
                    f"input {name} was prepared as {place.dtype} {place.shape}, not {source.dtype} {source.shape}",
                    fix="shapes are fixed when the graph is captured: prepare one executable per shape",
                )

    def read(self) -> dict[str, NDArray[Any]]:
        """Copies of the host block's tensors."""
        return {name: _copy_of(place) for name, place in self.arrays.items()}


def _copy_with_threads(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Copies a contiguous array as PyTorch does: with several threads."""
    torch.from_numpy(target.reshape(-1).view(np.uint8)).copy_(torch.from_numpy(source.reshape(-1).view(np.uint8)))


def _copy_of(source: NDArray[Any]) -> NDArray[Any]:
    if source.nbytes < _PARALLEL_BYTES:
        return source.copy()
    target = np.empty_like(source)
    _copy_with_threads(source, target)
    return target


def _runs(like: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names in groups: small tensors with others of their type, each large one alone."""
    small: dict[torch.dtype, list[str]] = {}
    alone = []
    for name, tensor in like.items():
        if 0 < tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            small.setdefault(tensor.dtype, []).append(name)
        else:
            alone.append([name])
    return [*small.values(), *alone]


def _tensor(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return block[offset : offset + size].view(like.dtype).view(like.shape)


def _array(block: NDArray[Any], offset: int, like: torch.Tensor) -> NDArray[Any]:
    size = like.numel() * like.element_size()
    return block[offset : offset + size].view(numpy_dtype(dtype_name(like.dtype))).reshape(tuple(like.shape))
