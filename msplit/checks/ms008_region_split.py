"""A loop or a cond is split over streams.

Finds: The nodes of one v1 while loop (Enter to Exit, with all that is nested in it) or of one v1 cond (Switch to Merge) have different ids.
`While` and `If` of TensorFlow 2 are one node each and can not be split.

Why: What a loop's turn must wait for is only known while it runs. A plan made before the run can not order nodes of different turns on
different streams, so msplit keeps such regions together, and so must ids that are set by hand.

Example: `while/MatMul` on stream 1 and `while/NextIteration` on stream 0.

Mend: Put `- colocation` in the rules and assign again, or give the whole region one id.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject, splits


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per region."""
    flat = subject.flat
    control = np.asarray([region.kind != "variable" for region in flat.regions] + [False], np.bool_)
    for region, members, streams in splits(subject, np.where(control[flat.region], flat.region, -1).astype(np.int32)):
        found = flat.regions[region]
        what = f"are in the {found.kind} '{found.name}', but on {streams}"
        yield subject.about(members, what, "give them one id, or let the rule `colocation` do so")


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find)
