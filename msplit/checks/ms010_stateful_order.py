"""The order of stateful ops is broken across streams.

Finds: Two nodes on different streams use the same variable, table or array, at least one of them writes it, and no path of data or control
edges leads from one to the other. A path out of a loop of TensorFlow 1 may lead through its turns. Ops that msplit does not know count as
writers.

Why: On one stream kernels run one after the other, whatever their order. On two streams they run at the same time: a reader may see half of
an update, and the result differs from run to run.

Example: `AssignAddVariableOp` of w on stream 1 and `ResourceGather` from w on stream 2, without a control edge.

Mend: Put them on one stream (the rule `colocation` does), or add the control dependency that the program means.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.analysis.colocation import paths, unordered, users
from msplit.checks.subject import Check, Finding, Severity, Subject, listed


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per variable, table or array, about the first pair of its users that nothing orders."""
    ids = subject.ids.tolist()
    split = []
    for name, known in users(subject.flat).items():
        placed = {node: writes for node, writes in known.items() if subject.placed[node]}
        if any(placed.values()) and len({ids[node] for node in placed}) > 1:
            split.append((name, placed))
    before = paths(subject.flat.graph, [node for _, nodes in split for node in nodes], subject.flat.back_edges)
    for name, placed in split:
        pairs = unordered(before, placed, ids)
        if pairs:
            involved = list(dict.fromkeys(node for pair in pairs for node in pair))
            names, count = subject.names(involved), len(involved)
            streams = sorted({ids[node] for node in involved})
            yield Finding(
                f"'{names[0]}' writes '{name}' and '{names[1]}' uses it, on streams {listed(streams)}, and no "
                "path orders them" + (f" ({len(pairs)} such pairs)" if len(pairs) > 1 else ""),
                "put them on one stream, or order them with a control dependency",
                names,
                count,
            )


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find)
