"""What the tests of passes share."""

import numpy as np

from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.passes.tracing import trace
from msplit.engines.cuda.runtime.executables import SimulatedExecutable, plan_for
from msplit.engines.cuda.runtime.stream_program import arrange
from msplit.verify.compare import compare
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, kernels, program_of

RNG = np.random.default_rng(0)
VIEWS = {"Reshape", "ExpandDims", "Squeeze"}


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def weight_bytes(program):
    return sum(tensor.untyped_storage().nbytes() for tensor in program.constants.values())


def image(channels=3, size=8):
    return {"x": normal(2, size, size, channels)}


def check(build, feeds, expected, *, outputs=None, tolerance=None):
    """Equal to TensorFlow on 1 and 4 streams, in exactly these kernels."""
    flat = graph_of(build, outputs=outputs)
    assert_equals_tensorflow(flat, feeds, tolerance=tolerance)
    program = program_of(flat, feeds)
    assert kernels(program) == sorted(expected)
    assert {step.op.op for step in program.steps if not step.launches} <= VIEWS
    return program


def assert_equals_itself(flat, feeds):
    """With and without passes that simplify the same."""
    plain, rewritten = (optimize(flat, feeds, CPU, simplify=flag).graph for flag in (False, True))
    assert compare(run_source(rewritten, feeds)[0], run_source(plain, feeds)[0]).passed


def placeholder(tf, v1, array, name="x"):
    return v1.placeholder(tf.as_dtype(array.dtype), [None, *array.shape[1:]], name=name)


def normalized(tf, y, channels):
    gamma, beta, mean = normal(channels), normal(channels), normal(channels)
    variance = np.abs(normal(channels)) + 0.1
    return tf.compat.v1.nn.fused_batch_norm(y, gamma, beta, mean, variance, epsilon=0.01, is_training=False)


def run_source(graph, feeds):
    program = trace(graph, feeds, CPU)
    lanes = arrange(
        program, plan_for(program, np.zeros(1000, np.int32), None)
    )  # more ids than any graph here has nodes
    return SimulatedExecutable(program, lanes, {}).step(feeds), program
