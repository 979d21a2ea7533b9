"""A bench holds what a step learns against TensorFlow: its loss tells nothing of gradients, and variants share their mistakes."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import msplit
from msplit.benchmark.benchmark import bench
from msplit.core.arguments import Precision
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.runtime.executables import SimulatedExecutable
from msplit.errors import EngineError
from msplit.verify import check as verified
from msplit.verify.results import Settings
from tests import training_graphs
from tests.benchmark.test_bisect import plant
from tests.engines.cuda.cases import graph_of

pytestmark = pytest.mark.tf

FETCHES = ["loss", "train_op"]
QUICK = {
    "engine": "cuda",
    "device": "cpu",
    "batch": 4,
    "streams": (2,),
    "group": False,
    "fuse": False,
    "settings": Settings(duration=0, warmup=0, min_rounds=1, builds=1, verify_inputs=2),
}


def small_net(optimizer="GradientDescent", *, resource=True, drop=False, outputs=FETCHES):
    """Builds the training graph of a convolution and an average pool."""

    def build(tf, v1):
        rng = np.random.default_rng(0)
        x = v1.placeholder(tf.float32, [None, 6, 6, 2], name="x")
        with v1.variable_scope("", use_resource=resource):
            filters = v1.get_variable("filters", initializer=rng.standard_normal((3, 3, 2, 4)).astype(np.float32))
            head = v1.get_variable("head", initializer=rng.standard_normal((4, 3)).astype(np.float32))
            hidden = tf.nn.avg_pool2d(tf.tanh(tf.nn.conv2d(x, filters, 1, "SAME")), 3, 1, "SAME", name="pool")
            if drop:
                hidden = v1.nn.dropout(hidden, rate=0.5)
            logits = tf.matmul(tf.reduce_max(hidden, [1, 2]), head)
            loss = tf.reduce_mean(tf.square(logits - 1.0), name="loss")
            chosen = getattr(v1.train, f"{optimizer}Optimizer")(0.1, **MORE.get(optimizer, {}))
            chosen.minimize(loss, v1.train.get_or_create_global_step(), name="train_op")

    return graph_of(build, outputs=outputs)


MORE = {"Momentum": {"momentum": 0.9}, "RMSProp": {"momentum": 0.9}}


def test_a_bench_holds_what_a_step_learns_against_tensorflow(monkeypatch):
    """All variants of the engine share a lowering: that they agree says nothing, and the loss is that of the step before."""
    found = bench(small_net("GradientDescent"), **QUICK)
    assert not found.result.failed
    ours = [one for one in found.result.variants if one.label.startswith("msplit")]
    for one in ours:
        assert "variables of TensorFlow on the CPU" in [check.against for check in one.checks]
        assert {check.precision for check in one.checks} == {Precision.IEEE}  # a CPU has no TF32: once is enough
    assert len(ours) == 2


@pytest.mark.parametrize("wrong", ["factor", "shift"])
@pytest.mark.parametrize("optimizer", ["GradientDescent", "RMSProp"])
def test_a_bench_with_a_wrong_gradient_fails(monkeypatch, wrong, optimizer):
    wrongs = {"factor": lambda node, y: y * 1.5, "shift": lambda node, y: y.roll(1, 1)}
    plant(monkeypatch, "AvgPoolGrad", wrongs[wrong])
    found = bench(small_net(optimizer), **QUICK)
    assert all(one.failed for one in found.result.variants)
    assert "variables of TensorFlow on the CPU (ieee): filters" in found.result.describe_failures()


def precision_on_a_gpu(variant):
    return Precision.TF32 if isinstance(variant.engine, CudaEngine) else Precision.IEEE


class RoundsAsTf32(TorchDispatchMode):
    """Products and convolutions read float32 with the 10 bits that TF32 has."""

    aten = torch.ops.aten
    products = frozenset(
        {aten.mm.default, aten.addmm.default, aten.convolution.default, aten.convolution_backward.default}
    )

    def __init__(self):
        super().__init__()
        self.rounded = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in self.products:
            self.rounded += 1
            args = tuple(self.tf32(one) if place < 3 else one for place, one in enumerate(args))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def tf32(value):
        if not isinstance(value, torch.Tensor):
            return value
        bits = value.view(torch.int32)
        return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def in_tf32(monkeypatch, mode):
    """Runs what is verified as a GPU does: once in IEEE float32, then in TF32. Gives a list that holds something once it has done so."""
    on, apart, verify, step, try_steps = [], [], verified._verify, SimulatedExecutable.step, CudaEngine.try_steps

    def verify_in_tf32(running, how):
        with monkeypatch.context() as patch:
            if running[-1].variant.job.precision is Precision.TF32:  # the other pass is in IEEE float32
                patch.setattr(verified, "_precision", precision_on_a_gpu)
                patch.setattr(SimulatedExecutable, "step", rounded)
                patch.setattr(CudaEngine, "try_steps", in_ieee)
                on.append(True)
            verify(running, how)

    def rounded(self, feeds):
        with nullcontext() if apart else mode:
            return step(self, feeds)

    def in_ieee(*args):
        apart.append(True)
        try:
            return try_steps(*args)
        finally:
            apart.clear()

    monkeypatch.setattr(verified, "_verify", verify_in_tf32)
    monkeypatch.setattr(CudaEngine, "device", lambda engine, job: "GPU")
    return on


@pytest.mark.parametrize("optimizer", ["GradientDescent", "Momentum", "RMSProp", "Adam"])
def test_a_step_in_tf32_is_as_near_to_tensorflow_in_float32_as_it_has_to_be(monkeypatch, optimizer):
    """As on a GPU: what is rounded is allowed for, in a step that is right."""
    mode = RoundsAsTf32()
    on = in_tf32(monkeypatch, mode)
    found = bench(small_net(optimizer), **QUICK)
    assert on
    assert mode.rounded
    assert not found.result.failed, found.result.describe_failures()


def test_tf32_may_go_further_on_special_inputs_where_rounding_does(monkeypatch):
    """Scores that are steep where inputs are zeros, and flat on random ones. Inception-v3 was refused on a GPU for that."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, [None, 64], name="x")
        rng = np.random.default_rng(0)
        weights, row = rng.standard_normal((64, 8)).astype("float32"), rng.uniform(1, 2, 64).astype("float32")
        near = tf.exp(-tf.reduce_sum(tf.square(x), 1, keepdims=True))
        tf.nn.softmax(tf.matmul(near * row * 90.0, weights) - 90.0 * near * (row @ weights), name="scores")

    mode = RoundsAsTf32()
    on = in_tf32(monkeypatch, mode)
    found = bench(graph_of(build, outputs=["scores"]), **QUICK)
    assert on
    assert mode.rounded
    assert not found.result.failed, found.result.describe_failures()


