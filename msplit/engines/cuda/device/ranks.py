"""Messages between processes that train together: the sums of their values, and all of their rows.

Until a step is one of all of them, nothing is said: each does as if the others had its own rows. So what traces, times and verifies a
model needs nobody else, and what comes of it is what the whole batch would give if it were made of these rows again and again.

Means go over NCCL, or through symmetric memory: each GPU reads a part of the values of all, and writes the sums to all. Every sum is made
by one GPU, so that all have the same bits. Or no mean is made: who needs it reads the values of all ranks where they lie, and sums them up
in the order of ranks, which gives the same bits on all GPUs as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module

import torch

from msplit.engines.cuda.device.capture import capture, is_capturing
from msplit.engines.cuda.device.device import Device
from msplit.errors import RankLost

SYMMETRIC = "MSPLIT_SYMMETRIC"
"""Environment variable: with ``1`` what is averaged goes through symmetric memory, or is read there by who sums it up, where that is faster
than NCCL, as measured."""


def uses_symmetric_memory() -> bool:
    """True if it is asked for."""
    return os.environ.get(SYMMETRIC) == "1"


_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Environment of PyTorch's symmetric memory. Each process sees one GPU alone, and calls it by the number that the others call theirs."""

_CALLS = 10
"""Calls in a graph of which one is timed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Room:
    """Memory for the values of a message, which the GPUs of all ranks read and write.

    Attributes:
        own: The flat tensor of this rank.
        every: Those of all ranks, by rank.
        wait: Has the current stream wait until those of all ranks are there.
        by_rank: True if the values are read of all ranks, and no mean is made in their place.
    """

    own: torch.Tensor
    every: list[torch.Tensor]
    wait: Callable[[], object]
    by_rank: bool


class Symmetric:
    """Memory of a GPU that those of the other processes read and write.

    Attributes:
        rooms: By message and size the memory for its values; None where there is none, or NCCL is as fast. It stays as long as the
            process: to free it waits for the device, which must not be amid a capture.
    """

    def __init__(self, device: Device) -> None:
        self.rooms: dict[tuple[int, int], Room | None] = {}

    def room(self, like: torch.Tensor, size: int, message: int, *, by_rank: bool) -> torch.Tensor:
        """The flat tensor for a message. All processes ask for it for the first time outside of captures, and then measure."""
        key = message, size
        if key not in self.rooms and not is_capturing():
            self.rooms[key] = self._fastest(like, size, by_rank=by_rank)
        found = self.rooms.get(key)
        return like.new_empty(size) if found is None else found.own

    def find(self, flat: torch.Tensor) -> Room | None:
        """The room that a tensor is the memory of; None for any other tensor."""
        rooms = (one for one in self.rooms.values() if one is not None)
        return next((one for one in rooms if one.own.data_ptr() == flat.data_ptr()), None)

    def average(self, flat: torch.Tensor) -> bool:
        """Puts the mean over all processes in the place of a room's values; False for any other tensor."""
        if self.find(flat) is None:
            return False
        _sum_and_divide(flat)
        return True

    def read(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """The values of all ranks where they lie, once all are there; None for a tensor whose mean is to be made."""
        room = self.find(flat)
        if room is None or not room.by_rank:
            return None
        room.wait()
        return room.every

    def wait(self) -> None:
        """Waits until all ranks are done with what was read of rooms in the step before."""
        for room in self.rooms.values():
            if room is not None and room.by_rank:
                room.wait()
                return  # one stands for all

    def _fastest(self, like: torch.Tensor, size: int, *, by_rank: bool) -> Room | None:
        ranks = torch.distributed.get_world_size()
        if not like.is_cuda or like.dtype != torch.float32 or ranks < 2:
            return None
        os.environ |= _NO_MULTICAST
        own = None
        with contextlib.suppress(RuntimeError, ImportError, AttributeError):
            memory = import_module("torch.distributed._symmetric_memory")
            own = memory.empty(size, dtype=like.dtype, device=like.device)
        if not _all(own is not None):
            return None
        try:
            handle = memory.rendezvous(own, torch.distributed.group.WORLD.group_name)
            others = [
                None if rank == handle.rank else handle.get_buffer(rank, (size,), like.dtype) for rank in range(ranks)
            ]
        except RuntimeError:
            own = None
        if not _all(own is not None) or own is None:
            return None
        own.zero_()
        every = [own if one is None else one for one in others]

        def read(_: torch.Tensor) -> None:
            """Does what reading costs more than a mean that is there: an update reads its own gradient in any case."""
            handle.barrier()
            torch.add(every[0], every[1])

        ways = [_average, _sum_and_divide, *([read] if by_rank else [])]
        times = torch.tensor([_time(one, own) for one in ways])
        torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX)  # on the host: all take the same
        best = ways[int(times.argmin())]
        return None if best is _average else Room(own, every, handle.barrier, best is read)


