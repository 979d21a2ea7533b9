"""The next step's inputs on their way to the device while a step runs."""

from __future__ import annotations

import torch

from msplit.engines.base import Feeds
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.runtime.input_staging import InputStaging
from msplit.engines.cuda.runtime.memcpy import AsyncCopy
from msplit.errors import EngineError


class Prefetch:
    """A second place for a step's inputs: pinned memory, and as much on the device, to which a stream of its own copies.

    A captured graph reads its inputs at fixed addresses, so a step takes over what is there by one copy on the device, before its graph:
    10 µs for 17 MB, which take 1.2 ms from the host. Neither place is written while somebody may still read it:

    - pinned memory, by the host, once the copies out of it have `arrived`;
    - the place on the device, by these copies, once the step before has `taken` what was there: its graph may still run.

    And what a step takes has `arrived`, whole. One thread does all of this.

    Attributes:
        feeds: The mapping whose values were sent for the next step; None where nothing was.
    """

    def __init__(self, inputs: InputStaging, device: Device) -> None:
        self._device = device
        self._streams = device.streams.lease(1)
        (self._copies,) = self._streams
        self._next = InputStaging(inputs.on_device, device, own_kernel=False, stream=self._copies.cuda_stream)
        self._take_over = AsyncCopy(self._next.memory, inputs.memory)
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()
        self._taken.record(torch.cuda.current_stream(device.place))  # which has filled the new memory with zeros
        self.feeds: Feeds | None = None

    def send(self, feeds: Feeds) -> None:
        """Copies arrays into pinned memory, and issues their copies to the device, which do not wait for a step that runs.

        Where a value is no array or does not fit, nothing can be taken: the step that is given it says what is wrong.
        """
        self.feeds = None
        self._arrived.synchronize()
        self._copies.wait_event(self._taken)
        try:
            self.feeds = feeds if self._next.send_all(feeds) else None
        except EngineError:
            pass
        finally:
            self._arrived.record(self._copies)

    def take(self, feeds: Feeds) -> bool:
        """Issues, on the current stream, what makes the values that were sent the inputs of the graphs behind it; false where they were
        those of another mapping, which nobody gets any more."""
        sent, self.feeds = self.feeds, None
        if sent is not feeds:
            return False
        current = torch.cuda.current_stream(self._device.place)
        current.wait_event(self._arrived)
        self._take_over.send(0, self._next.memory.numel())
        self._taken.record(current)
        return True

    def close(self) -> None:
        """Gives the stream back. Nothing may be on it."""
        self._device.streams.give_back(self._streams)
