"""What is fused into another node's kernel, what is a view, and what is computed once: as the engine does it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msplit.cost import estimate
from msplit.engines.cuda.options import EngineOptions
from msplit.flatten.flat import Tensor
from msplit.shapes.infer import infer
from tests.shapes.small import Builder, costs_of

SAMPLES = Path(__file__).parents[2] / "sample_graphs"
FLOAT: dict[str, Any] = {"T": "float32"}
SAME: dict[str, Any] = {**FLOAT, "strides": (1, 1, 1, 1), "padding": "SAME"}


def _kernels(b: Builder) -> list[str]:
    """Ops of the nodes that take time."""
    flat = b.flat()
    costs = costs_of(flat)
    assert costs.inside is not None
    assert not (costs.inside & (costs.time_us > 0)).any()
    return [b.ops[node] for node in np.flatnonzero(costs.time_us > 0).tolist()]


def _convolution(b: Builder) -> int:
    return b.add("Conv2D", b.input("x", (1, 8, 8, 4)), b.weight(3, 3, 4, 16), **SAME)


def test_bias_and_activation_are_fused_into_a_product() -> None:
    b = Builder()
    product = b.add("MatMul", b.input("x", (2, 8)), b.weight(8, 4), **FLOAT)
    b.add(
        "Sigmoid", b.add("Reshape", b.add("BiasAdd", product, b.weight(4), **FLOAT), b.ints(2, 2, 2), **FLOAT), **FLOAT
    )
    assert _kernels(b) == ["MatMul"]


@pytest.mark.parametrize("spelled", [("Mul", "AddV2"), ("Sub", "RealDiv"), ("FusedBatchNormV3",)])
def test_a_batch_norm_in_any_spelling_and_its_relu_are_fused_into_a_convolution(spelled: tuple[str, ...]) -> None:
    b = Builder()
    node = _convolution(b)
    for op in spelled:
        parameters = [b.weight(16) for _ in range(4 if op.startswith("Fused") else 1)]
        node = b.add(op, node, *parameters, **FLOAT, is_training=False)
    b.add("Relu", node, **FLOAT)
    assert _kernels(b) == ["Conv2D"]


def test_a_batch_norm_that_trains_is_a_kernel() -> None:
    b = Builder()
    b.add("FusedBatchNormV3", _convolution(b), *(b.weight(16) for _ in range(4)), **FLOAT, is_training=True)
    assert _kernels(b) == ["Conv2D", "FusedBatchNormV3"]


def test_what_somebody_else_reads_or_fetches_is_not_fused() -> None:
    b = Builder()
    node = _convolution(b)
    biased = b.add("BiasAdd", node, b.weight(16), **FLOAT)
    active = b.add("Relu", biased, **FLOAT)
    flat = b.flat()
    fetched = replace(flat, outputs=(Tensor("y", active, 0), Tensor("z", biased, 0)))
    assert (costs_of(flat).time_us > 0).sum() == 1
    assert (costs_of(fetched).time_us > 0).sum() == 2
    b.add("Neg", node, **FLOAT)
    assert _kernels(b) == ["Conv2D", "BiasAdd", "Relu", "Neg"]


@pytest.mark.parametrize("shape", [(8, 8, 1), (1, 8, 8, 16)])
def test_only_scales_per_channel_are_fused(shape: tuple[int, ...]) -> None:
    b = Builder()
    b.add("Mul", _convolution(b), b.weight(*shape), **FLOAT)
    assert _kernels(b) == ["Conv2D", "Mul"]


def test_a_scale_that_is_computed_is_not_fused() -> None:
    b = Builder()
    b.add("Mul", _convolution(b), b.input("scale", (16,)), **FLOAT)
    assert _kernels(b) == ["Conv2D", "Mul"]


def test_a_shortcut_is_fused_where_a_relu_follows_and_is_read() -> None:
    b = Builder()
    other = b.input("shortcut", (1, 8, 8, 16))
    node = _convolution(b)
    total = b.add("AddV2", node, other, **FLOAT)
    moved = costs_of(b.flat()).bytes[node]
    assert _kernels(b) == ["Conv2D", "AddV2"]
    b.add("Relu", total, **FLOAT)
    assert _kernels(b) == ["Conv2D"]
    assert costs_of(b.flat()).bytes[node] == moved + 4 * 8 * 8 * 16


def test_a_bias_behind_the_sum_of_two_products_moves_to_one_of_them() -> None:
    b = Builder()
    one = b.add("MatMul", b.input("x", (2, 8)), b.weight(8, 4), **FLOAT)
    two = b.add("MatMul", b.input("h", (2, 4)), b.weight(4, 4), **FLOAT)
    b.add("BiasAdd", b.add("AddV2", one, two, **FLOAT), b.weight(4), **FLOAT)
    assert _kernels(b) == ["MatMul", "MatMul", "AddV2"]


def _dilated(b: Builder, sequence: bool, padding: str = "VALID") -> tuple[int, int]:
    """The convolution and what comes last: a bias and a ReLU behind the BatchToSpaceND."""
    x = b.input("x", (1, 10, 4) if sequence else (1, 10, 10, 4))
    axes = 1 if sequence else 2
    block = b.const([2] * axes, "int32")
    pads, crops = (b.const([[size, size]] * axes, "int32") for size in (2, 0))
    node = b.add("SpaceToBatchND", x, block, pads, **FLOAT, Tblock_shape="int32", Tpaddings="int32")
    attrs = {**SAME, "padding": padding}
    if sequence:
        convolution = b.add("Conv2D", b.add("ExpandDims", node, b.ints(1), **FLOAT), b.weight(1, 3, 4, 16), **attrs)
        node = b.add("Squeeze", convolution, **FLOAT, squeeze_dims=(1,))
    else:
        node = convolution = b.add("Conv2D", node, b.weight(3, 3, 4, 16), **attrs)
    joined = b.add("BatchToSpaceND", node, block, crops, **FLOAT, Tblock_shape="int32", Tcrops="int32")
    return convolution, b.add("Relu", b.add("BiasAdd", joined, b.weight(16), **FLOAT), **FLOAT)


@pytest.mark.parametrize("sequence", [True, False])
def test_dilation_that_is_spelled_is_fused_into_the_convolution(sequence: bool) -> None:
    b = Builder()
    _dilated(b, sequence)
    assert _kernels(b) == ["Conv2D"]


@pytest.mark.parametrize("sequence", [True, False])
def test_dilation_is_no_dilation_where_the_parts_are_padded_or_read(sequence: bool) -> None:
    b = Builder()
    _dilated(b, sequence, "SAME")
    assert _kernels(b) == ["SpaceToBatchND", "Conv2D", "BatchToSpaceND", "BiasAdd", "Relu"]
    b = Builder()
    convolution, _ = _dilated(b, sequence)
    b.add("Neg", convolution, **FLOAT)
    assert _kernels(b) == ["SpaceToBatchND", "Conv2D", "BatchToSpaceND", "BiasAdd", "Relu", "Neg"]


@pytest.mark.parametrize("sequence", [True, False])
def test_padding_is_fused_into_a_convolution(sequence: bool) -> None:
    b = Builder()
    x = b.input("x", (1, 10, 4) if sequence else (1, 10, 10, 4))
    node = b.add("Pad", x, b.const([[0, 0], *[[1, 1]] * (1 if sequence else 2), [0, 0]], "int32"), **FLOAT)
    if sequence:
        node = b.add("ExpandDims", node, b.ints(1), **FLOAT)
    b.add("Conv2D", node, b.weight(1 if sequence else 3, 3, 4, 16), **{**SAME, "padding": "VALID"})
    assert _kernels(b) == ["Conv2D"]


def _gelu(b: Builder, value: int) -> int:
    inner = b.add("Erf", b.add("Mul", value, b.const(0.7071), **FLOAT), **FLOAT)
    half = b.add("Mul", value, b.const(0.5), **FLOAT)
    return b.add("Mul", half, b.add("AddV2", inner, b.const(1.0), **FLOAT), **FLOAT)


def test_gelu_is_fused_and_another_gate_does_not() -> None:
    b = Builder()
    product = b.add("BiasAdd", b.add("MatMul", b.input("x", (2, 8)), b.weight(8, 4), **FLOAT), b.weight(4), **FLOAT)
    _gelu(b, product)
    assert _kernels(b) == ["MatMul"]
    b = Builder()
    product = b.add("MatMul", b.input("x", (2, 8)), b.weight(8, 4), **FLOAT)
    b.add("Mul", product, b.add("Sigmoid", product, **FLOAT), **FLOAT)
    assert _kernels(b) == ["MatMul", "Sigmoid", "Mul"]


def _normalized(b: Builder, axes: tuple[int, ...]) -> None:
    x, along = b.input("x", (2, 3, 8)), b.ints(*axes)
    centred = b.add("Sub", x, b.add("Mean", x, along, **FLOAT, keep_dims=True), **FLOAT)
    variance = b.add("Mean", b.add("Square", centred, **FLOAT), along, **FLOAT, keep_dims=True)
    factor = b.add("Rsqrt", b.add("AddV2", variance, b.const(1e-5), **FLOAT), **FLOAT)
    b.add("AddV2", b.add("Mul", centred, b.add("Mul", factor, b.weight(8), **FLOAT), **FLOAT), b.weight(8), **FLOAT)


def test_a_layer_norm_is_one_kernel_and_a_norm_over_the_batch_is_not() -> None:
    b = Builder()
    _normalized(b, (-1,))
    assert _kernels(b) == ["Mean"]
    b = Builder()
    _normalized(b, (0, 1))
    assert len(_kernels(b)) == 9


def test_a_softmax_that_is_spelled_out_is_one_kernel() -> None:
    b = Builder()
    x = b.input("x", (4, 10))
    exp = b.add("Exp", b.add("Sub", x, b.add("Max", x, b.ints(-1), **FLOAT, keep_dims=True), **FLOAT), **FLOAT)
    b.add("RealDiv", exp, b.add("Sum", exp, b.ints(-1), **FLOAT, keep_dims=True), **FLOAT)
    assert _kernels(b) == ["Max"]


def test_padding_is_fused_where_a_convolution_alone_reads_it() -> None:
    b = Builder()
    pads = b.const([[0, 0], [1, 1], [1, 1], [0, 0]], "int32")
    padded = b.add("Pad", b.input("x", (1, 8, 8, 4)), pads, **FLOAT)
    b.add("DepthwiseConv2dNative", padded, b.weight(3, 3, 4, 1), **{**SAME, "padding": "VALID"})
    assert _kernels(b) == ["DepthwiseConv2dNative"]
    b.add("MaxPool", padded, ksize=(1, 3, 3, 1), **{**SAME, "padding": "VALID"})
    assert _kernels(b) == ["Pad", "DepthwiseConv2dNative", "MaxPool"]


def test_views_launch_nothing_and_a_reshape_behind_a_transposition_copies() -> None:
    b = Builder()
    x = b.input("x", (2, 4, 6))
    turned = b.add("Transpose", x, b.ints(0, 2, 1), **FLOAT)
    b.add("Slice", turned, b.ints(0, 0, 0), b.ints(1, 6, 4), **FLOAT)
    b.add("Reshape", x, b.ints(8, 6), **FLOAT)
    assert _kernels(b) == []
    copied = b.add("Reshape", turned, b.ints(12, 4), **FLOAT)
    costs = costs_of(b.flat())
    assert np.flatnonzero(costs.time_us).tolist() == [copied]
    assert costs.bytes[copied] >= 2 * 4 * 48


def test_nodes_that_compute_the_same_share_one_kernel() -> None:
    b = Builder()
    x = b.input("x", (64, 1024))
    one = b.add("Tanh", x, **FLOAT)
    alone = costs_of(b.flat())
    two = b.add("Tanh", x, **FLOAT, _stream_id=3)
    other = b.add("Relu", x, **FLOAT)
    noise = [b.add("Dropout", x, **FLOAT) for _ in range(2)]
    costs = costs_of(b.flat(stateful=np.array([op == "Dropout" for op in b.ops])))
    assert costs.time_us[[one, two]] == pytest.approx(alone.time_us[one] / 2)
    assert costs.bytes[[one, two]].sum() == alone.bytes[one]
    assert (costs.time_us[[other, *noise]] > 1).all()


def test_an_activation_that_is_there_twice_is_fused_once_for_both() -> None:
    b = Builder()
    node = _convolution(b)
    for _ in range(2):
        b.add("Neg", b.add("Relu", node, **FLOAT), **FLOAT)
    assert _kernels(b) == ["Conv2D", "Neg", "Neg"]


@pytest.mark.parametrize(
    "name", ["mmoe_small.pb", "towers_small.pb", "lstm_small.pb", "keras_inception", "inception_v3_stripped.pb"]
)
def test_each_kernel_of_the_engine_has_one_node_that_carries_it(name: str) -> None:
    """A Concat has a price, too, where the engine writes its parts in place: on a GPU that is measured. So is what makes one kernel of a
    mean, a dense layer and a softmax, which here stay apart."""
    pytest.importorskip("torch", reason="the cuda engine's kernel library is not installed")
    from msplit import api
    from msplit.engines.base import Job
    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.ir.program import JOINED
    from msplit.engines.cuda.passes.convolution.fuse_mlp import MLPS
    from msplit.engines.cuda.passes.measured import deciding
    from msplit.inputs.make import make_inputs

    flat = api.load(SAMPLES / name)
    _, costs = api.price(flat, batch=2)
    feeds = make_inputs(flat, {}, batch=2)
    job = Job(flat, np.zeros(len(flat), np.int32), 1, feeds, options=EngineOptions("cpu"))
    with deciding({MLPS: lambda graph, found: (False, None)}):
        steps = ENGINE.compile(job).program.steps
    carried = [
        [node for node in set(step.op.source_nodes) if costs.time_us[node] > 0] for step in steps if step.launches
    ]
    assert [len(nodes) for nodes in carried] == [1] * len(carried)
    found = sorted(node for nodes in carried for node in nodes)
    in_place = set(np.flatnonzero(costs.time_us > 0).tolist()) - set(found)
    assert {flat.graph.ops[node] for node in in_place} <= {"ConcatV2"}
    assert bool(in_place) is any(step.op.op == JOINED for step in steps)
    assert sorted([*found, *in_place]) == np.flatnonzero(costs.time_us > 0).tolist()


def test_a_layer_norm_as_keras_writes_it_is_one_kernel() -> None:
    b = Builder()
    x, along = b.input("x", (2, 3, 8)), b.ints(-1)
    mean = b.add("Mean", x, along, **FLOAT, keep_dims=True)
    stopped = b.add("StopGradient", mean, **FLOAT)
    variance = b.add("Mean", b.add("SquaredDifference", x, stopped, **FLOAT), along, **FLOAT, keep_dims=True)
    factor = b.add("Rsqrt", b.add("AddV2", variance, b.const(1e-3), **FLOAT), **FLOAT)
    scale = b.add("Mul", factor, b.weight(8), **FLOAT)
    shift = b.add("AddV2", b.add("Mul", b.add("Neg", mean, **FLOAT), scale, **FLOAT), b.weight(8), **FLOAT)
    b.add("AddV2", b.add("Mul", x, scale, **FLOAT), shift, **FLOAT)
    assert _kernels(b) == ["Mean"]


def test_an_activation_that_no_library_has_as_an_epilogue_adds_its_kernel_to_the_product() -> None:
    def time(activation: str) -> float:
        b = Builder()
        product = b.add("MatMul", b.input("x", (64, 64)), b.weight(64, 64), **FLOAT)
        node = b.add(activation, b.add("BiasAdd", product, b.weight(64), **FLOAT), **FLOAT)
        flat = b.flat()
        costs = estimate(flat, infer(flat))
        assert costs.time_us[node] == 0
        return float(costs.time_us[product])

    assert time("Sigmoid") > time("Relu") + 1


def test_zeros_in_front_of_a_dilation_are_the_convolutions_own_padding() -> None:
    b = Builder()
    padded = b.add("Pad", b.input("x", (4, 20, 8)), b.const([[0, 0], [4, 0], [0, 0]], "int32"), **FLOAT)
    wide = b.add("ExpandDims", padded, b.ints(1), **FLOAT)
    blocks, none = b.ints(1, 4), b.const([[0, 0], [0, 0]], "int32")
    apart = b.add("SpaceToBatchND", wide, blocks, none, **FLOAT)
    data = b.add("Conv2D", apart, b.weight(1, 2, 8, 16), **FLOAT, strides=(1, 1, 1, 1), padding="VALID")
    b.add("BatchToSpaceND", data, blocks, none, **FLOAT)
    assert _kernels(b) == ["Conv2D"]
