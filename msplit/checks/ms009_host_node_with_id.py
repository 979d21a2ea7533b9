"""MS009: an id on a node that runs on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.base import Check
from msplit.checks.finding import Finding, Severity
from msplit.checks.subject import Subject
from msplit.checks.words import nodes, verb


def find(subject: Subject) -> Iterator[Finding]:
    """One finding. Id 0 says nothing and is fine."""
    which = np.flatnonzero(subject.flat.host & (subject.stated > 0))
    if len(which):
        names, count = subject.names(which), len(which)
        yield Finding(
            f"{nodes(names, count)} {verb(count, 'runs', 'run')} on the host and {verb(count, 'has', 'have')} a "
            "stream id, which has no effect",
            "remove the id, or move the node to the GPU",
            names,
            count,
        )


CHECK = Check(
    code="MS009",
    name="host-node-with-id",
    severity=Severity.WARNING,
    title="A host node has a stream id",
    what="A node without a GPU kernel (strings, lookup tables, parsing, iterators), or pinned to the CPU, has a "
    "`_stream_id` other than 0.",
    why="It has no effect: host nodes have no stream. Whoever set it may believe that the work overlaps on the GPU.",
    example="`StringToHashBucketFast` with `_stream_id` 2.",
    mend="Remove the id. Scopes such as `tf.stream` put it on every op inside: close the scope around host work.",
    find=find,
)
