"""The engine on the stock TensorFlow runtime: stream k is its k-th logical device.

A job whose nodes are all on stream 0 is the model as its user runs it today, without any placement: the baseline. Every other job
runs the flat graph (functions inlined) with a device per node, so a comparison of the two checks the flat graph as well.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msplit.engines.base import Arrays, Engine, Executable, Job
from msplit.engines.tensorflow import cluster_session, runtime
from msplit.engines.tensorflow.cluster import how_many
from msplit.engines.tensorflow.placed import PlacedGraph, place, unplaced, unrewritten
from msplit.engines.tensorflow.session import Placement, SessionExecutable
from msplit.errors import INSTALL_TENSORFLOW, EngineError
from msplit.flatten.flat import FlatGraph
from msplit.formats.model import Model
from msplit.opset import schema
from msplit.opset.traits import VARIABLES, ops_with
from msplit.progress import phase


@dataclass(frozen=True)
class TensorFlowEngine(Engine):
    """Builds sessions."""

    name: str = "tensorflow"

    def unavailable(self) -> str | None:
        """None where TensorFlow is installed, else what would help."""
        spec = importlib.util.find_spec("tensorflow")
        if spec is None:
            return f"TensorFlow is not installed: {INSTALL_TENSORFLOW}"
        if spec.origin is None:  # a namespace: no __init__.py
            return f"only TensorFlow's protobuf modules are installed: {INSTALL_TENSORFLOW}"
        return None

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Fixes the GPUs of the process, or the logical devices of the first one, for all jobs that will be built; call it first.

        Raises:
            EngineError: TensorFlow has started with fewer.
        """
        named = [device for job in jobs for device in job.tensorflow.devices]
        streams = max((job.streams for job in jobs if not job.tensorflow.devices), default=1)
        options = jobs[0].tensorflow if jobs else None  # a process has one kind of devices
        runtime.configure(max(streams, how_many(named, "GPU")), spread=bool(named), options=options)

    def device(self, job: Job) -> str:
        """Device that a job will run on: "GPU" or "CPU"."""
        if job.tensorflow.cluster is not None:
            return "GPU" if any("GPU" in name for name in job.tensorflow.cluster.devices) else "CPU"
        return "GPU" if runtime.has_gpu() and not job.tensorflow.cpu else "CPU"

    def build(self, job: Job) -> Executable:
        """Makes a session for a job. See `Engine`.

        Raises:
            EngineError: TensorFlow is not installed, or XLA is asked for on several streams.
        """
        if job.tensorflow.cluster is not None:
            return cluster_session.build(job, job.tensorflow.cluster)
        missing = self.unavailable()
        if missing:
            raise EngineError(missing)
        own = job.tensorflow
        if not own.cpu:
            self.prepare([job])
        runtime.load_op_libraries(job.op_libraries)
        facts: dict[str, Any] = {"engine": self.name, "streams": job.streams, "device": self.device(job)}
        single = not (job.ids.any() or own.devices)
        if own.xla:
            if not single:
                raise EngineError("XLA compiles the whole model for one device", fix="ask for XLA with one stream")
            return with_xla(job, facts)
        placed, more = _placed(job, single)
        with phase("opening a session"):
            executable = _session(job, placed, _config(job), {**facts, **more})
            executable.load_state(job.state)
            return executable

    def placement(self, job: Job) -> Placement:
        """Device on which TensorFlow puts each node of a job that was built before, by one more step in a session that rewrites nothing.

        Raises:
            EngineError: TensorFlow can not run it.
        """
        placed, _ = _placed(job, not (job.ids.any() or job.tensorflow.devices))
        config = _config(job, optimized=False)
        # The optimizer folds constants at higher levels.
        config.graph_options.optimizer_options.opt_level = config.graph_options.optimizer_options.L0
        with phase("asking where TensorFlow puts nodes"), closing(_session(job, placed, config, {})) as executable:
            return executable.placement(job.feeds, placed.graph_def, _asked(job))


