"""A fork would wrap an id silently.

Finds: An id, on the graph or of a pattern, is not below `fork_streams` of the settings: the number of streams that the fork is started with
(`TF_GPU_STREAM_GROUP_COUNT` in NVIDIA's, `multi_stream_num` in DeepRec). Without that setting nothing is checked.

Why: Both forks take ids modulo that number and say nothing. Two groups of nodes that were to overlap then share a stream.

Example: Ids 0 to 7 on the graph, and `TF_GPU_STREAM_GROUP_COUNT=4`: streams 1 and 5 are one.

Mend: Start the fork with as many streams as there are ids, or assign with fewer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Skip, Subject, place, verb
from msplit.rules import streamfile
from msplit.rules.regex import Regex


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per id on the graph, and one per pattern."""
    streams = subject.settings.fork_streams
    if streams is None:
        raise Skip("`fork_streams` does not say how many streams the fork has")
    fix = f"start the fork with more streams, or assign with --streams {streams}"
    stated = subject.stated
    for stream in np.unique(stated[stated >= streams]).tolist():
        which = np.flatnonzero(stated == stream)
        company = np.count_nonzero(stated == stream % streams)
        beside = f", beside {company:,} of its own" if company else ""
        have, taken = (
            verb(len(which), "has", "have"),
            f"a fork with {streams} streams takes as {stream % streams}{beside}",
        )
        yield subject.about(which, f"{have} stream id {stream}, which {taken}", fix)
    for rule in subject.ruleset.rules if subject.ruleset else ():
        for entry in rule.entries if isinstance(rule, Regex) else ():
            if entry.stream >= streams:
                file, line = place(entry.where)
                text = (
                    f"pattern {streamfile.shorten(entry.pattern)!r} gives stream id {entry.stream}, which a fork "
                    f"with {streams} streams takes as {entry.stream % streams}"
                )
                yield Finding(text, fix, file=file, line=line)


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find)
