"""Nodes that share a kernel are on several streams.

Finds: With `--plan`, where the plan lists groups (a tuned one does): a node of a group has another `_stream_id` than its group, or another
stream in the order of the plan. One kernel does the work of a group: pointwise ops that are compiled together, alike nodes of several
branches side by side, lookups of several embedding columns, or a product with its bias and activation.

Why: A kernel runs on one stream. The graph says of such a node that it runs where it does not: whoever reads the ids is misled, and rules
that build on them put its neighbours on the wrong stream.

Example: `tower_a/Relu` and `tower_b/Relu` are one kernel on stream 1, and `tower_b/Relu` has the id 0.

Mend: Write the annotated model and the plan together: `msplit tune MODEL -o OUT --plan-out PLAN`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject, listed, verb

_FIX = "write the model and the plan together: msplit tune MODEL -o OUT --plan-out PLAN"


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per group, against the graph's ids, and one against the streams of the plan itself."""
    plan_file = subject.plan_file
    assert plan_file is not None
    index = subject.flat.graph.index
    planned = subject.resolved_plan[0].stream
    for group in plan_file.groups:
        known = np.asarray([index[name] for name in group.nodes if name in index], np.int32)
        for ids, placed, where in (
            (subject.ids, subject.placed, "on the graph"),
            (planned, planned >= 0, "in the order of the plan"),
        ):
            if where == "on the graph" and not subject.annotated:
                continue  # the ids are the plan's
            members = known[placed[known]]
            wrong = members[ids[members] != group.stream]
            if not len(wrong):
                continue
            streams, count = listed(np.unique(ids[wrong]).tolist()), len(wrong)
            what = (
                f"{verb(count, 'is', 'are')} on stream {streams} {where}, but the kernel that does the work "
                f"of {verb(count, 'it', 'them')} ({group.kind}, of {len(group.nodes)} nodes) runs on stream {group.stream}"
            )
            yield subject.about(wrong, what, _FIX, file=plan_file.source)


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find, needs=("plan",))
