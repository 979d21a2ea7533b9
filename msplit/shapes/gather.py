"""Gathers, scatters, segments, sparse tensors, and ops whose output length depends on values."""

from __future__ import annotations

from msplit.opset.traits import ops_with
from msplit.shapes.elementwise import reduced
from msplit.shapes.registry import Node, Outputs, Shape, axis_of, merge, rank, shape_from, shape_function, unsized

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
    table, indices = node.shape(0) if node.handle() is None else node.element(), node.shape(1)
    if table is None or not indices or indices[-1] is None:
        return (None,)
    return (indices[:-1] + table[indices[-1] :],)


@shape_function(
    "SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd",
    "SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN",
)  # fmt: skip
def segment(node: Node) -> Outputs:
    """As many rows as the last id says, which is a value."""
    ids = node.ints(2 if node.op.startswith("Sparse") else 1)
    count = None if not ids or ids[-1] is None else ids[-1] + 1
    return ((count, *node.ranked(0)[1:]),)


@shape_function(
    "SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments",
    "SparseSegmentSumGrad", "SparseSegmentMeanGrad", "SparseSegmentSqrtNGrad",
)  # fmt: skip
def counted_sparse_segment(node: Node) -> Outputs:
    """The number of rows, of segments or for the gradient of the table, is an input."""
    return ((node.scalar(3), *node.ranked(0)[1:]),)


@shape_function("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2")
def unique_rows(node: Node) -> Outputs:
    """The gradient of the rows that are used, and which these are."""
    return ((None, *node.ranked(0)[1:]), (None,))


@shape_function(
    "SegmentSumV2", "SegmentMaxV2", "SegmentMinV2", "SegmentProdV2",
    "UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd",
)  # fmt: skip
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
    if rest is None:
        return (None,)
    few = sum(value.size for value in node.values[:half] if value is not None) <= MAX_INDICES
    indices: list[int | None] = []
    for place in range(half):
        values = node.ints(place) if few else None
        indices += [None] if values is None else values
    found = [index for index in indices if index is not None]
    return ((max([-1, *found]) + 1 if len(found) == len(indices) else None, *rest),)


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


@shape_function("SparseFillEmptyRowsGrad")
def sparse_fill_empty_rows_grad(node: Node) -> Outputs:
    """A gradient per element that was given, and that of the default."""
    return (node.shape(0), ())


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
