"""Two dense layers, and a mean in front of them, become one op: found where it can be, equal to TensorFlow. The kernel is tested apart."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.passes import pipeline
from tests.campaign import examples
from tests.engines.cuda.cases import assert_equals_tensorflow, graph_of, kernels, program_of
from tests.engines.cuda.passes.harness import normal, placeholder

pytestmark = pytest.mark.tf

CHANNELS, HIDDEN = 16, 4


@pytest.fixture
def takes_all(monkeypatch):
    """Every pair of layers becomes one op, as if that had measured faster."""
    monkeypatch.setattr(pipeline, "mlps_on", lambda device, measure: lambda graph, found: (True, None))


def squeezed(tf, x, hidden=HIDDEN):
    """Factors of squeeze-and-excitation as Keras's EfficientNet computes them."""
    channels = int(x.shape[-1])
    mean = tf.reshape(tf.reduce_mean(x, [1, 2]), [-1, 1, 1, channels])
    inner = tf.nn.bias_add(tf.nn.conv2d(mean, normal(1, 1, channels, hidden), 1, "SAME"), normal(hidden))
    inner = inner * tf.sigmoid(inner)
    outer = tf.nn.bias_add(tf.nn.conv2d(inner, normal(1, 1, hidden, channels), 1, "SAME"), normal(channels))
    return tf.sigmoid(outer)


@pytest.mark.parametrize("batch", [1, 3])
def test_squeeze_and_excitation_is_two_kernels_with_its_convolution(batch):
    feeds = {"x": normal(batch, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        tf.nn.conv2d(x * squeezed(tf, x), normal(1, 1, CHANNELS, 8), 1, "SAME", name="out")

    flat = graph_of(build)
    assert kernels(program_of(flat, feeds)) == ["_MLP", "_PrologueConv2D"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, fuse=True, group=True)


@pytest.mark.parametrize(
    "what", ["mean read", "hidden read", "fetched", "axes", "transposed", "weights fed", "many rows", "wide", "sum"]
)
def test_what_stays(takes_all, what):
    hidden = 200 if what == "wide" else HIDDEN
    feeds = {"x": normal(17 if what == "many rows" else 2, CHANNELS, CHANNELS, CHANNELS), "w": normal(CHANNELS, hidden)}

    def build(tf, v1):
        x, fed = placeholder(tf, v1, feeds["x"]), v1.placeholder(tf.float32, [CHANNELS, hidden], name="w")
        mean = tf.reduce_mean(x, [0, 1] if what == "axes" else [1, 2], name="mean")
        weights = fed if what == "weights fed" else tf.constant(normal(CHANNELS, hidden))
        inner = tf.nn.relu(tf.matmul(mean, weights), name="inner")
        second = normal(3, hidden) if what == "transposed" else normal(hidden, 3)
        outer = tf.matmul(inner, second, transpose_b=what == "transposed")
        y = tf.reduce_sum(outer) + tf.reduce_sum(fed)
        if what in ("hidden read", "mean read"):
            y += tf.reduce_sum(inner if what == "hidden read" else mean)
        tf.identity(outer + y if what != "sum" else tf.matmul(inner + 1.0, second) + y, name="out")

    flat = graph_of(build, outputs=["out", "inner"] if what == "fetched" else ["out"])
    expected = {"mean read": 1, "axes": 1}.get(what, 0)  # without their mean these two layers still are one
    program = program_of(flat, feeds)
    assert kernels(program).count("_MLP") == expected
    assert kernels(program).count("Mean") == 1
    assert_equals_tensorflow(flat, feeds, tolerance=1e-3)


def test_of_three_layers_the_first_two_become_one(takes_all):
    feeds = {"x": normal(2, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        for size in (8, 12):
            x = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, normal(int(x.shape[-1]), size)), normal(size)))
        tf.nn.tanh(tf.matmul(x, normal(12, 3)), name="out")

    flat = graph_of(build)
    assert sorted(kernels(program_of(flat, feeds))) == ["MatMul", "Tanh", "_MLP"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


@settings(max_examples=examples(25, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    front=st.sampled_from(["rows", "mean", "mean kept", "negative axes", "pixel"]),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    biases=st.tuples(st.booleans(), st.booleans()),
    names=st.tuples(*[st.sampled_from(["", "relu", "relu6", "sigmoid", "tanh", "swish", "gelu", "elu"])] * 2),
    dtype=st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64"]),
    options=st.sampled_from([{}, {"fuse": True}, {"group": True}]),
)
def test_whatever_layers(takes_all, batch, front, sizes, biases, names, dtype, options):
    feeds = {"x": normal(batch, CHANNELS) if front == "rows" else normal(batch, 3, 2, CHANNELS)}

    def build(tf, v1):
        x = tf.cast(placeholder(tf, v1, feeds["x"]), dtype)
        y = {
            "rows": lambda: x,
            "mean": lambda: tf.reduce_mean(x, [1, 2]),
            "mean kept": lambda: tf.reduce_mean(x, [1, 2], keepdims=True),
            "negative axes": lambda: tf.reduce_mean(x, [-2, -3]),
            "pixel": lambda: x[:, :1, :1],
        }[front]()
        for size, biased, name in zip(sizes, biases, names, strict=True):
            inner = int(y.shape[-1])
            if len(y.shape) == 2:
                y = tf.matmul(y, tf.constant(normal(inner, size) / 4, dtype))
            else:
                y = tf.nn.conv2d(y, tf.constant(normal(1, 1, inner, size) / 4, dtype), 1, "SAME")
            y = tf.nn.bias_add(y, tf.constant(normal(size), dtype)) if biased else y
            y = y * tf.sigmoid(y) if name == "swish" else getattr(tf.nn, name)(y) if name else y
        tf.cast(y, tf.float32, name="out")

    flat = graph_of(build)
    found = kernels(program_of(flat, feeds)).count("_MLP")
    # The kernel has no Elu. Behind the layers it is an op of its own, unless a product takes it along together with its bias.
    assert found == (dtype != "float64" and names[0] != "elu" and not (names[1] == "elu" and biases[1]))
    tolerance = {"float32": 1e-3, "float64": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}[dtype]
    assert_equals_tensorflow(flat, feeds, tolerance=tolerance, streams=(1, 4), **options)