def _session(job: Job, placed: PlacedGraph, config: Any, facts: Mapping[str, Any]) -> SessionExecutable:
    ieee, timeout = job.precision.ieee, job.tensorflow.timeout
    return SessionExecutable(job.flat.model, placed, config, ieee=ieee, facts=facts, timeout=timeout)


def _asked(job: Job) -> dict[str, str]:
    """Node -> the device that its id names. Constants, which go to who reads them, and what the host runs are nobody's choice."""
    own, flat = job.tensorflow, job.flat
    if not (job.ids.any() or own.devices):
        return {}
    devices = own.devices or runtime.devices(job.streams, cpu_only=own.cpu)
    named = zip(flat.graph.names, flat.graph.ops, job.ids.tolist(), flat.host.tolist(), strict=True)
    return {name: devices[number] for name, op, number, host in named if op != "Const" and not host}


def _placed(job: Job, single: bool) -> tuple[PlacedGraph, dict[str, Any]]:
    """The graph of a job, with devices if it is not for a single one, and what is worth reporting of it."""
    if single:
        return unplaced(job.flat), {}
    own = job.tensorflow
    devices = list(own.devices) or runtime.devices(job.streams, cpu_only=own.cpu)
    placed = place(job.flat, job.ids, devices, "/device:CPU:0")
    facts = {"devices": len(devices), "cross_stream_tensors": placed.copies, "cloned_constants": placed.clones}
    return placed, {**facts, "moved_nodes": placed.moved}


def _config(job: Job, *, optimized: bool = True) -> Any:
    """The options of its session."""
    own = job.tensorflow
    config = runtime.session_config(
        job.streams,
        cpu_only=own.cpu,
        optimized=optimized,
        merge_streams=own.merge_streams,
        soft=own.soft,
        base=runtime.config_of(own.config),
    )
    if own.devices:
        config.device_count["CPU"] = max(1, how_many(own.devices, "CPU"))
    if job.precision.half:
        runtime.mix_precision(config, job.precision.half, cpu=own.cpu)
    return config


ENGINE = TensorFlowEngine()


@dataclass(frozen=True)
class ReferenceEngine(Engine):
    """TensorFlow on the CPU, in IEEE float32 whatever a job asks for, each op as the graph has it: see `reference`."""

    name: str = "tensorflow"

    def unavailable(self) -> str | None:
        """None where TensorFlow is installed, else what would help."""
        return ENGINE.unavailable()

    def device(self, job: Job) -> str:
        """Device that a job runs on."""
        return "CPU"

    def build(self, job: Job) -> Executable:
        """Makes a session for a job. See `Engine`.

        Raises:
            EngineError: TensorFlow can not load the model.
        """
        return session_on_cpu(job.flat, op_libraries=job.op_libraries, state=job.state)


REFERENCE = ReferenceEngine()


def reference(
    flat: FlatGraph,
    feeds: Arrays,
    *,
    op_libraries: Sequence[Path] = (),
    inlined: bool = False,
    state: Arrays | None = None,
) -> dict[str, NDArray[Any]]:
    """The outputs of the model by TensorFlow on the CPU, in IEEE float32: what other engines are held against.

    Each op runs as the graph has it: to rewrite the graph first would take longer than the one step, up to a minute for a large one.
    oneDNN stays as it is in this process (on by default), so the last bits may differ from machine to machine.

    Args:
        flat: The graph.
        feeds: Its inputs.
        op_libraries: Shared objects with custom ops to load first.
        inlined: Run the flat graph in place of the model, so that outputs may be inside of functions.
        state: What variables are before the step, where steps change them; as the model has them where nothing is said.

    Raises:
        EngineError: TensorFlow can not run the model.
    """
    with (
        phase("running the reference in TensorFlow"),
        closing(session_on_cpu(flat, op_libraries=op_libraries, inlined=inlined, state=state)) as executable,
    ):
        return executable.step(feeds)


