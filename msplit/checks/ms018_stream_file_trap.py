"""NVIDIA's reader takes the stream file differently.

Finds: A file that the rules read (`regex: {file: …}`) has a line that msplit understands and the reader of NVIDIA's fork
(`TF_STREAM_FROM_FILE`) takes in another way: comments and blank lines (it may crash), space around ids and patterns, `:` and `,` inside a
pattern (it cuts there), a second line of an id (it forgets the first), syntax that ECMAScript lacks (it stops with an error); or nodes have
ids on the graph and match no pattern (it puts them on stream 0).

Why: The same file gives other streams there, and nothing says so.

Example: `1:tower_a/(x|y){1,2}`: its reader sees the two patterns `tower_a/(x|y){1` and `2}`.

Mend: Let msplit write the file: `msplit assign MODEL --rules FILE --emit stream-file PATH`. Where you do not run NVIDIA's fork, ignore
MS018.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from msplit.checks.subject import Check, Finding, Severity, Subject, verb
from msplit.formats.files import read_bytes
from msplit.rules import streamfile
from msplit.rules.base import MAX_STREAM_FILE
from msplit.rules.regex import Regex
from msplit.rules.streamfile import Entry

_ONLY_RE2 = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?![:=!])|\\[AzQECpP](?![a-z]))")
"""Syntax that RE2 has and an ECMAScript engine refuses: flags, named groups, look-behinds, \\A, \\z, \\Q…\\E, \\C, \\pL."""


def find(subject: Subject) -> Iterator[Finding]:
    """One finding per line, and one per file for the ids on the graph that it undoes."""
    assert subject.ruleset is not None
    for rule in subject.ruleset.rules:
        if isinstance(rule, Regex) and rule.file is not None:
            yield from _of_file(subject, rule.file, rule.entries)


def _of_file(subject: Subject, file: str, entries: tuple[Entry, ...]) -> Iterator[Finding]:
    fix = "write the line as NVIDIA's reader takes it: `id:pattern,pattern`, one line per id, nothing else"
    # Not read_text: it would hide the carriage returns of Windows, which are part of the last pattern to that reader.
    try:
        text = read_bytes(file, MAX_STREAM_FILE).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:  # a pipe gives its text once
        yield Finding(f"it can not be read a second time: {getattr(error, 'strerror', None) or error}", fix, file=file)
        return
    for trap in streamfile.traps(text):
        yield Finding(trap.text, fix, file=file, line=trap.line)
    for entry in entries:
        if _ONLY_RE2.search(entry.pattern):
            line = int(entry.where.rpartition(":")[2])
            text = (
                f"pattern {streamfile.shorten(entry.pattern)!r} is no ECMAScript regular expression: its reader "
                "stops with an error"
            )
            yield Finding(text, "write the pattern without it", file=file, line=line)
    matched = np.zeros(len(subject.flat), np.bool_)
    matched[streamfile.match([entry.pattern for entry in entries], subject.flat.graph.names)[1]] = True
    lost = np.flatnonzero((subject.stated > 0) & ~matched & ~subject.flat.host)
    if len(lost):
        count = len(lost)
        yield subject.about(
            lost,
            f"{verb(count, 'has', 'have')} a stream id and {verb(count, 'matches', 'match')} no pattern: "
            "its newer readers then put it on stream 0, whatever the graph says",
            "name the node in the file (`msplit assign --emit stream-file` does so for all nodes)",
            file=file,
        )


CHECK = Check.of(__name__, __doc__, Severity.WARNING, find, needs=("rules",))
