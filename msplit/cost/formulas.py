"""Ops whose work does not follow from the sizes of their inputs and outputs: products, convolutions, pooling, sparse lookups, cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from msplit.cost import gpus
from msplit.cost.fused_into import elements
from msplit.formats.tensors import itemsize
from msplit.opset.traits import ops_with
from msplit.shapes.linalg import einsum_sizes, matrix_sizes
from msplit.shapes.nn import layout
from msplit.shapes.registry import MAX_RANK, Node, Shape, is_float, registering

THREADS = 256
"""Threads of a block that makes one output per thread."""

WINDOWS = 512
"""Windows of pooling and of depthwise convolutions that fill an SM: two blocks that wait for memory share it."""

RESIDENT = 1024
"""Threads that an SM holds (CUDA programming guide, compute capabilities; 1024 to 2048)."""

TILE_COLUMNS = 64
LEAST_FILL = 1 / 64
"""Least size of a tile of a product, however few its rows and columns are."""

CHANNELS = 8
"""Fewer channels are no work for tensor cores."""

STEP = 32
"""Summands that a tile of a product takes at a time."""

COLUMNS = 16
"""Columns of a block of a product with one row."""

SUPPRESSION_KERNELS, SUPPRESSION_FLOPS, SUPPRESSION_BYTES = 8, 6.0, 32.0
"""Kernels of one round of non-maximum suppression; operations and bytes read per score in it."""


@dataclass(frozen=True)
class NodeWork:
    """Work of a node on the device.

    Attributes:
        flops: Operations.
        blocks: Blocks of its grid.
        product: Whether tensor cores run it.
        read: Bytes read, where they are not simply its inputs.
        setup: Clock cycles of waiting before and behind the work; 0: what a plain kernel waits, `gpus.ACCESS`.
        chain: Clock cycles that one block takes for its part, step by step, however few blocks there are.
        launches: Kernels.
        fill: Part of the peak that is left where tiles are not full, or channels too few.
    """

    flops: float
    blocks: float
    product: bool = False
    read: float | None = None
    setup: float = 0.0
    chain: float = 0.0
    launches: int = 1
    fill: float = 1.0


@dataclass(frozen=True)
class Case:
    """A node with its outputs' shapes.

    Attributes:
        node: The node, with the shapes of its inputs.
        outputs: Shapes of its outputs.
        sms: Multiprocessors of the device.
        sizes: Bytes of each input.
    """

    node: Node
    outputs: tuple[Shape, ...]
    sms: int
    sizes: list[float]


Formula = Callable[[Case], NodeWork]
FORMULAS: dict[str, Formula] = {}


formula = registering(FORMULAS)


def _size(value: int | None) -> int:
    return 1 if value is None else value


def _product(
    rows: float, inner: float, columns: float, batch: float, sms: int, setup: float = gpus.TILE_SETUP
) -> NodeWork:
    """A product of matrices in tiles of 64 x 64. Where these leave multiprocessors idle, long sums are split and joined.

    With a single row or column there is nothing for tensor cores to share: every thread goes through its own part of the sum.
    """
    flops = 2.0 * batch * rows * inner * columns
    if rows <= 1 or columns <= 1:
        blocks = batch * math.ceil(max(rows, columns) / COLUMNS)
        return NodeWork(flops, max(blocks, 1.0), setup=gpus.ROW_SETUP, chain=inner / STEP * gpus.ROW_STEP)
    blocks = batch * math.ceil(rows / 64) * math.ceil(columns / 64)
    parts = max(1.0, min(sms // max(blocks, 1), inner // gpus.SUMMANDS))
    setup += gpus.JOINING if parts > 1 else 0.0
    fill = rows / (math.ceil(rows / 64) * 64) * columns / (math.ceil(columns / TILE_COLUMNS) * TILE_COLUMNS)
    chain = inner / parts / STEP * gpus.TILE_STEP
    return NodeWork(flops, max(blocks * parts, 1.0), True, setup=setup, chain=chain, fill=max(fill, LEAST_FILL))


@formula(
    "MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "_FusedBatchMatMulV2", "SparseMatMul"
)
def matmul(case: Case) -> NodeWork:
    """2 M N K, times the batch."""
    rows, inner, columns = (_size(size) for size in matrix_sizes(case.node))
    out = case.outputs[0]
    return _product(rows, inner, columns, elements(out[:-2]) if out else 1.0, case.sms)


@formula("Einsum", "XlaEinsum")
def einsum(case: Case) -> NodeWork:
    """As a batched product: labels in all terms are the batch, those that vanish the inner size."""
    equation = str(case.node.attr("equation", ""))
    found = einsum_sizes(equation, case.node.inputs)
    if found is None:
        return NodeWork(0.0, 1.0)
    sizes, lead, right = found
    terms = equation.replace(" ", "").partition("->")[0].replace("...", "").split(",")
    groups = {"batch": elements(lead), "inner": 1.0, "rows": 1.0, "columns": 1.0}
    for label, size in sizes.items():
        if label not in right:
            groups["inner"] *= _size(size)
        elif all(label in term for term in terms):
            groups["batch"] *= _size(size)
        else:
            groups["rows" if label in terms[0] else "columns"] *= _size(size)
    if len(terms) == 1:
        return NodeWork(groups["inner"] * elements(case.outputs[0]), elements(case.node.shape(0)) / 1024)
    product = _product(groups["rows"], groups["inner"], groups["columns"], groups["batch"], case.sms)
    batch = [label for label in right if all(label in term for term in terms) and _size(sizes.get(label, 1)) > 1]
    copies = sum(not term.startswith("".join(batch)) for term in terms) if len(batch) > 1 else 0
    return replace(product, setup=product.setup + copies * gpus.REORDERING, launches=1 + copies)


@formula("Conv2D", "Conv3D", "_FusedConv2D", "_FusedConv3D", "Conv")
def convolution(case: Case) -> NodeWork:
    """2 times outputs times the window's inputs: an implicit product [positions, window] x [window, channels] per group."""
    data, weights, out = case.node.shape(0), case.node.shape(1), case.outputs[0]
    if weights is None or out is None:
        return NodeWork(0.0, 1.0)
    channel, _ = layout(case.node, len(out))
    per_group = _size(weights[-2])
    groups = max(1, _size(data[channel]) // per_group) if data is not None and data[channel] is not None else 1
    columns = _size(weights[-1])
    rows = elements(out) / max(columns, 1)
    gathers = gpus.TILE_SETUP + (gpus.GATHERING if elements(weights[:-2]) > 1 else 0.0)
    if per_group < CHANNELS and elements(weights[:-2]) > 1:
        blocks = max(groups * math.ceil(rows / 64) * math.ceil(columns / groups / 64), 1.0)
        return NodeWork(2.0 * rows * elements(weights), blocks, setup=gathers, fill=gpus.NARROW)
    return _product(rows, elements(weights[:-1]), columns / groups, groups, case.sms, gathers)


@formula("Conv2DBackpropInput", "Conv3DBackpropInputV2")
def convolution_data_gradient(case: Case) -> NodeWork:
    """As much as the convolution: 2 times the gradient's elements times the window of the filter [.., in, out] per output."""
    weights, gradient = case.node.shape(1), case.node.shape(2)
    if weights is None:
        return NodeWork(0.0, 1.0)
    work = 2.0 * elements(gradient) * elements(weights[:-1])
    columns = _size(weights[-2])
    rows = elements(case.outputs[0]) / max(columns, 1)
    chain = elements(weights) / max(columns, 1) / STEP * gpus.TILE_STEP
    blocks = math.ceil(rows / 64) * math.ceil(columns / 64)
    # The library turns the data into its own layout first, and the result back.
    return NodeWork(
        work, blocks, True, setup=gpus.TILE_SETUP + gpus.GATHERING + 2 * gpus.REORDERING, chain=chain, launches=3
    )


@formula("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
def convolution_filter_gradient(case: Case) -> NodeWork:
    """As much as the convolution."""
    gradient, weights = case.node.shape(2), case.outputs[0]
    if weights is None:
        return NodeWork(0.0, 1.0)
    inner = elements(gradient) / max(_size(weights[-1]), 1)
    return _product(elements(weights[:-1]), inner, _size(weights[-1]), 1.0, case.sms)


# 2 times outputs times the window; plain arithmetic. A thread goes through the window one element after the other.
formula("DepthwiseConv2dNative", "_FusedDepthwiseConv2dNative")(
    lambda case: _looping(case.outputs[0], case.node.shape(1), case.sms)
)


@formula("DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter")
def depthwise_gradient(case: Case) -> NodeWork:
    """As much as the convolution."""
    weights = case.outputs[0] if case.node.op.endswith("Filter") else case.node.shape(1)
    return _looping(case.node.shape(2), weights, case.sms)


@formula("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "MaxPoolWithArgmax", "MaxPoolV2", "MaxPoolGrad", "AvgPoolGrad")
def pooling(case: Case) -> NodeWork:
    """One operation per element of each window, of which that of MaxPoolV2, whose size is an input, counts one.

    Raises:
        ValueError: A window has more axes than there are.
    """
    sizes = case.node.attr("ksize", (1,))
    if len(sizes) > MAX_RANK:
        raise ValueError(f"a window of {len(sizes)} axes")
    return _windows(case.node.shape(-1) if case.node.op.endswith("Grad") else case.outputs[0], float(math.prod(sizes)))


def _windows(out: Shape, per_element: float) -> NodeWork:
    count = elements(out)
    return NodeWork(count * per_element, math.ceil(count / WINDOWS))


def _looping(out: Shape, weights: Shape, sms: int) -> NodeWork:
    """One thread per output goes through the window, the first two axes of weights; as many at a time as the multiprocessors hold."""
    window = elements(weights[:2] if weights else None)
    waves = max(1.0, elements(out) / (sms * RESIDENT))
    return replace(_windows(out, 2.0 * window), chain=window * gpus.WINDOW_STEP * waves)


@formula("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm")
def reduction(case: Case) -> NodeWork:
    """One operation per element. Along rows threads exchange what they have; along columns each goes through its own."""
    data, out = case.node.shape(0), case.outputs[0]
    count, left = elements(data), max(elements(out), 1.0)
    flops = count if is_float(str(case.node.attr("T", "float32"))) else 0.0
    each = count / left
    if data and out and len(data) > 1 and data[-1] == out[-1] != 1 and each > 1:
        chain = gpus.COLUMN_STEP * min(each, gpus.COLUMN) + gpus.COLUMN_HALVING * math.log2(
            max(each / gpus.COLUMN, 1.0)
        )
    else:
        chain = float(gpus.halvings(np.asarray(each, np.float64)))
    return NodeWork(flops, count / 2048, chain=chain)


@formula("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd")
def unsorted_segment(case: Case) -> NodeWork:
    """Segments are filled, ids made wide, and the rows added by atomic operations."""
    count = elements(case.node.shape(0))
    return NodeWork(count, count / 1024, setup=2 * gpus.REORDERING, launches=3)


@formula("Bucketize")
def bucketize(case: Case) -> NodeWork:
    """A search per element, of data that are laid side by side first."""
    count = elements(case.outputs[0])
    steps = math.log2(max(len(case.node.attr("boundaries", ())), 1) + 1)
    return NodeWork(count, math.ceil(count / 1024), chain=steps * gpus.WINDOW_STEP, launches=2)


# Two kernels: the border is filled, the inside is copied.
formula("Pad", "PadV2", "MirrorPad")(
    lambda case: NodeWork(0.0, math.ceil(elements(case.outputs[0]) / 1024), launches=2)
)

# Squares and sums a window of channels.
formula("LRN")(lambda case: _windows(case.outputs[0], 2.0 * (2 * int(case.node.attr("depth_radius", 5)) + 1) + 3))


@formula("Softmax", "LogSoftmax")
def softmax(case: Case) -> NodeWork:
    """A maximum, exponentials, their sum and a division along the last axis."""
    out = case.outputs[0]
    count = elements(out)
    along = np.asarray(_size(out[-1]) if out else 1, np.float64)
    return NodeWork(5.0 * count, math.ceil(count / 1024), chain=float(gpus.halvings(along)))


@formula(*ops_with("suppresses boxes"))
def non_max_suppression(case: Case) -> NodeWork:
    """As many rounds as boxes may be selected, each of small kernels over all scores. One, where the shape does not say how many."""
    found = case.outputs[0]
    rounds = max(_size(found[0]) if found else 1, 1)
    scores = elements(case.node.shape(1))
    return NodeWork(
        SUPPRESSION_FLOPS * rounds * scores,
        math.ceil(scores / 1024),
        read=SUPPRESSION_BYTES * rounds * scores,
        launches=SUPPRESSION_KERNELS * rounds,
    )


@formula("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3", "_FusedBatchNormEx")
def batch_norm(case: Case) -> NodeWork:
    """Scale and shift; in training also mean and variance, which need the data a second time."""
    count = elements(case.outputs[0])
    if case.node.attr("is_training", True):
        return NodeWork(7.0 * count, math.ceil(count / 2048), read=2 * case.sizes[0] + sum(case.sizes[1:]))
    return NodeWork(2.0 * count, math.ceil(count / 1024))


@formula(*(f"{op}{ending}" for op in ops_with("sparse segment") for ending in ("", "WithNumSegments")))
def sparse_segment(case: Case) -> NodeWork:
    """Reads one row of the table per index and adds it up."""
    table = case.node.shape(0)
    count = elements(case.node.shape(1)) * elements(table[1:] if table else None)
    rows = case.sizes[0] / max(elements(table), 1) * count
    return NodeWork(count, math.ceil(count / 1024), read=rows + sum(case.sizes[1:]))


@formula("SparseTensorDenseMatMul")
def sparse_dense_product(case: Case) -> NodeWork:
    """2 operations per stored element and column."""
    stored, out = elements(case.node.shape(1)), case.outputs[0]
    count = stored * (_size(out[-1]) if out else 1)
    return NodeWork(2.0 * count, math.ceil(count / THREADS))


# The whole is made (or copied), and parts of it changed.
formula("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin")(
    lambda case: NodeWork(elements(case.node.shape(2)), math.ceil(elements(case.outputs[0]) / 1024))
)
formula("ScatterNd")(lambda case: NodeWork(elements(case.node.shape(1)), math.ceil(elements(case.outputs[0]) / 1024)))


@formula(*ops_with("rows in place"))
def scatter_in_place(case: Case) -> NodeWork:
    """Reads and writes only the rows that the indices name: as much again as the updates, twice."""
    node = case.node
    sizes = [size for index, size in enumerate(case.sizes) if index or node.op.startswith("Resource")]
    update = max(sizes, default=0.0)
    count = update / max(itemsize(str(node.attr("T", node.attr("dtype", "float32")))), 1)
    return NodeWork(2.0 * count, math.ceil(count / 1024), read=sum(sizes) + 2 * update)


@formula("LSTMBlockCell", "BlockLSTM", "BlockLSTMV2", "GRUBlockCell")
def cell(case: Case) -> NodeWork:
    """The gates as one product [batch, in + cells] x [in + cells, gates * cells], per step."""
    node = case.node
    first = 0 if node.op in ops_with("single cell") else 1
    x, state = node.shape(first) or (1, 1), node.shape(first + 1) or (1, 1)
    steps = _size(x[0]) if len(x) == 3 else 1
    cells, batch = _size(state[-1]), _size(x[-2])
    gates = 3 if node.op == "GRUBlockCell" else 4
    one = _product(batch, _size(x[-1]) + cells, gates * cells, 1.0, case.sms)
    return NodeWork(
        steps * (one.flops + 20.0 * batch * cells), one.blocks, one.product, setup=one.setup, chain=steps * one.chain
    )


@formula("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3")
def cudnn(case: Case) -> NodeWork:
    """Two operations per step, row and parameter; the steps follow each other."""
    x, hidden = case.node.shape(0) or (1, 1, 1), case.node.shape(1) or (1, 1, 1)
    steps, batch, units = _size(x[0]), _size(x[1]), _size(hidden[2])
    parameters = elements(case.node.shape(3))
    blocks = math.ceil(batch / 64) * math.ceil(4 * units / 64)
    chain = float(steps * units * _size(hidden[0])) / STEP * gpus.TILE_STEP
    return NodeWork(2.0 * steps * batch * parameters, blocks, True, setup=gpus.TILE_SETUP, chain=chain)


def work(case: Case) -> NodeWork | None:
    """The work of a node that has a formula; None where the node contradicts it."""
    try:
        found = FORMULAS[case.node.op](case)
    except (ValueError, IndexError, TypeError, KeyError, ArithmeticError):
        return None
    # A damaged attribute, such as a window of -1 elements, is no statement either.
    counts = (found.flops, found.blocks, found.chain, 0.0 if found.read is None else found.read)
    return found if all(0 <= count < math.inf for count in counts) else None