def _all(holds: bool) -> bool:
    """True if something holds in all processes."""
    told = torch.tensor(int(holds))
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN)
    return bool(told)


def _time(issue: Callable[[torch.Tensor], object], flat: torch.Tensor) -> float:
    """Milliseconds of calls in a graph."""
    issue(flat)
    with capture([torch.cuda.current_stream(flat.device)], torch.cuda.graph_pool_handle()) as graph:
        for _ in range(_CALLS):
            issue(flat)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))


def _average(flat: torch.Tensor) -> None:
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.AVG)


def _sum_and_divide(flat: torch.Tensor) -> None:
    torch.ops.symm_mem.two_shot_all_reduce_(flat, "sum", torch.distributed.group.WORLD.group_name)
    flat.mul_(1 / torch.distributed.get_world_size())


def _together(device: torch.device | None) -> AbstractContextManager[object]:
    """A block whose messages are one, on a GPU; gloo, on the CPU, says them one by one."""
    return contextlib.nullcontext() if device is None else torch.distributed._coalescing_manager(device=device)


class ProcessGroup:
    """The processes of PyTorch's default group, which train together: over NCCL where tensors are on GPUs. All say the same things in the
    same order.

    Attributes:
        rank: Number of this one, from 0.
    """

    def __init__(self) -> None:
        self.rank: int = torch.distributed.get_rank()

    def room(self, like: torch.Tensor, size: int, message: int, *, by_rank: bool = False) -> torch.Tensor:
        """A flat tensor for the values of a message of a step, which are to be averaged, or may be read of all ranks."""
        if not uses_symmetric_memory():
            return like.new_empty(size)
        with _told():
            return Device.of(like.device).owned(Symmetric).room(like, size, message, by_rank=by_rank)

    def read(self, flat: torch.Tensor) -> list[torch.Tensor] | None:
        """What all ranks have in the place of a tensor of `room`, by rank, until `wait` is over; None where it is to be averaged."""
        with _told():
            return Device.of(flat.device).owned(Symmetric).read(flat)

    def wait(self, place: torch.device) -> None:
        """Waits until no rank reads any more what it read in the step before."""
        with _told():
            Device.of(place).owned(Symmetric).wait()

    def average(self, flat: torch.Tensor) -> None:
        """Puts the mean over all processes in the place of a tensor."""
        with _told():
            if not flat.is_cuda:  # gloo has no mean
                torch.distributed.all_reduce(flat)
                flat.div_(torch.distributed.get_world_size())
            elif not Device.of(flat.device).owned(Symmetric).average(flat):
                _average(flat)

    def gather(self, every: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> None:
        """Collects tensors of each process, each behind that of the process before. NCCL does so in one kernel, from where they lie to
        where they go: 80 tensors take it half the time of packing, one message and unpacking."""
        pairs = [(to.view(-1), one.view(-1)) for to, one in zip(every, own, strict=True) if one.numel()]
        device = own[0].device if own[0].is_cuda and pairs else None
        with _told(), _together(device):
            for to, one in pairs:
                torch.distributed.all_gather_into_tensor(to.view(torch.uint8), one.view(torch.uint8))

    def spread(self, tensor: torch.Tensor) -> None:
        """Puts the values of the first process in the place of a tensor."""
        with _told():
            torch.distributed.broadcast(tensor, 0)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError):  # what can not be captured is told by who captures
            raise
        raise RankLost(f"another process does not answer: {str(error).partition(chr(10))[0]}") from error


class Ranks:
    """Whom the steps that a thread issues on a device are said to."""

    def __init__(self, device: Device) -> None:
        self._of_thread = threading.local()

    @property
    def group(self) -> ProcessGroup | None:
        """Nobody, unless this thread is in a block of `talking`."""
        found: ProcessGroup | None = getattr(self._of_thread, "group", None)
        return found

    @contextlib.contextmanager
    def talking(self, group: ProcessGroup | None) -> Iterator[None]:
        """A block whose steps are those of all of a group; of this process alone, where there is none."""
        before = self.group
        self._of_thread.group = group
        try:
            yield
        finally:
            self._of_thread.group = before
