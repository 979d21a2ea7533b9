"""What kind of kernel an op is. Ops that need a formula of their own are in `formulas.py`; what is in neither counts as elementwise."""

from __future__ import annotations

FREE = frozenset({
    "Const", "HostConst", "Placeholder", "PlaceholderV2", "PlaceholderWithDefault", "_Arg", "_Retval", "_DeviceArg",
    "_DeviceRetval", "NoOp", "ControlTrigger", "Assert", "Abort", "Identity", "IdentityN", "RefIdentity", "Snapshot",
    "StopGradient", "PreventGradient", "EnsureShape", "XlaOptimizationBarrier", "GuaranteeConst", "DebugGradientIdentity",
    "DebugGradientRefIdentity", "Reshape", "ExpandDims", "Squeeze", "Bitcast", "Shape", "ShapeN", "Size", "Rank",
    "VariableShape", "BroadcastArgs", "BroadcastGradientArgs", "ConcatOffset", "VarHandleOp", "ReadVariableOp",
    "KvVarHandleOp", "TFRA>CuckooHashTableOfTensors", "TFRA>HkvHashTableOfTensors",
    "Variable", "VariableV2", "VarIsInitializedOp", "IsVariableInitialized", "Enter", "RefEnter", "Exit", "RefExit",
    "NextIteration", "RefNextIteration", "Switch", "RefSwitch", "_SwitchN", "Merge", "RefMerge", "LoopCond", "Print",
    "PrintV2", "StringFormat", "HashTableV2", "MutableHashTableV2", "TensorListReserve", "EmptyTensorList",
    "TensorListLength", "TensorListElementShape", "TensorListResize", "TensorListPopBack", "TensorArrayV3",
    "TensorArraySizeV3", "TensorArrayCloseV3", "TensorArrayGradV3", "TensorListFromTensor", "TensorListGetItem",
    "TensorListSetItem", "TensorArrayReadV3", "TensorArrayWriteV3", "TensorArrayScatterV3", "Iterator", "IteratorV2",
    "IteratorGetNext", "Stack", "StackV2", "StackPushV2", "StackPopV2", "StatelessRandomGetKeyCounter",
    "StatelessRandomGetAlg", "DebugIdentityV2", "DestroyResourceOp", "InvertPermutation",
})  # fmt: skip
"""Ops that launch no kernel: sources, handles, shape functions, control flow. Lists and arrays hand buffers around."""

VIEWS = frozenset({"Transpose", "Split", "SplitV", "Unpack", "Slice", "StridedSlice", "BroadcastTo"})
"""Ops whose result lies where their input does, in msplit's engine: what reads it takes the strides. Stock TensorFlow copies."""

RESHAPES = frozenset({"Reshape", "Squeeze", "ExpandDims"})
"""Ops that keep the elements in their order. Behind a transposition they have to copy."""

MOVES = frozenset({
    "Cast", "Concat", "ConcatV2", "Pack", "ParallelConcat", "ConjugateTranspose", "Pad", "PadV2",
    "MirrorPad", "Tile", "Reverse", "ReverseV2", "ReverseSequence", "Roll", "SpaceToDepth", "DepthToSpace",
    "SpaceToBatchND", "BatchToSpaceND", "DeepCopy", "Copy", "Assign", "AssignVariableOp", "TensorListStack",
    "TensorArrayGatherV3", "TensorArrayConcatV3", "TensorListConcatV2", "TensorListGather", "DynamicStitch",
    "ParallelDynamicStitch", "MatrixBandPart", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3", "MatrixSetDiag",
    "MatrixSetDiagV3", "ExtractImagePatches", "Select", "SelectV2", "Where", "RandomShuffle", "TensorListPushBack",
    "MirrorPadGrad", "StridedSliceGrad", "Bucketize",
})  # fmt: skip
"""Ops that read their inputs and write their outputs and compute nothing to speak of."""

CHOICES = frozenset({"Select", "SelectV2"})
"""Those of them that take elements of several inputs, one by one."""

CUTS = frozenset({
    "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3",
    "DynamicPartition", "ResizeNearestNeighbor", "Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd",
    "KvResourceGather", "KvResourceGatherV1", "DiagPart",
})  # fmt: skip
"""Ops that read only as much of their first input as they write."""

MAKES = frozenset({
    "Fill", "Range", "LinSpace", "ZerosLike", "OnesLike", "Empty", "OneHot", "RandomUniform", "RandomStandardNormal",
    "TruncatedNormal", "RandomUniformInt", "StatelessRandomUniform", "StatelessRandomUniformV2", "StatelessRandomNormal",
    "StatelessRandomNormalV2", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "StatelessRandomUniformInt",
    "StatelessRandomUniformIntV2", "StatefulUniform", "StatefulStandardNormalV2",
})  # fmt: skip
"""Ops that only write."""

REDUCES = frozenset({
    "Sum", "Mean", "Prod", "Max", "Min", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin", "L2Loss", "BiasAddGrad",
    "SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", "UnsortedSegmentSum", "UnsortedSegmentMax",
    "UnsortedSegmentMin", "UnsortedSegmentProd", "AddN", "AccumulateNV2", "TopK", "TopKV2", "Unique", "UniqueV2",
    "UniqueWithCounts", "Bincount", "DenseBincount", "InTopK", "InTopKV2", "NthElement", "HistogramFixedWidth",
})  # fmt: skip
"""Ops that take one operation per element of their inputs."""

PER_ELEMENT = {
    "SoftmaxCrossEntropyWithLogits": 7, "SparseSoftmaxCrossEntropyWithLogits": 7, "Cumsum": 2,
    "Cumprod": 2, "Sigmoid": 4, "Tanh": 4, "Elu": 3, "Selu": 3, "Softplus": 4, "SquaredDifference": 2, "Erf": 6, "Pow": 6,
    "ResizeBilinear": 8, "ResizeBicubic": 40, "FusedBatchNormGrad": 9, "FusedBatchNormGradV3": 9, "SigmoidGrad": 3, "TanhGrad": 3,
    "ResizeBilinearGrad": 8, "LRNGrad": 30, "RandomUniform": 10, "RandomStandardNormal": 20, "TruncatedNormal": 25,
    "StatelessRandomUniformV2": 10, "StatelessRandomNormalV2": 20,
    "ResourceApplyAdam": 10, "ApplyAdam": 10, "ResourceApplyAdagrad": 5, "ApplyAdagrad": 5,
    "ResourceApplyMomentum": 4, "ApplyMomentum": 4, "ResourceApplyKerasMomentum": 4, "ResourceApplyRMSProp": 8, "ApplyRMSProp": 8,
    "ResourceApplyGradientDescent": 2, "ApplyGradientDescent": 2, "ResourceApplyFtrl": 12, "ResourceApplyFtrlV2": 12,
}  # fmt: skip
"""Operations per element of the output (or of the largest input, where there is no output); 1 where an op is not named here."""
