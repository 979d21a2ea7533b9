"""Training in float16: the loss is scaled, gradients are unscaled where they leave their chain, and steps that overflow change nothing."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from msplit.core.arguments import Precision
from msplit.engines.base import BESIDE_VARIABLES, FIRST_SCALE, GOOD_STEPS, LOSS_SCALE, Job
from msplit.engines.cuda import compile as compiling
from msplit.engines.cuda.engine import CudaEngine
from msplit.engines.cuda.ops import optimizers as lowerings
from msplit.engines.cuda.ops.variables import all_nowhere_unless
from msplit.engines.cuda.options import KernelMode, Shards
from msplit.errors import EngineError
from msplit.verify.tensorflow_process import initial_state
from tests.campaign import sampled
from tests.engines.cuda.cases import bits, options_of, scattered
from tests.engines.cuda.test_training import job_of, trained
from tests.training_graphs import apart, kept, loaded

pytestmark = pytest.mark.tf

GRAPHS = [
    ("mmoe", "Adam", "resource"),
    ("deepfm", "Adagrad", "ref"),
    ("deepfm", "Ftrl", "resource"),
    ("lstm", "Momentum", "resource"),
    ("inception_v3", "RMSProp", "ref"),
]
MODES = [KernelMode.PLAIN, KernelMode.FUSED_AND_GROUPED]


def without_scale(state):
    return {name: value for name, value in state.items() if name not in BESIDE_VARIABLES}


def exported(build):
    """The graph of a step that fetches ``loss`` and runs ``train_op``, and what its variables begin with."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default():
        build(tf, v1)
        v1.global_variables_initializer()
        return loaded(v1.train.export_meta_graph().SerializeToString())


def job(flat, feeds, precision=Precision.FP16, mode=KernelMode.PLAIN, streams=2):
    options = replace(options_of("cpu"), mode=mode)
    return Job(flat, scattered(flat, streams), streams, feeds, precision, options, state=begun(flat))


@functools.cache
def _values(flat):
    return initial_state(flat)


def begun(flat):
    """What its initializers give variables, which TensorFlow runs once for each graph."""
    return {name: value.copy() for name, value in _values(flat).items()}


@pytest.mark.parametrize(("name", "optimizer", "kind"), GRAPHS)
def test_a_scale_that_is_a_power_of_two_changes_nothing_but_the_order_of_factors(name, optimizer, kind, monkeypatch):
    """In IEEE float32, where nothing underflows: constants of the chain are no longer folded with its beginning."""
    flat, training = kept(name, optimizer, kind)
    expected, state = trained(CudaEngine(), job_of(flat, training, 2), training, 3)
    monkeypatch.setattr(compiling, "_trains_scaled", lambda _: True)
    for mode in MODES if name in ("mmoe", "lstm") else MODES[:1]:
        CudaEngine().forget(flat)
        if mode is not KernelMode.PLAIN:
            monkeypatch.setattr(compiling, "_trains_scaled", lambda _: False)
            expected, state = trained(CudaEngine(), job_of(flat, training, 2, mode), training, 3)
            monkeypatch.setattr(compiling, "_trains_scaled", lambda _: True)
            CudaEngine().forget(flat)
        losses, after = trained(CudaEngine(), job_of(flat, training, 2, mode), training, 3)
        assert (float(after[LOSS_SCALE]), int(after[GOOD_STEPS])) == (2.0**15, 3)
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        assert max(apart(without_scale(after), state).values()) < 1e-4
    CudaEngine().forget(flat)


@sampled(3, graph=GRAPHS[:3], mode=MODES)
def test_float16_trains_as_near_to_float32_as_its_mantissa_allows(graph, mode):
    flat, training = kept(*graph)
    exact, _ = trained(CudaEngine(), job_of(flat, training, 2, mode), training, 6)
    losses, state = trained(
        CudaEngine(), replace(job_of(flat, training, 2, mode), precision=Precision.FP16), training, 6
    )
    np.testing.assert_allclose(losses, exact, rtol=2e-3)
    assert {name for name, value in state.items() if value.dtype == np.float16} == set()


