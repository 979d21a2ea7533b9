"""Messages between processes that train together: the sums of their values, and all of their rows.

Until a step is one of all of them, nothing is said: each does as if the others had its own rows. So what traces, times and verifies a
model needs nobody else, and what comes of it is what the whole batch would give if it were made of these rows again and again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from msplit.errors import RankLost

if TYPE_CHECKING:
    from msplit.engines.cuda.device.device import Device


class ProcessGroup:
    """The processes of PyTorch's default group, which train together: over NCCL where tensors are on GPUs. All say the same things in the
    same order.

    Attributes:
        rank: Number of this one, from 0.
    """

    def __init__(self) -> None:
        self.rank: int = torch.distributed.get_rank()

    def average(self, flat: torch.Tensor) -> None:
        """Puts the mean over all processes in the place of a tensor."""
        with _told():
            if flat.is_cuda:
                torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.AVG)
            else:  # gloo has no mean
                torch.distributed.all_reduce(flat)
                flat.div_(torch.distributed.get_world_size())

    def gather(self, every: torch.Tensor, own: torch.Tensor) -> None:
        """Collects a tensor of each process, by rank."""
        with _told():
            torch.distributed.all_gather_into_tensor(every.view(-1), own.view(-1))

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
