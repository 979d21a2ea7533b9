"""Gathers, scatters, segments, sparse tensors, lookup tables, and ops whose output length depends on values."""

from __future__ import annotations

from collections.abc import Iterable

from msplit.opset.traits import ops_with
from msplit.shapes.array import sized
from msplit.shapes.registry import Node, Outputs, Shape, axis_of, merge, shape_from, shape_function

MAX_INDICES = 1 << 16
"""Most indices among which the largest is looked for: one constant may go into a node many times."""


def table_shape(node: Node, index: int = 0) -> Shape:
    """Shape of a table that is a tensor or a handle."""
    handle = node.handle(index)
    return handle.shape if handle is not None else node.shape(index)


@shape_function("Gather", "ResourceGather", "KvResourceGather", "KvResourceGatherV1")
def gather(node: Node) -> Outputs:
    """Rows of a table."""
    table = table_shape(node)
    if node.op == "Gather":
        table = node.shape(0)
    elif node.handle(0) is None:
        table = None
    indices = node.shape(1)
    batch = int(node.attr("batch_dims", 0))
    return (None if table is None or indices is None else indices + table[batch + 1 :],)


@shape_function("GatherV2")
def gather_v2(node: Node) -> Outputs:
    """Entries along an axis, with leading batch axes."""
    table, indices, axis = node.shape(0), node.shape(1), node.scalar(2)
    if table is None or indices is None:
        return (None,)
    if axis is None:
        return ((None,) * (len(table) + len(indices) - 1),)
    place = axis_of(axis, len(table))
    batch = int(node.attr("batch_dims", 0))
    batch = batch + len(indices) if batch < 0 else batch
    return (table[:place] + indices[batch:] + table[place + 1 :],)


@shape_function("GatherNd", "ResourceGatherNd")
def gather_nd(node: Node) -> Outputs:
    """Entries named by the last axis of the indices."""
    table, indices = table_shape(node), node.shape(1)
    if table is None or not indices or indices[-1] is None:
        return (None,)
    return (indices[:-1] + table[indices[-1] :],)


@shape_function("ScatterNd")
def scatter_nd(node: Node) -> Outputs:
    """A shape given as a value."""
    return (sized(node, 2),)


def _rows(count: int | None, data: Shape) -> Shape:
    return None if data is None else (count, *data[1:])


@shape_function("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd")
def segment(node: Node) -> Outputs:
    """As many rows as the last id says, which is a value."""
    ids = node.ints(1)
    count = None if not ids or ids[-1] is None else ids[-1] + 1
    return (_rows(count, node.shape(0)),)


@shape_function(
    "SegmentSumV2", "SegmentMaxV2", "SegmentMinV2", "SegmentProdV2",
    "UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd",
)  # fmt: skip
def counted_segment(node: Node) -> Outputs:
    """The number of segments is an input; ids cover the leading axes of the data."""
    data, ids = node.shape(0), node.shape(1)
    if data is None or ids is None:
        return (None,)
    return ((node.scalar(2), *data[len(ids) :]),)


@shape_function("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN")
def sparse_segment(node: Node) -> Outputs:
    """Rows of a table, reduced by sorted ids: as many as the last id says."""
    ids = node.ints(2)
    count = None if not ids or ids[-1] is None else ids[-1] + 1
    return (_rows(count, node.shape(0)),)


@shape_function(
    "SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments", "SparseSegmentSqrtNWithNumSegments"
)
def counted_sparse_segment(node: Node) -> Outputs:
    """Rows of a table, reduced by sorted ids into a given number of segments."""
    return (_rows(node.scalar(3), node.shape(0)),)


@shape_function("SparseSegmentSumGrad", "SparseSegmentMeanGrad", "SparseSegmentSqrtNGrad")
def sparse_segment_gradient(node: Node) -> Outputs:
    """As many rows as the table has, which is an input."""
    return (_rows(node.scalar(3), node.shape(0)),)


