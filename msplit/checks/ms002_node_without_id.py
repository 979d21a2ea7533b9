"""A node has no stream id where the rules say there is one.

Finds: Applying the rules gives the node a stream other than 0, but the graph has no `_stream_id` on it. An absent id means stream 0, so
nodes that the rules put there need none. Host nodes need none either.

Why: The node runs on stream 0, in line with everything there: the overlap that the rules planned is lost, and its stream waits for stream
0. It happens when nodes are added to a model after its streams were assigned.

Example: A new layer `tower_b/dense_3` in a graph whose other `tower_b/` nodes are on stream 2.

Mend: Run `msplit assign MODEL --rules FILE` again and commit what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import ABSENT, Check, Finding, Severity, Subject, verb, wanted


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per stream that nodes should be on."""
    ids = wanted(subject)
    missing = (subject.stated == ABSENT) & (ids > 0)
    for stream in np.unique(ids[missing]).tolist():
        which = np.flatnonzero(missing & (ids == stream))
        yield subject.about(
            which,
            f"{verb(len(which), 'has', 'have')} no stream id, but the rules say stream {stream}",
            "run `msplit assign` with the rules again and commit what it writes",
        )


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find, needs=("rules",), depends="rules")
