"""Shapes of ops that one expression says, and of gathers, sparse tensors and reductions.

Ops for which one expression says the shapes of all outputs.

Elementwise ops that do not simply broadcast, and reductions over axes.

Gathers, scatters, segments, sparse tensors, and ops whose output length depends on values.
"""

from __future__ import annotations

import math
from functools import reduce

from msplit.opset.traits import ops_with
from msplit.shapes.registry import (
    Node,
    Outputs,
    Shape,
    axis_of,
    broadcast,
    join,
    merge,
    product,
    rank,
    shape_from,
    shape_function,
    sure,
    unsized,
)

shape_function(*ops_with("gives what it updates"))(lambda node: (node.shape(0),))
shape_function(*ops_with("scalar result"))(lambda node: ((),))
shape_function(*ops_with("sized by its first input"))(lambda node: (node.sizes(0),))
shape_function(*ops_with("shape of its second input"))(lambda node: (node.shape(1),))
shape_function(*ops_with("shape is an attribute"))(lambda node: (node.attr("shape"),))


@shape_function(*ops_with("operands agree"), "Cross", "Assign", "AssignAdd", "AssignSub", "DestroyTemporaryVariable")
def agreeing(node: Node) -> Outputs:
    """Both operands have the same shape."""
    return (merge(node.shape(0), node.shape(1)),)


shape_function(*ops_with("broadcasts"))(lambda node: (broadcast(node.shape(0), node.shape(1)),))


# The shape is a value; for random numbers behind the generator and its algorithm.
shape_function("SparseToDense")(lambda node: (node.sizes(1),))
shape_function(*ops_with("sized by its third input"))(lambda node: (node.sizes(2),))
shape_function("LinSpace", "HistogramFixedWidth")(lambda node: ((node.scalar(2),),))

# It is an attribute.
shape_function("Const", "HostConst", "_HostConst")(lambda node: (node.attr("value").shape,))
shape_function("EnsureShape")(lambda node: (merge(node.shape(0), node.attr("shape")),))

# It is that of inputs.
shape_function("TridiagonalMatMul")(lambda node: (node.shape(3),))
shape_function("SparseReorder", "XlaKeyValueSort")(lambda node: (node.shape(0), node.shape(1)))
shape_function("IdentityN", "XlaOptimizationBarrier")(lambda node: tuple(node.inputs))
shape_function("ConcatOffset")(lambda node: tuple(node.inputs[1:]))
shape_function("Switch", "RefSwitch")(lambda node: (node.shape(0),) * 2)
shape_function("_SwitchN")(lambda node: (node.shape(0),) * node.count("num_outs", node.outputs))

# It is what inputs have in common, or say together.
shape_function("Merge", "RefMerge")(lambda node: (reduce(join, node.inputs), ()))
shape_function("RefSelect")(lambda node: (reduce(join, node.inputs[1:]),))
shape_function("AddN", "AccumulateNV2")(lambda node: (reduce(merge, node.inputs, None),))
shape_function("Betainc", "SelectV2")(lambda node: (reduce(broadcast, [(), *node.inputs]),))

# It follows from ranks, or from what a handle refers to.
shape_function("Shape", "ShapeN")(lambda node: tuple((rank(shape),) for shape in node.inputs))
shape_function("Where")(lambda node: ((None, rank(node.shape(0))),))
shape_function("VariableShape", "TensorListElementShape")(lambda node: ((rank(node.element()),),))
shape_function("ReadVariableOp", "_ReadVariablesOp")(
    lambda node: tuple(None if handle is None else handle.shape for handle in node.handles) or (None,)
)
shape_function("TensorArrayReadV3")(lambda node: (node.element(),))

# It follows from the shape of one input or two.
shape_function("MatrixDeterminant", "BatchMatrixDeterminant")(lambda node: (node.ranked(0)[:-2],))
shape_function("NthElement")(lambda node: (node.ranked(0)[:-1],))
shape_function("Diag")(lambda node: (node.ranked(0) * 2,))
shape_function("DecodeRaw", "DecodePaddedRaw")(lambda node: ((*node.ranked(0), None),))
shape_function("UnravelIndex")(lambda node: ((*node.ranked(1), *node.ranked(0)),))

# It is always the same, or depends on values.
shape_function("TensorArrayV3", "TensorArrayGradV3")(lambda node: ((2,), ()))
shape_function("StatelessRandomGetKeyCounter")(lambda node: ((1,), (2,)))
shape_function("StatelessRandomGetKeyCounterAlg")(lambda node: ((1,), (2,), ()))
shape_function("RngReadAndSkip")(lambda node: ((3,),))
shape_function("StringSplit", "StringSplitV2", "SparseCross")(lambda node: ((None, 2), (None,), (2,)))
shape_function("StringNGrams", "UnicodeDecode")(lambda node: ((None,), (None,)))
shape_function("UnicodeDecodeWithOffsets")(lambda node: ((None,),) * 3)
shape_function("DecodeImage")(lambda node: (None,))
shape_function("DecodeGif")(lambda node: ((None,) * 4,))
shape_function("DecodeJpeg", "DecodePng", "DecodeBmp")(
    lambda node: ((None, None, int(node.attr("channels", 0)) or None),)
)
shape_function("ComputeAccidentalHits")(lambda node: ((None,),) * 3)
shape_function("ListDiff", "RaggedRange")(lambda node: ((None,), (None,)))
shape_function("NonMaxSuppression", "NonMaxSuppressionV2", "NonMaxSuppressionV3", "NonMaxSuppressionWithOverlaps")(
    lambda node: ((None,),)
)