@shape_function("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
def unique(node: Node) -> Outputs:
    """As many values as differ, an index per input, and their counts."""
    shape = node.shape(0)
    single = node.op in ops_with("unique") or (shape is not None and len(shape) == 1)
    values: Shape = (None,) if single else None if shape is None else (None,) * len(shape)
    index: Shape = shape if single else (None,)
    return (values, index, (None,)) if "Counts" in node.op else (values, index)


@shape_function("Where")
def where(node: Node) -> Outputs:
    """One row of coordinates per true element."""
    shape = node.shape(0)
    return ((None, None if shape is None else len(shape)),)


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
    largest: int | None = -1
    if sum(value.size for value in node.values[:half] if value is not None) > MAX_INDICES:
        largest = None
    for place in range(half):
        index, data = node.shape(place), node.shape(half + place)
        if index is not None and data is not None:
            rest = merge(rest, data[len(index) :])
        values = None if largest is None else node.ints(place)
        if values is None or largest is None:
            largest = None
        else:
            for value in values:
                largest = None if value is None or largest is None else max(largest, value)
    return (None if rest is None else (None if largest is None else largest + 1, *rest),)


@shape_function("SparseToDense")
def sparse_to_dense(node: Node) -> Outputs:
    """A shape given as a value."""
    return (sized(node, 1),)


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


@shape_function("SparseSlice", "SparseConcat", "SparseReorder", "SparseAdd", "SparseSplit")
def sparse_result(node: Node) -> Outputs:
    """A sparse tensor (indices, values, shape) of a length that depends on values."""
    indices = node.shape(1 if node.op == "SparseSplit" else 0)
    rank = indices[1] if indices and len(indices) > 1 else None
    if node.op == "SparseReorder":
        return (node.shape(0), node.shape(1))
    if node.op == "SparseSplit":
        count = node.count("num_split")
        return ((None, rank),) * count + ((None,),) * count + ((rank,),) * count
    return ((None, rank), (None,), (rank,))


@shape_function("SparseReduceSum", "SparseReduceMax")
def sparse_reduce(node: Node) -> Outputs:
    """A dense tensor: the sparse shape without the reduced axes."""
    from msplit.shapes.reduction import reduced

    return (reduced(shape_from(node.ints(2)), node.ints(3), bool(node.attr("keep_dims", False))),)


@shape_function("SparseSoftmax", "SparseDenseCwiseMul", "SparseDenseCwiseAdd", "SparseDenseCwiseDiv")
def sparse_elementwise(node: Node) -> Outputs:
    """One value per stored element."""
    return (node.shape(1),)


@shape_function("LookupTableFind", "LookupTableFindV2")
def table_find(node: Node) -> Outputs:
    """One value per key; values that are vectors add axes that the graph does not tell, so scalars are taken."""
    return (node.shape(1),)


@shape_function("LookupTableSize", "LookupTableSizeV2")
def scalar(node: Node) -> Outputs:
    """A scalar."""
    return ((),)


@shape_function("StringSplit", "StringSplitV2")
def string_split(node: Node) -> Outputs:
    """A sparse tensor of words."""
    return ((None, 2), (None,), (2,))


@shape_function("RaggedTensorToTensor")
def ragged_to_dense(node: Node) -> Outputs:
    """The shape input, where it is known."""
    return (sized(node, 0),)


@shape_function("RaggedRange")
def ragged_range(node: Node) -> Outputs:
    """Row splits and values."""
    return ((None,), (None,))


@shape_function("Bincount", "DenseBincount")
def bincount(node: Node) -> Outputs:
    """One count per bin, per row where the input is a matrix."""
    shape, size = node.shape(0), node.scalar(1)
    if node.op == "DenseBincount" and shape is not None and len(shape) == 2:
        return ((shape[0], size),)
    return ((size,),)


@shape_function("LowerBound", "UpperBound")
def searched(node: Node) -> Outputs:
    """One position per value."""
    return (node.shape(1),)


@shape_function("UnravelIndex")
def unravel_index(node: Node) -> Outputs:
    """One row per axis, one column per index."""
    indices, dims = node.shape(0), node.shape(1)
    if indices is None or dims is None:
        return (None,)
    return ((*dims, *indices),)


@shape_function("HistogramFixedWidth")
def histogram(node: Node) -> Outputs:
    """One count per bin."""
    return ((node.scalar(2),),)


def _dense(batch: tuple[int | None, ...], shapes: Iterable[Shape]) -> list[Shape]:
    return [None if shape is None else batch + shape for shape in shapes]


@shape_function("ParseExample", "ParseExampleV2", "ParseSingleExample")
def parse_example(node: Node) -> Outputs:
    """Sparse indices, values and shapes, then dense tensors of the shapes in the attributes, one row per example."""
    serialized = node.shape(0)
    single = node.op == "ParseSingleExample" or serialized == ()
    batch = () if single else serialized or (None,)
    sparse = node.count("num_sparse") or node.count("Nsparse")
    rank = 1 if single else 2
    dense = _dense(batch, node.attr("dense_shapes", ()))
    ragged = len(node.attr("ragged_value_types", ()) or ()), len(node.attr("ragged_split_types", ()) or ())
    return (
        *(((None, rank),) * sparse),
        *(((None,),) * sparse),
        *(((rank,),) * sparse),
        *dense,
        *(((None,),) * (ragged[0] + ragged[1])),
    )


@shape_function("DecodeRaw", "DecodePaddedRaw")
def decode_raw(node: Node) -> Outputs:
    """A last axis of a length that depends on values."""
    shape = node.shape(0)
    return (None if shape is None else (*shape, None),)


@shape_function("DecodeJpeg", "DecodePng", "DecodeImage", "DecodeBmp", "DecodeGif")
def decode_image(node: Node) -> Outputs:
    """Height and width depend on the file."""
    channels = int(node.attr("channels", 0)) or None
    return (((None,) * 4 if node.op == "DecodeGif" else (None, None, channels)) if node.op != "DecodeImage" else None,)
