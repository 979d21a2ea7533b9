"""How merged products lie in memory: as what reads them wants it, so that turning them takes no copy."""

from __future__ import annotations

import numpy as np

from msplit.engines.cuda.ir.graph import OpGraph

_TURNED = [1, 0, 2]


def put_rows_first(graph: OpGraph) -> None:
    """Lets products whose members are laid side by side next write each row of all members together."""
    readers = graph.consumers()
    fetched = set(graph.fetches.values())
    for op in graph.ops.values():
        key = (op.node, 0)
        if op.op != "_GroupedMatMul" or op.attrs.get("single") or len(op.attrs["layers"]) > 1 or key in fetched:
            continue
        found = [graph.ops[number] for number in readers.get(key, ())]
        if found and all(reader.op == "Transpose" and _turns(graph, reader.inputs[1]) for reader in found):
            op.attrs["rows_first"] = True


def _turns(graph: OpGraph, key: tuple[int, int]) -> bool:
    order = graph.constants.get(key)
    return order is not None and np.array_equal(order, _TURNED)
