"""The host part: strings, tables and parsing, run by TensorFlow on the CPU before the device starts.

What it makes is fed to the device part like any input. TensorFlow is imported only for a model that has such a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable, HasBuffers, HasTimeline, Timeline
from msplit.engines.cuda.coverage import Division
from msplit.engines.cuda.program import Key
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph, Tensor


class HostPart:
    """Everything in front of the device part, as one TensorFlow session.

    Args:
        flat: The graph.
        division: Which of its nodes run here.
        op_libraries: Shared objects with custom ops to load first.
        origin: Value -> what it is in the graph, for those that are not in it: outputs of raised loops.

    Attributes:
        feeds: Name of each value that is handed to the device -> the value.
        nodes: How many nodes run here.

    Raises:
        EngineError: TensorFlow is missing, or can not load the model.
    """

    def __init__(
        self,
        flat: FlatGraph,
        division: Division,
        op_libraries: Sequence[Path] = (),
        origin: Mapping[Key, Key] | None = None,
    ) -> None:
        from msplit.engines.tensorflow import runtime
        from msplit.engines.tensorflow.placed import place
        from msplit.engines.tensorflow.session import SessionExecutable

        names = flat.graph.names
        fed = {(tensor.node, tensor.port): tensor.name for tensor in flat.inputs}
        self.feeds: Mapping[str, Key] = {
            f"{names[node]}:{port} (host)": (node, port) for node, port in division.frontier
        }
        self.nodes = len(division.host)
        # An input that is an output as it is: a session gives nothing back that it was fed.
        self._handed_on = {name: fed[key] for name, key in division.fetched.items() if key in fed}
        made = {name: key for name, key in division.fetched.items() if key not in fed}
        self._made = tuple(made)
        self._session: SessionExecutable | None = None
        wanted = {**self.feeds, **made}
        if not wanted:
            return
        runtime.load_op_libraries(op_libraries)
        # The flat graph, so that values inside of functions can be fetched.
        origin = origin or {}
        cut = replace(
            flat, outputs=tuple(Tensor(name, *origin.get(key, key)) for name, key in wanted.items()), targets=()
        )
        placed = place(cut, np.zeros(len(flat), np.int32), ["/device:CPU:0"], "/device:CPU:0")
        config = runtime.session_config(1, cpu_only=True)
        self._session = SessionExecutable(flat.model, placed, config, ieee=True, facts={})

    def run(self, feeds: Arrays) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Runs it once.

        Args:
            feeds: The model's inputs.

        Returns:
            Inputs of the device part: the model's own and what the host made; and those outputs of the model that the host made.
        """
        made = self._session.step(feeds) if self._session is not None else {}
        outputs = {name: made.pop(name) for name in self._made}
        outputs |= {name: np.array(feeds[given]) for name, given in self._handed_on.items()}
        return {**feeds, **made}, outputs

    def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            self._session.close()


class WithHost:
    """An executable whose steps run the host part first. `launch` and `device_times` are the device's alone."""

    def __init__(self, host: HostPart, device: Executable) -> None:
        self._host, self._device = host, device

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """See `Executable`."""
        inputs, outputs = self._host.run(feeds)
        return {**self._device.step(inputs), **outputs}

    def launch(self) -> None:
        """See `Executable`."""
        self._device.launch()

    def device_times(self, count: int) -> list[float] | None:
        """See `Executable`."""
        return self._device.device_times(count)

    def buffers(self) -> Arrays:
        """The device's."""
        return self._device.buffers() if isinstance(self._device, HasBuffers) else {}

    def timeline(self) -> Timeline:
        """The device's part alone."""
        if not isinstance(self._device, HasTimeline):
            raise EngineError("this engine can not time the parts of a step")
        return self._device.timeline()

    def facts(self) -> Mapping[str, Any]:
        """See `Executable`."""
        return {**self._device.facts(), "host_nodes": self._host.nodes}

    def close(self) -> None:
        """Frees the device's part. The session is shared by all executables of the model."""
        self._device.close()
