"""A conversion rides on the load of the convolution behind it: found where it can, equal to TensorFlow. The kernel is tested apart."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ir.windows import CAST_FROM
from msplit.engines.cuda.passes.convolution.fuse_prologue import CASTS
from msplit.engines.cuda.passes.measured import deciding
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, bits, graph_of, job, kernels, program_of
from tests.engines.cuda.passes.harness import normal, placeholder

pytestmark = pytest.mark.tf

rng = np.random.default_rng(0)


def image(*shape, dtype=np.uint8):
    return rng.integers(0, 256, shape).astype(dtype)


def converted(program):
    return [step.op.attrs[CAST_FROM] for step in program.steps if step.op.op == "_CastConv2D"]


def compiled(flat, feeds, precision=Precision.IEEE):
    return CudaEngine().compile(replace(job(flat, feeds), precision=precision)).program


def run(flat, feeds, precision=Precision.IEEE, **options):
    executable = CudaEngine().build(replace(job(flat, feeds, **options), precision=precision))
    try:
        return executable.step(feeds)
    finally:
        executable.close()


def test_an_image_of_bytes_is_converted_by_the_convolution():
    feeds = {"x": image(2, 9, 8, 3)}

    def build(tf, v1):
        x = tf.cast(placeholder(tf, v1, feeds["x"]), tf.float32) / 255.0  # which becomes the filter's
        y = tf.nn.bias_add(tf.nn.conv2d(x, normal(3, 3, 3, 8), 2, "SAME"), normal(8))
        tf.nn.relu6(y, name="out")

    flat = graph_of(build)
    program = program_of(flat, feeds)
    assert converted(program) == ["uint8"]
    assert kernels(program) == ["_CastConv2D"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, fuse=True)


@pytest.mark.parametrize(
    "what", ["channels", "read twice", "fetched", "computed", "signed", "depthwise", "channels first"]
)
def test_what_stays(what):
    channels = 16 if what == "channels" else 3
    dtype = {"signed": np.int8, "fetched": np.uint8}.get(what)
    feeds = {"x": normal(2, 6, 5, channels) if dtype is None else image(2, 6, 5, channels, dtype=dtype)}
    precision = Precision.IEEE if what == "fetched" else Precision.BF16

    def build(tf, v1):
        x = tf.cast(placeholder(tf, v1, feeds["x"]), tf.float32)
        y = tf.exp(x) if what == "computed" else x  # in float32
        if what == "depthwise":
            z = tf.nn.depthwise_conv2d(y, normal(3, 3, channels, 1), [1, 1, 1, 1], "SAME")
        elif what == "channels first":
            first = tf.transpose(y, [0, 3, 1, 2])
            z = v1.nn.conv2d(first, normal(3, 3, channels, 4), [1, 1, 1, 1], "SAME", data_format="NCHW")
        else:
            z = tf.nn.conv2d(y, normal(3, 3, channels, 4), 1, "SAME")
        z = tf.identity(z, name="out")
        if what == "read twice":
            tf.nn.conv2d(y, normal(1, 1, channels, 4), 1, "SAME", name="other")
        tf.identity(y, name="wide")

    outputs = {"read twice": ["out", "other"], "fetched": ["out", "wide"]}.get(what, ["out"])
    flat = graph_of(build, outputs=outputs)
    program = compiled(flat, feeds, precision)
    assert converted(program) == []
    assert sum(step.op.op == "Cast" and step.launches for step in program.steps) >= 1
    found = compare(run(flat, feeds, precision), run(flat, feeds), precision=Precision.BF16, tolerance=3e-2)
    assert found.passed, found.describe()


@settings(max_examples=examples(8, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bytes_in=st.booleans(),
    channels=st.sampled_from([1, 3, 3, 4, 15, 16]),
    window=st.sampled_from([(1, 1), (3, 3), (7, 5)]),
    strides=st.sampled_from([1, 2, (2, 3)]),
    padding=st.sampled_from(["SAME", "VALID", [[0, 0], [1, 0], [0, 2], [0, 0]]]),
    epilogue=st.sampled_from(["", "bias", "relu", "swish", "elu"]),
    scaled=st.booleans(),
    precision=st.sampled_from([Precision.IEEE, Precision.BF16, Precision.FP16]),
    options=st.sampled_from([{}, {"fuse": True}, {"group": True}]),
)
def test_with_and_without_it_is_the_same_to_the_bit(
    bytes_in, channels, window, strides, padding, epilogue, scaled, precision, options
):
    feeds = {"x": image(2, 9, 8, channels) if bytes_in else normal(2, 9, 8, channels)}

    def build(tf, v1):
        x = tf.cast(placeholder(tf, v1, feeds["x"]), tf.float32)
        x = x / 255.0 if scaled else x
        z = tf.nn.conv2d(x, normal(*window, channels, 6) / 4, strides, padding)
        z = tf.nn.bias_add(z, normal(6)) if epilogue else z
        z = {"relu": tf.nn.relu, "elu": tf.nn.elu, "swish": lambda z: z * tf.sigmoid(z)}.get(epilogue, tf.identity)(z)
        tf.identity(tf.nn.conv2d(z, normal(1, 1, 6, 3), 1, "SAME"), name="out")

    flat = graph_of(build)
    taken = ["uint8" if bytes_in else "float32"] * (channels < 16 and (bytes_in or precision is not Precision.IEEE))
    assert converted(compiled(flat, feeds, precision)) == taken
    got = run(flat, feeds, precision, **options)
    same = replace(flat)  # of which nothing is compiled yet
    with deciding({CASTS: lambda graph, found: (False, None)}):
        apart = run(same, feeds, precision, **options)
        assert converted(compiled(same, feeds, precision)) == []
    assert bits(got) == bits(apart)
    found = compare(got, run(flat, feeds), precision=Precision.BF16, tolerance=5e-2)
    assert found.passed, found.describe()