@sampled(5, graph=GRAPHS, mode=MODES)
def test_a_step_that_overflows_changes_no_variable_and_halves_the_scale(graph, mode):
    flat, training = kept(*graph)
    executable = CudaEngine().build(replace(job_of(flat, training, 2, mode), precision=Precision.FP16))
    begun = executable.save_state()
    executable.load_state({LOSS_SCALE: np.array(2.0**60, np.float32), GOOD_STEPS: np.array(7, np.int64)})
    executable.step(training.feeds(8))
    after = executable.save_state()
    assert (float(after[LOSS_SCALE]), int(after[GOOD_STEPS])) == (2.0**59, 0)
    assert bits(without_scale(after)) == bits(without_scale(begun))
    executable.load_state({LOSS_SCALE: np.array(2.0**4, np.float32)})
    executable.step(training.feeds(8))
    after = executable.save_state()
    assert int(after[GOOD_STEPS]) == 1
    assert bits(without_scale(after)) != bits(without_scale(begun))
    executable.close()


WEIGHTS = [np.random.default_rng(1).standard_normal(shape).astype(np.float32) / 4 for shape in ((6, 16), (16, 3))]


def perceptron(tf, v1, small=1.0, clip=False):
    x = v1.placeholder(tf.float32, (8, 6), name="x")
    y = v1.placeholder(tf.float32, (8, 3), name="y")
    first, second = (v1.get_variable(f"w{at}", initializer=tf.constant(one)) for at, one in enumerate(WEIGHTS))
    found = tf.matmul(tf.tanh(tf.matmul(x, first)), second)
    loss = tf.multiply(tf.reduce_mean(tf.square(found - y)), small, name="loss")
    optimizer = v1.train.MomentumOptimizer(0.1 / small, 0.9)
    pairs = optimizer.compute_gradients(loss)
    if clip:
        gradients, _ = tf.clip_by_global_norm([gradient for gradient, _ in pairs], 0.1 * small)
        pairs = list(zip(gradients, [first, second], strict=True))
    optimizer.apply_gradients(pairs, name="train_op")


def data(step, large=1.0):
    generator = np.random.default_rng(step)
    x, y = (generator.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (8, 3)))
    return {"x": x, "y": y * large}


@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_float16_has_no_numbers_for_train(clip):
    """A loss of some 1e-7: its gradients are zero in float16 but for the scale."""
    flat = exported(lambda tf, v1: perceptron(tf, v1, 1e-7, clip))
    states = {}
    for precision in (Precision.IEEE, Precision.FP16):
        executable = CudaEngine().build(job(flat, data(0), precision))
        for step in range(5):
            executable.step(data(step))
        states[precision] = executable.save_state()
        executable.close()
    for at, begun in enumerate(WEIGHTS):
        moved, expected = (states[one][f"w{at}"] - begun for one in (Precision.FP16, Precision.IEEE))
        np.testing.assert_allclose(moved, expected, atol=2e-2 * np.abs(expected).max())
    assert float(states[Precision.FP16][LOSS_SCALE]) == 2.0**15


def test_losses_scale_and_overflows_are_those_of_kerass_own_loss_scaling(monkeypatch):
    """Keras's optimizer that scales, around a model whose products are in float16: a curve with an overflow that large labels provoke."""
    import keras
    import tensorflow as tf

    monkeypatch.setattr(lowerings, "GROWTH_STEPS", 4)
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15, dynamic_growth_steps=4)
    weights = [keras.Variable(one) for one in WEIGHTS]
    optimizer.build(weights)
    flat = exported(perceptron)
    executable = CudaEngine().build(job(flat, data(0)))
    scales, losses = [], []
    for step in range(14):
        feeds = data(step, 1e4 if step in (6, 7) else 1.0)
        with tf.GradientTape() as tape:
            first, second = (tf.cast(one.value, tf.float16) for one in weights)
            hidden = tf.tanh(tf.matmul(tf.cast(feeds["x"], tf.float16), first))
            loss = tf.reduce_mean(tf.square(tf.cast(tf.matmul(hidden, second), tf.float32) - feeds["y"]))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [one.value for one in weights]), weights)
        got = executable.step(feeds)["loss"]
        losses.append((float(got), float(loss)))
        state = executable.save_state()
        scales.append((float(state[LOSS_SCALE]), float(optimizer.dynamic_scale)))
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)
    assert [one for one, _ in scales] == [one for _, one in scales]
    assert min(one for one, _ in scales) < 2.0**15 < max(one for one, _ in scales)
    executable.close()


