"""Ops for which one expression says the shapes of all outputs."""

from __future__ import annotations

from functools import reduce

from msplit.opset.traits import ops_with
from msplit.shapes.registry import Node, Outputs, broadcast, join, merge, product, rank, shape_function


@shape_function(
    "NoOp", "Assert", "ControlTrigger", "Abort", "PrintV2", "SaveV2", "Save", "MergeV2Checkpoints", "InitializeTable",
    "InitializeTableV2", "InitializeTableFromTextFile", "InitializeTableFromTextFileV2", "LookupTableImport", "LookupTableImportV2",
    "LookupTableInsert", "LookupTableInsertV2", "MakeIterator", "WriteScalarSummary", "WriteSummary", "CreateSummaryFileWriter",
    "FlushSummaryWriter", "CloseSummaryWriter", "QueueEnqueueV2", "QueueEnqueueManyV2", "QueueCloseV2", "AssignVariableOp",
    "AssignAddVariableOp", "AssignSubVariableOp", "DestroyResourceOp", "_Send", "TensorArrayCloseV3",
    "ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterMul", "ResourceScatterDiv", "ResourceScatterMin",
    "ResourceScatterMax", "ResourceScatterUpdate", "ResourceScatterNdUpdate", "ResourceScatterNdAdd", "ResourceScatterNdSub",
    "ResourceStridedSliceAssign", "BoostedTreesCreateEnsemble", "ResourceApplyGradientDescent", "ResourceApplyMomentum",
    "ResourceApplyKerasMomentum", "ResourceApplyAdam", "ResourceApplyAdagrad", "ResourceApplyAdagradV2", "ResourceApplyAdadelta",
    "ResourceApplyRMSProp", "ResourceApplyFtrl", "ResourceApplyFtrlV2", "ResourceApplyAdamWithAmsgrad", "ResourceApplyAdaMax",
    "ResourceApplyCenteredRMSProp", "ResourceSparseApplyAdagrad", "ResourceSparseApplyAdagradV2", "ResourceSparseApplyMomentum",
    "ResourceSparseApplyKerasMomentum", "ResourceSparseApplyFtrl", "ResourceSparseApplyFtrlV2", "ResourceSparseApplyRMSProp",
    "ResourceSparseApplyAdadelta", "ResourceApplyAdagradDA", "ResourceApplyAddSign", "ResourceApplyPowerSign",
    "ResourceApplyProximalAdagrad", "ResourceApplyProximalGradientDescent", "ResourceSparseApplyAdagradDA",
    "ResourceSparseApplyCenteredRMSProp", "ResourceSparseApplyProximalAdagrad", "ResourceSparseApplyProximalGradientDescent",
    "ResourceScatterNdMax", "ResourceScatterNdMin", "RngSkip",
)  # fmt: skip
def nothing(node: Node) -> Outputs:
    """No output."""
    return ()


@shape_function(
    "VarHandleOp", "KvVarHandleOp", "HashTable", "HashTableV2", "MutableHashTable", "MutableHashTableV2", "MutableDenseHashTableV2",
    "AnonymousHashTable", "Iterator", "IteratorV2", "OneShotIterator", "TensorDataset", "FIFOQueueV2", "StatelessRandomGetAlg",
    "VarIsInitializedOp", "TensorListReserve", "EmptyTensorList", "TensorListFromTensor", "TensorListSetItem",
    "TensorListPushBack", "TensorListResize", "TensorListLength", "TensorListScatter", "TensorListScatterV2",
    "TensorListScatterIntoExistingList", "TensorListSplit", "TensorArraySizeV3", "TensorArrayWriteV3", "TensorArrayScatterV3",
    "TensorArraySplitV3", "ReadFile", "ShardedFilename", "Timestamp", "GlobalIterId", "AnonymousIteratorV3", "StackV2", "Size",
    "Rank", "LookupTableSize", "LookupTableSizeV2", "L2Loss",
)  # fmt: skip
def scalar(node: Node) -> Outputs:
    """A scalar: a handle, a list as a variant, a flow, or a plain number."""
    return ((),)


