"""Roles that ops may play in a kernel that they share with others.

What is not in these tables runs as its library has it: products, convolutions, gathers, sorts, anything that Inductor has no code for.
Left out on purpose are integer divisions and remainders (what they give for a divisor of zero is the library's), and dtypes that
Triton computes in another width than PyTorch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph
from msplit.engines.cuda.ir.interpret import device_inputs, static_slots
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes.pattern import FLOATS
from msplit.opset.traits import BATCH_NORMS, VIEWS, ops_with


class Role(enum.Enum):
    """Part that an op takes in a group."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    JOIN = "join"
    VIEW = "view"


_STEPS = ops_with("step") | ops_with("comparison")
_POINTWISE = (
    (ops_with("exact") - ops_with("reduction"))
    | _STEPS
    | ops_with("curve")
    | ops_with("arithmetic")
    | ops_with("rounds smoothly")
)
_JOINS = ops_with("parts")
_ONE_RESULT = ops_with("exact") | _STEPS | VIEWS | _JOINS
_REDUCTIONS = ops_with("row kernel")

_COMPUTED = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64", "bool"})
"""Dtypes that a kernel computes as PyTorch does, to the bit where there is one result: half precision in float32, rounded after each op."""

_CAST_FROM = _COMPUTED | {"uint8", "int8", "int16"}
_MOST_JOINED = 8  # Inductor writes larger ones in one kernel per part
_ADD_N_CHAIN = 4  # more addends are stacked, which is no pointwise op


def role(graph: OpGraph, op: Op, dtypes: dict[Key, str]) -> Role | None:
    """The role that an op may play in a group, or None: also where an input's dtype or what decides its shape is not known."""
    # All that decides shapes must be known.
    lowering = table().get(op.op)
    if lowering is None or lowering.dynamic or lowering.shape_only or not op.inputs:
        return None
    if any(op.inputs[slot] not in graph.constants for slot in static_slots(op)):
        return None
    if op.out not in graph.shapes or 0 in graph.shapes[op.out]:
        return None
    return _role_among(op, [dtypes.get(key) for key in device_inputs(op)])


def _role_among(op: Op, read: Sequence[str | None]) -> Role | None:
    """The role of an op that reads such types, and of which all is known that decides shapes."""
    # Casts and views take types that nothing is computed in.
    if op.op == "Cast":
        known = all(dtype in _CAST_FROM for dtype in read) and op.attrs.get("DstT") in _COMPUTED
        return Role.POINTWISE if known and not op.attrs.get("Truncate") else None
    if op.op in VIEWS:
        return Role.VIEW if len(read) == 1 and read[0] in _CAST_FROM else None
    if not all(dtype in _COMPUTED for dtype in read):
        return None
    # Of what is computed some ops only under conditions of their own.
    if op.op in _REDUCTIONS:
        return Role.REDUCTION
    if op.op in _JOINS:
        return Role.JOIN if len(read) <= _MOST_JOINED else None
    floats = all(dtype in FLOATS for dtype in read)
    if op.op in BATCH_NORMS:
        return Role.POINTWISE if floats and not op.attrs.get("is_training", True) else None
    if op.op == "AddN" and len(op.inputs) > _ADD_N_CHAIN:
        return None
    if op.op == "Div":  # of integers it rounds
        return Role.POINTWISE if floats else None
    return Role.POINTWISE if op.op in _POINTWISE else None


def is_exact(op: Op, dtypes: dict[Key, str]) -> bool:
    """Returns whether an op's result is the same in every correct implementation, given the same inputs."""
    return op.op in _ONE_RESULT or op.op == "Cast" or not any(dtypes.get(key) in FLOATS for key in op.inputs)


def is_step(op: Op, dtypes: dict[Key, str]) -> bool:
    """Returns whether an op must not be behind rounding that another kernel does in another way."""
    if op.op == "Cast":
        return dtypes.get(op.inputs[0]) in FLOATS and op.attrs.get("DstT") not in FLOATS
    return op.op in _STEPS and any(dtypes.get(key) in FLOATS for key in op.inputs)
