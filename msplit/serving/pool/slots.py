"""Slots of a pool: each runs one step of the model at a time. Here are the interface, and the slots that are not a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from msplit.engines.base import Executable, Feeds, refuse
from msplit.engines.tensors import tensor
from msplit.engines.user_rows import UserRows
from msplit.errors import EngineError
from msplit.formats.tensors import numpy_dtype
from msplit.serving.pool.ports import Ports
from msplit.serving.pool.scheduler import Bucket, rows_in

Answer = dict[str, Any]
"""Outputs by name: arrays, or PyTorch tensors where they stay on the device."""


class Slot(Protocol):
    """Place in which one step runs at a time. On a GPU it is an arena: streams, captured graphs of all buckets, and memory for inputs,
    intermediate values and outputs. Subclasses inherit methods for steps that are over once they were started."""

    def start(self, bucket: Bucket, feeds: Sequence[Feeds]) -> None:
        """Starts a step of a size on the rows of all these requests, in their order, which have its length."""

    def over(self) -> bool:
        """True if the step is over. Raises the error with which it failed."""
        return True

    def wait(self) -> None:
        """Returns when the step is over, or sooner. Other threads of Python can run meanwhile."""

    def outputs(self, into: Mapping[str, Any] | None = None) -> Answer:
        """Outputs of the step that is over, which belong to the caller; those that fit may lie in these arrays of the caller's."""

    def outputs_on_device(self) -> dict[str, Any]:
        """Outputs of the step that is over, as PyTorch tensors on the device.

        Raises:
            EngineError: The slot has no device.
        """
        raise EngineError("outputs are on the host here")

    def facts(self) -> Mapping[str, Any]:
        """Facts such as the number of streams or bytes."""

    def close(self) -> None:
        """Gives memory and streams back."""


class StepSlot(Slot):
    """Slot that runs a step from beginning to end in `start`.

    Args:
        steps: Functions that run a step, by bucket; the one under 0 runs a step of any size.
        ports: Joins requests; None where each step gets one that is whole.
        owned: Executables that are closed together with the slot.
    """

    def __init__(
        self, steps: Mapping[Bucket, Callable[[Feeds], Answer]], ports: Ports | None, owned: Sequence[Executable] = ()
    ) -> None:
        self._steps, self._ports, self._owned = steps, ports, owned
        self._outputs: Answer = {}

    def start(self, bucket: Bucket, feeds: Sequence[Feeds]) -> None:
        """Runs a step."""
        step = self._steps[bucket if bucket in self._steps else 0]
        self._outputs = step(feeds[0] if self._ports is None else self._ports.join(feeds, rows_in(bucket)))

    def wait(self) -> None:
        """Returns at once."""

    def outputs(self, into: Mapping[str, Any] | None = None) -> Answer:
        """Outputs of the step, in memory of their own."""
        return self._outputs

    def facts(self) -> Mapping[str, Any]:
        """Facts of the executable."""
        return self._owned[-1].facts() if self._owned else {}

    def close(self) -> None:
        """Closes the executables."""
        for executable in self._owned:
            executable.close()


class SimulatedSlot:
    """Slot that stands in for one of a GPU: a thread of its own runs the steps of another slot, so that they take time to be over."""

    def __init__(self, slot: Slot) -> None:
        self._slot, self._thread = slot, ThreadPoolExecutor(1, thread_name_prefix="msplit-simulated")
        self._running: Future[None] | None = None

    def start(self, bucket: Bucket, feeds: Sequence[Feeds]) -> None:
        """Starts a step in the thread."""
        self._running = self._thread.submit(self._slot.start, bucket, feeds)

    def over(self) -> bool:
        """True if the thread is done. Raises the error with which the step failed."""
        assert self._running is not None
        if not self._running.done():
            return False
        self._running.result()
        return True

    def wait(self) -> None:
        """Waits for the thread."""
        assert self._running is not None
        self._running.exception()

    def outputs(self, into: Mapping[str, Any] | None = None) -> Answer:
        """Outputs of the step."""
        return self._slot.outputs(into)

    def outputs_on_device(self) -> dict[str, Any]:
        """Outputs as PyTorch tensors on the CPU, which stands in for the device; strings as arrays."""
        return {
            name: value if value.dtype.kind in "OSU" else tensor(name, value) for name, value in self.outputs().items()
        }

    def facts(self) -> Mapping[str, Any]:
        """Facts of the other slot."""
        return self._slot.facts()

    def close(self) -> None:
        """Ends the thread, and closes the other slot."""
        self._thread.shutdown()
        self._slot.close()


class HostedSlot(Slot):
    """Slot whose steps have a host part that takes little, or several users: whoever starts a step runs what is in front of the device, and
    whoever takes the outputs what is behind. In threads of its own it would wait for Python's lock longer than it runs.

    Args:
        slot: Runs the device part.
        hosts: By bucket, the host part (`HostPart` of the engine); empty where there is none.
        made: By bucket, type and shape of what the device part is fed.
        once: By bucket, inputs of the device part of which one row is read for each user.
        ports: Joins requests.
    """

    def __init__(
        self,
        slot: Slot,
        hosts: Mapping[Bucket, Any],
        made: Mapping[Bucket, Mapping[str, tuple[str, tuple[int, ...]]]],
        once: Mapping[Bucket, UserRows],
        ports: Ports,
    ) -> None:
        self._slot, self._hosts, self._ports, self._once = slot, hosts, ports, once
        self._made = {
            bucket: [(name, numpy_dtype(dtype), shape) for name, (dtype, shape) in taken.items()]
            for bucket, taken in made.items()
        }
        self._host, self._given, self._there = hosts.get(max(made)), dict[str, Any](), Answer()

    def start(self, bucket: Bucket, feeds: Sequence[Feeds]) -> None:
        """Runs what is in front, and starts the device part."""
        self._host, self._given = self._hosts.get(bucket), dict(self._ports.join(feeds, rows_in(bucket)))
        made, self._there = (self._given, {}) if self._host is None else self._host.run(self._given)
        inputs = self._once[bucket].of(made)
        for name, dtype, shape in self._made[bucket]:
            value = inputs[name]
            if value.shape != shape or value.dtype != dtype:  # the copy would repeat it, or convert
                refuse({name: value}, {name: (dtype.name, shape)})
        self._slot.start(bucket, [inputs])

    def over(self) -> bool:
        """True if the device part is over."""
        return self._slot.over()

    def wait(self) -> None:
        """Waits for the device part."""
        self._slot.wait()

    def outputs(self, into: Mapping[str, Any] | None = None) -> Answer:
        """Outputs of the device part, and what the host makes behind it."""
        return self._finished(self._slot.outputs(into))

    def outputs_on_device(self) -> dict[str, Any]:
        """The same on the device; on the host what the host makes."""
        return self._finished(self._slot.outputs_on_device())

    def _finished(self, made: Answer) -> Answer:
        return made if self._host is None else {**self._host.finish(self._given, made), **self._there}

    def facts(self) -> Mapping[str, Any]:
        """Facts of the device part."""
        return self._slot.facts()

    def close(self) -> None:
        """Closes the device part."""
        self._slot.close()
