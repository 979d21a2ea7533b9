"""Who uses the same variable, table or array, and which of them nothing orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msplit.analysis.paths import Paths
from msplit.core.graph import CONTROL
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import ops_with

_READERS, _PASSING = ops_with("reads state"), ops_with("hands on a handle")


def users(flat: FlatGraph) -> dict[str, dict[int, bool]]:
    """By variable, table or array the nodes that use it, and whether they may write. Handles of one shared name are one.

    Ops that msplit does not know may write.
    """
    graph = flat.graph
    kinds = {op: _kind(op) for op in dict.fromkeys(graph.ops)}
    found: dict[str, dict[int, bool]] = {}
    for node, op in enumerate(graph.ops):
        kind = kinds[op]
        if kind is None:
            continue
        shared = graph.attrs[node].get("shared_name")
        name = shared if isinstance(shared, str) and shared else graph.names[node]
        known = found.setdefault(name, {})
        waiting, seen = [node], {node}
        while waiting:
            producer = waiting.pop()
            for edge in graph.out_edges(producer).tolist():
                user, slot = int(graph.edges.dst[edge]), int(graph.edges.slot[edge])
                if slot == CONTROL or (producer == node and not _is_handle(op, int(graph.edges.port[edge]))):
                    continue
                if graph.ops[user] not in _PASSING:
                    known[user] = known.get(user, False) or _writes(flat, user, slot, kind)
                    continue
                hands_on = kind == "resource" or graph.ops[user].startswith("Ref")
                if hands_on and user not in seen:
                    seen.add(user)
                    waiting.append(user)
                elif not hands_on:
                    known.setdefault(user, False)  # an Identity of a reference reads it
    return found


def unordered(paths: Paths, known: Mapping[int, bool], apart: Sequence[int]) -> list[tuple[int, int]]:
    """(writer, user) of the pairs that no path orders, either way.

    Args:
        known: The users, and whether they may write.
        apart: By node what it must share with another for the two not to count: its stream, or its group.
    """
    found = []
    done: set[int] = set()
    for writer in (node for node, writes in known.items() if writes):
        done.add(writer)
        for other in known:
            if other in done or apart[other] == apart[writer]:
                continue
            if not paths.between(writer, other) and not paths.between(other, writer):
                found.append((writer, other))
    return found


def _kind(op: str) -> str | None:
    """Whether an op makes a handle ("resource") or a reference ("ref") that it was not given."""
    info = schema.lookup(op)
    if op == "KvVarHandleOp":
        return "resource"
    if info is None or not info.stateful:
        return None
    if any(argument.dtype == "resource" or argument.is_ref for argument in info.inputs):
        return None
    if any(argument.is_ref for argument in info.outputs):
        return "ref"
    return "resource" if any(argument.dtype == "resource" for argument in info.outputs) else None


def _is_handle(op: str, port: int) -> bool:
    """Whether an output of an op that makes a handle is the handle: the flow of a TensorArray is a number."""
    info = schema.lookup(op)
    if info is None or port >= len(info.outputs):
        return True
    return info.outputs[port].dtype == "resource" or info.outputs[port].is_ref


def _writes(flat: FlatGraph, user: int, slot: int, kind: str) -> bool:
    op = flat.graph.ops[user]
    if op in _READERS:
        return False
    info = schema.lookup(op)
    if kind == "ref" and info is not None:
        # An op that does not ask for the reference gets the value.
        dtypes = schema.input_dtypes(op, flat.graph.attrs[user])
        return bool(dtypes and slot < len(dtypes) and (dtypes[slot] or "").endswith("_ref"))
    return True
