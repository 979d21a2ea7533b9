"""A training graph compiled by XLA as a whole: what `tf.function(jit_compile=True)` makes of it, with variables of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from msplit.engines.base import Engine, Executable, Job
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.engine import ENGINE
from msplit.errors import EngineError

HANDLE = "VarHandleOp"


@dataclass(frozen=True)
class WholeXla(Engine):
    """Builds it. See `engines.base.Engine`."""

    name: str = "tensorflow"

    def unavailable(self) -> str | None:
        return ENGINE.unavailable()

    def device(self, job: Job) -> str:
        return ENGINE.device(job)

    def build(self, job: Job) -> CompiledTraining:
        """The step, compiled for the job's feeds.

        Raises:
            EngineError: The graph has something that XLA does not compile.
        """
        tf = runtime.tensorflow()
        try:
            made = CompiledTraining(job)
            before = made.save_state()
            made.step(job.feeds)
            made.load_state(before)
        except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
            raise EngineError(f"XLA does not compile this step: {runtime.first_line(error)}") from error
        return made


class CompiledTraining(Executable):
    """See `engines.base.Executable`."""

    keeps_state = True

    def __init__(self, job: Job) -> None:
        tf = runtime.tensorflow()
        model = job.flat.model
        self._ieee = job.precision.ieee
        runtime.set_precision(self._ieee)
        (self._device,) = runtime.devices(1, cpu_only=job.tensorflow.cpu)
        graph_def = type(model.graph_def)()
        graph_def.CopyFrom(model.graph_def)
        needed = {model.graph_def.node[node].name for node in job.flat.origin_node.tolist()}
        given = {endpoint.tensor.partition(":")[0] for endpoint in model.inputs}
        kept = [node for node in model.graph_def.node if node.name in needed]
        del graph_def.node[:]
        # What is mapped to something else goes: XLA would be asked to compile a placeholder that nobody reads.
        graph_def.node.extend(node for node in kept if node.op != HANDLE and node.name not in given)
        for node in graph_def.node:
            if "_class" in node.attr:
                del node.attr["_class"]
        with tf.device(self._device):
            self._variables = {
                node.name: tf.Variable(tf.zeros([dim.size for dim in node.attr["shape"].shape.dim], dtype(tf, node)))
                for node in kept
                if node.op == HANDLE
            }
        self._inputs = [endpoint.name for endpoint in model.inputs]
        self._outputs = [endpoint.name for endpoint in model.outputs]
        tensors = [endpoint.tensor for endpoint in model.inputs]

        def train(*values: Any) -> list[Any]:
            capture = tf.compat.v1.get_default_graph().capture
            handles = {f"{name}:0": capture(variable.handle) for name, variable in self._variables.items()}
            fed = dict(zip(tensors, values, strict=True))
            wanted = [*(endpoint.tensor for endpoint in model.outputs), *model.targets]
            found = tf.graph_util.import_graph_def(
                graph_def, input_map={**handles, **fed}, return_elements=wanted, name=""
            )
            outputs, targets = found[: len(self._outputs)], found[len(self._outputs) :]
            with tf.control_dependencies(targets):
                return [tf.identity(one) for one in outputs]

        self._call = tf.function(train, jit_compile=True)
        self._last: list[Any] = []
        if job.state:
            self.load_state(job.state)

    def save_state(self) -> dict[str, np.ndarray]:
        return {name: variable.numpy() for name, variable in self._variables.items()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, variable in self._variables.items():
            if name in state:
                variable.assign(state[name])

    def step(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step. See `Executable`."""
        tf = runtime.tensorflow()
        with tf.device(self._device):
            self._last = [tf.constant(feeds[name]) for name in self._inputs]
        return dict(zip(self._outputs, [one.numpy() for one in self._run()], strict=True))

    def _run(self) -> list[Any]:
        runtime.set_precision(self._ieee)
        with runtime.tensorflow().device(self._device):
            outputs: list[Any] = self._call(*self._last)
        return outputs

    def launch(self) -> None:
        """One step on the inputs of the last one."""
        self._run()
        runtime.tensorflow().test.experimental.sync_devices()

    def device_times(self, count: int) -> None:
        """The runtime does not tell."""

    def facts(self) -> Mapping[str, Any]:
        return {"engine": "tensorflow", "streams": 1, "device": self._device, "xla": "whole step"}

    def close(self) -> None:
        self._call, self._variables = None, {}


def dtype(tf: Any, node: Any) -> Any:
    """The type of a variable."""
    return tf.dtypes.as_dtype(node.attr["dtype"].type)
