"""What TensorFlow's ops do with half precision: the lists of its own mixed precision.

They are those that Grappler has for CUDA (``auto_mixed_precision_lists.h`` of TensorFlow 2.21, cuDNN 8 and newer; a test holds them
against the header that TensorFlow installs), without ops that the cuda engine has not, and with those that its passes make. What is in
no list stays in float32, and so does whatever reads it next unless it is a product.
"""

from __future__ import annotations

from enum import StrEnum

from msplit.opset.traits import BATCH_MATMULS, MATMULS


class Half(StrEnum):
    """What an op does with half precision. TensorFlow's names for it are allow, infer, deny and clear."""

    GAINS = "gains"
    """Products and convolutions: faster, and safe, since sums are in float32. They are always in half precision."""

    TAKES = "takes"
    """Safe, unless what it reads was made by an op that is not. In half precision only between two products."""

    LOSES = "loses"
    """Overflows, or loses too much: stays in float32, and so does what reads it up to the next product."""

    CARRIES = "carries"
    """Does not round: takes the type of its neighbours."""


_LISTS = {
    Half.GAINS: """
        BatchMatMul BatchMatMulV2 BlockLSTM BlockLSTMV2 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Conv3DBackpropFilterV2
        Conv3DBackpropInputV2 DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Einsum
        LSTMBlockCell MatMul

        _FusedConv2D _FusedDepthwiseConv2dNative _FusedMatMul _GroupedMatMul
        """,
    Half.TAKES: """
        Add AddN AddV2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd BiasAddGrad BiasAddV1 Elu EluGrad Erf Erfc FloorDiv
        _FusedBatchNormEx FusedBatchNormGradV2 FusedBatchNormGradV3 FusedBatchNormV2 FusedBatchNormV3 Inv LeakyRelu LeakyReluGrad
        Log Log1p LogSoftmax Mul Prod RealDiv Reciprocal Selu SeluGrad Sigmoid SigmoidGrad Softmax Softplus SoftplusGrad Softsign
        SoftsignGrad Sqrt Sub Tanh TanhGrad

        _LayerNorm
        """,
    Half.LOSES: "Exp Expm1 L2Loss Mean Pow SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Sum",
    Half.CARRIES: """
        Abs ArgMax ArgMin BatchToSpace BatchToSpaceND BroadcastTo Ceil CheckNumerics ClipByValue Concat ConcatV2 DepthToSpace
        DynamicPartition DynamicStitch EnsureShape Equal ExpandDims Fill Floor Gather GatherNd GatherV2 Greater GreaterEqual
        Identity IdentityN IsFinite IsInf IsNan Less LessEqual Max MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad MaxPoolV2 Maximum Min
        Minimum MirrorPad MirrorPadGrad Neg NotEqual OneHot OnesLike Pack Pad PadV2 PreventGradient Relu Relu6 Relu6Grad ReluGrad
        Reshape ResizeNearestNeighbor ResizeNearestNeighborGrad Reverse ReverseSequence ReverseV2 Round Select SelectV2 Sign Slice
        Snapshot SpaceToBatch SpaceToBatchND SpaceToDepth Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Tile TopK
        TopKV2 Transpose Unpack Where ZerosLike

        _GroupedLookup _PeerCopy
        """,
}

HALF = {op: what for what, ops in _LISTS.items() for op in ops.split()}
"""Op -> what it does with half precision; what is not here is left in float32."""

WIDENING = frozenset(["LogSoftmax", "Mean", "Softmax", "Sum"])
"""Ops that can read half precision and compute in float32 in one kernel."""

CONVERTING = WIDENING | MATMULS | BATCH_MATMULS | {"_Columns"}
"""Ops that can give another type than the one they compute in, in one kernel."""

MASKING = frozenset(
    ["Add", "AddV2", "BiasAdd", "BiasAddV1", "ClipByValue", "Maximum", "Minimum", "Select", "SelectV2", "Sub"]
)
"""Ops in which a number beyond the largest of float16 is as good as the largest: what they add it to, or choose it for, is masked."""