@pytest.mark.parametrize("parts", [3, 66])
def test_all_gradients_of_what_is_packed_are_scaled(parts):
    """One op of the chain gives them all, however many they are: they were the first 64."""

    def build(tf, v1):
        x = v1.placeholder(tf.float32, (parts, 6), name="x")
        weight = v1.get_variable("w", initializer=tf.constant(WEIGHTS[0]))
        rows = [tf.matmul(one[None], weight) for one in tf.unstack(x)]
        loss = tf.reduce_mean(tf.square(tf.stack([row * (1 + at / parts) for at, row in enumerate(rows)])), name="loss")
        v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train_op")

    flat, feeds = exported(build), {"x": np.random.default_rng(0).standard_normal((parts, 6)).astype(np.float32)}
    states = []
    for precision in (Precision.IEEE, Precision.FP16):
        executable = CudaEngine().build(job(flat, feeds, precision))
        executable.step(feeds)
        states.append(executable.save_state()["w"] - WEIGHTS[0])
        executable.close()
    np.testing.assert_allclose(states[1], states[0], atol=1e-2 * np.abs(states[0]).max())


def test_what_scales_its_loss_itself_is_left_alone():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (8, 6), name="x")
        weight = v1.get_variable("w", initializer=tf.constant(WEIGHTS[0]))
        scale = v1.get_variable("current_loss_scale", initializer=tf.constant(8.0))
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weight)), name="loss")
        (gradient,) = tf.gradients(loss * scale, [weight])
        tf.group(v1.assign_sub(weight, 0.1 * gradient / scale), v1.assign(scale, scale * 2.0), name="train_op")

    flat = exported(build)
    executable = CudaEngine().build(job(flat, {"x": data(0)["x"]}))
    executable.step({"x": data(0)["x"]})
    assert executable.save_state().keys() == {"w", "current_loss_scale"}
    executable.close()


def test_two_losses_are_scaled_alike():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (8, 6), name="x")
        weights = [v1.get_variable(f"w{at}", initializer=tf.constant(WEIGHTS[0])) for at in range(2)]
        losses = [tf.reduce_mean(tf.square(tf.matmul(x, one) - 1.0)) for one in weights]
        steps = [
            v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[one])
            for loss, one in zip(losses, weights, strict=True)
        ]
        tf.add_n(losses, name="loss")
        tf.group(*steps, name="train_op")

    flat, feeds = exported(build), {"x": data(0)["x"]}
    states = []
    for precision in (Precision.IEEE, Precision.FP16):
        executable = CudaEngine().build(job(flat, feeds, precision))
        executable.step(feeds)
        states.append(executable.save_state())
        executable.close()
    for name in ("w0", "w1"):
        np.testing.assert_allclose(states[1][name], states[0][name], atol=1e-3)
    np.testing.assert_array_equal(states[1]["w0"], states[1]["w1"])


def refused(build, match):
    flat = exported(build)
    with pytest.raises(EngineError, match=match) as caught:
        CudaEngine().compile(job(flat, {"x": data(0)["x"]}))
    assert "bf16" in str(caught.value.fix)


def test_gradients_whose_beginning_is_not_to_be_found_are_refused():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (8, 6), name="x")
        weight = v1.get_variable("w", initializer=tf.constant(WEIGHTS[0]))
        found = tf.matmul(x, weight)
        tf.reduce_mean(tf.square(found), name="loss")
        tf.group(v1.assign_sub(weight, tf.matmul(x, tf.tanh(found), transpose_a=True)), name="train_op")

    refused(build, "where gradients begin in this graph is not to be found")


