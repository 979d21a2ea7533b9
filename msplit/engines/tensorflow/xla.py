"""The model compiled with XLA: as one program where every op allows it, else by TensorFlow's own clustering in a session."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Executable, Job
from msplit.engines.tensorflow import runtime
from msplit.engines.tensorflow.placed import unplaced
from msplit.engines.tensorflow.session import SessionExecutable
from msplit.errors import EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import Model
from msplit.opset import schema
from msplit.opset.traits import VARIABLES


def build(job: Job, facts: Mapping[str, Any]) -> Executable:
    """Compiles a job. Fact ``xla`` says how: "whole model", or "clusters" with ``xla_why``."""
    tf = runtime.tensorflow()
    try:
        executable = CompiledExecutable(job, {**facts, "xla": "whole model"})
        executable.step(job.feeds)
    except (tf.errors.OpError, ValueError, TypeError, KeyError, NotImplementedError, EngineError) as error:
        why = error.what if isinstance(error, EngineError) else _why(error)
        config = runtime.session_config(1, cpu_only=job.tensorflow.cpu, auto_jit=True)
        facts = {**facts, "xla": "clusters", "xla_why": why}
        return SessionExecutable(job.flat.model, unplaced(job.flat), config, ieee=job.precision.ieee, facts=facts)
    return executable


class CompiledExecutable(Executable):
    """A model compiled as a whole with ``jit_compile``.

    Raises:
        EngineError: The model has something that can not be compiled as a whole.
    """

    def __init__(self, job: Job, facts: Mapping[str, Any]) -> None:
        self._ieee = job.precision.ieee
        self._facts = dict(facts)
        (self._device,) = runtime.devices(1, cpu_only=job.tensorflow.cpu)
        model = job.flat.model
        if model.targets:
            raise EngineError("train steps are not compiled as a whole")
        strings = _first_of_strings(job.flat)
        if strings is not None:
            # XLA does not refuse strings as arguments: it ends the process.
            raise EngineError(f"XLA has no strings, and node {strings!r} gives one")
        self._inputs = tuple(endpoint.name for endpoint in model.inputs)
        self._outputs = tuple(endpoint.name for endpoint in model.outputs)
        self._last: list[Any] = []
        runtime.set_precision(self._ieee)
        self._call, self._dtypes = _saved_model(model) if model.is_saved_model else _graph(model)

    def _run(self, tensors: list[Any]) -> list[Any]:
        runtime.set_precision(self._ieee)
        with runtime.tensorflow().device(self._device):
            outputs: list[Any] = self._call(*tensors)
        return outputs

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs one step. See `Executable`."""
        tf = runtime.tensorflow()
        with tf.device(self._device):
            tensors = self._last = [  # another thread may set the attribute in between
                tf.constant(np.asarray(feeds[name]), dtype)
                for name, dtype in zip(self._inputs, self._dtypes, strict=True)
            ]
        outputs = self._run(tensors)
        return {name: np.asarray(tensor.numpy()) for name, tensor in zip(self._outputs, outputs, strict=True)}

    def launch(self) -> None:
        """Runs one step on the inputs that the last step left on the device, and waits for it."""
        self._run(self._last)
        runtime.tensorflow().test.experimental.sync_devices()

    def device_times(self, count: int) -> None:
        """None: the stock runtime does not tell a step's time on the device."""

    def facts(self) -> Mapping[str, Any]:
        """What is known of the run."""
        return dict(self._facts)

    def close(self) -> None:
        """Lets go of the compiled program."""
        self._last = []
        self._call = _closed


def _why(error: BaseException) -> str:
    unsupported = re.findall(r"(?:JIT: |, )(\w+) \(No registered", str(error))
    if unsupported:
        return f"XLA can not compile {', '.join(dict.fromkeys(unsupported))}"
    return runtime.first_line(error)


def _first_of_strings(flat: FlatGraph) -> str | None:
    for node in np.flatnonzero(flat.host).tolist():
        if "string" in (schema.output_dtypes(flat.graph.ops[node], flat.graph.attrs[node]) or ()):
            return flat.graph.names[node]
    return None


def _closed(*_: Any) -> list[Any]:
    raise EngineError("the executable is closed")


def _graph(model: Model) -> tuple[Callable[..., list[Any]], list[Any]]:
    tf = runtime.tensorflow()
    if any(node.op in VARIABLES for node in model.graph_def.node):
        raise EngineError("the graph has variables, which only a SavedModel brings into a compiled function")
    wrapped = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(model.graph_def, name=""), [])
    inputs = [wrapped.graph.get_tensor_by_name(endpoint.tensor) for endpoint in model.inputs]
    outputs = [wrapped.graph.get_tensor_by_name(endpoint.tensor) for endpoint in model.outputs]
    pruned = wrapped.prune(inputs, outputs)
    return tf.function(lambda *values: list(pruned(*values)), jit_compile=True), [tensor.dtype for tensor in inputs]


def _saved_model(model: Model) -> tuple[Callable[..., list[Any]], list[Any]]:
    tf = runtime.tensorflow()
    loaded = tf.saved_model.load(str(model.path), tags=list(model.tags))
    if model.signature not in loaded.signatures:
        raise EngineError(f"the SavedModel's signature {model.signature!r} is not a function")
    signature = loaded.signatures[model.signature]
    names = [endpoint.name for endpoint in model.inputs]
    outputs = [endpoint.name for endpoint in model.outputs]
    given = signature.structured_input_signature[1]

    def call(*values: Any) -> list[Any]:
        result = signature(**dict(zip(names, values, strict=True)))
        return [result[name] for name in outputs]

    compiled = tf.function(call, jit_compile=True)
    compiled.msplit_keeps = loaded  # its variables live as long as it does
    return compiled, [given[name].dtype for name in names]
