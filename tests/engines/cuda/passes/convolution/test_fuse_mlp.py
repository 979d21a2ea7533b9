"""Two dense layers, and a mean in front of them, become one op, and so does the end of a classifier: found where it can be, equal to
TensorFlow. The kernels are tested apart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msplit.core.arguments import Precision
from msplit.engines.cuda.autotune.tuner import Tuner, timed_by
from msplit.engines.cuda.compile import optimize
from msplit.engines.cuda.device.device import Device
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.ir.graph import attrs_key
from msplit.engines.cuda.passes.convolution import fuse_mlp
from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS
from msplit.engines.cuda.passes.measured import deciding
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, assert_equals_tensorflow, graph_of, job, kernels, program_of
from tests.engines.cuda.passes.harness import normal, placeholder

pytestmark = pytest.mark.tf

CHANNELS, HIDDEN = 16, 4


@pytest.fixture
def takes_all():
    """Every pair of layers becomes one op, as if that had measured faster."""
    with deciding({MLPS: lambda graph, found: (True, None)}):
        yield


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
    alone = what in ("hidden read", "fetched", "transposed", "wide", "sum")  # the first layer, with its mean
    assert kernels(program).count("_Classifier") == alone
    assert kernels(program).count("Mean") == 1 - alone
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


@settings(max_examples=examples(8, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


SOFTMAXES = {
    "": lambda tf, y: y,
    "op": lambda tf, y: tf.nn.softmax(y),
    "spelled": lambda tf, y: (
        (e := tf.exp(y - tf.reduce_max(y, -1, keepdims=True))) / tf.reduce_sum(e, -1, keepdims=True)
    ),
    "of images": lambda tf, y: tf.nn.softmax(tf.reshape(y, [-1, 1, 1, int(y.shape[-1])])),
    "of pairs": lambda tf, y: tf.nn.softmax(tf.reshape(y, [-1, 3, 2])),
}


FRONTS = {
    "": lambda tf, x, dtype: x,
    "relu": lambda tf, x, dtype: tf.nn.relu(x),
    "normalized": lambda tf, x, dtype: tf.nn.relu(
        x * tf.constant(normal(CHANNELS), dtype) + tf.constant(normal(CHANNELS), dtype)
    ),
    "shifted": lambda tf, x, dtype: x - tf.constant(normal(1, 1, 1, CHANNELS), dtype),
    "own factors": lambda tf, x, dtype: x * tf.nn.tanh(tf.reduce_max(x, [1, 2], keepdims=True)),
}
"""What images go through before their mean is taken."""


def classified(tf, x, *, softmax="op", results=6, biased=True, activation="", kept=False):
    """The end of a classifier of images, with names for its mean and its logits."""
    mean, dtype = tf.reduce_mean(x, [1, 2], keepdims=kept, name="mean"), x.dtype
    channels = int(x.shape[-1])
    if kept:
        y = tf.nn.conv2d(mean, tf.constant(normal(1, 1, channels, results) / 4, dtype), 1, "SAME")
    else:
        y = tf.matmul(mean, tf.constant(normal(channels, results) / 4, dtype))
    y = tf.nn.bias_add(y, tf.constant(normal(results), dtype)) if biased else y
    y = tf.identity(getattr(tf.nn, activation)(y) if activation else y, name="logits")
    return SOFTMAXES[softmax](tf, tf.reshape(y, [-1, results]) if kept else y)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_end_of_a_classifier_is_one_kernel(batch, softmax):
    feeds = {"x": normal(batch, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, normal(1, 1, CHANNELS, 8), 1, "SAME"), normal(8)))
        tf.identity(classified(tf, x, softmax=softmax), name="out")

    flat = graph_of(build, outputs=["out"])
    apart = ["Softmax"] if softmax == "of pairs" else []
    assert kernels(program_of(flat, feeds)) == [*apart, "_Classifier", "_FusedConv2D"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, fuse=True, group=True)


@pytest.mark.parametrize("normalized", ["op", "spelled"])
@pytest.mark.parametrize("read", [False, True])
def test_a_normalization_and_a_relu_in_front_of_the_mean_ride_along(read, normalized):
    feeds = {"x": normal(2, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        x = tf.concat([x, tf.nn.max_pool2d(x, 3, 1, "SAME")], 3)
        gamma, beta, mean, variance = (np.abs(normal(2 * CHANNELS)) + 0.1 for _ in range(4))
        if normalized == "op":
            y, *_ = v1.nn.fused_batch_norm(x, gamma, beta, mean, variance, is_training=False)
        else:
            y = (x - mean) * (gamma / np.sqrt(variance)) + beta
        y = tf.nn.relu(y, name="seen")
        tf.identity(classified(tf, y), name="out")

    flat = graph_of(build, outputs=["out", "seen"] if read else ["out"])
    found = kernels(program_of(flat, feeds))
    assert found.count("_Classifier") == 1
    assert ("Relu" in found) == read
    assert read or found == ["ConcatV2", "MaxPool", "_Classifier"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4, fuse=True, group=True)


@pytest.mark.parametrize("fetched", ["mean", "logits"])
def test_what_is_fetched_is_still_there(takes_all, fetched):
    feeds = {"x": normal(2, 5, 5, CHANNELS)}
    flat = graph_of(
        lambda tf, v1: tf.identity(classified(tf, placeholder(tf, v1, feeds["x"])), name="out"),
        outputs=["out", fetched],
    )
    expected = {"mean": ["Mean", "_Classifier"], "logits": ["Softmax", "_Classifier"]}[fetched]
    assert kernels(program_of(flat, feeds)) == expected
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


def test_a_product_alone_stays_and_with_its_softmax_is_one(takes_all):
    feeds = {"x": normal(2, CHANNELS), "many": normal(17, CHANNELS)}

    def build(tf, v1):
        x, many = (placeholder(tf, v1, feeds[name], name) for name in feeds)
        tf.matmul(x, normal(CHANNELS, 5), name="product")
        for name, data in (("few", x), ("rest", many)):
            tf.nn.softmax(tf.nn.bias_add(tf.matmul(data, normal(CHANNELS, 5)), normal(5)), name=name)

    flat = graph_of(build, outputs=["product", "few", "rest"])
    assert kernels(program_of(flat, feeds)) == ["MatMul", "Softmax", "_Classifier", "_FusedMatMul"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


def test_behind_two_layers_the_softmax_stays(takes_all):
    feeds = {"x": normal(2, 5, 5, CHANNELS)}

    def build(tf, v1):
        mean = tf.reduce_mean(placeholder(tf, v1, feeds["x"]), [1, 2])
        tf.nn.softmax(tf.matmul(tf.nn.relu(tf.matmul(mean, normal(CHANNELS, 4))), normal(4, 5)), name="out")

    flat = graph_of(build)
    assert kernels(program_of(flat, feeds)) == ["Softmax", "_MLP"]
    assert_equals_tensorflow(flat, feeds, tolerance=1e-4)


@settings(max_examples=examples(8, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    front=st.sampled_from(sorted(FRONTS)),
    end=st.fixed_dictionaries(
        {
            "softmax": st.sampled_from(sorted(SOFTMAXES)),
            "results": st.sampled_from([6, 12]),
            "biased": st.booleans(),
            "activation": st.sampled_from(["", "relu", "sigmoid"]),
            "kept": st.booleans(),
        }
    ),
    dtype=st.sampled_from(["float32", "float32", "float16", "bfloat16", "float64"]),
    fetched=st.sampled_from(["", "", "mean", "logits"]),
    options=st.sampled_from([{}, {"fuse": True}, {"group": True}]),
)
def test_whatever_classifier(takes_all, batch, front, end, dtype, fetched, options):
    feeds = {"x": normal(batch, 3, 2, CHANNELS)}

    def build(tf, v1):
        y = classified(tf, FRONTS[front](tf, tf.cast(placeholder(tf, v1, feeds["x"]), dtype), dtype), **end)
        tf.identity(tf.cast(y, tf.float32), name="out")
        if fetched:
            tf.identity(tf.cast(y.graph.get_tensor_by_name(f"{fetched}:0"), tf.float32), name="seen")

    flat = graph_of(build, outputs=["out", *(["seen"] if fetched else [])])
    found = kernels(program_of(flat, feeds))
    if dtype == "float64":
        assert "_Classifier" not in found
    elif not fetched:
        assert "_Classifier" in found
        assert "Mean" not in found
        assert "Relu" not in found or end["activation"] == "relu"
    tolerance = {"float32": 1e-3, "float64": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}[dtype]
    assert_equals_tensorflow(flat, feeds, tolerance=tolerance, streams=(1, 4), **options)


@pytest.mark.parametrize("precision", [Precision.IEEE, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("end", ["softmax", "logits", "two layers"])
def test_in_any_precision_outputs_are_of_the_type_that_they_have_apart(end, precision):
    feeds = {"x": normal(2, 5, 5, CHANNELS)}

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, normal(1, 1, CHANNELS, 8) / 4, 1, "SAME"), normal(8)))
        y = classified(
            tf, x, softmax="op" if end == "softmax" else "", activation="relu" if end == "two layers" else ""
        )
        y = tf.nn.bias_add(tf.matmul(y, normal(6, 5)), normal(5)) if end == "two layers" else y
        tf.identity(y, name="out")

    flat, outputs = graph_of(build, outputs=["out"]), []
    for takes in (False, True):
        with deciding({MLPS: lambda graph, found, takes=takes: (takes, None)}):
            executable = ENGINE.build(replace(job(flat, feeds), precision=precision))
        (one,) = executable.step(feeds).values()
        outputs.append(one)
        executable.close()
    apart, joined = outputs
    assert joined.dtype == apart.dtype == np.float32
    np.testing.assert_allclose(joined, apart, rtol=1e-5 if precision is Precision.IEEE else 5e-2, atol=1e-2)


@pytest.mark.parametrize("faster", ["apart", "<lambda>"])
@pytest.mark.parametrize(("softmax", "front"), [("op", ""), ("", ""), ("op", "normalized")])
def test_the_kernel_is_taken_where_it_is_faster_than_what_it_replaces(softmax, front, faster):
    """On a CPU both compute the same."""
    feeds = {"x": normal(2, 5, 5, CHANNELS)}

    def times(lanes):
        lanes[0]()
        return 1.0 if getattr(lanes[0].run, "__name__", "") == faster else 2.0

    def build(tf, v1):
        x = FRONTS[front](tf, placeholder(tf, v1, feeds["x"]), "float32")
        tf.identity(classified(tf, x, softmax=softmax), name="out")

    flat = graph_of(build, outputs=["out"])
    graph = optimize(flat, feeds, CPU).graph
    (found,) = fuse_mlp.find_mlps(graph)
    tuner = Tuner(Device(CPU))
    with torch.no_grad(), timed_by(times):
        assert tuner.known(MLPS.family, MLPS.key(graph, found, CPU)) is None
        chosen = MLPS.choose(tuner, MLPS.trial(graph, found, CPU))
        assert chosen == (next(iter(MLPS.trial(graph, found, CPU).candidates))[0] if faster == "<lambda>" else None)


@pytest.mark.parametrize("pooled", [True, False])
def test_what_it_is_timed_against_is_listed_with_it(pooled, monkeypatch):
    """Products were compiled late, one choice after the other, for what would be timed against a kernel for all layers."""
    feeds = {"x": normal(2, 5, 5, CHANNELS) if pooled else normal(2, CHANNELS)}
    asked: list[tuple] = []
    choose = fuse_mlp.matmul.choose

    def noted(op, arguments, run, **more):
        asked.append((op.op, attrs_key(op.attrs), *(tuple(one.shape) for one in arguments)))
        return choose(op, arguments, run, **more)

    monkeypatch.setattr(fuse_mlp.matmul, "choose", noted)

    def build(tf, v1):
        x = placeholder(tf, v1, feeds["x"])
        y = (
            classified(tf, x, softmax="op")
            if pooled
            else tf.nn.softmax(tf.nn.relu(x @ normal(CHANNELS, 6)) @ normal(6, 5))
        )
        tf.identity(y, name="out")

    graph = optimize(graph_of(build, outputs=["out"]), feeds, CPU).graph
    candidates = fuse_mlp.find_mlps(graph)
    assert candidates
    for found in candidates:
        with torch.no_grad(), timed_by(lambda lanes: 1.0):
            trial = MLPS.trial(graph, found, CPU)
            assert asked, "what is listed are the calls of a trial, which asks for products when it is set up"
            listed = asked.copy()
            MLPS.choose(Tuner(Device(CPU)), trial)
        assert asked == listed
        asked.clear()
