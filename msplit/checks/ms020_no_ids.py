"""The graph has no stream ids.

Finds: No node of the file, functions included, has a `_stream_id`, and no plan was given. Absent ids mean stream 0, so the graph is valid
and runs on one stream: nothing is split, unbalanced or out of order. With `--rules`, MS002 says which nodes should have ids.

Why: Most often the original was given in place of what `msplit assign` wrote, and then every check passes because there is nothing to
check. Raise it to an error (`severity: {MS020: error}`) where the file must be annotated.

Example: `msplit check model.pb` in place of `msplit check model.streams.pb`.

Mend: Check the file that `msplit assign` wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject
from msplit.formats.model import STREAM_ID


def find(subject: Subject) -> Iterator[Finding]:
    """One finding, unless a plan says where nodes run."""
    model = subject.flat.model.graph
    graphs = (model, *(function.body for function in model.functions.values()))
    if subject.plan_file is None and not any(graph.nodes_with(STREAM_ID) for graph in graphs):
        yield Finding(
            "no node has a stream id: the whole graph runs on one stream",
            "run `msplit assign` if it should have streams; check the file that it writes",
        )


CHECK = Check.of(__name__, __doc__, Severity.INFO, find)