def test_adam_may_turn_about_in_tf32_where_rows_that_are_alike_cancel(monkeypatch):
    """Of a gradient that is zero but for what TF32 rounds, Adam makes a whole step. An MMoE was refused on a GPU for that."""
    training = training_graphs.graph("mmoe", "Adam", "resource")[0]
    on = in_tf32(monkeypatch, RoundsAsTf32())
    found = bench(training, **{**QUICK, "batch": training_graphs.BATCH})
    assert on
    assert not found.result.failed, found.result.describe_failures()


def test_steps_that_draw_learn_what_tensorflows_first_step_does():
    found = bench(small_net("GradientDescent", drop=True), **QUICK)
    assert not found.result.failed, found.result.describe_failures()


def sampled_softmax(tf, x, w):
    classes = tf.constant(np.arange(24).reshape(8, 3) % 20, tf.int64)
    return tf.compat.v1.nn.nce_loss(tf.ones([20, 6]), tf.zeros([20]), classes[:, :1], x @ w, 5, 20)


def dropout_in_a_loop(tf, x, w):
    @tf.function(autograph=False)
    def turned(h):
        return tf.while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, tf.nn.dropout(h @ w, 0.5)), [0, h])[1]

    return turned(x)


DRAWING = {
    "dropout": lambda tf, x, w: tf.compat.v1.nn.dropout(x @ w, rate=0.5),
    "an own seed": lambda tf, x, w: x @ w + tf.random.normal([8, 6], seed=5),
    "a variational auto-encoder": lambda tf, x, w: (x @ w) + tf.exp(x @ w) * tf.compat.v1.random_normal([8, 6]),
    "nce": sampled_softmax,
    "a shuffle": lambda tf, x, w: tf.gather(x @ w, tf.random.shuffle(tf.range(8), seed=2)) * tf.range(8.0)[:, None],
    "a function's": lambda tf, x, w: tf.function(lambda h: tf.nn.dropout(h, 0.5))(x @ w),
    "a loop's": dropout_in_a_loop,
}


