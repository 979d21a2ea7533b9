"""Ops that hand on their inputs, and ops that do nothing on a GPU."""

from __future__ import annotations

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node


@lowering(
    "CheckNumericsV2",
    "Copy",
    "CopyHost",
    "DebugGradientIdentity",
    "DebugGradientRefIdentity",
    "DeepCopy",
    "GuaranteeConst",
    "Identity",
    "PlaceholderWithDefault",
    "PreventGradient",
    "Snapshot",
    "StopGradient",
    "XlaSharding",
)
def identity(node: Node, x: Tensor) -> Tensor:
    """The input itself."""
    return x


@lowering("CheckNumerics")
def check_numerics(node: Node, x: Tensor) -> Tensor:
    """The input itself. TensorFlow stops at NaN or infinity; looking for them would stop the device, so they pass."""
    return x


@lowering("IdentityN", "XlaOptimizationBarrier")
def identity_n(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs themselves."""
    return inputs


@lowering("NoOp", "ControlTrigger")
def no_op(node: Node) -> tuple[Tensor, ...]:
    """Nothing: the node only orders others."""
    return ()


@lowering("Assert")
def assertion(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Nothing: a condition on the device can not stop the run, so it goes unchecked."""
    return ()
