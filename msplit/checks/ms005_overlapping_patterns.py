"""Patterns of different ids match the same node.

Finds: Two patterns of one `regex` rule or stream file match the same node and give it different streams. Here the first one wins.

Why: In NVIDIA's reader the order of a hash map decides between ids, so the same file may mean something else there; and a reader of the
file can not tell from one line what it does.

Example: `1:tower.*` and `2:tower_b/.*`.

Mend: Make the patterns exclude each other: `1:tower_a/.*` and `2:tower_b/.*`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msplit.checks.subject import Check, Finding, Severity, Subject, place


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per pair of patterns."""
    for remark in subject.applied.remarks:
        if remark.kind == "overlap":
            file, line = place(remark.where)
            yield Finding(remark.text, "make the patterns exclude each other", file=file, line=line)


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, needs=("rules",), depends="rules")
