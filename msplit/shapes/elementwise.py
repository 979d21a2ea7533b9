"""Elementwise ops: unary ones keep the shape, binary ones broadcast."""

from __future__ import annotations

from functools import reduce

from msplit.shapes.registry import Node, Outputs, Shape, broadcast, merge, same_shape, shape_function

UNARY = [
    "Abs", "Acos", "Acosh", "Angle", "Asin", "Asinh", "Atan", "Atanh", "BesselI0", "BesselI0e", "BesselI1", "BesselI1e",
    "Cast", "Ceil", "ComplexAbs", "Conj", "Cos", "Cosh", "Digamma", "Elu", "Erf", "Erfc", "Erfinv", "Exp", "Expm1",
    "Floor", "Imag", "Inv", "Invert", "IsFinite", "IsInf", "IsNan", "IsVariableInitialized", "LeakyRelu",
    "Lgamma", "Log", "Log1p", "LogicalNot", "Ndtri", "Neg", "OnesLike", "Real", "Reciprocal", "Relu", "Relu6", "Rint",
    "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Tan", "Tanh",
    "ZerosLike", "_MklRelu", "PopulationCount", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics",
    "CheckNumericsV2", "QuantizeAndDequantize", "QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3",
    "QuantizeAndDequantizeV4", "FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel",
    "DeepCopy", "DebugIdentity", "DebugIdentityV2", "Print", "Copy", "CopyHost", "Bucketize", "Cumsum", "Cumprod",
    "CumulativeLogsumexp", "Softmax", "LogSoftmax", "LRN", "LRNGrad", "InvertPermutation", "Reverse", "ReverseV2",
    "ReverseSequence", "RandomShuffle", "MatrixBandPart", "BatchMatrixBandPart", "MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3",
    "MatrixInverse", "BatchMatrixInverse", "Cholesky", "MatrixExponential", "ClipByValue", "Roll",
    "ScatterNdNonAliasingAdd", "TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax",
    "TensorScatterMin", "TensorStridedSliceUpdate", "InplaceUpdate", "InplaceAdd", "InplaceSub", "StringToHashBucketFast",
    "StringToHashBucketStrong", "StringToHashBucket", "StringToNumber", "StringStrip", "StringLower", "StringUpper",
    "StringLength", "RegexReplace", "RegexFullMatch", "StaticRegexReplace", "StaticRegexFullMatch", "EncodeBase64",
    "DecodeBase64", "AsString", "Substr", "UnicodeTranscode", "UnicodeScript", "AdjustHue", "AdjustSaturation",
    "AdjustContrastv2", "RGBToHSV", "HSVToRGB", "FFT", "IFFT", "FFT2D", "IFFT2D", "FFT3D", "IFFT3D", "Dawsn", "Expint",
    "FresnelCos", "FresnelSin", "Spence", "BesselJ0", "BesselJ1", "BesselK0", "BesselK1", "BesselK0e", "BesselK1e",
    "BesselY0", "BesselY1", "DrawBoundingBoxes", "BiasAdd", "BiasAddV1", "TridiagonalSolve",
]  # fmt: skip
"""Ops whose only output has the shape of their first input; the last ones also move values about within it."""
same_shape(UNARY)

# The gradient of a unary op has the shape of its operands, which agree; what one leaves unknown the other may tell.
GRADIENTS = [
    "ReluGrad", "Relu6Grad", "LeakyReluGrad", "EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad",
    "SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "InvGrad", "ReciprocalGrad",
]  # fmt: skip

BINARY = [
    "Add", "AddV2", "Sub", "Mul", "MulNoNan", "Div", "DivNoNan", "RealDiv", "TruncateDiv", "TruncateMod", "FloorDiv",
    "FloorMod", "Mod", "Maximum", "Minimum", "Pow", "SquaredDifference", "Xdivy", "Xlogy", "Xlog1py", "Atan2", "Equal",
    "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "ApproximateEqual",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "Igamma", "Igammac", "IgammaGradA", "Zeta",
    "Polygamma", "NextAfter", "Complex", "_FusedBinary", "RandomGammaGrad",
]  # fmt: skip


@shape_function(*GRADIENTS)
def gradient(node: Node) -> Outputs:
    """Both operands have the same shape."""
    return (merge(node.shape(0), node.shape(1)),)


@shape_function(*BINARY)
def binary(node: Node) -> Outputs:
    """Broadcasts two operands."""
    return (broadcast(node.shape(0), node.shape(1)),)


@shape_function("Betainc", "SelectV2")
def ternary(node: Node) -> Outputs:
    """Broadcasts all operands."""
    lead: Shape = ()
    return (reduce(broadcast, node.inputs, lead),)


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


@shape_function("AddN", "AccumulateNV2")
def add_n(node: Node) -> Outputs:
    """All operands have the same shape."""
    return (reduce(merge, node.inputs, None),)


@shape_function("StringJoin")
def string_join(node: Node) -> Outputs:
    """Scalars join with every element of the others."""
    return (reduce(merge, [shape for shape in node.inputs if shape != ()], None),) if any(node.inputs) else ((),)
