"""Executables whose steps do something around the device's part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable, HasBuffers, HasTimeline, Timeline
from msplit.engines.cuda.ir.graph import STEPS
from msplit.errors import EngineError


class Wrapped:
    """All that is the device's alone. Sessions of a host part are shared by all executables of a model: closing leaves them."""

    def __init__(self, device: Executable) -> None:
        self.device = device

    def launch(self) -> None:
        """See `Executable`."""
        self.device.launch()

    def device_times(self, count: int) -> list[float] | None:
        """See `Executable`."""
        return self.device.device_times(count)

    def buffers(self) -> Arrays:
        """See `HasBuffers`."""
        return self.device.buffers() if isinstance(self.device, HasBuffers) else {}

    def timeline(self) -> Timeline:
        """See `HasTimeline`."""
        if not isinstance(self.device, HasTimeline):
            raise EngineError("this engine can not time the parts of a step")
        return self.device.timeline()

    def facts(self) -> Mapping[str, Any]:
        """See `Executable`."""
        return self.device.facts()

    def close(self) -> None:
        """Frees the device's part."""
        self.device.close()


class Counting(Wrapped):
    """An executable that is told at every step how many there were before, as the state of TensorFlow's random ops has it."""

    def __init__(self, device: Executable) -> None:
        super().__init__(device)
        self._steps = 0

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """See `Executable`."""
        outputs = self.device.step({**feeds, STEPS: np.asarray(self._steps, np.int64)})
        self._steps += 1
        return outputs
