"""A colocation group is split over streams.

Finds: Nodes that `_class: loc:@x` ties together, with each other and with node x, have different ids. A node without an id is on stream 0;
host nodes do not count.

Why: DeepRec and stock TensorFlow run streams as devices: a colocation group that asks for two devices is an error of the placer, or the ids
of some nodes are silently replaced.

Example: `w/Adam` (with `_class: loc:@w`) on stream 2 and `w` on stream 1.

Mend: Put `- colocation` in the rules and assign again, or give the nodes one id by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.analysis.colocation import groups
from msplit.checks.subject import Check, Finding, Severity, Subject, splits


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per group."""
    of = groups(subject.flat, regions=False, handles=False, state=False).of
    for _, members, streams in splits(subject, of):
        what = f"are one colocation group (`_class`), but on {streams}"
        yield subject.about(members, what, "give them one id, or let the rule `colocation` do so")


CHECK = Check.of(__name__, __doc__, Severity.ERROR, find)
