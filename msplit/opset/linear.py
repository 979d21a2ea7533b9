"""In which inputs ops are linear: scaled there, they give results that are scaled alike. Gradients are made of such ops."""

from __future__ import annotations

_ONE = """
    0: BatchToSpaceND BiasAddGrad BroadcastTo Cast ConjugateTranspose Cumsum DepthToSpace DivNoNan ExpandDims EluGrad FusedBatchNormGrad
       FusedBatchNormGradV2 FusedBatchNormGradV3 Gather GatherNd GatherV2 LeakyReluGrad Mean MirrorPadGrad Neg Pad PadV2 RealDiv
       Relu6Grad ReluGrad Reshape ResizeBilinearGrad ResizeNearestNeighborGrad Reverse ReverseSequence ReverseV2 SegmentSum SeluGrad
       Slice SoftplusGrad SoftsignGrad SpaceToBatchND SpaceToDepth SplitV Squeeze StridedSlice Sum Tile Transpose Unpack
    1: AvgPoolGrad AvgPool3DGrad Fill InvGrad ReciprocalGrad RsqrtGrad ScatterNd SigmoidGrad Split SqrtGrad TanhGrad
    2: MaxPoolGrad MaxPoolGradV2 MaxPool3DGrad
    4: StridedSliceGrad
"""
_PRODUCTS = """
    0 1: BatchMatMul BatchMatMulV2 Conv2D Conv3D DepthwiseConv2dNative Einsum MatMul Mul MulNoNan SparseTensorDenseMatMul
    1 2: Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
    0 2: Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter
"""
_SUMS = """
    0 1: Add AddV2 Sub
    1 2: Select SelectV2
    all: AddN ConcatV2 Pack AccumulateNV2
"""


def _read(text: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    slots: tuple[int, ...] = ()
    for line in text.strip().splitlines():
        *told, ops = line.split(":")
        if told:
            slots = tuple(int(slot) for slot in told[0].split() if slot != "all")
        found |= dict.fromkeys(ops.split(), slots)
    return found


PRODUCTS = {op: slots for text in (_ONE, _PRODUCTS) for op, slots in _read(text).items()}
"""Op -> the inputs of which exactly one may be scaled."""

SUMS = _read(_SUMS)
"""Op -> the inputs that are scaled together, but for those that are zero; none stands for all of one type."""
