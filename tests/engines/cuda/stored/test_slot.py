"""Slots of a GPU, as far as they can be looked at without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msplit.engines.cuda.device import device as pools  # noqa: E402
from msplit.engines.cuda.device.device import Device  # noqa: E402
from msplit.engines.cuda.options import EngineOptions  # noqa: E402
from msplit.engines.cuda.runtime.executable import CudaExecutable  # noqa: E402
from msplit.engines.cuda.stored import builds  # noqa: E402
from msplit.errors import EngineError  # noqa: E402


def test_a_slot_for_which_there_is_no_room_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest batch is captured, and then there is no memory for the next."""
    made = list[Any]()
    monkeypatch.setattr(
        pools, "new_stream", lambda place, priority: made.append(priority) or SimpleNamespace(cuda_stream=len(made))
    )
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    device = Device(torch.device("cpu"))
    monkeypatch.setattr(Device, "of", staticmethod(lambda place: device))
    captured, closed = list[int](), list[int]()

    class Captured(CudaExecutable):
        def __init__(self, batch: int) -> None:
            self.batch = batch

        def close(self) -> None:
            closed.append(self.batch)

    def capture(compiled: int, *given: Any, **more: Any) -> Captured:
        if captured:
            raise EngineError("out of memory")
        captured.append(compiled)
        return Captured(compiled)

    monkeypatch.setattr(builds, "executable_for", capture)
    found = builds.Opened(np.zeros(0, np.uint8), None, EngineOptions(device="cpu"), ieee=True, fits=True)
    buckets: Any = {batch: SimpleNamespace(compiled=batch, plan=SimpleNamespace(streams=3)) for batch in (1, 8, 4)}
    with pytest.raises(EngineError, match="out of memory"):
        found.slot(buckets, {}, urgency=1)
    assert (captured, closed) == ([8], [8])
    again = device.streams.lease(3, -1)
    assert made == [-1, -1, -1], "the streams are there for the next one"
    assert len(again) == 3
