"""MS010: two streams that touch the same state, and nothing that orders them."""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.finding import Finding, Severity, listed
from msplit.checks.paths import Paths
from msplit.checks.subject import Check, Subject
from msplit.core.graph import CONTROL
from msplit.flatten.flat import FlatGraph
from msplit.opset import schema
from msplit.opset.traits import ops_with

_READERS, _PASSING = ops_with("reads state"), ops_with("hands on a handle")


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per variable, table or array, about the first pair of its users that nothing orders."""
    split = []
    for name, users in resources(subject.flat).items():
        nodes = [node for node in users if subject.placed[node]]
        writers = [node for node in nodes if users[node]]
        if writers and len({int(subject.ids[node]) for node in nodes}) > 1:
            split.append((name, nodes, writers))
    paths = Paths(subject.flat.graph, [node for _, nodes, _ in split for node in nodes], subject.flat.back_edges)
    for name, nodes, writers in split:
        pairs = _unordered(subject, paths, nodes, writers)
        if pairs:
            involved = list(dict.fromkeys(node for pair in pairs for node in pair))
            names, count = subject.names(involved), len(involved)
            streams = sorted({int(subject.ids[node]) for node in involved})
            yield Finding(
                f"'{names[0]}' writes '{name}' and '{names[1]}' uses it, on streams {listed(streams)}, and no "
                "path orders them" + (f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""),
                "put them on one stream, or order them with a control dependency",
                names,
                count,
            )


def _unordered(subject: Subject, paths: Paths, nodes: list[int], writers: list[int]) -> list[tuple[int, int]]:
    pairs = []
    done: set[int] = set()
    for writer in writers:
        done.add(writer)
        for other in nodes:
            apart = other not in done and subject.ids[other] != subject.ids[writer]
            if apart and not paths.between(writer, other) and not paths.between(other, writer):
                pairs.append((writer, other))
    return pairs


def resources(flat: FlatGraph) -> dict[str, dict[int, bool]]:
    """By variable, table or array its users, and whether they may write. Handles of one shared name are one resource."""
    graph = flat.graph
    kinds = {op: _kind(op) for op in dict.fromkeys(graph.ops)}
    found: dict[str, dict[int, bool]] = {}
    for node, op in enumerate(graph.ops):
        kind = kinds[op]
        if kind is None:
            continue
        shared = graph.attrs[node].get("shared_name")
        name = shared if isinstance(shared, str) and shared else graph.names[node]
        users = found.setdefault(name, {})
        waiting, seen = [node], {node}
        while waiting:
            producer = waiting.pop()
            for edge in graph.out_edges(producer).tolist():
                user, slot = int(graph.edges.dst[edge]), int(graph.edges.slot[edge])
                if slot == CONTROL:
                    continue
                if graph.ops[user] not in _PASSING:
                    users[user] = users.get(user, False) or _writes(flat, user, slot, kind)
                    continue
                hands_on = kind == "resource" or graph.ops[user].startswith("Ref")
                if hands_on and user not in seen:
                    seen.add(user)
                    waiting.append(user)
                elif not hands_on:
                    users.setdefault(user, False)  # an Identity of a reference reads it
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


CHECK = Check(
    code="MS010",
    name="stateful-order",
    severity=Severity.ERROR,
    title="The order of stateful ops is broken across streams",
    what="Two nodes on different streams use the same variable, table or array, at least one of them writes it, "
    "and no path of data or control "
    "edges leads from one to the other. A path out of a loop of TensorFlow 1 may lead through its turns. "
    "Ops that msplit does not know count as writers.",
    why="On one stream kernels run one after the other, whatever their order. On two streams they run at the same time: "
    "a reader may see half of an update, and the result differs from run to run.",
    example="`AssignAddVariableOp` of w on stream 1 and `ResourceGather` from w on stream 2, without a control edge.",
    mend="Put them on one stream (the rule `colocation` does), or add the control dependency that the program means.",
    find=find,
)
