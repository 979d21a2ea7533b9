"""Chains of ops at random, in both layouts, with and without rewrites."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msplit.engines.cuda.ir.graph import Op, OpGraph
from msplit.engines.cuda.ir.verify import Stage
from msplit.engines.cuda.passes.pipeline import Context, run_passes
from msplit.verify.compare import compare
from tests.campaign import examples
from tests.engines.cuda.cases import CPU, kernels
from tests.engines.cuda.passes.harness import (
    run_source,
)

pytestmark = pytest.mark.tf


def source_of(ops, constants):
    """A source of a chain of ops: each reads the one before it, the first one the input."""
    graph = OpGraph({}, dict(constants), {"x": (0, 0)}, {}, numbers=1000)
    key = (0, 0)
    for number, (op, attrs, before, after) in enumerate(ops, 1):
        inputs = [*before, key, *after]
        graph.ops[number] = Op(number, f"{op}_{number}", op, {"T": "float32", **attrs}, inputs, [number])
        key = (number, 0)
    graph.fetches["out"] = key
    return graph


@st.composite
def chains(draw):
    """A convolution or product, and ops behind it that scale, shift, reshape or bend."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["Conv2D", "DepthwiseConv2dNative", "MatMul"]))
    layout = draw(st.sampled_from(["NHWC", "NCHW"])) if kind != "MatMul" else "NHWC"
    channels = draw(st.integers(1, 4))
    constants, ops = {}, []

    def constant(array):
        key = (500 + len(constants), 0)
        constants[key] = np.asarray(array, np.float32)
        return key

    if kind == "MatMul":
        x = rng.standard_normal((3, 5))
        turned = draw(st.booleans())
        weights = rng.standard_normal((channels, 5) if turned else (5, channels))
        ops.append(("MatMul", {"transpose_a": False, "transpose_b": turned}, [], [constant(weights)]))
        wide = [(channels,), (1, channels), (), (1, 1)]
    else:
        x = rng.standard_normal((2, 4, 5, 2) if layout == "NHWC" else (2, 2, 4, 5))
        multiplier = channels
        channels = 2 * channels if kind != "Conv2D" else channels
        weights = rng.standard_normal((2, 2, 2, multiplier))
        attrs = {"strides": (1, 1, 1, 1), "padding": "SAME", "data_format": layout}
        ops.append((kind, attrs, [], [constant(weights)]))
        wide = (
            [(channels,), (1, 1, 1, channels), ()] if layout == "NHWC" else [(channels, 1, 1), (1, channels, 1, 1), ()]
        )
    for _ in range(draw(st.integers(0, 6))):
        op = draw(st.sampled_from(["Mul", "AddV2", "Sub", "RealDiv", "BiasAdd", "Relu", "Tanh", "rows"]))
        if op in ("Relu", "Tanh"):
            ops.append((op, {}, [], []))
        elif op == "rows":  # a constant that is not per channel
            shape = (3, 1) if kind == "MatMul" else (2, 1, 1, 1)
            ops.append(("Mul", {}, [], [constant(rng.uniform(0.5, 2, shape))]))
        elif op == "BiasAdd":
            ops.append((op, {"data_format": layout}, [], [constant(rng.standard_normal(channels))]))
        else:
            value = constant(rng.uniform(0.5, 2, draw(st.sampled_from(wide))))
            first = op != "RealDiv" and draw(st.booleans())
            ops.append((op, {}, [value] if first else [], [] if first else [value]))
    return ops, constants, x.astype(np.float32)


@given(chains())
@settings(max_examples=examples(40, 120), deadline=None)
def test_a_chain_gives_the_same_with_and_without_rewrites(case):
    ops, constants, x = case
    feeds = {"x": x}
    plain = source_of(ops, constants)
    expected, before = run_source(plain, feeds)
    rewritten = source_of(ops, constants)
    run_passes(rewritten, Context(feeds, CPU, 1000), Stage.SPECIALIZED)
    found, after = run_source(rewritten, feeds)
    assert compare(found, expected, tolerance=2e-4).passed
    assert len(kernels(after)) <= len(kernels(before))
    covered = [node for step in after.steps for node in step.op.source_nodes]
    assert set(covered) <= set(range(1, len(ops) + 1))
    linear = [op for op, *_ in ops[1:]]
    if linear and all(op in ("AddV2", "Sub", "BiasAdd") for op in linear):
        assert len(kernels(after)) == 1
