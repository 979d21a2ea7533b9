"""A host node has a stream id.

Finds: A node without a GPU kernel (strings, lookup tables, parsing, iterators), or pinned to the CPU, has a `_stream_id` other than 0.

Why: It has no effect: host nodes have no stream. Whoever set it may believe that the work overlaps on the GPU.

Example: `StringToHashBucketFast` with `_stream_id` 2.

Mend: Remove the id. Scopes such as `tf.stream` put it on every op inside: close the scope around host work.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject, verb


def find(subject: Subject) -> Iterator[Finding]:
    """One finding. Id 0 says nothing and is fine."""
    which = np.flatnonzero(subject.flat.host & (subject.stated > 0))
    if len(which):
        what = f"{verb(len(which), 'runs', 'run')} on the host and {verb(len(which), 'has', 'have')} a stream id, which has no effect"
        yield subject.about(which, what, "remove the id, or move the node to the GPU")


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find)
