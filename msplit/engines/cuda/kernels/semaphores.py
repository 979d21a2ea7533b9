"""Counters by which the blocks of a kernel find out which of them is done last.

Each launch has counters of its own, since any two of them may run at once. They begin at zero, and the last block puts them back. A
launch in a captured graph runs again and again on the same counters, and nothing tells when its graph is gone: they are handed out once and
for all, from a supply that lasts for thousands of graphs. Those of graphs that are only timed are taken back (`lent`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

SUPPLY = 1 << 22
"""Counters per device: 16 MiB."""

_ALIGNED = 4
"""Counters in 16 bytes: a kernel is compiled anew for a pointer that is not a multiple of them."""

_supplies: dict[torch.device, torch.Tensor] = {}
_taken: dict[torch.device, int] = {}


def take(device: torch.device, count: int) -> torch.Tensor | None:
    """Counters at zero for one launch on the current stream, captured or not; None where there are no more.

    Outside of captures they are made for the launch, which takes a kernel more: that is what runs step by step, to look for faults.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        if device.type == "cuda" and device not in _supplies:
            _supplies[device] = torch.zeros(SUPPLY, dtype=torch.int32, device=device)
            _taken[device] = 0
            torch.cuda.synchronize(device)
        return torch.zeros(count, dtype=torch.int32, device=device)
    count += -count % _ALIGNED
    taken = _taken.get(device, SUPPLY)
    if taken + count > SUPPLY:
        return None
    _taken[device] = taken + count
    return _supplies[device][taken : taken + count]


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """What is taken inside is free again afterwards: for graphs that do not outlive this, and of which one runs at a time."""
    before = dict(_taken)
    try:
        yield
    finally:
        _taken.update(before)