@shape_function(
    "ScatterAdd", "ScatterSub", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax", "ScatterUpdate", "ScatterNdUpdate",
    "ScatterNdAdd", "ScatterNdSub", "ApplyGradientDescent", "ApplyMomentum", "ApplyAdam", "ApplyAdagrad", "ApplyAdagradV2",
    "ApplyAdadelta", "ApplyRMSProp", "ApplyFtrl", "ApplyFtrlV2", "ApplyProximalAdagrad", "ApplyProximalGradientDescent",
    "ApplyAdaMax", "ApplyCenteredRMSProp", "SparseApplyAdagrad", "SparseApplyAdagradV2", "SparseApplyMomentum",
    "SparseApplyFtrl", "SparseApplyFtrlV2", "SparseApplyRMSProp", "SparseApplyAdadelta", "CountUpTo", "StridedSliceAssign",
    "ApplyAdagradDA", "ApplyAddSign", "ApplyPowerSign", "ScatterNdMax", "ScatterNdMin", "SparseApplyAdagradDA",
    "SparseApplyCenteredRMSProp", "SparseApplyProximalAdagrad", "SparseApplyProximalGradientDescent",
)  # fmt: skip
def update(node: Node) -> Outputs:
    """The variable that is updated."""
    return (node.shape(0),)


@shape_function(*ops_with("operands agree"), "Cross", "Assign", "AssignAdd", "AssignSub", "DestroyTemporaryVariable")
def agreeing(node: Node) -> Outputs:
    """Both operands have the same shape."""
    return (merge(node.shape(0), node.shape(1)),)


@shape_function(*ops_with("broadcasts"))
def binary(node: Node) -> Outputs:
    """Broadcasts two operands."""
    return (broadcast(node.shape(0), node.shape(1)),)


@shape_function(
    "Fill", "Empty", "StridedSliceGrad", "RaggedTensorToTensor", "RandomUniform", "RandomStandardNormal", "TruncatedNormal",
    "RandomUniformInt", "ParameterizedTruncatedNormal", "StatelessRandomUniform", "StatelessRandomNormal",
    "StatelessTruncatedNormal", "StatelessRandomUniformInt", "StatelessRandomUniformFullInt", "StatelessRandomUniformV2",
    "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2",
    "StatelessParameterizedTruncatedNormal",
)  # fmt: skip
def sized(node: Node) -> Outputs:
    """The shape is the value of the first input."""
    return (node.sizes(0),)


# The shape is a value; for random numbers behind the generator and its algorithm.
shape_function("SparseToDense")(lambda node: (node.sizes(1),))
shape_function(
    "ScatterNd", "StatefulUniform", "StatefulStandardNormalV2", "StatefulUniformInt", "StatefulUniformFullInt",
    "StatefulTruncatedNormal",
)(lambda node: (node.sizes(2),))  # fmt: skip
shape_function("LinSpace", "HistogramFixedWidth")(lambda node: ((node.scalar(2),),))

# It is an attribute. What is fed need not have the shape of the default.
shape_function(
    "Placeholder", "PlaceholderV2", "PlaceholderWithDefault", "_Arg", "Variable", "VariableV2", "TemporaryVariable", "ParallelConcat",
)(lambda node: (node.attr("shape"),))  # fmt: skip
shape_function("Const", "HostConst", "_HostConst")(lambda node: (node.attr("value").shape,))
shape_function("EnsureShape")(lambda node: (merge(node.shape(0), node.attr("shape")),))

# It is that of inputs. Values of a hash table that are vectors add axes that the graph does not tell, so scalars are taken.
shape_function(
    "SparseSoftmax", "SparseDenseCwiseMul", "SparseDenseCwiseAdd", "SparseDenseCwiseDiv", "LookupTableFind", "LookupTableFindV2",
    "LowerBound", "UpperBound", "InTopK", "InTopKV2", "ResizeBilinearGrad", "ResizeBicubicGrad",
)(lambda node: (node.shape(1),))  # fmt: skip
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
shape_function("StringSplit", "StringSplitV2")(lambda node: ((None, 2), (None,), (2,)))
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
