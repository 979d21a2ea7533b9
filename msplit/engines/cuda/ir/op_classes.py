"""Classes of ops that several optimizations of the engine ask about, each listed here once.

Only ops that have a lowering are in them. What one optimization alone needs to know of an op stays with it.
"""

from __future__ import annotations

RESHAPES = frozenset({"Reshape", "Squeeze", "ExpandDims"})
"""Ops that give their input's elements in the same order, with another shape."""

VIEWS = RESHAPES | {"Transpose", "Split", "SplitV", "Unpack", "Slice", "StridedSlice", "BroadcastTo"}
"""Ops that launch nothing: their results lie where their inputs do."""

COMPARISONS = ("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")

LOGIC = ("LogicalAnd", "LogicalOr")
"""Of two truth values; `LogicalNot` is in `EXACT_UNARY`."""

EXACT_UNARY = ("Abs", "Neg", "Relu", "Relu6", "LogicalNot", "Invert", "OnesLike", "ZerosLike")
"""Functions of one element that do not round."""

EXACT_BINARY = ("Maximum", "Minimum", *LOGIC, "BitwiseAnd", "BitwiseOr", "BitwiseXor")
"""Functions of two elements, with NumPy's broadcasting, that do not round."""

STEPS = ("Ceil", "Floor", "Rint", "Round", "Sign", "IsFinite", "IsInf", "IsNan")
"""Functions of one element whose result jumps: a last bit more or less in front of them shows."""

CURVES = (
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Erf", "Erfc", "Exp", "Expm1", "Inv", "Log", "Log1p",
    "Reciprocal", "Rsqrt", "Sigmoid", "Sin", "Sinh", "Sqrt", "Square", "Tan", "Tanh", "LeakyRelu", "Elu", "Selu", "Softplus",
    "Softsign",
)  # fmt: skip
"""Functions of one floating point number whose result is rounded."""

ARITHMETIC = (
    "Add", "AddV2", "Sub", "Mul", "MulNoNan", "RealDiv", "DivNoNan", "Pow", "SquaredDifference", "Xdivy", "Xlogy", "Atan2",
)  # fmt: skip
"""Functions of two numbers, with NumPy's broadcasting, whose result is rounded where they are floating point."""