def session_on_cpu(
    flat: FlatGraph, *, op_libraries: Sequence[Path] = (), inlined: bool = False, state: Arrays | None = None
) -> Executable:
    """Session on the CPU that `reference` runs a step of, and closes. What only reads is not asked twice, see `Answers`.

    Raises:
        EngineError: TensorFlow can not load the model.
    """
    runtime.load_op_libraries(op_libraries)

    def opened() -> Executable:
        cpu = "/device:CPU:0"
        placed = place(flat, np.zeros(len(flat), np.int32), [cpu], cpu) if inlined else unplaced(flat)
        config = runtime.session_config(1, cpu_only=True, optimized=False)
        executable = SessionExecutable(flat.model, unrewritten(placed, config), config, ieee=True, facts={})
        if state:
            executable.load_state(state)
        return executable

    return opened() if state or op_libraries or not is_repeatable(flat) else Answers(flat, inlined, opened)


class Answers(Executable):
    """TensorFlow's answers for a graph whose steps depend on their inputs alone. A session takes longer to open than a step of it, and
    verification asks the same again, in another precision and of the next preparation: it is opened once something new is asked.

    Raises:
        EngineError: TensorFlow can not load the model.
    """

    keeps_state = True

    def __init__(self, flat: FlatGraph, inlined: bool, open_session: Callable[[], Executable]) -> None:
        parts = (flat.inputs, flat.outputs, flat.targets, inlined)
        self._about = (weakref.ref(flat.model), weakref.ref(flat.graph), *parts)
        self._open = functools.cache(open_session)
        if _known(self._about) is None:  # what can not run is refused when it is opened
            self._open()
            _keep(self._about, {})

    def step(self, feeds: Arrays) -> dict[str, NDArray[Any]]:
        """Runs one step, or gives what it gave before. See `Executable`."""
        key = (self._about, _digest(feeds))
        answer = _known(key)
        if answer is None:
            answer = self._open().step(feeds)
            _keep(key, answer)
        return {name: value.copy() for name, value in answer.items()}

    def close(self) -> None:
        """Ends the session, where there is one."""
        if self._open.cache_info().currsize:
            self._open().close()


def is_repeatable(flat: FlatGraph) -> bool:
    """True if a step depends on its inputs alone: all its ops are known, and none of them keeps, draws or waits for anything."""
    stateful = {flat.graph.ops[node] for node in np.flatnonzero(flat.stateful).tolist()}
    return stateful <= _REPEATABLE and all(map(schema.lookup, set(flat.graph.ops)))


_REPEATABLE = ops_with("repeatable")
_MOST_ANSWERS = 1 << 9
_MOST_BYTES, _LARGEST_ANSWER = 1 << 24, 1 << 18
"""Bytes of all answers that are kept, and of one."""

_answers: dict[Hashable, tuple[int, Arrays]] = {}
"""Bytes of each answer, and the answer."""


def _known(key: Hashable) -> Arrays | None:
    """A kept answer, which goes last from now on; None where there is none."""
    found = _answers.pop(key, None)
    if found is not None:
        _answers[key] = found
    return None if found is None else found[1]


def _keep(key: Hashable, answer: Arrays) -> None:
    """Keeps an answer, unless it is large, in the place of the one that was asked for the longest time ago."""
    own = sum(value.nbytes for value in answer.values())
    if own > _LARGEST_ANSWER:
        return
    _answers[key] = own, {name: value.copy() for name, value in answer.items()}
    size = sum(one for one, _ in _answers.values())
    for oldest in [*_answers]:
        if len(_answers) <= _MOST_ANSWERS and size <= _MOST_BYTES:
            break
        size -= _answers.pop(oldest, (0, {}))[0]


def _digest(feeds: Arrays) -> bytes:
    """A hash of the names, types, shapes and values of inputs."""
    made = blake2b(digest_size=16)
    for name in sorted(feeds):
        value = np.asarray(feeds[name])
        made.update(repr((name, value.dtype.str, value.shape)).encode())
        made.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    return made.digest()


def with_xla(job: Job, facts: Mapping[str, Any]) -> Executable:
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
