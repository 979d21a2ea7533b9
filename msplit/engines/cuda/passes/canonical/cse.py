"""Ops that compute the same from the same values: one of them does it for all.

Branches often begin with an activation of their common input each, and attention with a mask per layer. TensorFlow's optimizer merges
these too. Ops that draw random numbers are left alone.
"""

from __future__ import annotations

from typing import Any

from msplit.engines.cuda.ir.graph import Key, Op, OpGraph, attrs_key
from msplit.engines.cuda.ir.lowering import table
from msplit.engines.cuda.passes.pattern import Readers, value_key

_RANDOM = "msplit.engines.cuda.ops.random"
_LARGEST = 1024
"""Bytes of a constant that is compared by value: shapes, axes, scalars."""


def eliminate_common_subexpressions(graph: OpGraph) -> bool:
    """Keeps the first of ops with equal attributes and inputs; it does the others' work."""
    before = len(graph.ops)
    names: dict[Key, Key] = {}
    first: dict[tuple[Any, ...], Op] = {}
    values: dict[Key, Key] = {}
    ports = Readers(graph).ports
    same: dict[tuple[Any, ...], Key] = {}

    def canonical(key: Key) -> Key:
        """The one name of a value: of ops that are merged, and of small constants that are equal."""
        key = names.get(key, key)
        constant = graph.constants.get(key)
        if constant is None or constant.nbytes > _LARGEST:
            return key
        if key not in values:
            values[key] = same.setdefault(value_key(constant), key)
        return values[key]

    for number, op in list(graph.ops.items()):
        if table()[op.op].file == _RANDOM:
            continue
        kept = first.setdefault((op.op, attrs_key(op.attrs), tuple(map(canonical, op.inputs))), op)
        if kept is not op:
            kept.source_nodes = [*kept.source_nodes, *op.source_nodes]
            names |= {(number, port): (kept.node, port) for port in ports.get(number, ())}
            del graph.ops[number]
    graph.rename(names)
    return len(graph.ops) < before