NOT_OURS = ("a shuffle", "a loop's")
"""What the cuda engine does not draw."""


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*((kind, "tensorflow") for kind in DRAWING), *((kind, "cuda") for kind in DRAWING if kind not in NOT_OURS)],
)
def test_random_numbers_of_training_are_compared_with_as_many_steps_behind_them(kind, engine):
    """A session of TensorFlow draws others in each step, and one that others are held against takes more steps than they."""

    def build(tf, v1):
        x = v1.placeholder("float", [8, 6], "x")
        w = v1.get_variable("w", initializer=np.random.default_rng(0).normal(size=(6, 6)).astype("float32"))
        loss = tf.reduce_mean(tf.square(DRAWING[kind](tf, x, w) - 1.0), name="loss")
        v1.train.AdamOptimizer(1e-3).minimize(loss, name="train_op")

    request = dict(QUICK, engine=engine, batch=None, settings=replace(QUICK["settings"], builds=2))
    result = bench(graph_of(build, outputs=FETCHES), **request).result
    assert not result.failed, result.describe_failures()
    assert all(any("variables of" in check.against for check in one.checks) for one in result.variants[1:])


def test_a_reference_file_holds_no_variables_and_the_bench_says_so(tmp_path):
    path = tmp_path / "reference.npz"
    bench(small_net(), **dict(QUICK, save_reference=path))
    found = bench(small_net(), **dict(QUICK, reference=path))
    assert any("holds no variables" in note for note in found.notes)
    assert "variables of TensorFlow" not in str(
        [check.against for one in found.result.variants for check in one.checks]
    )


def normed(optimizer, drop):
    """Builds the training graph of a layer with a bias in front of a batch norm, as Keras layers have it, and dropout behind it."""

    def build(tf, v1):
        rng = np.random.default_rng(1)
        x, label = v1.placeholder(tf.float32, [None, 12], "x"), v1.placeholder(tf.float32, [None], "label")
        with v1.variable_scope("", use_resource=True):
            h = x
            for number, width in enumerate((8,)):
                drawn = (rng.standard_normal((h.shape[1], width)) * 0.3).astype(np.float32)
                h = tf.matmul(h, v1.get_variable(f"w{number}", initializer=drawn))
                h = tf.nn.bias_add(h, v1.get_variable(f"bias{number}", initializer=np.zeros(width, np.float32)))
                scale = v1.get_variable(f"scale{number}", initializer=np.ones(width, np.float32))
                shift = v1.get_variable(f"shift{number}", initializer=np.zeros(width, np.float32))
                h = tf.nn.relu(tf.nn.batch_normalization(h, *tf.nn.moments(h, [0]), shift, scale, 1e-3))
                h = v1.nn.dropout(h, rate=0.3, seed=5 + number) if drop else h
            head = v1.get_variable("head", initializer=(rng.standard_normal((8, 1)) * 0.3).astype(np.float32))
            logits = tf.matmul(h, head)[:, 0]
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(label, logits), name="loss")
            getattr(v1.train, f"{optimizer}Optimizer")(0.01).minimize(loss, name="train_op")

    return graph_of(build, outputs=FETCHES)


PREPARED = {"engine": "cuda", "device": "cpu", "batch": 16, "fuse": False, "group": False, "effort": "full"}


@pytest.mark.parametrize(("optimizer", "drop"), [("GradientDescent", True), ("Adam", True), ("Adam", False)])
def test_a_bias_in_front_of_a_batch_norm_is_nobodys_fault(optimizer, drop):
    """Its gradient is zero but for rounding, of which Adam makes a whole step."""
    with msplit.prepare(normed(optimizer, drop), **PREPARED) as runner:
        assert all(check.passed for check in runner.checks)
        told = any("nothing but rounding decides" in note and "'bias0'" in note for note in runner.notes)
        assert told or optimizer != "Adam"


def test_beside_a_bias_that_rounding_decides_a_wrong_gradient_is_refused(monkeypatch):
    plant(monkeypatch, "RsqrtGrad", lambda node, y: y * 1.01)
    with pytest.raises(EngineError, match="TensorFlow on the CPU"):
        msplit.prepare(normed("Adam", False), **PREPARED)


def test_what_rounding_decides_is_finite(monkeypatch):
    plant(monkeypatch, "BiasAddGrad", lambda node, y: y * np.nan)
    with pytest.raises(EngineError, match="is nan"):
        msplit.prepare(normed("GradientDescent", False), **PREPARED)
