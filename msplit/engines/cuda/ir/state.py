"""Memory that stays on a device between steps: the variables of a training graph, what a program says of them, and constants."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.ir.dtypes import dtype_name, to_numpy, to_torch, torch_dtype
from msplit.engines.cuda.ir.graph import Key
from msplit.errors import EngineError

ALIGNED = 16
"""Bytes: every variable begins at a multiple of it, since kernels of products and pointwise ops read 16 bytes at a time."""


@dataclass(frozen=True, eq=False)
class State:
    """Variables of a program: where their values are, and in which memory.

    Attributes:
        keys: Variable -> its value when a step begins.
        final: Variable -> its value when the step is over, for those that are written.
        stacks: Values that are several variables of one shape side by side.
        arenas: Variables of one type that lie one behind the other in memory.
        initial: Variable -> its value before the first step.
    """

    keys: Mapping[str, Key] = field(default_factory=dict)
    final: Mapping[str, Key] = field(default_factory=dict)
    stacks: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)
    arenas: Sequence[tuple[str, ...]] = ()
    initial: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all variables."""
        return sum(self.initial[name].nbytes for name in self.keys)


class StateMemory:
    """The variables of a program on a device, where they stay: kernels and captured graphs know their addresses.

    Attributes:
        tensors: By variable.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._state = state
        # By storage: first byte's address, one behind the last, variable.
        self._memory: dict[int, list[tuple[int, int, str]]] = {}
        placed = {name for names in state.arenas for name in names}
        for names in (*state.arenas, *((name,) for name in state.keys if name not in placed)):
            self._allocate([name for name in names if name in state.keys], device)
        self.load(state.initial)

    def _allocate(self, names: Sequence[str], device: torch.device) -> None:
        if not names:
            return
        values = [self._state.initial[name] for name in names]
        sizes = [-(-value.nbytes // ALIGNED) * ALIGNED for value in values]
        # Zeros between variables, and behind the last one, stay harmless where an update runs over all of them.
        memory = torch.zeros(max(sum(sizes), ALIGNED), dtype=torch.uint8, device=device)
        found = self._memory.setdefault(memory.untyped_storage().data_ptr(), [])
        start = 0
        for name, value, size in zip(names, values, sizes, strict=True):
            end = start + value.nbytes
            self.tensors[name] = memory[start:end].view(torch_dtype(value.dtype.name)).view(value.shape)
            found.append((memory.data_ptr() + start, memory.data_ptr() + end, name))
            start += size

    def values(self) -> dict[Key, torch.Tensor]:
        """Values that a step reads: each variable, and stacks of them."""
        found = {key: self.tensors[name] for name, key in self._state.keys.items()}
        return found | {key: self._stack(names) for key, names in self._state.stacks.items()}

    def _stack(self, names: Sequence[str]) -> torch.Tensor:
        first = self.tensors[names[0]]
        step = (self.tensors[names[1]].data_ptr() - first.data_ptr()) // first.element_size() if len(names) > 1 else 0
        for place, name in enumerate(names):
            if self.tensors[name].data_ptr() != first.data_ptr() + place * step * first.element_size():
                raise EngineError(f"internal error: the variable {name} does not lie in its stack")
        return torch.as_strided(first, (len(names), *first.shape), (step, *first.stride()))

    def lies_in(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The variables in whose memory a tensor's elements lie, by address."""
        found = self._memory.get(tensor.untyped_storage().data_ptr())
        if not found or not tensor.numel():
            return ()
        extent = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        first, last = tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
        return tuple(name for begin, end, name in found if begin < last and first < end)

    def load(self, values: Mapping[str, Any]) -> None:
        """Gives variables other values. What is none of the program's is passed over.

        Raises:
            EngineError: A value has another shape or type.
        """
        known = {name: value for name, value in values.items() if name in self.tensors}
        for name, value in known.items():
            tensor, array = self.tensors[name], np.asarray(value)
            if tuple(array.shape) != tuple(tensor.shape) or array.dtype.name != dtype_name(tensor.dtype):
                raise EngineError(
                    f"variable {name} is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, not {array.dtype} {array.shape}",
                    fix="give values of the same model",
                )
        with torch.no_grad():
            for name, value in known.items():
                self.tensors[name].copy_(to_torch(np.asarray(value)))

    def save(self) -> dict[str, NDArray[Any]]:
        """The values, in memory of their own."""
        return {name: to_numpy(tensor.detach().clone().cpu()) for name, tensor in self.tensors.items()}

    def spread(self, from_first: Callable[[torch.Tensor], None]) -> None:
        """Gives variables the values that the first of several processes has, by what does so with a tensor of bytes."""
        for tensor in self.tensors.values():
            from_first(tensor.view(-1).view(torch.uint8))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block after which variables are what they were before: what is run to warm up, to tune or to time does not train."""
        written = [self.tensors[name] for name in self._state.final]
        with torch.no_grad():
            saved = [tensor.clone() if _fits(tensor) else tensor.cpu() for tensor in written]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(written, saved, strict=True):
                    tensor.copy_(value)
            if written and written[0].is_cuda:
                torch.cuda.synchronize(written[0].device)


def _fits(tensor: torch.Tensor) -> bool:
    """Checks that a copy on the device leaves room there; otherwise it is put aside on the host."""
    return not tensor.is_cuda or tensor.nbytes < torch.cuda.mem_get_info(tensor.device)[0] // 4


class Placed:
    """Constants that lie on a device, which owns this, by the arrays that they were made of: programs of one graph share them."""

    def __init__(self, device: Device) -> None:
        self._place = device.place
        self._made: dict[int, tuple[weakref.ref[NDArray[Any]], weakref.ref[torch.Tensor]]] = {}

    def of(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device: what lies there as long as somebody holds it, or else a new one."""
        number = id(array)
        _, made = self._made.get(number, (None, None))
        tensor = None if made is None else made()
        if tensor is None:
            tensor = to_torch(array, self._place)
            gone = weakref.ref(array, lambda _: self._made.pop(number, None))  # another array may get its number
            self._made[number] = gone, weakref.ref(tensor)
        return tensor
