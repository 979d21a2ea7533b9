"""TF32 held to what rounding alone does: kernels that cut bits off pass every bound per element, and are coarser than TensorFlow's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from msplit.benchmark.timing import bench
from msplit.core.arguments import Precision
from msplit.engines.cuda.engine import ENGINE, CudaEngine
from msplit.engines.cuda.ir.windows import to_tf32
from msplit.engines.cuda.runtime import executables
from msplit.engines.cuda.runtime.executables import RoundedProducts
from msplit.inputs.reference import Reference
from msplit.verify import check as verified
from msplit.verify.compare import compare
from msplit.verify.mixed_precision import emulated_errors, tf32_tolerances
from msplit.verify.results import Settings, Variant
from tests.engines.cuda.cases import flat_of, graph_of, job, run
from tests.engines.cuda.random_graphs import FLOAT, INT32, _Graph

QUICK = Settings(duration=0.0, warmup=0.0, min_rounds=1, builds=1)
WIDTH = 64


def cut(value):
    """What tensor cores make of a number that nobody rounds."""
    return (value.view(torch.int32) & -0x2000).view(torch.float32)


def deep(layers=12, rows=16):
    """Dense layers of positive weights, each of which keeps the size of what it reads."""
    graph = _Graph(lambda strategy: 0)
    y = graph.placeholder("x", [rows, WIDTH])
    for _ in range(layers):
        weights = (graph.rng.random((WIDTH, WIDTH)) * 2 / WIDTH).astype(np.float32)
        y = graph.node("MatMul", [y, graph.constant(weights)], T=FLOAT, transpose_a=False, transpose_b=False)
        y = graph.node("Relu", [y], T=FLOAT)
    return flat_of(graph.graph_def, outputs=[y])


def fresh(seed):
    return {"x": np.random.default_rng(seed).random((16, WIDTH), np.float32)}


class OnGpu(CudaEngine):
    """The simulated engine, whose products in TF32 do something to what they read, as a GPU's do."""

    def build(self, job):
        executable = super().build(job)
        if job.precision is not Precision.TF32:
            return executable
        step = executable.step

        def rounded(feeds):
            with RoundedProducts():
                return step(feeds)

        executable.step = rounded
        return executable


def benched(monkeypatch, does, **settings):
    """How variants of the deep network compare, whose products do something to what they read."""
    flat = deep()
    reference = Reference(fresh(0), run(flat, fresh(0)), "exactly")
    emulated = ENGINE.try_out

    def try_out(job, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(executables, "to_tf32", to_tf32)
            return emulated(job, inputs)

    monkeypatch.setattr(ENGINE, "try_out", try_out, raising=False)
    monkeypatch.setattr(executables, "to_tf32", does)
    monkeypatch.setattr(verified, "_precision", lambda variant: variant.job.precision)
    made = replace(job(flat, fresh(0)), precision=Precision.TF32)
    variants = [Variant("one", OnGpu(), made), Variant("two", OnGpu(), made)]
    return bench(variants, fresh=fresh, settings=replace(QUICK, **settings), reference=reference)


def test_products_that_round_pass(monkeypatch):
    assert not benched(monkeypatch, to_tf32).failed


def test_products_that_cut_off_are_refused(monkeypatch):
    result = benched(monkeypatch, cut)
    assert result.failed
    failed = {check.against for one in result.variants for check in one.checks if not check.passed}
    assert failed == {"exactly"}, "they agree with each other"
    (output,) = next(check for check in result.variants[0].checks if not check.passed).comparison.outputs
    assert output.as_a_whole
    assert output.distance == output.needed > output.tolerance
    assert "away (root mean square, relative)" in result.describe_failures()


def test_a_tolerance_that_is_given_counts_alone(monkeypatch):
    assert not benched(monkeypatch, cut, tolerance=0.1).failed


def test_cutting_off_is_within_the_bound_of_every_element(monkeypatch):
    """So that it takes the other one to see it."""
    flat = deep()
    monkeypatch.setattr(executables, "to_tf32", cut)
    with RoundedProducts():
        got = run(flat, fresh(0))
    expected = run(flat, fresh(0))
    assert compare(got, expected, precision=Precision.TF32).passed
    assert not compare(got, expected, precision=Precision.TF32, rounding=dict.fromkeys(expected, 1e-4)).passed
    few = {name: value[:1, :8] for name, value in expected.items()}
    few_got = {name: value[:1, :8] for name, value in got.items()}
    assert compare(few_got, few, precision=Precision.TF32, rounding=dict.fromkeys(few, 1e-9)).passed


def products(tf, v1):
    x = v1.placeholder(tf.float32, [8, 16], name="x")
    image = v1.placeholder(tf.float32, [2, 9, 9, 5], name="image")
    rng = np.random.default_rng(3)

    def normal(*shape):
        return tf.constant(rng.standard_normal(shape).astype(np.float32))

    tf.matmul(x, normal(16, 12), name="matmul")
    tf.nn.relu(tf.nn.bias_add(tf.matmul(x, normal(16, 12)), normal(12)), name="dense")
    tf.matmul(tf.reshape(x, [2, 4, 16]), normal(2, 16, 4), name="batched")
    tf.identity(tf.einsum("ij,kj->ik", x, normal(12, 16)), name="summed")
    tf.nn.conv2d(image, normal(3, 3, 5, 7), 1, "SAME", name="conv")
    tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(image, normal(3, 3, 5, 7), 2, "VALID"), normal(7)), name="stem")
    tf.nn.conv2d_transpose(image, normal(3, 3, 6, 5), [2, 18, 18, 6], 2, name="transposed")