@shape_function("RaggedTensorToSparse")
def ragged_to_sparse(node: Node) -> Outputs:
    """Places, values and the dense shape: as many values as the ragged rows have, the lengths of which are inputs in front of these."""
    splits = node.count("RAGGED_RANK", 1)
    values = node.shape(splits)
    if values is None:
        return (None, None), (None,), (None,)
    return (product(values), splits + len(values)), (product(values),), (splits + len(values),)


@shape_function("Select")
def select(node: Node) -> Outputs:
    """The branches have the same shape; the condition has it too, or is a scalar, or a vector that chooses rows."""
    shape, condition = merge(node.shape(1), node.shape(2)), node.shape(0)
    if shape is None:
        return (condition if condition is not None and len(condition) > 1 else None,)
    if condition:
        rows = merge(shape[:1], condition[:1]) or ()
        return (merge(shape, condition) if len(condition) == len(shape) else (*rows, *shape[1:]),)
    return (shape,)


@shape_function("StringJoin")
def string_join(node: Node) -> Outputs:
    """Scalars join with every element of the others."""
    return (reduce(merge, [shape for shape in node.inputs if shape != ()], None),) if any(node.inputs) else ((),)


def reduced(shape: Shape, axes: list[int | None] | None, keep: bool) -> Shape:
    """Shape after a reduction; unknown axes leave the rank known only where dimensions are kept."""
    if shape is None:
        return None
    if axes is None or None in axes:
        return unsized(len(shape)) if keep else None
    gone = {axis_of(axis, len(shape)) for axis in axes if axis is not None}
    if keep:
        return tuple(1 if axis in gone else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in gone)


@shape_function("Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ReduceJoin")
def reduction(node: Node) -> Outputs:
    """Reduces over the axes of the second input. Where only their number is known, so is the rank."""
    shape, axes, vector = node.ranked(0), node.ints(1), node.shape(1)
    keep = bool(node.attr("keep_dims", False))
    if axes is None and vector is not None and not keep:
        count = None if None in vector else math.prod(size or 0 for size in vector)  # old graphs have axes of any rank
        if count is not None and count <= len(shape):
            return (unsized(len(shape) - count),)
    return (reduced(shape, axes, keep),)


@shape_function("ArgMax", "ArgMin")
def arg_max(node: Node) -> Outputs:
    """Drops one axis."""
    shape, axis = node.ranked(0), node.scalar(1)
    return (unsized(len(shape) - 1) if axis is None else reduced(shape, [axis], False),)


@shape_function("ApproxTopK")
def approx_top_k(node: Node) -> Outputs:
    """k along one axis, and their positions; how many there are before they are aggregated is up to the device."""
    shape = node.ranked(0)
    axis = axis_of(int(node.attr("reduction_dimension", -1)), len(shape))
    count = int(node.attr("k")) if node.attr("aggregate_to_topk", True) else None
    result = (*shape[:axis], count, *shape[axis + 1 :])
    return (result, result)


MAX_INDICES = 1 << 16
"""Most indices among which the largest is looked for: one constant may go into a node many times."""


@shape_function("Gather", "ResourceGather", "KvResourceGather", "KvResourceGatherV1")
def gather(node: Node) -> Outputs:
    """Rows of a table."""
    table, indices = node.shape(0) if node.op == "Gather" else node.element(), node.ranked(1)
    return (None if table is None else indices + table[int(node.attr("batch_dims", 0)) + 1 :],)


@shape_function("GatherV2")
def gather_v2(node: Node) -> Outputs:
    """Entries along an axis, with leading batch axes."""
    table, indices, axis = node.ranked(0), node.ranked(1), node.scalar(2)
    if axis is None:
        return (unsized(len(table) + len(indices) - 1),)
    place = axis_of(axis, len(table))
    batch = int(node.attr("batch_dims", 0))
    batch = batch + len(indices) if batch < 0 else batch
    return (table[:place] + indices[batch:] + table[place + 1 :],)


@shape_function("GatherNd", "ResourceGatherNd")
def gather_nd(node: Node) -> Outputs:
    """Entries named by the last axis of the indices."""
    table, indices = sure(node.shape(0) if node.handle() is None else node.element()), node.ranked(1)
    return (indices[:-1] + table[sure(indices[-1]) :],)


@shape_function(*ops_with("as many rows as its last id"))
def segment(node: Node) -> Outputs:
    """As many rows as the last id says, which is a value."""
    ids = node.ints(2 if node.op.startswith("Sparse") else 1)
    count = None if not ids or ids[-1] is None else ids[-1] + 1
    return ((count, *node.ranked(0)[1:]),)


