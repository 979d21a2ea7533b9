"""Graphs for the tests of the engine, and the engine on simulated streams."""

from __future__ import annotations

import functools
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from msplit import samples
from msplit.core.arguments import Precision
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.options import EngineOptions, KernelMode
from msplit.engines.tensorflow.engine import reference, session_on_cpu
from msplit.engines.tensorflow.placed import expanded
from msplit.engines.tensorflow.runtime import session_config
from msplit.engines.tensorflow.session import SessionExecutable
from msplit.flatten.build import flatten
from msplit.flatten.flat import FlatGraph
from msplit.formats import read
from msplit.verify.compare import compare

SAMPLES = Path(__file__).parents[3] / "sample_graphs"
CPU = torch.device("cpu")


def flat_of(graph_def, *, inputs: Sequence[str] | None = None, outputs: Sequence[str] | None = None):
    """The flat graph of a GraphDef, through the reader. The next one is written to the same file; a GraphDef keeps nothing in it."""
    path = Path(_folder().name) / "model.pb"
    path.write_bytes(graph_def.SerializeToString())
    return flatten(read(path, inputs=inputs, outputs=outputs, gradients=expanded))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    """One for all: to remove one takes longer than all else."""
    return tempfile.TemporaryDirectory()


def graph_of(build, *, outputs: Sequence[str] | None = None):
    """The flat graph of what `build` makes, in a TensorFlow graph of its own. It gets ``tf`` and ``tf.compat.v1``."""
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        build(tf, tf.compat.v1)
    return flat_of(graph.as_graph_def(), outputs=outputs)


built_sample = functools.cache(samples.build)
"""The sample model of a name and sizes. TensorFlow makes each once."""


def exported(model, folder: Path):
    """The flat graph of what Keras exports of a model."""
    model.export(folder / "model", verbose=False)
    return flatten(read(folder / "model"))


def saved(call, specs, kept, folder: Path):
    """The flat graph of the SavedModel of a function, whose variables and tables are kept. It is traced once: an export of Keras traces
    three times, and a module that has the function twice."""
    import tensorflow as tf

    module = tf.Module()
    module.kept = list(kept)
    concrete = tf.function(call, input_signature=specs).get_concrete_function()
    tf.saved_model.save(module, str(folder), signatures=concrete)
    return flatten(read(folder))


def saved_keras(model, folder: Path):
    """The flat graph of a Keras model, in a third of the time of `exported`."""
    import tensorflow as tf

    def call(*inputs):
        return model(list(inputs) if len(inputs) > 1 else inputs[0])

    specs = [tf.TensorSpec(one.shape, one.dtype, name=one.name) for one in model.inputs]
    return saved(call, specs, [one.value for one in model.variables], folder / "model")


def initial_values(v1) -> dict[str, np.ndarray]:
    """Values that initializers give the variables of the default graph of TensorFlow, by name. Nothing is optimized to run once."""
    with v1.Session(config=session_config(1, cpu_only=True, optimized=False)) as session:
        session.run(v1.global_variables_initializer())
        return session.run({one.op.name: one for one in v1.global_variables()})


def options_of(device: str = "cpu", *, fuse: bool = False, group: bool = False, **more) -> EngineOptions:
    """The engine's options, larger kernels by what makes them."""
    return EngineOptions(device, mode=KernelMode.of(fuses=fuse, groups=group), **more)


def job(flat, feeds, ids=None, *, streams: int = 1, **options) -> Job:
    """A job for the simulated engine, in IEEE float32."""
    ids = np.zeros(len(flat), np.int32) if ids is None else ids
    return Job(flat, ids, streams, feeds, precision=Precision.IEEE, options=options_of(**options))


def scattered(flat, streams: int, seed: int = 0) -> np.ndarray:
    """A stream at random for every node: the worst that an assignment can do."""
    return np.random.default_rng(seed).integers(0, streams, len(flat)).astype(np.int32)


def run(flat, feeds, streams: int = 1, *, seed: int = 0, steps: int = 1, **options) -> dict[str, np.ndarray]:
    """The outputs of the last of some steps, nodes scattered over streams. Every step interleaves in another way."""
    executable = ENGINE.build(job(flat, feeds, scattered(flat, streams, seed), streams=streams, **options))
    for _ in range(steps):
        outputs = executable.step(feeds)
    executable.close()
    return outputs


def program_of(flat, feeds):
    """The program that the engine makes of a graph."""
    return CudaEngine().compile(job(flat, feeds)).program


def kernels(program) -> list[str]:
    """The ops of the steps that launch something, sorted."""
    return sorted(step.op.op for step in program.steps if step.launches)


_SESSIONS: weakref.WeakKeyDictionary[FlatGraph, SessionExecutable] = weakref.WeakKeyDictionary()


_ONLY_READ = {"VarHandleOp", "ReadVariableOp", "ResourceGather", "HashTableV2", "LookupTableFindV2"}
"""Ops with a state, that change none."""


def outputs_of_tensorflow(flat: FlatGraph, feeds) -> dict[str, np.ndarray]:
    """The outputs of `reference`. A graph whose steps leave everything as it was has one session for whatever it is fed."""
    if any(map(_keeps_state, set(flat.graph.ops) - _ONLY_READ)):
        return reference(flat, feeds)
    if flat not in _SESSIONS:
        _SESSIONS[flat] = session_on_cpu(flat)
        weakref.finalize(flat, _SESSIONS[flat].close)
    return _SESSIONS[flat].step(feeds)


def _keeps_state(op: str) -> bool:
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    return definition is None or definition.is_stateful


def assert_equals_tensorflow(
    flat, feeds, *, streams: Sequence[int] = (1, 4), tolerance: float | None = None, **options
) -> None:
    """Runs on each number of streams and holds the outputs against TensorFlow's."""
    wanted = outputs_of_tensorflow(flat, feeds)
    for count in streams:
        found = compare(run(flat, feeds, count, seed=count, steps=2, **options), wanted, tolerance=tolerance)
        assert found.passed, f"{count} streams\n{found.describe()}"


def bits(outputs: Mapping[str, np.ndarray]) -> dict[str, tuple]:
    """Outputs in a form in which == means equal to the bit."""
    return {name: (value.dtype.name, value.shape, value.tobytes()) for name, value in outputs.items()}


def step_then(executable, feeds, then, **named):
    """A step, while which what the next one is fed goes to the device."""
    return executable.step_prefetching(feeds, lambda: then, **named)