@pytest.mark.tf
@pytest.mark.parametrize("name", ["matmul", "dense", "batched", "summed", "conv", "stem", "transposed"])
def test_every_kind_of_product_rounds_when_it_is_emulated(name):
    """As far as products of rounded numbers are, computed in float64, and no less."""
    flat = graph_of(products, outputs=[name])
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((8, 16)), "image": rng.standard_normal((2, 9, 9, 5))}
    feeds = {key: value.astype(np.float32) for key, value in feeds.items() if key in flat.graph.names}
    made = replace(job(flat, feeds), precision=Precision.TF32)
    (away,) = emulated_errors(made, [feeds]).values()
    assert 5e-5 < away < 2.0**-11


def test_what_is_no_product_rounds_nothing():
    graph = _Graph(lambda strategy: 0)
    x = graph.placeholder("x", [16, WIDTH])
    flat = flat_of(graph.graph_def, outputs=[graph.node("Tanh", [graph.node("Square", [x], T=FLOAT)], T=FLOAT)])
    made = replace(job(flat, fresh(0)), precision=Precision.TF32)
    assert list(emulated_errors(made, [fresh(0)]).values()) == [0.0]


def alike(rows=200):
    """Two towers over inputs whose rows are all the same, and their product: an output that is one number, near zero."""
    graph = _Graph(lambda strategy: 0)
    x, towers = graph.placeholder("x", [rows, WIDTH]), []
    for _ in range(2):
        y = x
        for size in (64, 32):
            width = WIDTH if y is x else 64
            weights = (graph.rng.standard_normal((width, size)) / width**0.5).astype(np.float32)
            y = graph.node("MatMul", [y, graph.constant(weights)], T=FLOAT, transpose_a=False, transpose_b=False)
        towers.append(y)
    product = graph.node("Mul", towers, T=FLOAT)
    total = graph.node("Sum", [product, graph.constant(np.int32(1))], T=FLOAT, Tidx=INT32, keep_dims=True)
    return flat_of(graph.graph_def, outputs=[total])


def test_tolerances_hold_where_rows_are_alike_however_kernels_round():
    """Of a single number, one rounding tells nothing: a two-tower was refused on a GPU on empty strings for 4.9 times what it came to."""
    flat = alike()
    feeds = {"x": np.tile(np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32), (200, 1))}
    made = replace(job(flat, feeds), precision=Precision.TF32)
    (tolerances, _), exact = tf32_tolerances(made, [feeds], {}), run(flat, feeds)
    (name,) = exact
    needed = []
    for seed in range(100, 150):
        with RoundedProducts(seed):
            needed.append(compare(run(flat, feeds), exact).outputs[0].needed)
    assert max(needed) <= tolerances[name]
    with RoundedProducts():
        assert sum(one > 3 * compare(run(flat, feeds), exact).outputs[0].needed for one in needed) > 5, (
            "one is not enough"
        )