# The number of rows, of segments or for the gradient of the table, is an input.
shape_function(*ops_with("counts its rows"))(lambda node: ((node.scalar(3), *node.ranked(0)[1:]),))


@shape_function("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2")
def unique_rows(node: Node) -> Outputs:
    """The gradient of the rows that are used, and which these are."""
    return ((None, *node.ranked(0)[1:]), (None,))


@shape_function(*ops_with("counts its segments"))
def counted_segment(node: Node) -> Outputs:
    """The number of segments is an input; ids cover the leading axes of the data."""
    return ((node.scalar(2), *node.ranked(0)[len(node.ranked(1)) :]),)


@shape_function("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
def unique(node: Node) -> Outputs:
    """As many values as differ, an index per input, and their counts."""
    shape = node.shape(0)
    single = node.op in ops_with("unique") or rank(shape) == 1
    values, index = ((None,), shape) if single else (unsized(rank(shape)), (None,))
    return (values, index, (None,)) if "Counts" in node.op else (values, index)


@shape_function("DynamicPartition")
def dynamic_partition(node: Node) -> Outputs:
    """As many rows in each part as the partition says."""
    data, parts = node.shape(0), node.shape(1)
    part = None if data is None or parts is None else (None, *data[len(parts) :])
    return (part,) * node.count("num_partitions")


@shape_function("DynamicStitch", "ParallelDynamicStitch")
def dynamic_stitch(node: Node) -> Outputs:
    """As many rows as the largest index says, known where all indices are values."""
    half = len(node.inputs) // 2
    rest: Shape = None
    for index, data in zip(node.inputs[:half], node.inputs[half:], strict=False):
        if index is not None and data is not None:
            rest = merge(rest, data[len(index) :])
    few = sum(value.size for value in node.values[:half] if value is not None) <= MAX_INDICES
    indices: list[int | None] = []
    for place in range(half):
        values = node.ints(place) if few else None
        indices += [None] if values is None else values
    found = [index for index in indices if index is not None]
    return ((max([-1, *found]) + 1 if len(found) == len(indices) else None, *sure(rest)),)


@shape_function("SparseReshape")
def sparse_reshape(node: Node) -> Outputs:
    """Coordinates of as many elements in the new rank, and the new shape."""
    indices, target = node.shape(0), node.shape(2)
    return ((indices[0] if indices else None, target[0] if target else None), target)


@shape_function("SparseFillEmptyRows")
def sparse_fill_empty_rows(node: Node) -> Outputs:
    """At least one element per row: how many is a value."""
    indices, elements = node.shape(0), node.shape(1)
    sizes = node.ints(2)
    rows = sizes[0] if sizes else None
    return ((None, indices[1] if indices else None), (None,), (rows,), (elements[0] if elements else None,))


# A gradient per element that was given, and that of the default.
shape_function("SparseFillEmptyRowsGrad")(lambda node: (node.shape(0), ()))


@shape_function("SparseSlice", "SparseConcat", "SparseAdd", "SparseSplit")
def sparse_result(node: Node) -> Outputs:
    """Sparse tensors (indices, values, shape) of lengths that depend on values."""
    indices = node.shape(1 if node.op == "SparseSplit" else 0)
    axes = indices[1] if indices and len(indices) > 1 else None
    count = node.count("num_split") if node.op == "SparseSplit" else 1
    return ((None, axes),) * count + ((None,),) * count + ((axes,),) * count


@shape_function("SparseReduceSum", "SparseReduceMax")
def sparse_reduce(node: Node) -> Outputs:
    """A dense tensor: the sparse shape without the reduced axes."""
    return (reduced(shape_from(node.ints(2)), node.ints(3), bool(node.attr("keep_dims", False))),)


@shape_function("Bincount", "DenseBincount")
def bincount(node: Node) -> Outputs:
    """One count per bin, per row where the input is a matrix."""
    shape, size = node.shape(0), node.scalar(1)
    if node.op == "DenseBincount" and shape is not None and len(shape) == 2:
        return ((shape[0], size),)
    return ((size,),)


@shape_function("ParseExample", "ParseExampleV2", "ParseSingleExample")
def parse_example(node: Node) -> Outputs:
    """Sparse indices, values and shapes, then dense tensors of the shapes in the attributes, one row per example."""
    serialized = node.shape(0)
    single = node.op == "ParseSingleExample" or serialized == ()
    batch = () if single else serialized or (None,)
    axes = 1 if single else 2
    sparse = node.count("num_sparse") or node.count("Nsparse")
    dense = [None if shape is None else batch + shape for shape in node.attr("dense_shapes", ())]
    ragged = len(node.attr("ragged_value_types", ()) or ()) + len(node.attr("ragged_split_types", ()) or ())
    return (*[(None, axes)] * sparse, *[(None,)] * sparse, *[(axes,)] * sparse, *dense, *[(None,)] * ragged)