def test_a_write_that_can_not_be_left_out_is_refused():
    def build(tf, v1):
        x = v1.placeholder(tf.float32, (8, 6), name="x")
        weight = v1.get_variable("w", initializer=tf.constant(WEIGHTS[0]))
        count = v1.get_variable("count", initializer=tf.constant(0), use_resource=False)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weight)), name="loss")
        step = v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=[weight])
        tf.group(step, v1.count_up_to(count, 5), name="train_op")

    refused(build, "CountUpTo writes a variable")


def test_several_processes_are_refused():
    """Each would have to know whether the gradients of the others are finite."""
    wanted = job(exported(perceptron), data(0))
    shards = replace(wanted.options, shards=Shards(2, ("x", "y"), is_open=False))
    with pytest.raises(EngineError, match="in one process only") as caught:
        CudaEngine().compile(replace(wanted, options=shards))
    assert "bf16" in str(caught.value.fix)


def test_the_first_scale_is_that_of_keras():
    import keras

    assert keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).initial_scale == FIRST_SCALE[LOSS_SCALE]
    assert keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).dynamic_growth_steps == lowerings.GROWTH_STEPS


def test_many_gradients_are_unscaled_together():
    """On a GPU each of these operators is one kernel for up to a hundred gradients; of copies one by one there would be as many."""

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.name())
            return function(*args, **(kwargs or {}))

    names = []
    gradients = [torch.full((3, number + 1), float(number)) for number in range(80)]
    gradients[7] = torch.arange(12.0).reshape(2, 6)[:, 1:3]
    with Called():
        *found, finite = lowerings.unscale(None, torch.tensor(8.0), *gradients)
    assert finite
    assert all(one.equal(gradient / 8) and one is not gradient for one, gradient in zip(found, gradients, strict=True))
    assert len(names) < 10
    for number in range(20, 52):  # parts of what was joined, of two shapes, as those of tables are
        gradients[number] = torch.arange(60.0).reshape(3, 20)[:, number % 7 : number % 7 + 2 + number % 2]
    before = len(names)
    with Called():
        *found, finite = lowerings.unscale(None, torch.tensor(8.0), *gradients)
    assert finite
    assert all(one.equal(gradient / 8) for one, gradient in zip(found, gradients, strict=True))
    assert all(one.is_contiguous() for one in found)
    assert len(names) - before == before + 4  # each shape is joined and parted
    gradients[40][1, 1] = torch.nan
    assert not lowerings.unscale(None, torch.tensor(8.0), *gradients)[-1]
    gradients[40] = torch.zeros(3, 2)
    gradients[5][2, 0] = torch.inf
    assert not lowerings.unscale(None, torch.tensor(8.0), *gradients)[-1]


@pytest.mark.parametrize("steps", [0, 7, 1998, 1999, 5000])
@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0, 2.0**15, 2.0**127])
@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_follows_what_gradients_were(steps, scale, finite):
    """As `tf.keras.mixed_precision.LossScaleOptimizer` has it, one step of which that long finite is counted as the last."""
    found, counted = torch.tensor(scale), torch.tensor(steps)
    lowerings.update_loss_scale(None, found, counted, torch.tensor(finite))
    grows = finite and steps + 1 >= lowerings.GROWTH_STEPS
    expected = scale / 2 if not finite else scale * 2 if grows and scale < 2.0**127 else scale
    assert float(found) == max(expected, 1)
    assert int(counted) == (steps + 1 if finite and not grows else 0)
    assert counted.dtype == torch.int64


def test_rows_of_many_tables_are_left_as_they_are_by_one_kernel():
    """Which is 130 of a step of DeepFM; each took two launches of its own."""
    one, other, bytes = torch.tensor([3, 1, 4]), torch.tensor([[1], [5]]), torch.tensor([9, 2], dtype=torch.int32)
    given = [one, other, bytes, one, other]
    for finite, expected in ((True, given), (False, [torch.full_like(each, -1) for each in given])):
        found = all_nowhere_unless(torch.tensor(finite), given)
        assert found[0] is found[3]
        for each, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(each, wanted, rtol=0, atol=0)
