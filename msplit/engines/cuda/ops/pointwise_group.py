"""A group of ops that fusion made one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msplit.engines.cuda.ir.lowering import lowering
from msplit.engines.cuda.ir.node import Node, Unsupported


@lowering("_FusedPointwise", own=True)
def fused_pointwise(node: Node, *inputs: Tensor) -> tuple[Any, ...]:
    """What fusion makes of a group of pointwise ops: its compiled kernel, or its ops one by one where there is none."""
    run = node.get("kernel") or node.get("body")
    if run is None:
        raise Unsupported("it is an op of the engine's own, which no graph can hold")
    return tuple(run(*inputs))
